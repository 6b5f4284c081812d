"""The mixture task: its losses in closed form, its texts, and what weights learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.tree import flatten, unflatten
from fedbilevel.tasks import mixture
from tests.support import tool
from tests.support.tool import Outcome

SMALL: dict[str, Any] = {
    "owners": ["json", "xml", "shuffled:json"],
    "target": "json",
    "characters": 20_000,
    "context": 16,
    "width": 16,
    "depth": 1,
}


def test_the_losses_are_the_weighted_ones_of_the_owners_and_that_of_the_target() -> None:
    task = fb.tasks.load("mixture", **SMALL, ridge=0.0, start=[0.5, 0.3, 0.2])
    x, y = task.problem.start
    oracle = Oracle(task.problem)
    net = mixture.Transformer(16, 1, 4, 16)
    net.load_state_dict(y)
    uppers = []
    for i, client in enumerate(task.clients):
        batch = fb.Batch(client.train, client.val)
        tokens = client.train[0].long()
        plain = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(oracle.lower(x, y, batch), 3 * x["weights"][i] * plain.detach())
        uppers.append(float(oracle.upper(x, y, batch).detach()))
    windows = task.clients[0].val[0].long()
    target = F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).detach()
    assert uppers[1:] == [0.0, 0.0]
    assert sum(uppers) / 3 == pytest.approx(float(target), rel=1e-5)


def test_texts_are_those_of_the_packages_or_of_files(tmp_path: Path) -> None:
    text = mixture.read_text("json", 3000)
    shuffled = mixture.read_text("shuffled:json", 3000)
    assert text != shuffled
    assert Counter(text) == Counter(shuffled)
    mixture.write_texts(["json"], 3000, tmp_path)
    assert mixture.read_text("json", 3000, tmp_path) == text
    with pytest.raises(ValueError, match=r"owner is 'xml', but there is no .*xml\.txt"):
        mixture.read_text("xml", 3000, tmp_path)
    with pytest.raises(ValueError, match="owner is 'nothing', which is not an installed package"):
        mixture.read_text("nothing", 3000)


def test_no_package_is_imported_for_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An experiment, which a server may send, names the packages."""
    package = tmp_path / "harmful" / "part"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit")
    (package / "__init__.py").write_text("text = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert mixture.read_text("harmful", 1000) == b"raise SystemExittext = 1\n"
    with pytest.raises(ValueError, match=r"'harmful\.part', which is not an installed package"):
        mixture.read_text("harmful.part", 1000)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"digest": "0" * 16}, "digest is '0000000000000000', but the texts have '"),
        ({"start": [1.0]}, "start has 1 entries; there are 3 owners"),
        ({"target": "email"}, "target is 'email'"),
        ({"context": 1000}, "'json' has 20000 bytes of text; with context=1000 it must have"),
    ],
)
def test_refuses_what_does_not_fit(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fb.tasks.load("mixture", **{**SMALL, **options})


def test_a_run_records_the_texts_and_is_not_resumed_on_others(tmp_path: Path) -> None:
    mixture.write_texts(["json", "xml"], 3000, tmp_path)
    options = ['task.owners=["json","xml"]', "task.target=json", "task.context=8"]

    def invoke(*more: str) -> Outcome:
        settings = [*options, f"task.text={tmp_path}", "task.width=8"]
        words = [word for setting in settings for word in ("--set", setting)]
        return tool.invoke("run", "mixture", *words, "--out", tmp_path / "run", *more, "--quiet")

    assert invoke("--rounds", "1").code == 0
    config = fb.load_run(tmp_path / "run").config
    task = fb.tasks.load(**config["task"])
    assert task.options == {"digest": config["task"]["digest"]}
    (tmp_path / "xml.txt").write_bytes(b"x" * 3000)
    outcome = invoke("--rounds", "2", "--resume")
    assert outcome.code == 2
    assert "was run with task.digest = " in outcome.err


def test_validation_and_test_text_are_not_trained_on() -> None:
    task = fb.tasks.load("mixture", **SMALL)
    train, val = (side[0] for side in (task.clients[0].train, task.clients[0].val))
    windows = mixture._windows("json", mixture.read_text("json", 20_000), 16)
    assert torch.equal(torch.cat([train, val]), windows[: len(train) + len(val)])
    assert len(windows) - len(train) - len(val) == len(val)


def test_a_run_learns_the_text_and_moves_the_weights_on_the_simplex() -> None:
    task = fb.tasks.load("mixture", **SMALL)
    method = fb.algorithms.MemFBO(server_lr_x=0.02, server_lr_y=0.5, server_lr_u=0.5, penalty=3.0)
    environment = fb.Environment(batch_size=8)
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=30,
        every=30,
        environment=environment,
        evaluate=task.evaluate,
    )
    first, last = result.history
    assert last["test_loss"] < first["test_loss"] - 1
    weights = result.x["weights"]
    assert (weights - 1 / 3).abs().max() > 1e-3
    assert weights.min() >= 0
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_shuffled_bytes_lose_their_weight_once_more_than_frequencies_is_learnt() -> None:
    options = {**SMALL, "width": 32, "context": 32, "characters": 50_000}
    task = fb.tasks.load("mixture", **options)
    method = fb.algorithms.MemFBO(
        server_lr_x=lambda t: 0.02 if t >= 50 else 1e-12,
        server_lr_y=lambda t: 0.01 * min((t + 1) / 20, 1.0),
        server_lr_u=lambda t: 0.01 * min((t + 1) / 20, 1.0),
        penalty=3.0,
        adaptive=True,
    )
    environment = fb.Environment(batch_size=8)
    result = fb.solve(
        task.problem, task.clients, method, rounds=110, every=110, environment=environment
    )
    assert result.x["weights"][2] < 0.02


