"""Problems, client data, split modules and weights; wrong ones are refused in one sentence."""

import dataclasses
import math
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from fedbilevel import Environment, Problem, Tree, solve
from fedbilevel.algorithms import SimFBO
from fedbilevel.core.client_data import Batch, ClientData, client_weights, named_tensors, repack
from fedbilevel.core.modules import split_module
from fedbilevel.core.rng import root, uniform
from fedbilevel.nets import seeded

ONE = torch.ones(1)
THREE_SAMPLES = torch.arange(6.0).reshape(3, 2)


def upper(x, y, batch):
    return (batch[0] @ y["v"] * x["w"]).mean()


def lower(x, y, batch):
    return ((batch[0] @ y["v"] - x["w"]) ** 2).mean()


def problem(**arguments):
    """A valid problem, with some arguments replaced."""
    valid = {"upper": upper, "lower": lower, "x": {"w": ONE}, "y": {"v": torch.ones(2)}}
    return Problem(**valid | arguments)


def client(samples=2):
    return ClientData(train=(torch.ones(samples, 2),), val=(torch.ones(2, 2),))


def refuses(kind, sentence):
    """Expect an error with exactly this sentence."""
    return pytest.raises(kind, match=f"^{re.escape(sentence)}$")


# Data


def holding(value):
    return torch.tensor([[1.0, value], [0.0, 2.0]])


BAD_DATA = {
    "a list": (
        [THREE_SAMPLES],
        TypeError,
        "{} is list; it must be a non-empty tuple or dict of tensors",
    ),
    "a tensor": (
        THREE_SAMPLES,
        TypeError,
        "{} is Tensor; it must be a non-empty tuple or dict of tensors",
    ),
    "nothing": ((), TypeError, "{} is tuple; it must be a non-empty tuple or dict of tensors"),
    "no names": ({}, TypeError, "{} is dict; it must be a non-empty tuple or dict of tensors"),
    "a number": (
        (THREE_SAMPLES, 3),
        TypeError,
        "{}[1] must be a tensor whose leading axis counts samples, got int",
    ),
    "a 0-d tensor": (
        {"a": torch.tensor(2.0)},
        TypeError,
        "{}['a'] must be a tensor whose leading axis counts samples, got torch.float32 of shape ()",
    ),
    "NaN": (
        (THREE_SAMPLES[:2], holding(math.nan)),
        ValueError,
        "{}[1] holds NaN or infinity; every number in the data must be finite",
    ),
    "infinity, by name": (
        {"image": holding(-math.inf)},
        ValueError,
        "{}['image'] holds NaN or infinity; every number in the data must be finite",
    ),
    "unequal lengths": (
        (torch.ones(3, 2), torch.ones(4)),
        ValueError,
        "{} holds tensors of [3, 4] samples; all must have the same number",
    ),
    "no samples": (
        (torch.ones(0, 2), torch.ones(0)),
        ValueError,
        "{} is empty; a client needs at least one sample on each side",
    ),
}


@pytest.mark.parametrize("side", ["train", "val"])
@pytest.mark.parametrize(("data", "kind", "sentence"), BAD_DATA.values(), ids=BAD_DATA)
def test_client_data_refuses(side, data, kind, sentence):
    with refuses(kind, sentence.format(side)):
        ClientData(**{"train": (THREE_SAMPLES,), "val": {"a": THREE_SAMPLES}, side: data})


def test_client_data_counts_samples_on_each_side():
    data = ClientData(
        train={"a": torch.ones(5, 2), "b": torch.zeros(5, dtype=torch.int64)}, val=(torch.ones(1),)
    )
    assert (data.size("train"), data.size("val")) == (5, 1)


@pytest.mark.parametrize(
    "data", [(ONE, THREE_SAMPLES), {"a": ONE, "b": THREE_SAMPLES}], ids=["tuple", "dict"]
)
def test_repack_inverts_named_tensors(data):
    doubled = repack(data, [2 * tensor for _, tensor in named_tensors(data)])
    assert type(doubled) is type(data)
    assert [name for name, _ in named_tensors(doubled)] == [name for name, _ in named_tensors(data)]
    assert torch.equal(named_tensors(doubled)[1][1], 2 * THREE_SAMPLES)


