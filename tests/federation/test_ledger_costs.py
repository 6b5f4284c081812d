"""The ledger's operations, memory and bytes: closed forms, and the same for every executor."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm, Message, Phase
from fedbilevel.execution.stacked import _steps as steps
from fedbilevel.federation import Federation, Ledger, ledger
from fedbilevel.federation.delays import LogNormal
from fedbilevel.federation.ledger import Accounts
from fedbilevel.federation.phase import Steps
from fedbilevel.runs.run import Run

B, K, C = 8, 7, 3  # samples, inputs, classes


def linear_problem() -> fb.Problem:
    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(batch[0] @ y["w"], batch[1]) + (x["x"] * y["w"]).sum()

    return fb.Problem(loss, loss, x={"x": torch.ones(K, C)}, y={"w": torch.zeros(K, C)})


def clients_of_sizes(*sizes: int, shape: tuple[int, ...] = (K,)) -> list[fb.ClientData]:
    generator = torch.Generator().manual_seed(2)
    clients = []
    for size in sizes:
        side = (torch.randn(size, *shape, generator=generator), torch.arange(size) % C)
        clients.append(fb.ClientData(train=side, val=side))
    return clients


def advance(method: Algorithm, fed: Federation, iterations: int) -> None:
    run = Run(method, fed, {})
    for _ in range(iterations):
        run.advance()


def test_every_client_pays_for_its_own_steps_batches_and_bytes() -> None:
    """FedAvg on a linear model: a gradient is a product with the batch and with its transpose."""
    local_steps = [3, 1, 2, 2]
    sizes = [8, 8, 6, 8]
    environment = fb.Environment(local_steps=local_steps)
    fed = fb.simulated_federation(linear_problem(), clients_of_sizes(*sizes), environment)
    advance(fb.algorithms.get("fedavg")(), fed, 5)
    for client, (tau, size) in enumerate(zip(local_steps, sizes, strict=True)):
        paid = fed.ledger.clients[client]
        assert paid["flops"] == 5 * tau * 2 * (2 * size * K * C)
        assert paid["bytes_up"] == paid["bytes_down"] == 5 * 4 * 2 * K * C
    totals = fed.ledger.totals()
    assert totals["flops"] == sum(fed.ledger.clients[i]["flops"] for i in range(4))
    peaks = [fed.ledger.clients[i]["peak_bytes"] for i in range(4)]
    assert peaks[0] == peaks[1] == peaks[3] > peaks[2], "a smaller batch takes less memory"
    assert totals["peak_bytes"] == max(peaks)
    # Two samples with labels, and what is computed of them: logits, log-probabilities, gradients.
    inputs = 2 * (4 * K + 8)
    results = 2 * 4 * 4 * C
    assert inputs <= peaks[0] - peaks[2] <= inputs + results


def test_clients_with_submodels_pay_for_these_alone() -> None:
    """Training an MLP of 8 or 4 hidden units: operations and bytes are in proportion to them."""

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy((batch[0] @ x["w"].T).relu() @ y["v"].T, batch[1])

    problem = fb.Problem(
        loss,
        loss,
        x={"w": torch.ones(8, K)},
        y={"v": torch.ones(C, 8)},
        axes={"w": ("hidden", None), "v": (None, "hidden")},
    )
    environment = fb.Environment(capacity=[1.0, 0.5])
    fed = fb.simulated_federation(problem, clients_of_sizes(B, B, B, B), environment)
    advance(fb.algorithms.get("fedrolex")(), fed, 3)
    gradient_flops = 2 * B * (2 * 8 * K + 3 * C * 8)
    parameters = 8 * K + C * 8
    small, large = fed.ledger.clients.groups()
    assert (small["clients"], large["clients"]) == (2, 2)
    for group, capacity in ((small, 0.5), (large, 1.0)):
        assert group["flops"] == 3 * capacity * gradient_flops
        assert group["bytes_up"] == 3 * capacity * 4 * parameters
    assert small["peak_bytes"] < large["peak_bytes"]


def test_the_last_smaller_batch_of_an_epoch_costs_less() -> None:
    method = fb.algorithms.get("fednest")(lower_steps="2 epochs", lower="sgd", inner_rounds=1)
    environment = fb.Environment(batch_size=4)
    fed = fb.simulated_federation(linear_problem(), clients_of_sizes(10, 10), environment)
    advance(method, fed, 1)
    cost = fed.ledger.phases["lower_round"]
    samples = 2 * 2 * 10  # clients, epochs, samples of each client
    assert cost.samples == samples
    assert cost.flops == samples * 2 * 2 * K * C


class ConvolutionalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4 * 16, C)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images).relu().flatten(1))
        return logits


@pytest.mark.parametrize("name", ["simfbo", "la-asfbo", "fednest"])
def test_stack_loop_and_chunks_cost_the_same(name: str) -> None:
    apply, x, y = fb.split_module(fb.nets.seeded(ConvolutionalNet, 0), lower="head.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum((tensor**2).sum() for tensor in y.values())
        return F.cross_entropy(apply(x, y, batch[0]), batch[1]) + penalty

    def ledger(**options: Any) -> Ledger:
        environment = fb.Environment(local_steps=[1, 3, 2, 3], batch_size=4)
        clients = clients_of_sizes(5, 5, 5, 4, shape=(2, 6, 6))
        problem = fb.Problem(loss, loss, x=x, y=y)
        fed = fb.simulated_federation(problem, clients, environment, **options)
        advance(fb.algorithms.get(name)(), fed, 2)
        return fed.ledger

    stack = ledger()
    loop = ledger(mode="loop")
    chunks = ledger(memory=1)
    assert stack.phases == loop.phases == chunks.phases
    for client in range(4):
        assert stack.clients[client] == loop.clients[client] == chunks.clients[client]
    assert stack.totals()["flops"] > 0


class ExpensiveFinish(Phase):
    """Most of its memory and some of its operations are in `finish`."""

    name = "expensive_finish"
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
def test_a_task_of_one_step_pays_for_its_finish(
    trace_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pays the same with whomever it is stacked, and after a restart."""
    monkeypatch.setattr(steps, "TRACE_FROM", trace_from)
    environment = fb.Environment(local_steps=[1, 1, 3])
    problem = linear_problem()
    clients = clients_of_sizes(B, B, B)
    x, y = problem.start
    fed = fb.simulated_federation(problem, clients, environment)
    task_flops = 2 * 2 * B * K * C + 2 * 2 * K * C * C
    for asked, cohort in enumerate(([0], [0, 1], [0, 1, 2]), 1):
        fed.ask(ExpensiveFinish(), cohort, x=x, y=y)
        paid = fed.ledger.clients[0]
        assert paid["flops"] == asked * task_flops
        assert 4 * 9000 < paid["peak_bytes"] < 4 * 9000 + 4 * 50 * K * C
    restarted = fb.simulated_federation(problem, clients, environment)
    restarted.restore(fed.snapshot())
    for federation in (fed, restarted):
        federation.ask(ExpensiveFinish(), [0, 1], x=x, y=y)
    assert restarted.ledger == fed.ledger


