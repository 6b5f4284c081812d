"""What a run costs: operations and memory against closed forms, the same however clients are run, client by client."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm, Message, Phase
from fedbilevel.core import process
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.stacked import _parts as parts
from fedbilevel.federation import Federation, Ledger
from fedbilevel.federation.delays import LogNormal
from fedbilevel.federation.ledger import Accounts
from fedbilevel.federation.phase import Steps
from fedbilevel.runs.run import Run
from fedbilevel.tasks.quadratic import quadratic
from tests.support.tool import QUADRATIC, done, summary, write

B, K, H, C = 8, 7, 5, 3  # samples, inputs, hidden units, classes
INPUTS, LABELS = torch.randn(B, K, generator=torch.Generator().manual_seed(0)), torch.arange(B) % C
IMAGES = torch.randn(B, 4, 9, 9, generator=torch.Generator().manual_seed(1))
CONVOLUTION = (
    2 * B * (6 * 7 * 7) * (4 * 3 * 3)
)  # 6 channels of 7 x 7, each from 4 channels and a 3 x 3 kernel


def measured(fn: Callable[..., Any], *args: Any) -> Meter:
    with Meter() as meter:
        fn(*args)
    return meter


def mlp(w: Tensor, v: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(F.linear(INPUTS, w).relu(), v), LABELS)


def convolution(kernel: Tensor, groups: int = 1) -> Tensor:
    return F.conv2d(IMAGES, kernel, groups=groups).pow(2).sum()


def product(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The loss's Hessian times ones."""
    made: Tensor = grad(lambda u: grad(loss)(u).sum())(at)
    return made


# Operations


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        # forward, to the weights and to the inputs, of which the first layer needs none
        (grad(mlp, argnums=(0, 1)), [(H, K), (C, H)], 6 * B * (H * K + C * H) - 2 * B * H * K),
        # the hidden layer once; the head forward, to its weight, and both of these differentiated
        (
            lambda w, v: product(lambda u: mlp(w, u), v),
            [(H, K), (C, H)],
            2 * B * H * K + 4 * 2 * B * C * H,
        ),
        (lambda v: (INPUTS @ v) @ torch.ones(B), [(K,)], 2 * B * K + 2 * B),
        (lambda v: torch.addmv(torch.ones(B), INPUTS, v), [(K,)], 2 * B * K),
        (grad(convolution), [(6, 4, 3, 3)], 2 * CONVOLUTION),
        (
            vmap(grad(convolution)),
            [(3, 6, 4, 3, 3)],
            3 * 2 * CONVOLUTION,
        ),  # vmap makes one of three groups of it
        (grad(lambda k: convolution(k, groups=2)), [(6, 2, 3, 3)], CONVOLUTION),
        # a product takes four, and autograd one to the images that nobody asked for
        (lambda k: product(convolution, k), [(6, 4, 3, 3)], 5 * CONVOLUTION),
        (lambda v: (v.exp() * v).sum() + v.norm(), [(K,)], 0),
    ],
    ids=[
        "mlp",
        "product",
        "vectors",
        "addmv",
        "convolution",
        "stacked",
        "grouped",
        "convolution-product",
        "none",
    ],
)
def test_operations_are_the_closed_form(fn: Callable[..., Any], shapes: Any, flops: int) -> None:
    assert measured(fn, *(torch.ones(shape) for shape in shapes)).flops == flops


# Memory


@pytest.mark.parametrize(
    ("fn", "kilobytes"),
    [
        (lambda a: a * 2, 4),
        (lambda a: ((a * 2 + 1) * 3).exp(), 8),  # each is freed when the next has been made
        (lambda a: [a * k for k in range(5)], 20),
        (
            lambda a: (a * 2).view(10, 100).t().reshape(10, 100)[:2],
            8,
        ),  # one copy of the product, and views
        (lambda a: torch.zeros(1000).add_(a).mul_(2), 4),
        (lambda a: a.view(10, 100)[1:], 0),
        (grad(lambda a: a.exp().sin().sum()), 12),  # exp a, the cosine of it, their product
    ],
)
def test_memory_is_what_is_alive_at_once(fn: Callable[[Tensor], Any], kilobytes: int) -> None:
    peak = measured(fn, torch.ones(1000)).peak_bytes
    assert 1000 * kilobytes <= peak <= 1000 * kilobytes + 16  # and a number or two


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", None])
def test_what_is_freed_is_kept_unless_the_user_has_a_say(
    variable: str | None, monkeypatch: Any
) -> None:
    told: list[Any] = []
    library = SimpleNamespace(mallopt=lambda *parameter: told.append(parameter))
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(
        process.os, "environ", {"HOME": "", **({variable: "1"} if variable else {})}
    )
    process.configure_process()
    assert len(told) == (0 if variable else 3)


