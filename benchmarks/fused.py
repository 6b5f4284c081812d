"""The fused step against its floor (two plain gradients) and against the five terms one by one, client by client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fedbilevel as fb
from benchmarks.measure import Row, describe, seconds
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import Tree, dot
from fedbilevel.execution.lift import lifted, single, stacked
from fedbilevel.execution.stacked._trace import trace

Stack = tuple[Tree, Tree, Tree, Batch]


def problem(net: torch.nn.Module, ridge: float = 1e-3) -> fb.Problem:
    _, x, y = fb.split_module(net, lower="head.")
    below, above = fb.nets.stem(net)

    def embed(x: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return below(x, batch[0]), batch[1]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(above({**x, **y}, batch[0]), batch[1])

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.5 * ridge * dot(y, y)

    return fb.Problem(upper=upper, lower=lower, x=x, y=y, embed=embed)


def stack(p: fb.Problem, clients: int, batch: int, shape: tuple[int, ...]) -> Stack:
    """Every client at its own point, as in the middle of a round."""
    key = root(0, "bench")

    def spread(tree: Tree, tag: int) -> Tree:
        noise = tree.map(lambda t: normal(fold_in(key, tag), (clients, *t.shape)) * 0.01)
        return tree.map(lambda t, n: t.expand(clients, *t.shape) + n, noise)

    def side(tag: int) -> tuple[Tensor, Tensor]:
        labels = (normal(fold_in(key, tag + 1), (clients, batch)).abs() * 5).long().clamp(max=9)
        return normal(fold_in(key, tag), (clients, batch, *shape)), labels

    x, y = p.start
    keys = fold_in(key, torch.arange(clients))
    return spread(x, 1), spread(y, 2), spread(y, 3), Batch(side(10), side(20), keys)


def two_plain_gradients(p: fb.Problem) -> Callable[[Tree, Tree, Tree, Batch], object]:
    """One gradient of the lower loss on the training batch, one of the upper loss on the validation batch."""
    oracle = Oracle(p)
    return lambda x, y, z, b: (
        grad(oracle.lower, argnums=(0, 1))(x, y, b),
        grad(oracle.upper, argnums=(0, 1))(x, y, b),
    )


def written_out_mlp(x: Tree, y: Tree, z: Tree, b: Batch) -> object:
    """The same two gradients of the MLP as batched matrix products: nothing but arithmetic."""
    w, c = x["backbone.1.weight"], x["backbone.1.bias"]
    v, e = y["head.weight"], y["head.bias"]
    out = []
    for inputs, labels in (b.train, b.val):
        a = inputs.flatten(2)
        h = torch.baddbmm(c.unsqueeze(1), a, w.transpose(1, 2))
        r = h.relu()
        p = torch.baddbmm(e.unsqueeze(1), r, v.transpose(1, 2)).softmax(-1)
        p.scatter_add_(2, labels.unsqueeze(-1), torch.full((*labels.shape, 1), -1.0))
        p /= labels.shape[1]
        dh = torch.bmm(p, v).mul_(h > 0)
        out.append(
            (torch.bmm(dh.transpose(1, 2), a), dh.sum(1), torch.bmm(p.transpose(1, 2), r), p.sum(1))
        )
    return out


def five_terms_one_by_one(p: fb.Problem, x: Tree, y: Tree, z: Tree, b: Batch) -> list[object]:
    """What published codes do: a client at a time, each term by its own autograd calls."""
    replies: list[object] = []
    oracle = Oracle(p)
    for i in range(len(next(iter(x.values())))):
        xi, yi = ({n: t[i].detach().requires_grad_() for n, t in tree.items()} for tree in (x, y))
        train, val = (tuple(t[i] for t in side) for side in (b.train, b.val))
        xs, ys, zs = list(xi.values()), list(yi.values()), [t[i] for t in z.values()]
        lower, upper = (
            partial(level, Tree(xi), Tree(yi), Batch(train, val))
            for level in (oracle.lower, oracle.upper)
        )
        g_y = torch.autograd.grad(lower(), ys)
        f_x = torch.autograd.grad(upper(), xs)
        f_y = torch.autograd.grad(upper(), ys)
        slope = torch.autograd.grad(lower(), ys, create_graph=True)
        hessian = torch.autograd.grad(slope, ys, grad_outputs=zs)
        slope = torch.autograd.grad(lower(), ys, create_graph=True)
        cross = torch.autograd.grad(slope, xs, grad_outputs=zs)
        replies.append(
            (
                [f - c for f, c in zip(f_x, cross, strict=True)],
                g_y,
                [h - f for h, f in zip(hessian, f_y, strict=True)],
            )
        )
    return replies


def replayed(function: Callable[..., object], at: Stack) -> Callable[[], object]:
    """A function of a stack as the runtime runs it in a long run: traced once, replayed."""
    values, form = pytree.tree_flatten(at)
    run = trace(
        lambda *values: pytree.tree_leaves(function(*pytree.tree_unflatten(values, form))), values
    )
    return lambda: run(*values)


def one_by_one(function: Callable[..., object], at: Stack) -> Callable[[], object]:
    """The same, a client at a time, as the runtime does on a CPU where convolutions are large."""
    clients = [pytree.tree_map(lambda t, i=i: t[i : i + 1], at) for i in range(len(at[3].rng))]
    runs = [replayed(lifted(single, function), clients[0])] * len(
        clients
    )  # of the same shapes, so that one will do
    return lambda: [run() for run in runs]


def against_floor(name: str, p: fb.Problem, at: Stack, repeats: int) -> Row:
    fused, plain = Oracle(p).directions, two_plain_gradients(p)
    functions: dict[str, Callable[[], object]] = {
        "plain, stacked": lambda: lifted(stacked, plain)(*at),
        "plain, stacked and traced": replayed(lifted(stacked, plain), at),
    }
    if name == "MLP":
        functions["fused"] = replayed(lifted(stacked, fused), at)
        functions["fused before it is traced"] = lambda: lifted(stacked, fused)(*at)
        functions["plain, written out"] = lambda: written_out_mlp(*at)
    else:
        functions["fused"] = one_by_one(fused, at)
        functions["plain, one by one and traced"] = one_by_one(plain, at)
    times = seconds(functions, repeats)
    floor = min(value for key, value in times.items() if key.startswith("plain"))
    clients, batch = at[3].train[1].shape
    title = f"fused step / two plain gradients, {name}, {clients} clients, batch {batch}"
    return Row(title, times["fused"] / floor, "at most 1.10", describe(times))


def rows() -> list[Row]:
    mlp, cnn = problem(fb.nets.mlp(784, 200, 10)), problem(fb.nets.lenet(3, 32, 10))
    resnet = problem(fb.nets.resnet12(1, 28, 10))
    at = stack(mlp, clients=10, batch=32, shape=(1, 28, 28))
    fused = replayed(lifted(stacked, Oracle(mlp).directions), at)
    times = seconds({"naive": lambda: five_terms_one_by_one(mlp, *at), "fused": fused}, 40)
    title = "five terms one by one / fused and stacked, MLP, 10 clients, batch 32"
    return [
        against_floor("MLP", mlp, stack(mlp, 10, 64, (1, 28, 28)), 60),
        against_floor("CNN", cnn, stack(cnn, 10, 64, (3, 32, 32)), 10),
        against_floor("ResNet-12", resnet, stack(resnet, 2, 10, (1, 28, 28)), 3),
        Row(title, times["naive"] / times["fused"], "at least 3", describe(times)),
    ]
