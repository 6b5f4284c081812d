"""Text on a GPU: the mixture of owners at two sizes, and adapters on a GPT-2 shape.

It needs PyTorch alone. Each part prints one JSON object per line as soon as it knows something, and
adds it to a file; it can be run in a call of its own, because a machine may be lent for minutes:

    python -m benchmarks.gpu_text write                 # where the packages are: texts in runs/text
    python -m benchmarks.gpu_text gpt2                  # a round of memfbo and one of FedAvg
    python -m benchmarks.gpu_text mixture --size 10     # learns weights, and trains with them
    python -m benchmarks.gpu_text mixture --size 1 --learn-only
    python -m benchmarks.gpu_text random --first 0 --count 16      # a slice of 64 random mixtures
    python -m benchmarks.gpu_text summary               # gains over uniform weights, from the file

A part that is told `--seconds` begins nothing after them, and what is in the file is not run again,
so that a call that was cut short is repeated as it was. Slices of random mixtures can run side by
side, on one GPU and into one file:

    for first in 0 16 32 48; do
        python -m benchmarks.gpu_text random --first $first --count 16 --seconds 540 &
    done; wait
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.rng import fold_in, root, uniform
from fedbilevel.tasks import mixture as text

PACKAGES = ("numpy", "scipy", "sklearn", "torch", "sympy", "email", "asyncio")
OWNERS = (*PACKAGES, "shuffled:torch")
CHARACTERS = 2_000_000
SIZES: dict[int, dict[str, int]] = {  # millions of parameters: the shape; 0 is for a CPU
    0: {"width": 32, "depth": 1, "context": 32},
    1: {"width": 128, "depth": 5, "context": 256},
    10: {"width": 320, "depth": 8, "context": 256},
}
TARGET = "scipy"
RANDOM = 64


class Output:
    """Prints results, and keeps them in a file that later calls read."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file = Path(args.out)
        self.began = time.perf_counter()
        self.seconds = args.seconds

    def say(self, **values: Any) -> None:
        """Print one result, and add it to the file."""
        line = json.dumps({"at": round(time.perf_counter() - self.began, 1), **values})
        print(line, flush=True)
        with self.file.open("a") as file:
            file.write(line + "\n")

    def said(self, **values: Any) -> list[dict[str, Any]]:
        """Return what the file has with these values."""
        if not self.file.exists():
            return []
        rows = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [row for row in rows if values.items() <= row.items()]

    def is_late(self) -> bool:
        """Tell whether the part has used its seconds."""
        return time.perf_counter() - self.began > self.seconds


def load(size: int) -> fb.tasks.Task:
    """Return the mixture task at a size, with the texts that `write` left."""
    return fb.tasks.load(
        "mixture",
        owners=OWNERS,
        target=TARGET,
        characters=CHARACTERS,
        heads=4,
        text="runs/text",
        **SIZES[size],
    )


def warm(lr: float, rounds: int, decay: bool) -> Any:
    """Return a step size that grows for 30 rounds, and then is constant or falls to a tenth."""

    def at(t: int) -> float:
        left = 1 - 0.9 * t / rounds if decay else 1.0
        return lr * min((t + 1) / 30, 1.0) * max(left, 0.1)

    return at


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def peak_gb(device: str) -> float | None:
    """Return the most memory that tensors on a GPU have taken."""
    return None if device == "cpu" else torch.cuda.max_memory_allocated() / 1e9