def test_the_garbage_collector_leaves_alone_what_was_there_before_a_run() -> None:
    assert gc.get_freeze_count() == 0
    threshold, task = gc.get_threshold(), quadratic(clients=2)
    fed = fb.simulated_federation(task.problem, task.clients)
    run = iter(Run(fb.algorithms.SimFBO(), fed, {"rounds": 3}))
    next(run)
    before = gc.get_freeze_count()
    assert before > 1000
    with process.relaxed_garbage_collection():
        assert gc.get_freeze_count() >= before
    assert gc.get_freeze_count() >= before, "who did not begin it does not end it"
    assert gc.get_threshold()[0] == process.YOUNG_OBJECTS
    run.close()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, threshold)
    try:
        gc.set_threshold(0)
        with process.relaxed_garbage_collection():
            assert gc.get_threshold()[0] == 0, "who has turned it off has it off"
    finally:
        gc.set_threshold(*threshold)


# Federations


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4 * 16, C)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images).relu().flatten(1))
        return logits


def linear_problem() -> fb.Problem:
    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(batch[0] @ y["w"], batch[1]) + (x["x"] * y["w"]).sum()

    return fb.Problem(loss, loss, x={"x": torch.ones(K, C)}, y={"w": torch.zeros(K, C)})


def data(*sizes: int, shape: tuple[int, ...] = (K,)) -> list[fb.ClientData]:
    rng = torch.Generator().manual_seed(2)
    sides = [(torch.randn(n, *shape, generator=rng), torch.arange(n) % C) for n in sizes]
    return [fb.ClientData(train=side, val=side) for side in sides]


def advanced(method: Algorithm, fed: Federation, iterations: int) -> None:
    run = Run(method, fed, {})
    for _ in range(iterations):
        run.advance()


def test_every_client_pays_for_its_own_steps_batches_and_letters() -> None:
    """FedAvg on a linear model: a gradient is the product with the batch and the one with its transpose."""
    steps, sizes = [3, 1, 2, 2], [8, 8, 6, 8]
    environment, method = fb.Environment(local_steps=steps), fb.algorithms.get("fedavg")()
    fed = fb.simulated_federation(linear_problem(), data(*sizes), environment)
    advanced(method, fed, 5)
    for client, (tau, size) in enumerate(zip(steps, sizes, strict=True)):
        paid = fed.ledger.clients[client]
        assert paid["flops"] == 5 * tau * 2 * (2 * size * K * C)
        assert paid["bytes_up"] == paid["bytes_down"] == 5 * 4 * 2 * K * C
    totals = fed.ledger.totals()
    assert totals["flops"] == sum(fed.ledger.clients[i]["flops"] for i in range(4))
    peaks = [fed.ledger.clients[i]["peak_bytes"] for i in range(4)]
    assert peaks[0] == peaks[1] == peaks[3] > peaks[2], "a smaller batch takes less memory"
    assert totals["peak_bytes"] == max(peaks)
    # The inputs and labels of the samples, and what they give: logits, log-probabilities and their gradients.
    assert 2 * (4 * K + 8) <= peaks[0] - peaks[2] <= 2 * (4 * K + 8 + 4 * 4 * C)


def test_clients_with_submodels_pay_for_these_alone() -> None:
    """Training an MLP of 8 or 4 hidden units: operations and bytes go with the width."""

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy((batch[0] @ x["w"].T).relu() @ y["v"].T, batch[1])

    weights, axes = (
        {"w": torch.ones(8, K), "v": torch.ones(C, 8)},
        {"w": ("hidden", None), "v": (None, "hidden")},
    )
    problem = fb.Problem(loss, loss, x={"w": weights["w"]}, y={"v": weights["v"]}, axes=axes)
    environment = fb.Environment(capacity=[1.0, 0.5])
    fed = fb.simulated_federation(problem, data(B, B, B, B), environment)
    advanced(fb.algorithms.get("fedrolex")(), fed, 3)
    gradient, numbers = 2 * B * (2 * 8 * K + 3 * C * 8), 8 * K + C * 8
    small, large = fed.ledger.clients.groups()
    assert (small["clients"], large["clients"]) == (2, 2)
    for group, width in ((small, 0.5), (large, 1.0)):
        assert group["flops"] == 3 * width * gradient
        assert group["bytes_up"] == 3 * width * 4 * numbers
    assert small["peak_bytes"] < large["peak_bytes"]