def test_an_unused_side_of_a_batch_is_empty():
    assert Batch(val=(ONE,)) == ((), (ONE,), ())


# Problem

SIGNATURES = "it must take (x, y, batch) or (x, y, batch, rng)"
BAD_PROBLEMS = {
    "lower_level": (
        {"lower_level": "privat"},
        ValueError,
        "lower_level is 'privat' (did you mean 'private'?); it must be one of 'shared', 'private'",
    ),
    "loss is no function": (
        {"upper": 3},
        TypeError,
        "upper is 3; it must be a function of (x, y, batch) or (x, y, batch, rng)",
    ),
    "loss of two": (
        {"upper": lambda x, y: ONE},
        TypeError,
        f"the upper loss takes 2 arguments; {SIGNATURES}",
    ),
    "loss of five": (
        {"lower": lambda x, y, b, r, s: ONE},
        TypeError,
        f"the lower loss takes 5 arguments; {SIGNATURES}",
    ),
    "loss of any": (
        {"lower": lambda *arguments: ONE},
        TypeError,
        f"the lower loss takes 0 arguments; {SIGNATURES}",
    ),
    "x is no dict": ({"x": ONE}, TypeError, "x is Tensor; it must be a non-empty dict of tensors"),
    "y is empty": ({"y": {}}, TypeError, "y is dict; it must be a non-empty dict of tensors"),
    "a number": ({"y": {"v": 1.5}}, TypeError, "y['v'] must be a floating tensor, got float"),
    "integer x": (
        {"x": {"w": torch.tensor([1, 2])}},
        TypeError,
        "x['w'] must be a floating tensor, got torch.int64 of shape (2,)",
    ),
    "NaN": (
        {"x": {"w": ONE, "b": holding(math.nan)}},
        ValueError,
        "x['b'] holds NaN or infinity at the start; it must be finite",
    ),
    "shared name": (
        {"y": {"v": ONE, "w": ONE}},
        ValueError,
        "x and y share the name 'w'; every tensor belongs to one level",
    ),
    "mixed dtypes": (
        {"x": {"w": ONE.double()}},
        TypeError,
        "x and y hold tensors of several dtypes; all must have the same",
    ),
}


@pytest.mark.parametrize(("arguments", "kind", "sentence"), BAD_PROBLEMS.values(), ids=BAD_PROBLEMS)
def test_problem_refuses(arguments, kind, sentence):
    with refuses(kind, sentence):
        problem(**arguments)


MEAN = "must return a 0-d floating tensor (the mean over the batch), got"
GLOBAL = (
    "draws from torch's global generator; give it a fourth argument `rng` to draw from "
    "(fedbilevel.nets.Dropout does), so that runs can be repeated"
)
dropout = nn.Dropout(0.5)
BAD_LOSSES = {
    "a vector": (lambda x, y, b: b[0] @ y["v"], TypeError, f"{MEAN} torch.float32 of shape (2,)"),
    "a number": (lambda x, y, b: 0.5, TypeError, f"{MEAN} 0.5"),
    "nn.Dropout": (lambda x, y, b: dropout(b[0] @ y["v"]).mean(), ValueError, GLOBAL),
    "torch.rand": (lambda x, y, b: (b[0] @ y["v"]).mean() + torch.rand(()), ValueError, GLOBAL),
    "NaN": (
        lambda x, y, b: (x["w"] - 2).log().sum(),
        ValueError,
        "is nan at the start; it must be finite",
    ),
    "infinite": (
        lambda x, y, b: -(x["w"] - 1).log().sum(),
        ValueError,
        "is inf at the start; it must be finite",
    ),
}


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize(("loss", "kind", "sentence"), BAD_LOSSES.values(), ids=BAD_LOSSES)
def test_check_refuses_a_loss(level, loss, kind, sentence):
    with refuses(kind, f"the {level} loss {sentence}"):
        problem(**{level: loss}).check(client())


