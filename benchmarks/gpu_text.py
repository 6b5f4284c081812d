"""Text on a GPU: the mixture of owners at two sizes, and adapters on a GPT-2 shape.

It needs PyTorch alone. Each part prints one JSON object per line, and can be run in a call of its
own, because a machine may be lent for minutes only:

    python -m benchmarks.gpu_text write                 # where the packages are: texts in runs/text
    python -m benchmarks.gpu_text mixture --size 10     # learns weights; uniform at equal tokens
    python -m benchmarks.gpu_text mixture --size 1
    python -m benchmarks.gpu_text random --first 0 --count 8      # a slice of 64 random mixtures
    python -m benchmarks.gpu_text gpt2                  # a round of memfbo and one of FedAvg
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.rng import fold_in, root, uniform
from fedbilevel.tasks import mixture as text

PACKAGES = ("numpy", "scipy", "sklearn", "torch", "sympy", "email", "asyncio")
OWNERS = (*PACKAGES, "shuffled:torch")
CHARACTERS = 2_000_000
SIZES = {1: {"width": 128, "depth": 5}, 10: {"width": 320, "depth": 8}}  # millions: the shape


def say(**values: Any) -> None:
    """Print one result."""
    print(json.dumps(values), flush=True)


def load(args: argparse.Namespace, start: list[float] | None = None) -> fb.tasks.Task:
    """Return the mixture task at a size, with the texts that `write` left."""
    return fb.tasks.load(
        "mixture",
        owners=OWNERS,
        target=args.target,
        characters=CHARACTERS,
        context=256,
        heads=4,
        start=start,
        text="runs/text",
        **SIZES[args.size],
    )


def run(task: fb.tasks.Task, method: Any, args: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """Run a method on the GPU, and return its last metrics."""
    environment = fb.Environment(batch_size=args.batch)
    federation = fb.simulated_federation(
        task.problem.to(args.device),
        task.clients,
        environment,
        device=args.device,
        precision=args.precision,
    )
    began = time.perf_counter()
    result = fb.solve(
        task.problem, [], method, rounds=rounds, federation=federation,
        evaluate=task.evaluate, every=max(rounds // 4, 1),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    return {**result.history[-1], "status": result.status, "seconds": round(seconds, 1)}


def fixed(lr: float) -> Any:
    """Return FedAvg on y, with the weights that the task starts from."""
    return fb.algorithms.FedAvg(lr_y=lr, train="y")


def learn(args: argparse.Namespace) -> None:
    """Learn the weights; train with uniform and with the learnt ones at equal tokens."""
    task = load(args)
    parameters = sum(value.numel() for value in task.problem.y.values())
    growing = fb.schedules.Linear(2.0, increase=0.02, end=20.0)
    method = fb.algorithms.MemFBO(
        server_lr_x=args.lr_x, server_lr_y=args.lr, server_lr_u=args.lr, penalty=growing
    )
    learnt = run(task, method, args, args.rounds)
    say(part="learn", parameters=parameters, **learnt)
    weights = [learnt[f"weight {name}"] for name in OWNERS]
    say(part="uniform", size=args.size, **run(task, fixed(args.lr), args, args.rounds))
    again = run(load(args, weights), fixed(args.lr), args, args.rounds)
    say(part="learnt weights, from the start", size=args.size, **again)


def random(args: argparse.Namespace) -> None:
    """Train with random mixtures, drawn uniformly from the simplex."""
    for number in range(args.first, args.first + args.count):
        draws = uniform(fold_in(root(0, "mixtures"), number), (len(OWNERS),))
        weights = -(1 - draws).log()
        start = (weights / weights.sum()).tolist()
        ended = run(load(args, start), fixed(args.lr), args, args.rounds)
        say(part="random", number=number, size=args.size, **ended)


def gpt2(args: argparse.Namespace) -> None:
    """Time rounds with 124M frozen parameters, rank-8 adapters below, eight weights above."""
    n = 8
    context = 512
    net = text.Transformer(768, 12, 12, context, symbols=50257).to(args.device)
    base = sum(value.numel() for value in net.parameters())
    net = fb.nets.with_adapters(net, "*qkv").to(args.device)
    apply, _, y = fb.split_module(net, lower="", upper=())

    def cross_entropy(y: fb.Tree, tokens: torch.Tensor) -> torch.Tensor:
        scores = apply(fb.Tree(), y, tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())

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
        tokens = torch.randint(50257, (32, context + 1), generator=generator) // (number + 1)
        clients.append(fb.ClientData((tokens, torch.full((32,), number)), (tokens[:8],)))
    methods = {"memfbo": fb.algorithms.MemFBO(), "fedavg": fixed(0.1)}
    for name, method in methods.items():
        environment = fb.Environment(batch_size=args.batch)
        torch.cuda.reset_peak_memory_stats()
        federation = fb.simulated_federation(
            problem, clients, environment, device=args.device, precision=args.precision, mode="loop"
        )
        job = fb.Run(method, federation, {})
        for _ in range(3):
            job.advance()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(args.rounds):
            job.advance()
        torch.cuda.synchronize()
        finite = all(bool(value.isfinite().all()) for value in job.state.y.values())
        say(
            part="gpt2", method=name, base=base, adapters=y.numel, rounds=args.rounds,
            seconds_a_round=(time.perf_counter() - began) / args.rounds, finite=finite,
            peak_gb=torch.cuda.max_memory_allocated() / 1e9,
        )  # fmt: skip


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["write", "mixture", "random", "gpt2"])
    parser.add_argument("--size", type=int, default=10, choices=SIZES)
    parser.add_argument("--target", default="scipy", choices=PACKAGES)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--lr-x", type=float, default=0.003)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16-all")
    args = parser.parse_args()
    if args.part == "write":
        text.write_texts(PACKAGES, CHARACTERS, "runs/text")
    else:
        {"mixture": learn, "random": random, "gpt2": gpt2}[args.part](args)


if __name__ == "__main__":
    main()