def test_operations_of_the_last_smaller_batch_of_a_pass() -> None:
    method = fb.algorithms.get("fednest")(lower_steps="2 epochs", lower="sgd", inner_rounds=1)
    fed = fb.simulated_federation(linear_problem(), data(10, 10), fb.Environment(batch_size=4))
    advanced(method, fed, 1)
    cost = fed.ledger.phases["lower_round"]
    assert (cost.samples, cost.flops) == (2 * 2 * 10, 2 * 2 * 10 * 2 * 2 * K * C)


@pytest.mark.parametrize("name", ["simfbo", "la-asfbo", "fednest"])
def test_stack_loop_and_chunks_cost_the_same(name: str) -> None:
    net = fb.nets.seeded(Convolutional, 0)
    apply, x, y = fb.split_module(net, lower="head.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(apply(x, y, batch[0]), batch[1]) + sum(
            (v**2).sum() for v in y.values()
        )

    def ledger(**options: Any) -> Ledger:
        environment = fb.Environment(local_steps=[1, 3, 2, 3], batch_size=4)
        clients, problem = data(5, 5, 5, 4, shape=(2, 6, 6)), fb.Problem(loss, loss, x=x, y=y)
        fed = fb.simulated_federation(problem, clients, environment, **options)
        advanced(fb.algorithms.get(name)(), fed, 2)
        return fed.ledger

    stack, loop, chunks = ledger(), ledger(mode="loop"), ledger(memory=1)
    assert stack.phases == loop.phases == chunks.phases
    assert all(stack.clients[i] == loop.clients[i] == chunks.clients[i] for i in range(4))
    assert stack.totals()["flops"] > 0


class Last(Phase):
    """Most of its memory and some of its products are in `finish`."""

    name = "last"
    batch = "train"
    reply: ClassVar = {"g": "y"}

    steps: Steps = "local"

    def start(self, m: Message) -> Any:
        return m.x, m.y

    def step(self, c: Any, oracle: Any, batch: Any) -> Any:
        return c[0], oracle.lower_gradient_y(*c, batch)

    def finish(self, c: Any) -> dict[str, Any]:
        return {"g": c[1].map(lambda w: w @ (w.T @ w) + torch.zeros(9000).sum())}


@pytest.mark.parametrize("trace_from", [0, 10**9], ids=["traced", "as written"])
def test_a_task_of_one_step_pays_for_its_end(trace_from: int, monkeypatch: Any) -> None:
    """The same, whoever it is stacked with, and after a restart."""
    monkeypatch.setattr(parts, "TRACE_FROM", trace_from)
    environment, problem = fb.Environment(local_steps=[1, 1, 3]), linear_problem()
    x, y = problem.start
    fed, again = (fb.simulated_federation(problem, data(B, B, B), environment) for _ in range(2))
    for asked, cohort in enumerate(([0], [0, 1], [0, 1, 2]), 1):
        fed.ask(Last(), cohort, x=x, y=y)
        paid = fed.ledger.clients[0]
        assert paid["flops"] == asked * (2 * 2 * B * K * C + 2 * 2 * K * C * C)
        assert 4 * 9000 < paid["peak_bytes"] < 4 * 9000 + 4 * 50 * K * C
    again.restore(fed.snapshot())
    for each in (fed, again):
        each.ask(Last(), [0, 1], x=x, y=y)
    assert again.ledger == fed.ledger


