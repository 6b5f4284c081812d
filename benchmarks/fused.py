"""The fused step: against two plain gradients, and against five terms computed one by one.

The fused step computes the three directions of SimFBO in one pass. Two plain gradients, one on each
batch, are its floor; five terms computed client by client are what published codes do.
"""

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
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import Tree, dot
from fedbilevel.execution.stacked._trace import trace
from fedbilevel.execution.vectorize import apply_to_one, vectorized

Samples = tuple[Tensor, Tensor]  # inputs and labels
Point = tuple[Tree, Tree, Tree, Batch]  # x, y, z and the batches of one client, or of a stack
StepFunction = Callable[[Tree, Tree, Tree, Batch], object]
Timed = Callable[[], object]


def network_problem(net: torch.nn.Module, ridge: float = 1e-3) -> fb.Problem:
    """Cross-entropy of a network, whose head is y and whose backbone is x."""
    _, x, y = fb.split_module(net, lower="head.")
    below, above = fb.nets.stem(net)

    def embed(x: Tree, batch: Samples) -> Samples:
        return below(x, batch[0]), batch[1]

    def upper(x: Tree, y: Tree, batch: Samples) -> Tensor:
        return F.cross_entropy(above({**x, **y}, batch[0]), batch[1])

    def lower(x: Tree, y: Tree, batch: Samples) -> Tensor:
        return upper(x, y, batch) + 0.5 * ridge * dot(y, y)

    return fb.Problem(upper=upper, lower=lower, x=x, y=y, embed=embed)


def random_stack(problem: fb.Problem, clients: int, batch: int, shape: tuple[int, ...]) -> Point:
    """A stack of clients at different points, as in the middle of a round."""
    key = root(0, "bench")

    def perturb(tree: Tree, tag: int) -> Tree:
        noise = tree.map(lambda t: normal(fold_in(key, tag), (clients, *t.shape)) * 0.01)
        return tree.map(lambda t, n: t.expand(clients, *t.shape) + n, noise)

    def side(tag: int) -> Samples:
        labels = (normal(fold_in(key, tag + 1), (clients, batch)).abs() * 5).long().clamp(max=9)
        return normal(fold_in(key, tag), (clients, batch, *shape)), labels

    x, y = problem.start
    keys = fold_in(key, torch.arange(clients))
    return perturb(x, 1), perturb(y, 2), perturb(y, 3), Batch(side(10), side(20), keys)


def two_plain_gradients(problem: fb.Problem) -> StepFunction:
    """The gradient of g on the training batch and that of f on the validation batch."""
    oracle = Oracle(problem)

    def gradients(x: Tree, y: Tree, z: Tree, batch: Batch) -> object:
        lower = grad(oracle.lower, argnums=(0, 1))(x, y, batch)
        upper = grad(oracle.upper, argnums=(0, 1))(x, y, batch)
        return lower, upper

    return gradients


def written_out_mlp(x: Tree, y: Tree, z: Tree, batch: Batch) -> object:
    """The two gradients of an MLP as batched matrix products, with nothing but arithmetic."""
    w = x["backbone.1.weight"]
    c = x["backbone.1.bias"]
    v = y["head.weight"]
    e = y["head.bias"]
    gradients = []
    for inputs, labels in (batch.train, batch.val):
        a = inputs.flatten(2)
        h = torch.baddbmm(c.unsqueeze(1), a, w.transpose(1, 2))
        r = h.relu()
        p = torch.baddbmm(e.unsqueeze(1), r, v.transpose(1, 2)).softmax(-1)
        p.scatter_add_(2, labels.unsqueeze(-1), torch.full((*labels.shape, 1), -1.0))
        p /= labels.shape[1]
        dh = torch.bmm(p, v).mul_(h > 0)
        dw = torch.bmm(dh.transpose(1, 2), a)
        dv = torch.bmm(p.transpose(1, 2), r)
        gradients.append((dw, dh.sum(1), dv, p.sum(1)))
    return gradients