@pytest.mark.parametrize("name", ["simfbo", "afbo"])
def test_costs_survive_a_rollback_and_a_restart(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=6, samples=4)
    environment = fb.Environment(
        participation=3, local_steps=(1, 3), batch_size=2, delay=LogNormal()
    )

    def new_run() -> Run:
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        return Run(fb.algorithms.get(name)(), fed, {})

    def advance(run: Run, iterations: int) -> None:
        for _ in range(iterations):
            run.advance()

    run = new_run()
    advance(run, 4)
    restarted = new_run()
    restarted.fed.restore(run.fed.snapshot())
    restarted.state = run.state
    # The uses of a step decide when it is traced, and so how it rounds.
    step_runner = run.fed.transport.executor.step_runner  # type: ignore[attr-defined]
    restarted_runner = restarted.fed.transport.executor.step_runner  # type: ignore[attr-defined]
    uses = dict(step_runner.uses)
    assert restarted_runner.measured == step_runner.measured
    assert restarted_runner.uses == uses

    mark = run.fed.mark()
    state = run.state
    totals = run.fed.ledger.totals()
    now = run.fed.now
    for _ in range(2):  # a mark can be used again
        advance(run, 1)
        assert run.fed.ledger.totals() != totals
        # AFBO's replies were computed ahead, together with those of earlier iterations.
        assert step_runner.uses != uses or name == "afbo"
        run.fed.rollback(mark)
        run.state = state
        assert run.fed.ledger.totals() == totals
        assert step_runner.uses == uses
        assert (run.fed.now, run.fed.iteration) == (now, 4)

    for each in (run, restarted):
        advance(each, 5)
        each.fed.ledger.wall_s = 0.0
    assert run.fed.ledger == restarted.fed.ledger
    assert (run.fed.now, run.fed.iteration) == (restarted.fed.now, restarted.fed.iteration)
    totals = run.fed.ledger.totals()
    for figure in Accounts.FIGURES:
        paid = [run.fed.ledger.clients[client][figure] for client in range(6)]
        combine = max if figure == "peak_bytes" else sum
        assert totals[figure] == combine(paid)


