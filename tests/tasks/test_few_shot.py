"""Few-shot learning: episodes that do not leak, adaptation by hand, learning that carries over to new characters."""

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
    """Whose features are the images themselves."""

    def features(self, x: Any, images: Tensor) -> Tensor:
        return images.flatten(1)


def pixels(ways: int, shots: int) -> Learner:
    return Pixels(torch.nn.Identity(), ways, shots, ridge=0.1, steps=1, lr=0.5)


def numbered(characters: int, drawings: int = 20) -> Tensor:
    """Images of one pixel: drawing d of character c is 100 c + d."""
    number = 100 * torch.arange(characters)[:, None] + torch.arange(drawings)
    return number.float().reshape(characters, drawings, 1, 1, 1)


def sides(
    learner: Learner, images: Tensor, key: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x = fb.Tree()
    return learner.embed(x, {"support": images}, key), learner.embed(x, {"query": images}, key)


@pytest.mark.parametrize("shots", [1, 5])
def test_an_episode_splits_every_characters_drawings(shots: int) -> None:
    learner, images = pixels(5, shots), numbered(5)
    support, query = sides(learner, images, KEY)
    for part, each in ((support, shots), (query, 20 - shots)):
        places = torch.arange(5).repeat_interleave(each)
        assert torch.equal(part["features"][:, 0].long() // 100, places)
        assert torch.equal(part["labels"], places)
    drawn = torch.cat([support["features"], query["features"]]).flatten()
    assert torch.equal(drawn.sort().values, images.flatten())  # each drawing once, on one side
    assert torch.equal(sides(learner, images, KEY)[0]["features"], support["features"])
    assert not torch.equal(
        sides(learner, images, rng.fold_in(KEY, 1))[0]["features"], support["features"]
    )
    first = (support["features"] % 100)[::shots]
    assert len(first.unique()) > 1  # each character has an order of its own


def test_supports_are_uniform() -> None:
    keys = rng.fold_in(KEY, torch.arange(4000))
    learner, images = pixels(2, 1), numbered(2, drawings=4)
    drawn = (
        torch.vmap(
            lambda key: learner.embed(fb.Tree(), {"support": images}, key)["features"][1, 0]
        )(keys)
        - 100
    )
    counts = drawn.long().bincount(minlength=4)
    assert float((counts / 4000 - 0.25).abs().max()) < 4 * (0.1875 / 4000) ** 0.5


@pytest.mark.parametrize(("size", "held"), [(7, 7), (10, 10), (None, 15)])
def test_a_batch_is_one_episode(size: int | None, held: int) -> None:
    """Several episodes, each with its own labels, would share a head that can tell nothing apart."""
    task, environment = fb.tasks.load("few-shot", hidden=8), fb.Environment(batch_size=size)
    sentence = f"client 0, before round 1: a batch holds {held} characters; environment.batch_size must be 5, the"
    with pytest.raises(ValueError, match=sentence):
        fb.solve(task.problem, task.clients, "rabo", rounds=1, environment=environment)


def test_features_make_the_heads_curvature_about_2_for_every_network() -> None:
    for options in (
        {"hidden": 8},
        {"hidden": 64},
        {"model": "resnet12"},
        {"ways": 10, "clients": 4},
    ):
        task = fb.tasks.load("few-shot", **options)  # type: ignore[arg-type]
        (x, y), ways = task.problem.start, options.get("ways", 5)
        assert task.problem.embed is not None
        images = task.clients[0].train["support"][:ways]  # type: ignore[call-overload]
        batch: Any = task.problem.embed(x, {"support": images}, KEY)
        features = batch["features"]
        torch.testing.assert_close(
            (features**2).sum(1), torch.full((int(ways),), 2.0 * ways), rtol=1e-3, atol=0
        )
        torch.testing.assert_close(features.mean(1), torch.zeros(int(ways)), rtol=0, atol=1e-5)
        v = y.map(lambda t: rng.normal(KEY, t.shape))
        for _ in range(30):  # power iteration
            slope = partial(along, task.problem.lower, x, v / norm(v), batch)
            v = torch.func.grad(slope)(y)
        assert 1.0 < float(norm(v)) < 2.5


def along(lower: Any, x: fb.Tree, v: fb.Tree, batch: Any, y: fb.Tree) -> Tensor:
    """<grad_y g, v>, whose gradient is d2yy g v."""
    return dot(torch.func.grad(lower, argnums=1)(x, y, batch, KEY), v)


def test_one_step_on_a_head_at_0_is_the_nearest_prototype() -> None:
    """With one shot and features of one length: the step's scores are lr/N <support, query> and a constant."""
    options: dict[str, Any] = {"hidden": 8, "episodes": 20}
    head = fb.tasks.load("few-shot", adapt="head", adapt_steps=1, **options)
    nearest = fb.tasks.load("few-shot", adapt="prototypes", **options)
    assert head.evaluate is not None
    assert nearest.evaluate is not None
    found = head.evaluate(*head.problem.start)
    assert found["test_accuracy"] == pytest.approx(
        nearest.evaluate(*head.problem.start)["test_accuracy"], abs=1e-3
    )
    assert found["test_accuracy"] > 0.3


def test_accuracies_are_those_of_a_loop_over_episodes() -> None:
    for adapt in ("head", "all"):
        settings: dict[str, Any] = {"adapt_steps": 3, "adapt_lr": 0.1, "shots": 3, "ridge": 0.2}
        task = fb.tasks.load("few-shot", adapt=adapt, hidden=8, episodes=4, seed=5, **settings)
        x, y = task.problem.start
        y = y.map(lambda t: rng.normal(KEY, t.shape))
        assert task.evaluate is not None
        found = task.evaluate(x, y)
        characters, keys = data.characters("digits").test, rng.root(5, "test episodes")
        accuracies = []
        for episode in range(4):
            key = rng.fold_in(keys, episode)
            images = characters[rng.rows(rng.fold_in(key, 0), 12, 5)]
            a, b = (tree.map(lambda t: t.clone().requires_grad_()) for tree in (x, y))
            data: Any = task.problem
            for _ in range(3):
                support = data.embed(a, {"support": images}, rng.fold_in(key, 1))
                loss = data.lower(a, b, support, KEY)
                moved = [*b.values(), *(a.values() if adapt == "all" else ())]
                slopes = torch.autograd.grad(loss, moved)
                with torch.no_grad():
                    for tensor, slope in zip(moved, slopes, strict=True):
                        tensor -= 0.1 * slope
            query = data.embed(a, {"query": images}, rng.fold_in(key, 1))
            scores = F.linear(query["features"], b["head.weight"], b["head.bias"])
            accuracies.append((scores.argmax(1) == query["labels"]).float().mean())
        assert found["test_accuracy"] == pytest.approx(
            float(torch.stack(accuracies).mean()), abs=0.01
        )
        half_width = 1.96 * float(torch.stack(accuracies).std()) / 2
        assert found["test_accuracy_ci95"] == pytest.approx(half_width, abs=0.01)


def test_clients_hold_whole_sets_of_characters_on_both_sides_and_none_for_testing() -> None:
    task, source = fb.tasks.load("few-shot"), data.characters("digits")
    parts: list[Any] = [client.train for client in task.clients]
    assert [len(part["support"]) for part in parts] == [15, 15, 10, 10, 10, 10, 10, 10, 10, 10]
    assert torch.equal(torch.cat([part["support"] for part in parts]), source.train[:110])
    for client in task.clients:
        assert client.train["support"] is client.val["query"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "mnist"}, "name is 'mnist'; it must be one of 'digits', 'omniglot'"),
        ({"ways": 13}, "ways is 13; it must be at most 12, the test characters of digits"),
        (
            {"clients": 23},
            "clients is 23; it must be at most 22, as each needs 5 of the 112 training characters",
        ),
        ({"shots": 20}, "shots is 20; it must be 1 to 19"),
        ({"adapt": "heads"}, "adapt is 'heads'.*did you mean 'head'"),
        ({"model": "conv"}, "model is 'conv'; it must be one of 'conv4', 'resnet12'"),
        ({"ridge": 0}, "ridge is 0; it must be above 0"),
        ({"episodes": 1}, "episodes is 1; it must be at least 2"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("few-shot", **options)


def test_rabo_learns_a_backbone_for_characters_it_has_not_seen() -> None:
    """Seen: from .51 to .71."""
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
