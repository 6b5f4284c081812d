"""Measures what each part of UniFBO contributes: rounds to 90% and 95% of its variants on MNIST.

It prints the rows of the table in docs/unifbo.md:

    python docs/results/unifbo-ablation.py [VARIANT ...] [--seeds 5] [--scales 0.3,1,3]

The server steps of every variant are multiplied by the best of `scales`, chosen on seeds 0 and 1
of label shards.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import fedbilevel as fb
from fedbilevel.algorithms.simfbo import DescendMean
from fedbilevel.algorithms.unifbo import DirectionsAtPoint, State, UniFBO, gram, whiten
from fedbilevel.core.oracle import Directions
from fedbilevel.core.tree import norm
from fedbilevel.federation.phase import Phase
from fedbilevel.runs.run import Run

ROUNDS = 60


class Corrected(DescendMean):
    """Local steps along d - d_0 + m: clients do not drift, at twice the bytes down."""

    name = "look"  # the name keys the draws, so that all variants see the same batches

    def start(self, m: Any) -> Any:
        """Start at the server's point, with its momenta as the correction."""
        return super().start(m), Directions(m.mx, m.my, m.mz)

    def first(self, c: Any, oracle: Any, batch: Any) -> Any:
        """Move along m, and keep m - d_0 as the correction of later steps."""
        local, m = c
        d = self.directions(local, oracle, batch)
        correction = Directions(m.x - d.x, m.y - d.y, m.z - d.z)
        return self.move(local, m, d), correction

    def step(self, c: Any, oracle: Any, batch: Any) -> Any:
        """Move along the directions plus the correction."""
        local, e = c
        d = self.directions(local, oracle, batch)
        return self.move(local, Directions(d.x + e.x, d.y + e.y, d.z + e.z), d), e

    def move(self, c: Any, along: Directions, d: Directions) -> Any:
        """Move a client's copies along `along`, and add its directions d to the sums."""
        return c._replace(
            x=c.x - self.lr_x * along.x,
            y=c.y - self.lr_y * along.y,
            z=c.z - self.lr_z * along.z,
            q=Directions(c.q.x + d.x, c.q.y + d.y, c.q.z + d.z),
        )

    def finish(self, c: Any) -> Any:
        """Reply with the mean directions."""
        local, _ = c
        return super().finish(local)


class Moving(Corrected):
    """ShroFBO's local steps along d."""

    def first(self, c: Any, oracle: Any, batch: Any) -> Any:
        """Take the first step like any other."""
        return self.step(c, oracle, batch)

    def step(self, c: Any, oracle: Any, batch: Any) -> Any:
        """Move along the directions."""
        local, unused = c
        d = self.directions(local, oracle, batch)
        return self.move(local, d, d), unused


def mean_square(h: torch.Tensor) -> torch.Tensor:
    """Return the mean square of a tensor, for one step size per tensor."""
    return h.double().square().mean()


def squares(h: torch.Tensor) -> torch.Tensor:
    """Return the square of every entry, for one step size per coordinate."""
    return h.square()