def test_check_refuses_a_loss_of_integers():
    with pytest.raises(
        TypeError, match=r"^the upper loss must return a 0-d floating tensor .*int64"
    ):
        problem(upper=lambda x, y, b: torch.tensor(1)).check(client())


def test_check_gives_each_loss_its_own_side():
    def of_val(x, y, batch):
        return batch["v"].mean() * x["w"].sum()

    def of_train(x, y, batch):
        return batch["t"].mean() * y["v"][0]

    data = ClientData(train={"t": THREE_SAMPLES}, val={"v": THREE_SAMPLES})
    problem(upper=of_val, lower=of_train).check(data)
    with pytest.raises(KeyError, match="v"):
        problem(upper=of_val, lower=of_val).check(data)


def test_the_start_is_a_copy_without_a_graph():
    w = torch.ones(2, requires_grad=True)
    tested = problem(x={"w": w})
    with torch.no_grad():
        w += 1
    x, y = tested.start
    assert isinstance(x, Tree)
    assert isinstance(y, Tree)
    assert torch.equal(x["w"], torch.ones(2))
    assert not x["w"].requires_grad


def test_a_loss_of_four_arguments_receives_the_rng():
    tested = problem(upper=lambda x, y, batch, rng: uniform(rng, (3,)).sum(), lower=lower)
    key = root(3, "test")
    tested.check(client())
    assert tested.upper(*tested.start, (THREE_SAMPLES,), key) == uniform(key, (3,)).sum()
    expected = lower(*tested.start, (THREE_SAMPLES,))
    assert tested.lower(*tested.start, (THREE_SAMPLES,), key) == expected


def test_an_argument_with_a_default_is_not_mistaken_for_the_rng():
    tested = problem(upper=lambda x, y, batch, scale=2.0: scale * x["w"].sum())
    assert tested.upper(*tested.start, (THREE_SAMPLES,), root(3, "test")) == 2


def test_project_applies_project_x():
    tested = problem(
        x={"w": torch.tensor([-1.0, 2.0])}, project_x=lambda x: {"w": x["w"].clamp(min=0)}
    )
    projected = tested.project(Tree(tested.x))
    assert isinstance(projected, Tree)
    assert torch.equal(projected["w"], torch.tensor([0.0, 2.0]))
    assert problem().project(projected) is projected


@pytest.mark.parametrize(
    ("server_lr", "project_x", "end"),
    [
        (0.1, None, 0.35),  # local path 0.5, -1: directions 1.5, 0
        (0.1, lambda x: {"w": x["w"].clamp(min=0)}, 0.25),  # local path 0.5, 0: directions 1.5, 1
        (1.0, lambda x: {"w": x["w"].clamp(min=0)}, 0.0),  # the server's 0.5 - 2.5 is infeasible
    ],
    ids=["free", "clients", "server"],
)
def test_project_x_is_applied_on_clients_and_server(server_lr, project_x, end):
    """Two local steps with step size 1 on f = (x + 1)^2 / 2 from x = 1/2, by hand."""
    tested = Problem(
        upper=lambda x, y, batch: 0.5 * ((x["w"] + 1) ** 2).sum(),
        lower=lambda x, y, batch: 0.5 * (y["v"] ** 2).sum(),
        x={"w": torch.tensor([0.5])},
        y={"v": torch.zeros(1)},
        project_x=project_x,
    )
    algorithm = SimFBO(lr_x=1.0, server_lr_x=server_lr)
    result = solve(tested, [client()], algorithm, rounds=1, environment=Environment(local_steps=2))
    assert result.x["w"].item() == pytest.approx(end, abs=1e-6)


def test_sides_that_belong_together_have_the_same_length():
    private = problem(lower_level="private")
    assert private.validated(client(samples=2)).size("train") == 2
    sentence = (
        "train holds 3 samples and val 2; with a private lower level they belong together, "
        "so both must hold the same number"
    )
    with refuses(ValueError, sentence):
        private.validated(client(samples=3))
    assert problem().validated(client(samples=3)).size("train") == 3