def test_accounts_roll_back_to_a_mark() -> None:
    accounts = Accounts()
    expected = Accounts()
    for each in (accounts, expected):
        each.charge([3, 1], {"flops": [5, 7], "peak_bytes": [50, 70]})
    accounts.mark()
    for _ in range(2):  # a mark can be used again
        accounts.charge([1, 8, 1], {"flops": [1, 1, 1], "peak_bytes": [90, 10, 80]})
        accounts.charge([9, 3], {"flops": [2, 2]})
        assert accounts[1] == {**expected[1], "flops": 9, "peak_bytes": 90}
        assert accounts[9]["flops"] == 2
        accounts.rollback()
        assert accounts == expected
    accounts.charge([8], {"flops": [4]})
    assert accounts.settle().ids.tolist() == [3, 1, 8]
    assert accounts[8]["flops"] == 4
    assert accounts[8]["peak_bytes"] == 0


@pytest.mark.parametrize("entered_together", [1, 7, 1000])
def test_charges_that_wait_are_counted_and_rolled_back(
    entered_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "ENTERED_TOGETHER", entered_together)
    draw = random.Random(entered_together)
    accounts = Accounts()
    plain: dict[int, list[int]] = {}  # the flops and the peak of each client
    marked = deepcopy(plain)
    for step in range(200):
        if step % 5 == 0:
            accounts.mark()
            marked = deepcopy(plain)
        clients = [draw.randrange(step // 10 + 2) for _ in range(draw.randrange(1, 4))]
        amounts = [draw.randrange(100) for _ in clients]
        accounts.charge(clients, {"flops": amounts, "peak_bytes": amounts})
        for client, amount in zip(clients, amounts, strict=True):
            flops, peak = plain.get(client, [0, 0])
            plain[client] = [flops + amount, max(peak, amount)]
        if step % 7 == 0:
            accounts.rollback()
            plain = deepcopy(marked)
        if step % 11 == 0:
            assert [accounts[i]["flops"] for i in plain] == [each[0] for each in plain.values()]
    assert accounts.settle().ids.tolist() == list(plain)
    for client, (flops, peak) in plain.items():
        assert accounts[client]["flops"] == flops
        assert accounts[client]["peak_bytes"] == peak


def test_few_clients_are_grouped_by_equal_peaks() -> None:
    accounts = Accounts()
    accounts.charge([7, 3, 9], {"flops": [10, 20, 50], "peak_bytes": [5, 5, 8]})
    accounts.charge([3, 3], {"flops": [2, 2], "bytes_up": [6, 6], "peak_bytes": [1, 4]})
    assert accounts[3] == {"bytes_up": 12, "bytes_down": 0, "flops": 24, "peak_bytes": 5}
    assert accounts[4] == dict.fromkeys(Accounts.FIGURES, 0)
    assert accounts.groups() == [
        {"clients": 2, "bytes_up": 6, "bytes_down": 0, "flops": 17, "peak_bytes": 5},
        {"clients": 1, "bytes_up": 0, "bytes_down": 0, "flops": 50, "peak_bytes": 8},
    ]
    assert Accounts().groups() == []


def test_many_different_peaks_are_grouped_into_ten() -> None:
    accounts = Accounts()
    accounts.charge(range(1000), {"flops": range(1000), "peak_bytes": range(1000)})
    groups = accounts.groups()
    assert [group["clients"] for group in groups] == [100] * 10
    assert [group["peak_bytes"] for group in groups] == list(range(99, 1000, 100))
    assert sum(group["clients"] * group["flops"] for group in groups) == sum(range(1000))
