"""Few-shot learning: learn a backbone (upper level) on which a head (lower level) tells new characters apart.

An episode takes N characters (ways), K drawings (shots) of each as its support and the others as its queries, and
labels the characters by their places 0 to N-1. It has a head of its own, fitted from a start that all share:

lower: cross-entropy of the head on the support + ridge/2 ||y||^2,       upper: cross-entropy on the queries

A client's sample is a character with all its drawings, so that a batch of N samples is an episode. The losses that a
run records are those of one episode a client, at the shared y. Li et al., "Distributed bilevel optimization with dual
pruning for resource-limited clients", print one y*(x) for all episodes, which means nothing where every episode labels
anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.problem import ClientData, Problem, split_module
from fedbilevel.core.rng import fold_in, root, rows
from fedbilevel.core.tree import Tree, dot, zeros_like
from fedbilevel.data import characters
from fedbilevel.tasks.task import Task

IMAGES = (
    2000,
    100,
)  # through a backbone at once, when testing; on a CPU they stay in the cache of a core


def few_shot(
    *,
    data: str = "digits",
    clients: int = 10,
    ways: int = 5,
    shots: int = 1,
    model: str = "conv4",
    hidden: int = 32,
    ridge: float = 0.1,
    adapt: str = "head",
    adapt_steps: int = 10,
    adapt_lr: float = 0.5,
    episodes: int = 200,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Task:
    """data: digits, omniglot. model: conv4 (of `hidden` channels) or resnet12. environment.batch_size must be `ways`.

    The training characters are cut into sets of `ways` in the order of the data, and the sets into a shard a client: on
    Omniglot a client holds a few alphabets. Metrics: the mean accuracy on the queries of `episodes` episodes of unseen
    characters, always the same, and the half-width of its 95% confidence interval, after adapting to the support by
    `adapt`: "head", `adapt_steps` gradient steps of size `adapt_lr` on the head from the shared y; "all", such steps on
    the backbone too (MAML, Finn et al. 2017); "prototypes", the nearest mean of a character's features (Snell et al.
    2017).
    """
    checks.integer("clients", clients, least=1)
    checks.integer("ways", ways, least=2)
    checks.positive("ridge", ridge)
    checks.integer("adapt_steps", adapt_steps, least=0)
    checks.positive("adapt_lr", adapt_lr)
    checks.integer("episodes", episodes, least=2)
    source = characters(data, data_dir)
    count, drawings, _, size, _ = source.train.shape
    checks.integer("shots", shots, least=1, most=drawings - 1)
    if ways > len(source.test):
        raise ValueError(
            f"ways is {ways}; it must be at most {len(source.test)}, the test characters of {data}"
        )
    if clients > count // ways:
        raise ValueError(
            f"clients is {clients}; it must be at most {count // ways}, as each needs {ways} of the {count} training "
            f"characters of {data}"
        )
    if checks.one_of("model", model, ("conv4", "resnet12")) == "conv4":
        net = nets.conv4(1, size, ways, seed, hidden)
    else:
        net = nets.resnet12(1, size, ways, seed)
    learner = Learner(net, ways, shots, ridge, adapt_steps, adapt_lr)
    scores = {
        "head": learner.adapt_head,
        "all": learner.adapt_all,
        "prototypes": learner.prototypes,
    }
    adapted = scores[checks.one_of("adapt", adapt, scores)]

    keys = fold_in(root(seed, "test episodes"), torch.arange(episodes))
    used, place = shuffled(fold_in(keys, 0), len(source.test))[:, :ways].unique(return_inverse=True)
    order = shuffled(fold_in(fold_in(keys, 1)[:, None], torch.arange(ways)), drawings)

    @torch.no_grad()
    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        device = y["head.bias"].device
        pool = source.test[used].to(device)
        if adapt != "all":  # the backbone stays: one pass serves all episodes
            found = [
                learner.features(x, images)
                for images in pool.flatten(0, 1).split(IMAGES[device.type == "cpu"])
            ]
            pool = torch.cat(found).unflatten(0, (-1, drawings))
        drawn = pool[
            place[..., None].to(device), order.to(device)
        ]  # (episodes, ways, drawings, ...)
        support, query = drawn[:, :, :shots].flatten(1, 2), drawn[:, :, shots:].flatten(1, 2)
        guess = vmap(partial(adapted, x, y), chunk_size=1 if adapt == "all" else None)(
            support, query
        ).argmax(-1)
        accuracy = (guess == learner.places(query[0])).float().mean(1)
        return {
            "test_accuracy": float(accuracy.mean()),
            "test_accuracy_ci95": 1.96 * float(accuracy.std()) / episodes**0.5,
        }

    _, x, y = split_module(net, lower="head.")
    problem = Problem(
        upper=learner.upper,
        lower=learner.lower,
        x=x,
        y=zeros_like(y),  # no place is special
        lower_level="private",
        embed=learner.embed,
        axes=nets.axes(net),
    )
    sets = source.train[: count // ways * ways].unflatten(0, (-1, ways))
    shards = [shard.flatten(0, 1) for shard in sets.tensor_split(clients)]
    return Task(
        problem,
        [ClientData(train={"support": shard}, val={"query": shard}) for shard in shards],
        evaluate,
    )


@dataclass(frozen=True)
class Learner:
    """A network's losses on episodes, and three ways to adapt it to a support, each of which returns scores."""

    net: nn.Module
    ways: int
    shots: int
    ridge: float
    steps: int
    lr: float

    def features(self, x: Tree, images: Tensor) -> Tensor:
        """The backbone's, shifted and scaled to mean 0 and squared length 2 N.

        The head's Hessian at 0 then has a largest eigenvalue of about 2, so that one step size suits every network and
        submodel. As the features come, it is 2 to 250, depending on the network, its width and the images.
        """
        backbone = {name.removeprefix("backbone."): tensor for name, tensor in x.items()}
        h: Tensor = functional_call(self.net.get_submodule("backbone"), backbone, (images,))
        return F.layer_norm(h, h.shape[-1:]) * math.sqrt(2 * self.ways / h.shape[-1])

    def head(self, y: Tree, features: Tensor) -> Tensor:
        return F.linear(features, y["head.weight"], y["head.bias"])

    def places(self, samples: Tensor) -> Tensor:
        """The labels of samples that are sorted by character, equally many of each."""
        return torch.arange(self.ways, device=samples.device).repeat_interleave(
            len(samples) // self.ways
        )

    def embed(self, x: Tree, data: dict[str, Tensor], rng: Tensor) -> dict[str, Tensor]:
        """The features of a batch's support or of its queries, whichever its name asks for; rng says which is which."""
        ((side, images),) = data.items()
        count, drawings = images.shape[:2]
        if count != self.ways:
            raise ValueError(
                f"a batch holds {count} characters; environment.batch_size must be {self.ways}, the number of ways"
            )
        numbers = torch.arange(count, device=images.device)
        order = shuffled(fold_in(rng, numbers), drawings)
        chosen = order[:, : self.shots] if side == "support" else order[:, self.shots :]
        drawn = images[numbers[:, None], chosen].flatten(0, 1)
        return {"features": self.features(x, drawn), "labels": self.places(drawn)}

    def upper(self, x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(y, batch["features"]), batch["labels"])

    def lower(self, x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        return self.upper(x, y, batch) + 0.5 * self.ridge * dot(y, y)

    def adapt_head(self, x: Tree, y: Tree, support: Tensor, query: Tensor) -> Tensor:
        batch = {"features": support, "labels": self.places(support)}
        for _ in range(self.steps):
            y = y - self.lr * grad(self.lower, argnums=1)(x, y, batch)
        return self.head(y, query)

    def adapt_all(self, x: Tree, y: Tree, support: Tensor, query: Tensor) -> Tensor:
        def loss(x: Tree, y: Tree) -> Tensor:
            return self.lower(
                x, y, {"features": self.features(x, support), "labels": self.places(support)}
            )

        for _ in range(self.steps):
            d_x, d_y = grad(loss, argnums=(0, 1))(x, y)
            x, y = x - self.lr * d_x, y - self.lr * d_y
        return self.head(y, self.features(x, query))

    def prototypes(self, x: Tree, y: Tree, support: Tensor, query: Tensor) -> Tensor:
        return -torch.cdist(query, support.unflatten(0, (self.ways, self.shots)).mean(1))


def shuffled(keys: Tensor, count: int) -> Tensor:
    """The numbers below `count` in a random order for each key."""
    return rows(keys, count, count)