def five_terms_one_by_one(problem: fb.Problem, stack: Point) -> list[object]:
    """What published codes do: client by client, each term by its own autograd calls."""
    oracle = Oracle(problem)
    replies: list[object] = []
    for i in range(len(stack[3].rng)):
        x, y, z, (train, val, _) = pytree.tree_map(lambda tensor, i=i: tensor[i], stack)
        batch = Batch(train, val)
        x = x.map(lambda tensor: tensor.detach().requires_grad_())
        y = y.map(lambda tensor: tensor.detach().requires_grad_())
        xs = list(x.values())
        ys = list(y.values())
        zs = list(z.values())
        lower = partial(oracle.lower, x, y, batch)
        upper = partial(oracle.upper, x, y, batch)
        g_y = torch.autograd.grad(lower(), ys)
        f_x = torch.autograd.grad(upper(), xs)
        f_y = torch.autograd.grad(upper(), ys)
        gradient = torch.autograd.grad(lower(), ys, create_graph=True)
        hessian = torch.autograd.grad(gradient, ys, grad_outputs=zs)
        gradient = torch.autograd.grad(lower(), ys, create_graph=True)
        cross = torch.autograd.grad(gradient, xs, grad_outputs=zs)
        d_x = [f - c for f, c in zip(f_x, cross, strict=True)]
        d_z = [h - f for h, f in zip(hessian, f_y, strict=True)]
        replies.append((d_x, g_y, d_z))
    return replies


def replayed(function: Callable[..., object], stack: Point) -> Timed:
    """A function of a stack as a long run computes it: traced once, then replayed."""
    tensors, spec = pytree.tree_flatten(stack)

    def flat(*tensors: Tensor) -> list[Tensor]:
        return pytree.tree_leaves(function(*pytree.tree_unflatten(tensors, spec)))

    run = trace(flat, tensors)
    return lambda: run(*tensors)


def one_by_one(function: StepFunction, stack: Point) -> Timed:
    """A function replayed client by client, as on a CPU where convolutions are large."""
    clients = len(stack[3].rng)
    first = pytree.tree_map(lambda tensor: tensor[:1], stack)
    run = replayed(vectorized(function, apply_to_one), first)
    # All clients have the same shapes, so the first one stands for each of them.
    return lambda: [run() for _ in range(clients)]


def against_floor(name: str, problem: fb.Problem, stack: Point, repeats: int) -> Row:
    """Compare the fused step with the fastest way to compute two plain gradients."""
    fused = Oracle(problem).directions
    plain = two_plain_gradients(problem)
    functions: dict[str, Timed] = {
        "plain, stacked": lambda: vectorized(plain)(*stack),
        "plain, stacked and traced": replayed(vectorized(plain), stack),
    }
    if name == "MLP":
        functions["fused"] = replayed(vectorized(fused), stack)
        functions["fused before it is traced"] = lambda: vectorized(fused)(*stack)
        functions["plain, written out"] = lambda: written_out_mlp(*stack)
    else:
        functions["fused"] = one_by_one(fused, stack)
        functions["plain, one by one and traced"] = one_by_one(plain, stack)
    times = seconds(functions, repeats)
    floor = min(value for key, value in times.items() if key.startswith("plain"))
    clients, batch = stack[3].train[1].shape
    title = f"fused step / two plain gradients, {name}, {clients} clients, batch {batch}"
    return Row(title, times["fused"] / floor, "at most 1.10", describe(times))


def against_five_terms() -> Row:
    """Compare the fused step with five terms computed one by one."""
    mlp = network_problem(fb.nets.mlp(784, 200, 10))
    stack = random_stack(mlp, clients=10, batch=32, shape=(1, 28, 28))
    functions: dict[str, Timed] = {
        "naive": lambda: five_terms_one_by_one(mlp, stack),
        "fused": replayed(vectorized(Oracle(mlp).directions), stack),
    }
    times = seconds(functions, 40)
    title = "five terms one by one / fused and stacked, MLP, 10 clients, batch 32"
    return Row(title, times["naive"] / times["fused"], "at least 3", describe(times))


def rows() -> list[Row]:
    """Compare the fused step with its floor on three networks, and with published codes."""
    mlp = network_problem(fb.nets.mlp(784, 200, 10))
    cnn = network_problem(fb.nets.lenet(3, 32, 10))
    resnet = network_problem(fb.nets.resnet12(1, 28, 10))
    return [
        against_floor("MLP", mlp, random_stack(mlp, 10, 64, (1, 28, 28)), 60),
        against_floor("CNN", cnn, random_stack(cnn, 10, 64, (3, 32, 32)), 10),
        against_floor("ResNet-12", resnet, random_stack(resnet, 2, 10, (1, 28, 28)), 3),
        against_five_terms(),
    ]
