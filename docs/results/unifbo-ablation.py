"""What each part of UniFBO is worth: rounds to 90 and 95% of its variants on MNIST.

This makes the table of docs/unifbo.md:

python docs/results/unifbo-ablation.py [VARIANT ...] [--seeds 5] [--scales 0.3,1,3]

Every variant's server steps are scaled by the best of `scales`, found on seeds 0 and 1 of label
shards.
"""

import argparse
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
    """Local steps along d - d_0 + m: no drift, at twice the bytes down."""

    name = "look"  # names key the draws: all variants see the same batches

    def start(self, m: Any) -> Any:
        return super().start(m), Directions(m.mx, m.my, m.mz)

    def first(self, c: Any, oracle: Any, batch: Any) -> Any:
        local, m = c
        d = self.directions(local, oracle, batch)
        return self.move(local, m, d), Directions(m.x - d.x, m.y - d.y, m.z - d.z)

    def step(self, c: Any, oracle: Any, batch: Any) -> Any:
        local, e = c
        d = self.directions(local, oracle, batch)
        return self.move(local, Directions(d.x + e.x, d.y + e.y, d.z + e.z), d), e

    def move(self, c: Any, along: Directions, d: Directions) -> Any:
        q = Directions(c.q.x + d.x, c.q.y + d.y, c.q.z + d.z)
        x, y, z = c.x - self.lr_x * along.x, c.y - self.lr_y * along.y, c.z - self.lr_z * along.z
        return c._replace(x=x, y=y, z=z, q=q)

    def finish(self, c: Any) -> Any:
        return super().finish(c[0])


class Moving(Corrected):
    """ShroFBO's local steps along d."""

    def first(self, c: Any, oracle: Any, batch: Any) -> Any:
        return self.step(c, oracle, batch)

    def step(self, c: Any, oracle: Any, batch: Any) -> Any:
        d = self.directions(c[0], oracle, batch)
        return self.move(c[0], d, d), c[1]


def each(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return m / s.sqrt().clamp(min=1e-8)


@dataclass(frozen=True, kw_only=True)
class Variant(UniFBO):
    """UniFBO with other phases or server steps; `decay` makes the sums of squares running means."""

    name: ClassVar[str] = "variant"
    client: type[Phase] = DirectionsAtPoint
    local: float = 0.05
    squares: Callable[[torch.Tensor], torch.Tensor] = gram
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = whiten
    decay: float = 1.0
    scale_z: float = 1.0

    def look(self) -> Phase:
        if self.client is DirectionsAtPoint:
            return DirectionsAtPoint(damping=self.damping)
        return self.client(lr_x=self.local, lr_y=self.local, lr_z=self.local, damping=self.damping)

    def init(self, problem: Any) -> Any:
        s = super().init(problem)
        return s._replace(s=tuple(m.map(self.squares) for m in s.m))

    def iterate(self, s: Any, fed: Any) -> Any:
        w, rho, t = self.momentum_weight, self.decay, fed.iteration + 1
        extra = {}
        if self.client is not DirectionsAtPoint:
            extra = dict(zip(("mx", "my", "mz"), s.m, strict=True))
        r = fed.ask(self.look(), fed.sample(), x=s.x, y=s.y, z=s.z, **extra)
        h = r.mean("hx"), r.mean("hy"), r.mean("hz")
        m = tuple((1 - w) * old + w * new for old, new in zip(s.m, h, strict=True))
        new = [d.map(self.squares) * (1 - rho if rho < 1 else 1.0) for d in h]
        S = tuple(rho * a + b for a, b in zip(s.s, new, strict=True))
        corrected = 1 - rho**t if rho < 1 else 1.0
        lr = self.lr_x, self.lr_y, self.scale_z * self.lr_z
        x, y, z = (
            v - k * d.map(self.step, a / corrected)
            for v, k, d, a in zip((s.x, s.y, s.z), lr, m, S, strict=True)
        )
        return State(x, y, z, m, S)


def norms(h: torch.Tensor) -> torch.Tensor:
    return h.double().square().mean()


def entries(h: torch.Tensor) -> torch.Tensor:
    return h.square()


coordinates = {"squares": entries, "step": each}
VARIANTS: dict[str, tuple[UniFBO, int]] = {  # and the local steps
    "unifbo": (UniFBO(), 10),
    "no momentum": (UniFBO(momentum_weight=1.0), 10),
    "longer momentum": (UniFBO(momentum_weight=0.1), 10),
    "one step size per coordinate, summed (AdaGrad)": (Variant(**coordinates), 10),
    "one step size per coordinate, decaying (Adam)": (Variant(**coordinates, decay=0.99), 10),
    "one step size per tensor (AdaGrad-Norm)": (Variant(squares=norms, step=each), 10),
    "squares decay (.99)": (Variant(decay=0.99), 10),
    "clients move by .05": (Variant(client=Moving), 10),
    "clients move by .05, corrected": (Variant(client=Corrected), 10),
    "z stays 0": (Variant(scale_z=0.0), 10),
    "1 local step": (UniFBO(), 1),
    "3 local steps": (UniFBO(), 3),
    "30 local steps": (UniFBO(), 30),
}


def rounds_to(method: UniFBO, steps: int, partition: str, seed: int) -> tuple[float, float]:
    """Communication rounds to 90 and 95%; infinite beyond ROUNDS."""
    task = fb.tasks.load("hyper-representation", data="mnist", partition=partition, seed=seed)
    environment = fb.Environment(participation=10, local_steps=steps, batch_size=64)
    run = Run(
        method, fb.simulated_federation(task.problem, task.clients, environment, seed=seed), {}
    )
    first = [float("inf")] * 2
    for t in range(1, ROUNDS + 1):
        run.advance()
        if not bool(norm(run.state.x).isfinite()):
            break
        accuracy = task.evaluate(run.state.x, run.state.y)["test_accuracy"]  # type: ignore[misc]
        first = [
            min(found, t) if accuracy >= goal else found
            for found, goal in zip(first, (0.9, 0.95), strict=True)
        ]
        if accuracy >= 0.95:
            break
    return first[0], first[1]


def scaled(method: UniFBO, scale: float) -> UniFBO:
    return replace(
        method, lr_x=scale * method.lr_x, lr_y=scale * method.lr_y, lr_z=scale * method.lr_z
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scales", default="0.3,1,3")
    options = parser.parse_args()
    for name in options.variants:
        method, steps = VARIANTS[name]
        scales = [float(scale) for scale in options.scales.split(",")]
        tried = {
            k: [rounds_to(scaled(method, k), steps, "shards", seed) for seed in (0, 1)]
            for k in scales
        }
        best = min(scales, key=lambda k: sum(second for _, second in tried[k]))
        row = [f"{name}, x {best:g}"]
        for partition in ("shards", "iid"):
            found = [
                rounds_to(scaled(method, best), steps, partition, seed)
                for seed in range(options.seeds)
            ]
            for reached in zip(*found, strict=True):
                row.append(f"{statistics.median(reached):g} ({min(reached):g} to {max(reached):g})")
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
