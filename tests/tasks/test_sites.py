"""The sites of the RAND experiment: split by person, and spoiled where they should be."""

from __future__ import annotations

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.rng import root
from fedbilevel.data.people import read_rand, split_people
from fedbilevel.tasks.sites import sites
from tests.support.refusals import refusal


def labels(clients: list[fb.ClientData], side: str = "train") -> list[torch.Tensor]:
    return [getattr(client, side)["label"] for client in clients]


def test_no_person_is_on_two_sides() -> None:
    people = read_rand()
    sides = split_people(people, 0.15, 0.2, root(3, "test"))
    assert sum(side.sum() for side in sides) == len(people.site)
    persons = [set(people.person[side].tolist()) for side in sides]
    assert sum(map(len, persons)) == len(set.union(*persons)) == 5912
    assert abs(len(persons[2]) / 5912 - 0.2) < 0.002
    assert abs(len(persons[1]) / 5912 - 0.15) < 0.002


def test_only_training_answers_of_bad_sites_are_flipped() -> None:
    clean = sites(bad=0, seed=1)
    spoiled = sites(bad=2, noise=0.4, seed=1)
    assert len(spoiled.bad) == 2
    for side in ("train", "val"):
        pairs = zip(labels(clean.clients, side), labels(spoiled.clients, side), strict=True)  # type: ignore[arg-type]
        for site, (before, after) in enumerate(pairs):
            changed = float((before != after).double().mean())
            expected = 0.4 if side == "train" and site in spoiled.bad else 0.0
            assert changed == pytest.approx(expected, abs=0.03)


def test_bad_sites_may_be_shifted_or_small() -> None:
    clean = sites(bad=0, seed=1)
    other = sites(bad=1, noise=0.0, shift=2.0, keep=0.1, seed=1)
    (bad,) = other.bad
    for site in range(6):
        before = clean.clients[site].train["features"]  # type: ignore[call-overload]
        after = other.clients[site].train["features"]  # type: ignore[call-overload]
        if site == bad:
            assert len(after) / len(before) == pytest.approx(0.1, abs=0.03)
            assert float((after - before.mean(0)).mean()) == pytest.approx(2, abs=0.3)
        else:
            assert torch.equal(before, after)


def test_baselines_are_what_they_say() -> None:
    task = sites(seed=1)
    clean = sites(bad=0, seed=1)
    everything, trusted, without = (task.baselines[name] for name in task.baselines)
    for site in range(6):
        own = task.clients[site]
        assert everything[site].size("train") == own.size("train") + own.size("val")
        assert torch.equal(labels(trusted)[site], labels([own], "val")[0])
        assert torch.equal(
            labels(without)[site][: own.size("train")], labels([clean.clients[site]])[0]
        )


def test_learnt_weights_find_the_bad_sites_and_beat_both_baselines() -> None:
    task = sites(seed=0)
    steps = {"lr_y": 2.0, "lr_z": 2.0, "server_lr_y": 2.0, "server_lr_z": 2.0}
    result = fb.solve(
        task.problem,
        task.clients,
        fb.algorithms.SimFBO(lr_x=0.3, server_lr_x=0.3, **steps),
        rounds=100,
        weights="samples",
        every=100,
        evaluate=task.evaluate,
    )
    last = result.history[-1]
    assert last["weight_of_bad"] < 0.25
    refitted = task.evaluate(result.x, task.refit(result.x))
    for name in ("FedAvg, all sites", "trusted samples alone"):
        y = fb.solve_lower(task.plain, task.baselines[name], task.plain.x, weights="samples")
        assert refitted["test_loss"] < task.evaluate(task.plain.x, y)["test_loss"]


def test_a_refit_weighs_records_and_fits_the_trusted_people() -> None:
    """Its gradient by hand: 6 w_i for each record of site i, 1 for each of a trusted person."""
    task = sites(seed=0, trusted=0.1)
    w = torch.tensor([0.3, 0.0, 0.3, 0.1, 0.0, 0.3], dtype=torch.float64)
    x = fb.Tree({**task.problem.x, "client_weights": w})
    y = task.refit(x)
    total = torch.zeros_like(y["weight"])
    count = 0.0
    for share, client in zip(w, task.clients, strict=True):
        for scale, data in ((6 * share, client.train), (1.0, client.val)):
            features, label = data["features"], data["label"]  # type: ignore[call-overload]
            errors = torch.sigmoid(features @ y["weight"] + y["bias"]) - label
            total += scale * (features.T @ errors)
            count += float(scale) * len(label)
    slope = total / count + x["log_ridge"].exp() * y["weight"]
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-8, rtol=0)


def test_values_find_the_bad_sites() -> None:
    task = sites(seed=0, trusted=0.15)
    result = fb.value(task.problem, task.clients, weights="samples", groups="person")
    assert result.harmful == list(task.bad)


def test_wrong_options_are_refused_in_one_sentence() -> None:
    for options, sentence in (
        ({"bad": 7}, "bad is 7"),
        ({"noise": 1.5}, "noise is 1.5"),
        ({"keep": 0.0}, "keep is 0.0"),
        ({"trusted": 0.9}, "trusted is 0.9"),
    ):
        assert sentence in refusal(sites, **options)