def minimise(loss: Callable[[fb.Tree], Tensor], start: fb.Tree) -> fb.Tree:
    """The minimiser of a strongly convex loss."""
    v = flatten(start).clone().requires_grad_()
    search = torch.optim.LBFGS(
        [v], max_iter=400, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        search.zero_grad()
        value = loss(unflatten(v, start))
        value.backward()
        return value

    search.step(evaluate)
    return unflatten(v.detach(), start)


def test_the_direction_of_the_weights_is_that_of_finite_differences() -> None:
    """Of the head of a network without blocks, where the lower level is strongly convex.

    Shuffled bytes of the target teach its frequencies, which is all that such a network learns: the
    target's loss falls where their weight grows.
    """
    options = SMALL | {"characters": 400, "context": 8, "width": 4, "depth": 0, "ridge": 0.05}
    task = fb.tasks.load("mixture", **options)
    whole = fb.Tree(task.problem.y).map(Tensor.double)
    head = fb.Tree({name: whole[name] for name in ("head.weight", "head.bias")})
    problem = fb.Problem(
        lambda x, y, batch: task.problem.upper(x, {**whole, **y}, batch, ()),
        lambda x, y, batch: task.problem.lower(x, fb.Tree({**whole, **y}), batch, ()),
        x={"weights": task.problem.x["weights"].double()},
        y=head,
    )
    oracle = Oracle(problem)
    batches = [fb.Batch(client.train, client.val) for client in task.clients]

    def mean(loss: Callable[..., Tensor], x: fb.Tree, y: fb.Tree) -> Tensor:
        return torch.stack([loss(x, y, batch) for batch in batches]).mean()

    x, _ = problem.start
    y = minimise(lambda y: mean(oracle.lower, x, y), head)
    directions = []
    for penalty in (100.0, 200.0):
        u = minimise(
            lambda u, p=penalty: mean(oracle.lower, x, u) + mean(oracle.upper, x, u) / p, y
        )
        d = [oracle.penalty_directions(x, y, u, batch, penalty).x["weights"] for batch in batches]
        directions.append(torch.stack(d).mean(0))
    direction = 2 * directions[1] - directions[0]  # without the bias of the order 1 / penalty
    along = torch.tensor([0.3, 0.2, -0.5], dtype=torch.float64)
    rise = []
    for step in (1e-3, -1e-3):
        moved = fb.Tree(weights=x["weights"] + step * along)
        rise.append(mean(oracle.upper, x, minimise(lambda y, x=moved: mean(oracle.lower, x, y), y)))
    difference = (rise[0] - rise[1]) / 2e-3
    torch.testing.assert_close(direction @ along, difference, rtol=2e-3, atol=0)
    assert direction[2] < 0
