"""Every method for a shared lower level runs networks with PyTorch's own attention, or refuses."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.derivatives import grad
from fedbilevel.core.oracle import Oracle
from tests.support import sequences
from tests.support.conformance import OWN_HEADS

SHARED = [
    name for name in fb.algorithms.names() if "shared" in fb.algorithms.get(name).lower_levels
]
SECOND = [name for name in SHARED if fb.algorithms.get(name).second_derivatives]
SAID = "second derivatives are taken through unfused kernels"


def problem_for(name: str, problem: fb.Problem) -> fb.Problem:
    """The problem, whose y belongs to the clients if the method needs it so."""
    if name in OWN_HEADS:
        return dataclasses.replace(problem, owner=dict.fromkeys(problem.y, "client"))
    return problem


@pytest.fixture
def attention() -> sequences.Attention:
    torch.manual_seed(0)
    return sequences.Attention()


@pytest.mark.parametrize("name", SHARED)
def test_runs_with_attention_below(
    name: str, attention: sequences.Attention, caplog: pytest.LogCaptureFixture
) -> None:
    problem = problem_for(name, sequences.whole_network_below(attention))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fb.solve(problem, sequences.clients(), name, rounds=6)
    assert result.status == "completed"
    # The server's y of sdbo and adbo waits for the first cutting planes, fedbabu's heads for x.
    if name not in ("sdbo", "adbo", "fedbabu"):
        _, y = result.personal(0)
        assert any(not torch.equal(y[key], problem.y[key]) for key in problem.y)
    said = [record.message for record in caplog.records]
    assert [line.split(",")[0] for line in said] == ([SAID] if name in SECOND else [])


@pytest.mark.parametrize("name", SHARED)
def test_runs_with_attention_above_a_linear_head_as_it_is(
    name: str, attention: sequences.Attention, caplog: pytest.LogCaptureFixture
) -> None:
    """There nobody differentiates attention twice."""
    problem = problem_for(name, sequences.head_below(attention))
    result = fb.solve(problem, sequences.clients(), name, rounds=6)
    assert result.status == "completed"
    assert not caplog.records


def test_first_order_methods_are_those_that_take_no_second_derivative(
    attention: sequences.Attention,
) -> None:
    """The losses refuse to be differentiated twice; only these methods run on them."""
    whole = sequences.whole_network_below(attention, derivatives="exact")
    for name in SHARED:
        problem = problem_for(name, whole)
        if name not in SECOND:
            fb.solve(problem, sequences.clients(), name, rounds=1)
            continue
        sentence = f"{name} needs second derivatives of the lower loss, .* choose .* 'memfbo'$"
        with pytest.raises(ValueError, match=sentence):
            fb.solve(problem, sequences.clients(), name, rounds=1)
    assert {"memfbo", "mefbo", "f2sa", "rafbo", "fedavg"} <= set(SHARED) - set(SECOND)


@pytest.mark.parametrize("name", ["simfbo", "fednest", "rabo"])
def test_differences_give_nearly_the_run_of_unfused_kernels(
    name: str, attention: sequences.Attention
) -> None:
    attention.double()
    ends = []
    for derivatives in ("unfused", "differences"):
        problem = sequences.whole_network_below(attention, derivatives=derivatives)
        result = fb.solve(problem, sequences.clients(), name, rounds=31)
        ends.append(result.x["w"])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-9)


class Deep(torch.nn.Module):
    """An embedding, wide layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(sequences.WORDS, 16)
        self.layers = torch.nn.ModuleList([self.layer() for _ in range(6)])
        self.head = torch.nn.Linear(16, sequences.WORDS)

    def layer(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


@pytest.mark.parametrize(
    ("name", "mode"), [("memfbo", "stack"), ("memfbo", "loop"), ("simfbo", "stack")]
)
def test_activation_checkpointing_saves_memory(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    net = Deep().double()
    peaks = []
    ends = []
    for each in (net, fb.nets.with_checkpoints(net, "layers.*")):
        problem = sequences.whole_network_below(each)
        federation = fb.simulated_federation(problem, sequences.clients(samples=64), mode=mode)
        result = fb.solve(problem, [], name, rounds=2, every=2, federation=federation)
        assert federation.runtime == {"mode": mode, "derivatives": "exact"}
        peaks.append(federation.ledger.totals()["peak_bytes"])
        ends.append(result.y)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
    if name == "memfbo":  # graphs of second derivatives keep what was computed again
        assert peaks[1] < 0.6 * peaks[0]


def test_layers_are_computed_again_in_the_same_precision() -> None:
    torch.manual_seed(0)
    net = Deep()
    (client,) = sequences.clients(1, samples=8)
    gradients = []
    for each in (net, fb.nets.with_checkpoints(net, "layers.*")):
        for precision in ("fp32", "bf16-all"):
            problem = sequences.whole_network_below(each).with_precision(precision)
            batch = fb.Batch(client.train, client.val)
            gradients.append(Oracle(problem).lower_gradient_y(*problem.start, batch))
    exact, rounded, exact_again, rounded_again = gradients
    torch.testing.assert_close(exact_again, exact)
    torch.testing.assert_close(rounded_again, rounded, rtol=0, atol=0)
    assert not torch.equal(exact["layers.0.0.weight"], rounded["layers.0.0.weight"])


def test_tied_weights_within_a_layer_that_is_computed_again() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    layer[2].weight = layer[0].weight
    net = torch.nn.Sequential(layer)
    inputs = torch.randn(4, 3)

    def gradient(net: torch.nn.Module) -> fb.Tree:
        apply, _, y = fb.split_module(net, lower="", upper=())
        return grad(lambda y: apply(fb.Tree(), y, inputs).square().sum())(y)

    torch.testing.assert_close(gradient(fb.nets.with_checkpoints(net, "0")), gradient(net))


def test_layers_that_would_draw_again_are_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)))
    with pytest.raises(ValueError, match="layer '0' has dropout"):
        fb.nets.with_checkpoints(net, "0")
    fb.nets.with_checkpoints(net.eval(), "0")
    attention = torch.nn.ModuleDict({"a": torch.nn.MultiheadAttention(2, 1, dropout=0.1)})
    with pytest.raises(ValueError, match="layer 'a' has dropout"):
        fb.nets.with_checkpoints(attention, "a")
    with pytest.raises(ValueError, match="layers is 'no'; no layer of the module has such a name"):
        fb.nets.with_checkpoints(net, "no")