@pytest.mark.parametrize("name", ["simfbo", "afbo"])
def test_figures_survive_an_interruption_and_a_restart(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=6, samples=4)
    environment = fb.Environment(
        participation=3, local_steps=(1, 3), batch_size=2, delay=LogNormal()
    )

    def new() -> Run:
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        return Run(fb.algorithms.get(name)(), fed, {})

    def advance(run: Run, iterations: int) -> None:
        for _ in range(iterations):
            run.advance()

    whole, twin = new(), new()
    advance(whole, 4)
    twin.fed.restore(whole.fed.snapshot())
    twin.state = whole.state
    theirs, ours = twin.fed.transport.executor.parts, whole.fed.transport.executor.parts
    used = dict(ours.uses)  # by which steps are traced, and so round
    assert (theirs.measured, theirs.uses) == (ours.measured, used)
    before, kept, now = whole.fed.mark(), whole.fed.ledger.totals(), whole.fed.now
    for _ in range(2):  # a mark is not used up
        state = whole.state
        advance(whole, 1)
        assert whole.fed.ledger.totals() != kept
        assert ours.uses != used or name == "afbo"  # whose replies were evaluated ahead
        whole.fed.back(before)
        whole.state = state
        assert (whole.fed.ledger.totals(), ours.uses) == (kept, used)
        assert (whole.fed.now, whole.fed.iteration) == (now, 4)
    for run in (whole, twin):
        advance(run, 5)
        run.fed.ledger.wall_s = 0.0
    assert whole.fed.ledger == twin.fed.ledger
    assert (whole.fed.now, whole.fed.iteration) == (twin.fed.now, twin.fed.iteration)
    for column in Accounts.FIGURES:
        paid = [whole.fed.ledger.clients[i][column] for i in range(6)]
        assert whole.fed.ledger.totals()[column] == (
            max(paid) if column == "peak_bytes" else sum(paid)
        )


def test_accounts_go_back_to_a_mark() -> None:
    accounts, twin = Accounts(), Accounts()
    for each in (accounts, twin):
        each.charge([3, 1], {"flops": [5, 7], "peak_bytes": [50, 70]})
    mark = accounts.mark()
    for _ in range(2):  # a mark is not used up
        accounts.charge([1, 8, 1], {"flops": [1, 1, 1], "peak_bytes": [90, 10, 80]})
        accounts.charge([9, 3], {"flops": [2, 2]})
        assert (accounts[1], accounts[9]["flops"]) == ({**twin[1], "flops": 9, "peak_bytes": 90}, 2)
        accounts.back(mark)
        assert accounts == twin
    accounts.charge([8], {"flops": [4]})
    assert (accounts.ids.tolist(), accounts[8]["flops"], accounts[8]["peak_bytes"]) == (
        [3, 1, 8],
        4,
        0,
    )


# Figures


def test_clients_are_grouped_by_their_peak_and_by_few_of_them() -> None:
    few, many = Accounts(), Accounts()
    few.charge([7, 3, 9], {"flops": [10, 20, 50], "peak_bytes": [5, 5, 8]})
    few.charge([3, 3], {"flops": [2, 2], "bytes_up": [6, 6], "peak_bytes": [1, 4]})
    assert few[3] == {"bytes_up": 12, "bytes_down": 0, "flops": 24, "peak_bytes": 5}
    assert few[4] == dict.fromkeys(Accounts.FIGURES, 0)
    none = {"bytes_up": 0, "bytes_down": 0}
    assert few.groups() == [
        {**none, "clients": 2, "bytes_up": 6, "flops": 17, "peak_bytes": 5},
        {**none, "clients": 1, "flops": 50, "peak_bytes": 8},
    ]
    many.charge(range(1000), {"flops": range(1000), "peak_bytes": range(1000)})
    groups = many.groups()
    assert [group["clients"] for group in groups] == [100] * 10
    assert [group["peak_bytes"] for group in groups] == list(range(99, 1000, 100))
    assert sum(group["clients"] * group["flops"] for group in groups) == sum(range(1000))
    assert Accounts().groups() == []


def test_a_run_can_stop_and_be_evaluated_by_operations_and_its_summary_tells_what_clients_paid(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "a.toml", QUADRATIC)
    done("run", file, "--rounds", 6, "--out", tmp_path / "all")
    lines = [
        json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()
    ]
    spent = [line["flops"] for line in lines]
    assert spent[0] == 0
    assert spent == sorted(set(spent))
    done("run", file, "--rounds", 6, "--set", f"stop.flops={spent[3]}", "--out", tmp_path / "less")
    assert summary(tmp_path / "less")["rounds"] == 3
    told = summary(tmp_path / "all")
    assert told["flops"] == spent[-1]
    assert (
        told["peak_bytes"]
        == lines[-1]["peak_bytes"]
        == max(group["peak_bytes"] for group in told["clients"])
    )
    for name in ("flops", "bytes_up", "bytes_down"):
        assert sum(group["clients"] * group[name] for group in told["clients"]) == pytest.approx(
            told[name]
        )