def test_precision_rounds_the_features_and_nothing_else():
    def embed(x, data):
        return (data[0] @ torch.full((2, 1), 1.001), data[0])

    exact = problem(embed=embed)
    assert exact.with_precision("fp32") is exact
    features, others = exact.with_precision("bf16").embed(Tree(exact.x), (THREE_SAMPLES,), ())
    assert features.dtype == torch.float32
    assert torch.equal(features, torch.tensor([[1.0], [5.0], [9.0]]))
    assert torch.equal(others, THREE_SAMPLES)
    sentence = (
        "precision is 'bf16', but this problem has no embed to round; "
        "it must be 'fp32', 'tf32' or 'bf16-all'"
    )
    with refuses(ValueError, sentence):
        problem().with_precision("bf16")


# Modules


@pytest.fixture
def net():
    return seeded(
        lambda: nn.Sequential(
            OrderedDict(backbone=nn.Sequential(nn.Linear(2, 4), nn.Tanh()), head=nn.Linear(4, 1))
        ),
        0,
    )


@pytest.fixture
def normed():
    """A network with BatchNorm, whose statistics differ from those of the inputs below."""
    net = seeded(
        lambda: nn.Sequential(
            OrderedDict(backbone=nn.Linear(2, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 1))
        ),
        0,
    )
    net.norm.running_mean.copy_(torch.arange(4.0))
    return net


def test_split_module_splits_the_parameters(net):
    split = split_module(net, "head")
    assert list(split.x) == ["backbone.0.weight", "backbone.0.bias"]
    assert list(split.y) == ["head.weight", "head.bias"]
    assert not any(tensor.requires_grad for tensor in [*split.x.values(), *split.y.values()])
    problem(x=split.x, y=split.y)


def test_split_module_reproduces_the_module(net):
    split = split_module(net, "head")
    assert torch.equal(split.apply(split.x, split.y, THREE_SAMPLES), net(THREE_SAMPLES))
    doubled = split.apply(split.x, 2.0 * split.y, THREE_SAMPLES)
    torch.testing.assert_close(doubled, 2 * net(THREE_SAMPLES))


def test_split_module_refuses_buffers(normed):
    with refuses(
        ValueError,
        "the module has buffers (norm.running_mean, norm.running_var, norm.num_batches_tracked); "
        "pass buffers='freeze' to keep them unchanged, 'batch' to normalise each batch by itself, "
        "or use layers without buffers (GroupNorm instead of BatchNorm)",
    ):
        split_module(normed, "head")
    with pytest.raises(ValueError, match=r"num_batches_tracked, \.\.\.\)"):
        split_module(nn.Sequential(normed, nn.BatchNorm1d(1)), "1")


def test_frozen_buffers_do_not_change(normed):
    split = split_module(normed, "head", buffers="freeze")
    before = {name: value.clone() for name, value in normed.named_buffers()}
    out = [split.apply(split.x, split.y, THREE_SAMPLES) for _ in range(2)]
    assert torch.equal(out[0], normed.eval()(THREE_SAMPLES))
    assert torch.equal(out[0], out[1])
    assert all(torch.equal(before[name], value) for name, value in normed.named_buffers())


def test_frozen_buffers_do_not_depend_on_what_the_caller_does_with_the_module(normed):
    split = split_module(normed, "head", buffers="freeze")
    frozen = split.apply(split.x, split.y, THREE_SAMPLES)
    normed.train()
    assert torch.equal(split.apply(split.x, split.y, THREE_SAMPLES), frozen)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"lower": "head", "buffers": "thaw"},
            "buffers is 'thaw'; it must be one of 'freeze', 'batch'",
        ),
        (
            {"lower": "0"},
            "lower='0' selects 0 of 4 parameters (backbone.0.weight, backbone.0.bias, head.weight, "
            "head.bias); it must select some and leave some",
        ),
        (
            {"lower": ""},
            "lower='' selects 4 of 4 parameters (backbone.0.weight, backbone.0.bias, head.weight, "
            "head.bias); it must select some and leave some",
        ),
    ],
    ids=["buffers", "none", "all"],
)
def test_split_module_refuses(net, arguments, sentence):
    with refuses(ValueError, sentence):
        split_module(net, **arguments)


