"""Few-shot learning: supports and queries, adaptation by hand, accuracy on new characters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel import data
from fedbilevel.core import rng
from fedbilevel.core.tree import dot, norm
from fedbilevel.tasks.few_shot import Learner

KEY = rng.root(3, "test")


class Pixels(Learner):
    """A learner whose features are the images themselves."""

    def features(self, x: Any, images: Tensor) -> Tensor:
        return images.flatten(1)


def pixel_learner(ways: int, shots: int) -> Learner:
    return Pixels(torch.nn.Identity(), ways, shots, ridge=0.1, steps=1, lr=0.5)


def numbered_images(characters: int, drawings: int = 20) -> Tensor:
    """Return images of one pixel: drawing d of character c is 100 c + d."""
    number = 100 * torch.arange(characters)[:, None] + torch.arange(drawings)
    return number.float().reshape(characters, drawings, 1, 1, 1)


def embed_episode(
    learner: Learner, images: Tensor, key: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the support and the queries of one episode."""
    support = learner.embed(fb.Tree(), {"support": images}, key)
    query = learner.embed(fb.Tree(), {"query": images}, key)
    return support, query


@pytest.mark.parametrize("shots", [1, 5])
def test_an_episode_splits_every_characters_drawings(shots: int) -> None:
    learner = pixel_learner(5, shots)
    images = numbered_images(5)
    support, query = embed_episode(learner, images, KEY)
    for part, drawings in ((support, shots), (query, 20 - shots)):
        positions = torch.arange(5).repeat_interleave(drawings)
        assert torch.equal(part["features"][:, 0].long() // 100, positions)
        assert torch.equal(part["labels"], positions)
    drawn = torch.cat([support["features"], query["features"]]).flatten()
    assert torch.equal(drawn.sort().values, images.flatten())  # each drawing once, on one side


@pytest.mark.parametrize("shots", [1, 5])
def test_the_key_decides_the_support_of_each_character(shots: int) -> None:
    learner = pixel_learner(5, shots)
    images = numbered_images(5)
    support, _ = embed_episode(learner, images, KEY)
    same, _ = embed_episode(learner, images, KEY)
    other, _ = embed_episode(learner, images, rng.fold_in(KEY, 1))
    assert torch.equal(same["features"], support["features"])
    assert not torch.equal(other["features"], support["features"])
    first_drawings = (support["features"] % 100)[::shots]
    assert len(first_drawings.unique()) > 1  # characters are shuffled independently


def test_supports_are_uniform() -> None:
    keys = rng.fold_in(KEY, torch.arange(4000))
    learner = pixel_learner(2, 1)
    images = numbered_images(2, drawings=4)

    def drawing_of_character_1(key: Tensor) -> Tensor:
        support = learner.embed(fb.Tree(), {"support": images}, key)
        return support["features"][1, 0] - 100

    drawn = torch.vmap(drawing_of_character_1)(keys)
    counts = drawn.long().bincount(minlength=4)
    assert float((counts / 4000 - 0.25).abs().max()) < 4 * (0.1875 / 4000) ** 0.5


@pytest.mark.parametrize(("batch_size", "held"), [(7, 7), (10, 10), (None, 15)])
def test_a_batch_must_be_one_episode(batch_size: int | None, held: int) -> None:
    """Several episodes number their classes differently, and no single head can fit them."""
    task = fb.tasks.load("few-shot", hidden=8)
    environment = fb.Environment(batch_size=batch_size)
    message = (
        f"client 0, before round 1: a batch holds {held} characters; "
        "environment.batch_size must be 5, the"
    )
    with pytest.raises(ValueError, match=message):
        fb.solve(task.problem, task.clients, "rabo", rounds=1, environment=environment)


@pytest.mark.parametrize(
    "options",
    [{"hidden": 8}, {"hidden": 64}, {"model": "resnet12"}, {"ways": 10, "clients": 4}],
    ids=str,
)
def test_features_make_the_heads_curvature_about_2_for_every_network(
    options: dict[str, Any],
) -> None:
    ways = options.get("ways", 5)
    task = fb.tasks.load("few-shot", **options)
    x, y = task.problem.start
    assert task.problem.embed is not None
    images = task.clients[0].train["support"][:ways]  # type: ignore[call-overload]
    batch: Any = task.problem.embed(x, {"support": images}, KEY)
    features = batch["features"]
    squared_lengths = (features**2).sum(1)
    torch.testing.assert_close(squared_lengths, torch.full((ways,), 2.0 * ways), rtol=1e-3, atol=0)
    torch.testing.assert_close(features.mean(1), torch.zeros(ways), rtol=0, atol=1e-5)
    v = y.map(lambda t: rng.normal(KEY, t.shape))
    for _ in range(30):  # power iteration
        slope = partial(slope_along, task.problem.lower, x, v / norm(v), batch)
        v = torch.func.grad(slope)(y)
    assert 1.0 < float(norm(v)) < 2.5


def slope_along(lower: Any, x: fb.Tree, v: fb.Tree, batch: Any, y: fb.Tree) -> Tensor:
    """Return <grad_y g, v>, whose gradient is d2yy g v."""
    return dot(torch.func.grad(lower, argnums=1)(x, y, batch, KEY), v)


def test_one_step_on_a_head_at_0_is_the_nearest_prototype() -> None:
    """With one shot and features of one length, scores are lr/N <support, query> + a constant."""
    options: dict[str, Any] = {"hidden": 8, "episodes": 20}
    head = fb.tasks.load("few-shot", adapt="head", adapt_steps=1, **options)
    nearest = fb.tasks.load("few-shot", adapt="prototypes", **options)
    assert head.evaluate is not None
    assert nearest.evaluate is not None
    x, y = head.problem.start
    accuracy = head.evaluate(x, y)["test_accuracy"]
    assert accuracy == pytest.approx(nearest.evaluate(x, y)["test_accuracy"], abs=1e-3)
    assert accuracy > 0.3


def adapted_accuracy(task: Any, key: Tensor, x: fb.Tree, y: fb.Tree, adapt: str) -> Tensor:
    """Return the accuracy on the episode of a key, after three gradient steps on its support."""
    images = data.characters("digits").test[rng.rows(rng.fold_in(key, 0), 12, 5)]
    a = x.map(lambda t: t.clone().requires_grad_())
    b = y.map(lambda t: t.clone().requires_grad_())
    adapted = list(b.values())
    if adapt == "all":
        adapted += a.values()
    for _ in range(3):
        support = task.problem.embed(a, {"support": images}, rng.fold_in(key, 1))
        gradients = torch.autograd.grad(task.problem.lower(a, b, support, KEY), adapted)
        with torch.no_grad():
            for tensor, gradient in zip(adapted, gradients, strict=True):
                tensor -= 0.1 * gradient
    query = task.problem.embed(a, {"query": images}, rng.fold_in(key, 1))
    scores = F.linear(query["features"], b["head.weight"], b["head.bias"])
    return (scores.argmax(1) == query["labels"]).float().mean()


@pytest.mark.parametrize("adapt", ["head", "all"])
def test_accuracies_are_those_of_a_loop_over_episodes(adapt: str) -> None:
    options: dict[str, Any] = {"adapt_steps": 3, "adapt_lr": 0.1, "shots": 3, "ridge": 0.2}
    task = fb.tasks.load("few-shot", adapt=adapt, hidden=8, episodes=4, seed=5, **options)
    x, y = task.problem.start
    y = y.map(lambda t: rng.normal(KEY, t.shape))
    assert task.evaluate is not None
    metrics = task.evaluate(x, y)
    keys = rng.fold_in(rng.root(5, "test episodes"), torch.arange(4))
    accuracies = torch.stack([adapted_accuracy(task, key, x, y, adapt) for key in keys])
    assert metrics["test_accuracy"] == pytest.approx(float(accuracies.mean()), abs=0.01)
    half_width = 1.96 * float(accuracies.std()) / 2
    assert metrics["test_accuracy_ci95"] == pytest.approx(half_width, abs=0.01)


def test_clients_hold_whole_sets_of_training_characters_the_same_on_both_sides() -> None:
    task: Any = fb.tasks.load("few-shot")
    shards = [client.train["support"] for client in task.clients]
    assert [len(shard) for shard in shards] == [15, 15, 10, 10, 10, 10, 10, 10, 10, 10]
    assert torch.equal(torch.cat(shards), data.characters("digits").train[:110])
    for client in task.clients:
        assert client.train["support"] is client.val["query"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "mnist"}, "name is 'mnist' .*; it must be one of 'digits', 'omniglot'"),
        ({"ways": 13}, "ways is 13; it must be at most 12, the test characters of digits"),
        (
            {"clients": 23},
            "clients is 23; it must be at most 22, as each needs 5 of the 112 training characters",
        ),
        ({"shots": 20}, "shots is 20; it must be 1 to 19"),
        ({"adapt": "heads"}, r"adapt is 'heads' \(did you mean 'head'\?\)"),
        ({"model": "conv"}, "model is 'conv' .*'conv4'.*; it must be one of 'conv4', 'resnet12'"),
        ({"ridge": 0}, "ridge is 0; it must be above 0"),
        ({"episodes": 1}, "episodes is 1; it must be at least 2"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("few-shot", **options)


def test_rabo_learns_a_backbone_for_unseen_characters() -> None:
    """Observed: from .51 to .71."""
    task = fb.tasks.load("few-shot", hidden=16, episodes=100)
    method = fb.algorithms.get("rabo")(
        lr_x=0.3, lr_y=0.5, lower_steps=5, neumann_lr=0.5, neumann_steps=5
    )
    environment = fb.Environment(batch_size=5, local_steps=2)
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=20,
        environment=environment,
        evaluate=task.evaluate,
        every=20,
    )
    first, last = (metrics["test_accuracy"] for metrics in result.history)
    assert last > first + 0.1