def divide_by_root(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Return m / sqrt(s)."""
    return m / s.sqrt().clamp(min=1e-8)


@dataclass(frozen=True, kw_only=True)
class Variant(UniFBO):
    """UniFBO with another phase or other server steps.

    Args:
        client: the phase of the clients.
        local: the local step size of phases that move.
        squares: what is summed over the iterations, of each tensor of directions.
        step: the server's step, from momentum and sum.
        decay: below 1, the sums are running means with this decay.
        scale_z: the factor of the step of z.
    """

    name: ClassVar[str] = "variant"
    client: type[Phase] = DirectionsAtPoint
    local: float = 0.05
    squares: Callable[[torch.Tensor], torch.Tensor] = gram
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = whiten
    decay: float = 1.0
    scale_z: float = 1.0

    def init(self, problem: Any) -> Any:
        """Start as UniFBO, with sums of the right shapes."""
        s = super().init(problem)
        return s._replace(s=tuple(m.map(self.squares) for m in s.m))

    def iterate(self, s: Any, fed: Any) -> Any:
        """Get the mean directions, and step along their momenta."""
        message = {"x": s.x, "y": s.y, "z": s.z}
        if self.client is DirectionsAtPoint:
            phase = DirectionsAtPoint(damping=self.damping)
        else:
            lr = self.local
            phase = self.client(lr_x=lr, lr_y=lr, lr_z=lr, damping=self.damping)
            message |= zip(("mx", "my", "mz"), s.m, strict=True)
        r = fed.ask(phase, fed.sample(), **message)
        h = (r.mean("hx"), r.mean("hy"), r.mean("hz"))
        w = self.momentum_weight
        m = tuple((1 - w) * m_old + w * h_new for m_old, h_new in zip(s.m, h, strict=True))
        weight = 1.0
        bias_correction = 1.0
        if self.decay < 1:
            weight = 1 - self.decay
            bias_correction = 1 - self.decay ** (fed.iteration + 1)
        S = []
        for S_old, h_new in zip(s.s, h, strict=True):
            S.append(self.decay * S_old + h_new.map(self.squares) * weight)
        steps = [
            momentum.map(self.step, total / bias_correction)
            for momentum, total in zip(m, S, strict=True)
        ]
        return State(
            x=s.x - self.lr_x * steps[0],
            y=s.y - self.lr_y * steps[1],
            z=s.z - self.scale_z * self.lr_z * steps[2],
            m=m,
            s=tuple(S),
        )


PER_COORDINATE: dict[str, Any] = {"squares": squares, "step": divide_by_root}
VARIANTS: dict[str, tuple[UniFBO, int]] = {  # with the number of local steps
    "unifbo": (UniFBO(), 10),
    "no momentum": (UniFBO(momentum_weight=1.0), 10),
    "longer momentum": (UniFBO(momentum_weight=0.1), 10),
    "one step size per coordinate, summed (AdaGrad)": (Variant(**PER_COORDINATE), 10),
    "one step size per coordinate, decaying (Adam)": (Variant(**PER_COORDINATE, decay=0.99), 10),
    "one step size per tensor (AdaGrad-Norm)": (
        Variant(squares=mean_square, step=divide_by_root),
        10,
    ),
    "squares decay (.99)": (Variant(decay=0.99), 10),
    "clients move by .05": (Variant(client=Moving), 10),
    "clients move by .05, corrected": (Variant(client=Corrected), 10),
    "z stays 0": (Variant(scale_z=0.0), 10),
    "1 local step": (UniFBO(), 1),
    "3 local steps": (UniFBO(), 3),
    "30 local steps": (UniFBO(), 30),
}


def rounds_to(method: UniFBO, steps: int, partition: str, seed: int) -> tuple[float, float]:
    """Return the communication rounds to 90% and 95%; infinity if more than ROUNDS."""
    task = fb.tasks.load("hyper-representation", data="mnist", partition=partition, seed=seed)
    assert task.evaluate is not None
    environment = fb.Environment(participation=10, local_steps=steps, batch_size=64)
    federation = fb.simulated_federation(task.problem, task.clients, environment, seed=seed)
    run = Run(method, federation, {})
    to_90 = math.inf
    for t in range(1, ROUNDS + 1):
        run.advance()
        if not bool(norm(run.state.x).isfinite()):
            break
        accuracy = task.evaluate(run.state.x, run.state.y)["test_accuracy"]
        if accuracy >= 0.9:
            to_90 = min(to_90, t)
        if accuracy >= 0.95:
            return to_90, t
    return to_90, math.inf


def with_scaled_steps(method: UniFBO, scale: float) -> UniFBO:
    """Return the method with all server steps multiplied by `scale`."""
    return replace(
        method, lr_x=scale * method.lr_x, lr_y=scale * method.lr_y, lr_z=scale * method.lr_z
    )


def best_scale(method: UniFBO, steps: int, scales: list[float]) -> float:
    """Return the scale with the fewest rounds to 95% on seeds 0 and 1 of label shards."""

    def total_rounds(scale: float) -> float:
        scaled = with_scaled_steps(method, scale)
        return sum(rounds_to(scaled, steps, "shards", seed)[1] for seed in (0, 1))

    return min(scales, key=total_rounds)


def main() -> None:
    """Print one row of the table per variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scales", default="0.3,1,3")
    options = parser.parse_args()
    scales = [float(scale) for scale in options.scales.split(",")]
    for name in options.variants:
        method, steps = VARIANTS[name]
        scale = best_scale(method, steps, scales)
        row = [f"{name}, x {scale:g}"]
        scaled = with_scaled_steps(method, scale)
        for partition in ("shards", "iid"):
            reached = [rounds_to(scaled, steps, partition, seed) for seed in range(options.seeds)]
            for rounds in zip(*reached, strict=True):
                row.append(f"{statistics.median(rounds):g} ({min(rounds):g} to {max(rounds):g})")
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