# Weights


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("uniform", [1 / 3, 1 / 3, 1 / 3]),
        ("samples", [1 / 10, 3 / 10, 6 / 10]),
        ([2, 0, 6.0], [1 / 4, 0, 3 / 4]),
        ((0.2, 0.3, 0.5), [0.2, 0.3, 0.5]),
    ],
)
def test_weights_are_normalised(weights, expected):
    clients = [client(samples) for samples in (1, 3, 6)]
    assert list(client_weights(weights, clients)) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("weights", ["uniform", "samples", [0.3]])
def test_a_single_client_has_all_the_weight(weights):
    assert list(client_weights(weights, [client(4)])) == [1]


def test_uniform_weights_of_a_billion_clients_take_no_memory():
    weights = client_weights("uniform", range(10**9))
    assert (len(weights), weights[10**9 - 1]) == (10**9, 1e-9)
    with pytest.raises(IndexError, match="client 1000000000 of 1000000000"):
        weights[10**9]


@pytest.mark.parametrize(
    ("weights", "kind", "sentence"),
    [
        (
            "sample",
            ValueError,
            "weights is 'sample' (did you mean 'samples'?); it must be one of 'uniform', 'samples'",
        ),
        ([1.0], ValueError, "weights has 1 entries; there are 2 clients"),
        ([1.0, -0.5], ValueError, "weights is -0.5; it must not be negative"),
        ([1.0, math.nan], ValueError, "weights is nan; it must be finite"),
        ([1.0, "2"], TypeError, "weights is '2'; it must be a number"),
        ([1.0, True], TypeError, "weights is True; it must be a number"),
        ([0.0, 0.0], ValueError, "the sum of weights is 0.0; it must be above 0"),
    ],
)
def test_client_weights_refuses(weights, kind, sentence):
    with refuses(kind, sentence):
        client_weights(weights, [client(), client()])


def test_client_weights_refuses_what_is_not_a_sequence():
    with pytest.raises(TypeError, match=r"^weights is 3; it must be"):
        client_weights(3, [client(), client()])


@pytest.mark.parametrize(
    ("owner", "sentence"),
    [
        ({"head": "client"}, "owner names the variable is 'head'; it must be one of"),
        ({"v": "node"}, r"owner\['v'\] is 'node'; it must be one of 'server', 'client'"),
        ({"w": "client", "v": "client"}, "owner gives every variable to the clients"),
    ],
)
def test_a_wrong_owner_is_refused(owner: Any, sentence: str) -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=sentence):
        Problem(lambda x, y, b: 0, lambda x, y, b: 0, {"w": zeros}, {"v": zeros}, owner=owner)


def test_parts_of_a_tree_by_owner() -> None:
    zeros = torch.zeros(1)
    y = {"body": zeros, "head": zeros, "bias": zeros}
    problem = Problem(
        lambda x, y, b: 0, lambda x, y, b: 0, {"w": zeros}, y, owner={"head": "client"}
    )
    assert problem.client_levels == ("y",)
    tree = {"body": zeros + 1, "head": zeros + 2, "bias": zeros + 3}
    server = problem.server_part(tree)
    assert list(server) == ["body", "bias"]
    joined = problem.join_parts("y", server, problem.client_part(tree))
    assert list(joined.items()) == list(tree.items())
    assert problem.join_parts("y", server, {})["head"] == 0
    _, start = problem.start
    assert list(start) == ["body", "bias"]
    with pytest.raises(ValueError, match="lower_level is 'private'"):
        dataclasses.replace(problem, lower_level="private")