def train(
    task: fb.tasks.Task, method: Any, args: argparse.Namespace, rounds: int, output: Output
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run a method; return the mean of the weights in its last half, and what it ended with."""
    problem = task.problem.to(args.device)
    federation = fb.simulated_federation(
        problem,
        task.clients,
        fb.Environment(batch_size=args.batch),
        device=args.device,
        precision=args.precision,
        mode=args.mode,
        compile=False,
    )
    job = fb.Run(method, federation, {"rounds": rounds})
    total = torch.zeros(len(OWNERS), device=args.device)
    warm_up = 10
    synchronize(args.device)
    began = time.perf_counter()
    for t in range(rounds):
        if t == warm_up:
            synchronize(args.device)
            warm_at = time.perf_counter()
        job.advance()
        if t >= rounds // 2:
            total += job.state.x["weights"]
        if args.verbose and (t + 1) % args.verbose == 0:
            shown = [round(float(w), 3) for w in job.state.x["weights"]]
            loss = task.evaluate(job.state.x, job.state.y)["test_loss"]
            output.say(part="round", size=args.size, t=t + 1, test_loss=loss, weights=shown)
    synchronize(args.device)
    ended = time.perf_counter()
    x, y = job.state.x, job.state.y
    target = task.clients[OWNERS.index(TARGET)]
    val = 0.0
    with torch.no_grad():
        for windows, share in zip(*(side.split(64) for side in target.val), strict=True):
            batch = (windows.to(args.device), share.to(args.device))
            val += len(windows) * float(problem.upper(x, y, batch, ())) / len(OWNERS)
    return total / (rounds - rounds // 2), {
        "val_loss": val / target.size("val"),
        "test_loss": task.evaluate(x, y)["test_loss"],
        "final": [float(w) for w in x["weights"]],
        "seconds": round(ended - began, 2),
        "seconds_a_round": round((ended - warm_at) / (rounds - warm_up), 5),
        "mode": args.mode,
        "rounds": rounds,
        "tokens": federation.ledger.totals()["samples"] * SIZES[args.size]["context"],
    }


def train_fixed(
    task: fb.tasks.Task, weights: Sequence[float], args: argparse.Namespace, output: Output
) -> dict[str, Any]:
    """Train with fixed weights from the start."""
    start = text.project_to_simplex(torch.tensor(weights, dtype=torch.float32))
    problem = dataclasses.replace(task.problem, x={"weights": start})
    method = fb.algorithms.FedAdam(
        server_lr=warm(args.lr, args.rounds, decay=True), lr_y=1.0, train="y"
    )
    _, ended = train(dataclasses.replace(task, problem=problem), method, args, args.rounds, output)
    return ended


def learn(args: argparse.Namespace, output: Output) -> None:
    """Learn the weights; train with uniform, and with learnt ones, at equal tokens."""
    task = load(args.size)
    parameters = task.problem.start[1].numel
    lr = warm(args.lr, args.learn_rounds, decay=False)
    method = fb.algorithms.MemFBO(
        server_lr_x=lambda t: args.lr_x if t >= args.burn_in else 1e-12,
        server_lr_y=lr,
        server_lr_u=lr,
        penalty=args.penalty,
        adaptive=True,
    )
    if not output.said(part="learn", size=args.size):
        mean, learnt = train(task, method, args, args.learn_rounds, output)
        output.say(
            part="learn",
            size=args.size,
            parameters=parameters,
            mean=[float(w) for w in mean],
            **learnt,
            peak_gb=peak_gb(args.device),
        )
    if args.learn_only:
        return
    (row,) = output.said(part="learn", size=args.size)[-1:]
    uniform_weights = [1 / len(OWNERS)] * len(OWNERS)
    for name, weights in (
        ("uniform", uniform_weights),
        ("mean", row["mean"]),
        ("final", row["final"]),
    ):
        if not output.said(part="fixed", size=args.size, weights=name) and not output.is_late():
            ended = train_fixed(task, weights, args, output)
            output.say(part="fixed", size=args.size, weights=name, **ended)


def random(args: argparse.Namespace, output: Output) -> None:
    """Train with random mixtures, drawn uniformly from the simplex."""
    task = load(args.size)
    for number in range(args.first, min(args.first + args.count, RANDOM)):
        if output.said(part="random", size=args.size, number=number) or output.is_late():
            continue
        draws = uniform(fold_in(root(0, "mixtures"), number), (len(OWNERS),))
        weights = -(1 - draws).log()
        ended = train_fixed(task, (weights / weights.sum()).tolist(), args, output)
        output.say(part="random", number=number, size=args.size, **ended)


def ranks(values: Sequence[float]) -> torch.Tensor:
    """Return the rank of each value; equal ones share the mean of theirs."""
    v = torch.tensor(values, dtype=torch.float64)
    below = (v[:, None] > v).sum(1)
    equal = (v[:, None] == v).sum(1)
    return below + (equal - 1) / 2


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation."""
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def summary(args: argparse.Namespace, output: Output) -> None:
    """Print the figures that matter, from the file."""
    fixed = {row["weights"]: row for row in output.said(part="fixed", size=args.size)}
    uniform_row = fixed["uniform"]
    (learnt,) = output.said(part="learn", size=args.size)[-1:]
    randoms = output.said(part="random", size=args.size)
    for loss in ("val_loss", "test_loss"):
        base = uniform_row[loss]
        row: dict[str, Any] = {"uniform": base}
        for name in ("mean", "final"):
            if name in fixed:
                row[f"gain of {name}"] = 1 - fixed[name][loss] / base
        if randoms:
            row["random"] = len(randoms)
            row["best gain of random"] = max(1 - r[loss] / base for r in randoms)
        output.say(part="summary", size=args.size, loss=loss, **row)
    tokens = 1 + learnt["tokens"] / uniform_row["tokens"]  # to learn, and to train with the result
    shuffled = OWNERS.index("shuffled:torch")
    output.say(
        part="summary",
        size=args.size,
        runs_of_tokens=tokens,
        shuffled={name: learnt[name][shuffled] for name in ("mean", "final")},
    )
    for other in output.said(part="learn"):
        if other["size"] != args.size:
            for name in ("mean", "final"):
                rho = spearman(learnt[name], other[name])
                output.say(part="summary", sizes=[args.size, other["size"]], of=name, spearman=rho)


def gpt2(args: argparse.Namespace, output: Output) -> None:
    """Time rounds with 124M frozen parameters, rank-8 adapters below, eight weights above."""
    n = 8
    tiny = args.size == 0
    width, depth, heads, symbols = (32, 2, 4, 300) if tiny else (768, 12, 12, 50257)
    length = 32 if tiny else 512
    net = text.Transformer(width, depth, heads, 2 * length, symbols=symbols)
    net.head.weight = net.symbols.weight
    base = sum(value.numel() for value in net.parameters())
    net = fb.nets.with_adapters(net, "*qkv").to(args.device)
    apply, _, y = fb.split_module(net, lower="", upper=())

    def cross_entropy(y: fb.Tree, tokens: torch.Tensor) -> torch.Tensor:
        scores = apply(fb.Tree(), y, tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def lower(x: fb.Tree, y: fb.Tree, batch: Any) -> torch.Tensor:
        tokens, number = batch
        return n * x["weights"].gather(0, number[:1]).sum() * cross_entropy(y, tokens)

    weights = torch.full((n,), 1 / n, device=args.device)
    problem = fb.Problem(
        lambda x, y, batch: cross_entropy(y, batch[0]),
        lower,
        x={"weights": weights},
        y=y,
        project_x=lambda x: fb.Tree(weights=text.project_to_simplex(x["weights"])),
        derivatives="exact",  # first-order methods alone: nothing is looked for
    )
    generator = torch.Generator().manual_seed(0)
    clients = []
    for number in range(n):
        tokens = torch.randint(symbols, (32, length + 1), generator=generator) // (number + 1)
        clients.append(fb.ClientData((tokens, torch.full((32,), number)), (tokens[:8],)))
    methods = {
        "fedavg": (fb.algorithms.FedAvg(train="y"), 60),
        "memfbo": (
            fb.algorithms.MemFBO(
                server_lr_x=0.003, server_lr_y=1e-3, server_lr_u=1e-3, adaptive=True
            ),
            200,
        ),
        "fedadam": (fb.algorithms.FedAdam(train="y"), 60),
    }
    pace: dict[str, float] = {}
    for name, (method, rounds) in methods.items():
        if output.is_late():
            return
        rounds = min(rounds, args.rounds)
        if args.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        federation = fb.simulated_federation(
            problem,
            clients,
            fb.Environment(batch_size=4),
            device=args.device,
            precision=args.precision,
            mode=args.mode,
        )
        job = fb.Run(method, federation, {"rounds": rounds})
        done = min(10, rounds - 1)  # in which a captured step is captured
        for _ in range(done):
            job.advance()
        while done < rounds and not output.is_late():
            count = min(50, rounds - done)
            synchronize(args.device)
            began = time.perf_counter()
            for _ in range(count):
                job.advance()
            synchronize(args.device)
            pace[name] = (time.perf_counter() - began) / count
            done += count
            output.say(
                part="gpt2",
                method=name,
                mode=args.mode,
                base=base,
                adapters=y.numel,
                rounds=done,
                seconds_a_round=round(pace[name], 4),
                rounds_of_fedavg=round(pace[name] / pace["fedavg"], 3),
                finite=all(bool(value.isfinite().all()) for value in job.state.y.values()),
                weights=[round(float(w), 4) for w in job.state.x["weights"]],
                peak_gb=peak_gb(args.device),
            )


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {"mixture": learn, "random": random, "gpt2": gpt2, "summary": summary}
    parser.add_argument("part", choices=["write", *parts])
    parser.add_argument("--size", type=int, default=10, choices=SIZES)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--learn-rounds", type=int, default=600)
    parser.add_argument("--learn-only", action="store_true")
    parser.add_argument("--burn-in", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lr-x", type=float, default=0.01)
    parser.add_argument("--penalty", type=float, default=5.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--verbose", type=int, default=0)
    parser.add_argument("--out", default="runs/gpu_text.jsonl")
    parser.add_argument("--mode", default="stack", choices=["stack", "loop"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", help="bf16-all for gpt2, else tf32; fp32 on a CPU")
    args = parser.parse_args()
    if args.precision is None:
        args.precision = "bf16-all" if args.part == "gpt2" else "tf32"
    torch.backends.cuda.enable_cudnn_sdp(False)  # stacks of clients have rules for the others
    if args.part == "write":
        text.write_texts(PACKAGES, CHARACTERS, "runs/text")
    else:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        parts[args.part](args, Output(args))


if __name__ == "__main__":
    main()