CLIENT_BY_CLIENT = "clients run one by one, because losses cannot be stacked: "


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_run_client_by_client(
    layer: type[torch.nn.RNNBase], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    problem = sequences.whole_network_below(sequences.Recurrent(layer).double())
    for name in ("simfbo", "memfbo"):
        federation = fb.simulated_federation(problem, sequences.clients())
        result = fb.solve(problem, [], name, rounds=10, federation=federation)
        assert federation.runtime == {"mode": "loop", "derivatives": "exact"}
        assert result.history[-1]["upper_loss"] < result.history[0]["upper_loss"]
        assert caplog.messages.pop().startswith(CLIENT_BY_CLIENT)


def test_losses_that_cannot_be_stacked_run_client_by_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loss that branches on a value."""

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[torch.Tensor]) -> torch.Tensor:
        target = batch[0].mean()
        if target > 0.5:
            return ((y["y"] - x["x"]) ** 2).sum()
        return ((y["y"] - target) ** 2).sum()

    problem = fb.Problem(loss, loss, x={"x": torch.ones(1)}, y={"y": torch.ones(1)})
    data = (torch.zeros(2),), (torch.ones(2),)
    clients = [fb.ClientData(side, side) for side in data]
    result = fb.solve(problem, clients, "simfbo", rounds=60, every=60)
    assert result.history[-1]["upper_loss"] < 0.1 * result.history[0]["upper_loss"]
    (line,) = caplog.messages
    assert line.startswith(CLIENT_BY_CLIENT)


def test_what_was_chosen_is_in_the_config_and_a_run_resumes_under_it(
    attention: sequences.Attention, tmp_path: object
) -> None:
    problem = sequences.whole_network_below(attention)
    whole = fb.solve(problem, sequences.clients(), "simfbo", rounds=4, out=f"{tmp_path}/whole")
    fb.solve(problem, sequences.clients(), "simfbo", rounds=2, out=f"{tmp_path}/run")
    resumed = fb.solve(
        problem, sequences.clients(), "simfbo", rounds=4, out=f"{tmp_path}/run", resume=True
    )
    assert torch.equal(resumed.x["w"], whole.x["w"])
    config = fb.load_run(f"{tmp_path}/run").config
    assert config["runtime"] == {"mode": "stack", "derivatives": "unfused"}
    other = dataclasses.replace(problem, derivatives="differences")
    with pytest.raises(ValueError, match=r"derivatives = 'unfused', not 'differences'"):
        fb.solve(other, sequences.clients(), "simfbo", rounds=5, out=f"{tmp_path}/run", resume=True)


def test_a_loss_without_any_derivative_is_refused_before_the_run() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: torch.Tensor) -> torch.Tensor:
            return y * 2

    def loss(x: fb.Tree, y: fb.Tree, batch: object) -> torch.Tensor:
        return Once.apply(y["y"]).sum() * x["x"].sum()

    problem = fb.Problem(loss, loss, x={"x": torch.ones(1)}, y={"y": torch.ones(1)})
    with pytest.raises(ValueError, match=r"client 0, before .* no derivative in y"):
        fb.solve(problem, sequences.clients(), "fedavg", rounds=1)


def test_networks_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Problems with all derivatives say nothing, and are recorded as exact."""
    caplog.set_level(logging.INFO, "fedbilevel")
    task = fb.tasks.load("quadratic", clients=2)
    federation = fb.simulated_federation(task.problem, task.clients)
    fb.Run(fb.algorithms.SimFBO(), federation, {"rounds": 1})
    assert federation.runtime == {"mode": "stack", "derivatives": "exact"}
    assert not caplog.records
