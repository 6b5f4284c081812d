"""Few-shot learning: learn a backbone (upper level) for heads (lower level) on new classes.

An episode takes N characters (ways). K drawings (shots) of each form its support, the other
drawings its queries, and the labels are the positions 0 to N-1 of the characters in the episode.
It has its own head, fitted from a start that all episodes share:

lower: cross-entropy of the head on the support + ridge/2 ||y||^2,
upper: cross-entropy on the queries.

A client's sample is a character with all its drawings, so that a batch of N samples is an episode.
The losses that a run records are those of one episode per client, at the shared y.

Departure from the paper: Li et al., "Distributed bilevel optimization with dual pruning for
resource-limited clients", use one y*(x) for all episodes, which has no meaning where every episode
numbers its classes differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.derivatives import grad
from fedbilevel.core.modules import split_module
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, root, rows
from fedbilevel.core.tree import Tree, dot, zeros_like
from fedbilevel.data import characters
from fedbilevel.tasks.classification import cross_entropies, fraction
from fedbilevel.tasks.task import Task

# Images per pass through the backbone in the evaluation. On a CPU, a small batch stays in the
# cache of a core.
IMAGES_ON_GPU = 2000
IMAGES_ON_CPU = 100


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
    """Build the task of few-shot learning; `Environment.batch_size` must equal `ways`.

    The training characters are cut into sets of `ways` in the order of the data, and the sets into
    one shard per client: on Omniglot, a client holds a few alphabets.

    Args:
        data: "digits" or "omniglot".
        clients: The number of clients.
        ways: Characters per episode.
        shots: Drawings per character in the support.
        model: "conv4" or "resnet12".
        hidden: Channels of "conv4".
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        adapt: How the evaluation adapts to a support. "head": gradient steps on the head, from the
            shared y; "all": gradient steps on the backbone too (MAML, Finn et al. 2017);
            "prototypes": nearest mean of a character's features (Snell et al. 2017).
        adapt_steps: Gradient steps of "head" and "all".
        adapt_lr: Their step size.
        episodes: Test episodes of unseen characters, the same ones in every evaluation.
        seed: The seed of the initial parameters and of the test episodes.
        data_dir: Where the files of the data set are; see `fedbilevel.data.characters`.

    Returns:
        The task. Its metrics: `test_accuracy`, the mean accuracy on the queries of the test
        episodes, and `test_accuracy_ci95`, the half-width of its 95% confidence interval.

    Raises:
        ValueError: An option is out of range.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("few-shot", clients=4, ways=3, hidden=8)
        >>> len(task.clients), task.problem.lower_level
        (4, 'private')
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
            f"clients is {clients}; it must be at most {count // ways}, as each needs {ways} of "
            f"the {count} training characters of {data}"
        )
    if checks.one_of("model", model, ("conv4", "resnet12")) == "conv4":
        net = nets.conv4(1, size, ways, seed, hidden)
    else:
        net = nets.resnet12(1, size, ways, seed)
    learner = Learner(net, ways, shots, ridge, adapt_steps, adapt_lr)
    adaptations = {
        "head": learner.adapt_head,
        "all": learner.adapt_all,
        "prototypes": learner.prototypes,
    }
    scores = adaptations[checks.one_of("adapt", adapt, adaptations)]
    episodes_at_once = None  # all of them
    if adapt == "all":  # every episode has its own backbone, which takes memory
        episodes_at_once = 1

    keys = fold_in(root(seed, "test episodes"), torch.arange(episodes))
    drawn = shuffled(fold_in(keys, 0), len(source.test))[:, :ways]
    used, position = drawn.unique(return_inverse=True)
    order = shuffled(fold_in(fold_in(keys, 1)[:, None], torch.arange(ways)), drawings)

    @torch.no_grad()
    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        device = y["head.bias"].device
        pool = source.test[used].to(device)
        if adapt != "all":  # the backbone is the same for all episodes: embed every image once
            batch = IMAGES_ON_CPU if device.type == "cpu" else IMAGES_ON_GPU
            features = [learner.features(x, images) for images in pool.flatten(0, 1).split(batch)]
            pool = torch.cat(features).unflatten(0, (-1, drawings))
        # (episodes, ways, drawings, ...)
        episode = pool[position[..., None].to(device), order.to(device)]
        support = episode[:, :, :shots].flatten(1, 2)
        query = episode[:, :, shots:].flatten(1, 2)
        query_scores = vmap(partial(scores, x, y), chunk_size=episodes_at_once)(support, query)
        correct = query_scores.argmax(-1) == learner.labels(query[0])
        per_episode = correct.double().mean(1)
        return {
            "test_accuracy": fraction(correct),
            "test_accuracy_ci95": 1.96 * float(per_episode.std()) / episodes**0.5,
        }

    _, x, y = split_module(net, lower="head.")
    problem = Problem(
        upper=learner.upper,
        lower=learner.lower,
        x=x,
        y=zeros_like(y),  # at the start, no class of an episode is special
        lower_level="private",
        embed=learner.embed,
        axes=nets.axes(net),
    )
    sets = source.train[: count // ways * ways].unflatten(0, (-1, ways))
    client_data = []
    for client_sets in sets.tensor_split(clients):
        shard = client_sets.flatten(0, 1)
        client_data.append(ClientData(train={"support": shard}, val={"query": shard}))
    return Task(problem, client_data, evaluate)


@dataclass(frozen=True)
class Learner:
    """The losses of a network on episodes, and three ways of adapting it to a support.

    Args:
        net: A network with the submodules `backbone` and `head`.
        ways: Characters per episode.
        shots: Drawings per character in the support.
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        steps: Gradient steps of `adapt_head` and `adapt_all`.
        lr: Their step size.
    """

    net: nn.Module
    ways: int
    shots: int
    ridge: float
    steps: int
    lr: float

    def features(self, x: Tree, images: Tensor) -> Tensor:
        """Return the backbone's features, normalised to mean 0 and squared length 2 N.

        The Hessian of the head at 0 then has a largest eigenvalue of about 2, so that one step size
        suits every network and submodel. Without this normalisation the eigenvalue is 2 to 250,
        depending on the network, its width and the images.
        """
        backbone = {name.removeprefix("backbone."): tensor for name, tensor in x.items()}
        h: Tensor = functional_call(self.net.get_submodule("backbone"), backbone, (images,))
        return F.layer_norm(h, h.shape[-1:]) * math.sqrt(2 * self.ways / h.shape[-1])

    def head(self, y: Tree, features: Tensor) -> Tensor:
        """Return the class scores of features."""
        return F.linear(features, y["head.weight"], y["head.bias"])

    def labels(self, samples: Tensor) -> Tensor:
        """Return the labels of samples that are sorted by character, equally many of each."""
        positions = torch.arange(self.ways, device=samples.device)
        return positions.repeat_interleave(len(samples) // self.ways)

    def embed(self, x: Tree, data: dict[str, Tensor], rng: Tensor) -> dict[str, Tensor]:
        """Return features and labels of an episode's support or of its queries.

        Args:
            x: The backbone.
            data: One entry, named "support" or "query": characters with all their drawings.
            rng: The key that decides which drawings are the support.
        """
        ((side, images),) = data.items()
        count, drawings = images.shape[:2]
        if count != self.ways:
            raise ValueError(
                f"a batch holds {count} characters; environment.batch_size must be {self.ways}, "
                "the number of ways"
            )
        positions = torch.arange(count, device=images.device)
        order = shuffled(fold_in(rng, positions), drawings)
        if side == "support":
            order = order[:, : self.shots]
        else:
            order = order[:, self.shots :]
        drawn = images[positions[:, None], order].flatten(0, 1)
        return {"features": self.features(x, drawn), "labels": self.labels(drawn)}

    def upper(self, x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross-entropy of the head y on features."""
        return cross_entropies(self.head(y, batch["features"]), batch["labels"]).mean()

    def lower(self, x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross-entropy of the head y on features, with the ridge."""
        return self.upper(x, y, batch) + 0.5 * self.ridge * dot(y, y)

    def adapt_head(self, x: Tree, y: Tree, support: Tensor, query: Tensor) -> Tensor:
        """Return the scores of query features, after gradient steps on the head."""
        batch = {"features": support, "labels": self.labels(support)}
        for _ in range(self.steps):
            y = y - self.lr * grad(self.lower, argnums=1)(x, y, batch)
        return self.head(y, query)

    def adapt_all(self, x: Tree, y: Tree, support: Tensor, query: Tensor) -> Tensor:
        """Return the scores of query images, after gradient steps on backbone and head."""

        def loss(x: Tree, y: Tree) -> Tensor:
            batch = {"features": self.features(x, support), "labels": self.labels(support)}
            return self.lower(x, y, batch)

        for _ in range(self.steps):
            d_x, d_y = grad(loss, argnums=(0, 1))(x, y)
            x = x - self.lr * d_x
            y = y - self.lr * d_y
        return self.head(y, self.features(x, query))

    def prototypes(self, x: Tree, y: Tree, support: Tensor, query: Tensor) -> Tensor:
        """Return minus the distances of query features to each character's mean features."""
        means = support.unflatten(0, (self.ways, self.shots)).mean(1)
        return -torch.cdist(query, means)


def shuffled(keys: Tensor, count: int) -> Tensor:
    """Return the numbers below `count` in a random order, for each key."""
    return rows(keys, count, count)
