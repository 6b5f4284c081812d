"""`fb.check` warns of losses that cannot be used, and only of those."""

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.oracle import Oracle
from tests.support.small_problem import check_losses, lower, upper


class WithoutDerivative(torch.autograd.Function):
    """The identity, without a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v):
        return v.clone()

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("there is none")


def square(derivative):
    """v^2 as a custom function, whose backward is `derivative(g, v)`."""

    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(v):
            return v**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return derivative(g, *ctx.saved_tensors)

    return Square


class WithoutVmapRule(torch.autograd.Function):
    """v^2 as a custom function in the old style, which `torch.func` cannot differentiate."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v**2

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


Right = square(lambda g, v: 2 * g * v)
WrongFirst = square(lambda g, v: 3 * g * v)
WrongSecond = square(lambda g, v: 2 * g * v.detach())
WithoutSecond = square(lambda g, v: WithoutDerivative.apply(2 * g * v))
DifferentiableOnce = square(lambda g, v: 2 * g * v)
DifferentiableOnce.backward = staticmethod(
    once_differentiable(lambda ctx, g: 2 * g * ctx.saved_tensors[0])
)


def with_square(function):
    """A lower loss in which a custom function squares y - x."""

    def loss(x, y, batch):
        return function.apply(y["y"] - x["x"]).sum() + ((batch[0] @ y["y"]) ** 2).mean()

    return loss


def half_detached(x, y, batch):
    return (y["y"].detach() * y["y"]).sum() - y["y"] @ x["x"]


def lower_of_detached_x(x, y, batch):
    return lower({"x": x["x"].detach()}, y, batch)


def upper_of_detached_x(x, y, batch):
    return upper({"x": x["x"].detach()}, y, batch)


def upper_of_detached_y(x, y, batch):
    return upper(x, {"y": y["y"].detach()}, batch)


def piecewise_linear(x, y, batch):
    return (y["y"] - batch[0]).abs().mean() + (x["x"] ** 2).sum()


def independent_of_y(x, y, batch):
    return (x["x"] ** 2).sum()


UNUSABLE = [
    ("the lower loss's derivative in y is wrong", {"lower": half_detached}),
    ("the lower loss's derivative in y is wrong", {"lower": with_square(WrongFirst)}),
    ("the lower loss's mixed derivative is wrong", {"lower": lower_of_detached_x}),
    ("the upper loss's derivative in x is wrong", {"upper": upper_of_detached_x}),
    ("the upper loss's derivative in y is wrong", {"upper": upper_of_detached_y}),
    ("the lower loss's second derivative in y is wrong", {"lower": with_square(WrongSecond)}),
    # torch.func treats a derivative that is differentiable once as a constant.
    (
        "the lower loss's second derivative in y is wrong",
        {"lower": with_square(DifferentiableOnce)},
    ),
    (
        "the lower loss has no second derivative (differences of gradients, or a first-order "
        "method such as 'memfbo', do without): there is none",
        {"lower": with_square(WithoutSecond)},
    ),
    ("the lower loss has no derivative: ", {"lower": with_square(WithoutVmapRule)}),
    ("the Hessian of the lower loss in y is exactly zero", {"lower": piecewise_linear}),
    ("the lower loss does not depend on y", {"lower": independent_of_y}),
]


@pytest.mark.parametrize(("sentence", "losses"), UNUSABLE)
def test_unusable_losses_are_reported_and_get_no_settings(sentence, losses):
    report = check_losses(**losses)
    assert [warning for warning in report.warnings if warning.startswith(sentence)], report.warnings
    assert all("\n" not in warning for warning in report.warnings)
    assert report.measured is None
    assert sentence in str(report)
    with pytest.raises(ValueError, match=r"^there are no settings for this problem: the "):
        report.algorithm()


@pytest.mark.parametrize("loss", [with_square(Right), lower], ids=["custom function", "plain"])
def test_usable_losses_raise_no_warning(loss):
    report = check_losses(lower=loss)
    assert report.warnings == []
    assert "recommended: SimFBO(" in str(report)


def test_levels_that_do_not_depend_on_each_other_are_reported():
    def lower_without_x(x, y, batch):
        return lower({"x": torch.ones(3)}, y, batch) + (x["x"] ** 2).sum()

    (warning,) = check_losses(lower=lower_without_x).warnings
    assert warning == (
        "the minimiser of the lower loss does not depend on x: the problem is not bilevel"
    )
    (warning,) = check_losses(upper=lambda x, y, batch: (x["x"] ** 4).sum()).warnings
    assert warning == "the upper loss does not depend on y: the problem is not bilevel"


def batch_statistics(inputs):
    return F.batch_norm(inputs, None, None, training=True)


def frozen_statistics(inputs):
    return F.batch_norm(inputs, torch.zeros(3).double(), torch.ones(3).double())


def instance_statistics(inputs):
    return F.instance_norm(inputs[:, None, :])[:, 0]


BATCH_NORM = "the upper loss normalises a batch by its own statistics"


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [(batch_statistics, [BATCH_NORM]), (frozen_statistics, []), (instance_statistics, [])],
)
def test_only_normalisation_over_the_batch_is_reported(normalise, expected):
    report = check_losses(upper=lambda x, y, batch: upper(x, y, (normalise(batch[0]),)))
    assert [warning.split(" (")[0] for warning in report.warnings] == expected


def test_a_relu_network_in_single_precision_raises_no_warning_but_a_detached_bias_does():
    task = fb.tasks.load(
        "hyper-representation", data="digits", partition="shards", clients=10, hidden=16
    )
    report = fb.check(task.problem, task.clients, rounds=100)
    assert report.warnings == []
    # The ridge: cross-entropy is flat where one vector is added to all rows of the head.
    assert report.measured.mu == pytest.approx(1e-3, rel=0.01)
    assert 1e-3 < report.settings()["lr_x"] < 1
    assert "biased: methods that average them solve another problem" in str(report)
    oracle = Oracle(task.problem)
    bias = "backbone.1.bias"  # 16 of 1,040 entries

    def upper(x, y, batch):
        return oracle.upper(x, y, fb.Batch(val=batch))

    def lower_of_detached_bias(x, y, batch):
        x = fb.Tree({**x, bias: x[bias].detach()})
        return oracle.lower(x, y, fb.Batch(train=batch))

    broken = fb.Problem(upper, lower_of_detached_bias, *task.problem.start)
    (warning,) = fb.check(broken, task.clients).warnings
    assert warning.startswith("the lower loss's mixed derivative is wrong")
