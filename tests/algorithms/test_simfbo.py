"""SimFBO and ShroFBO: the coefficients a_i of local steps, and what they cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import ShroFBO, SimFBO, asfbo
from fedbilevel.algorithms.simfbo import Descend, DescendMean, coefficient, coefficient_norm
from fedbilevel.core.oracle import Oracle
from fedbilevel.federation.phase import Message, Phase
from tests.support.cases import client_means, directions, project_to_ball, start_xyz
from tests.support.conformance import iterate
from tests.support.estimators import load_quadratic

TAU = [1, 3, 5, 2]
WEIGHTS = [0.1, 0.4, 0.2, 0.3]
LOCAL = {"x": 0.03, "y": 0.1, "z": 0.05}
SERVER = {"x": 0.02, "y": 0.06, "z": 0.04}
STEPS: dict[str, Any] = {f"lr_{name}": lr for name, lr in LOCAL.items()}
STEPS |= {f"server_lr_{name}": lr for name, lr in SERVER.items()}


def momenta(tau: int, b: float) -> Tensor:
    """m_k = b m_{k-1} + d_k, k = 0 .. tau - 1, each a row of coefficients of d_0 .. d_{tau-1}."""
    rows = torch.eye(tau, dtype=torch.float64)
    for k in range(1, tau):
        rows[k] += b * rows[k - 1]
    return rows


@pytest.mark.parametrize("tau", [1, 2, 7])
@pytest.mark.parametrize("b", [0.0, 0.5, 0.9])
def test_coefficients_are_those_of_gradients_in_a_sum_of_momenta(tau: int, b: float) -> None:
    a = momenta(tau, b).sum(0)
    assert [coefficient(b, tau - k) for k in range(tau)] == pytest.approx(a.tolist())
    assert coefficient_norm(b, tau) == pytest.approx(float(a.sum()))


def printed_rounds(
    task: Any,
    b: float,
    robust: bool,
    iterations: int,
    local: bool = True,
    l1_norm: bool = True,
) -> Tensor:
    """x after rounds of eq. (3) to (5), or of (3), (4) and (6) to (8) if `robust`.

    `local` and `l1_norm` set to False make two broken variants: steps (3) without coefficients, and
    tau_i in place of ||a_i||_1.
    """
    server = list(start_xyz(client_means(task)[0]))
    for _ in range(iterations):
        norms = []
        sums = []
        for m, tau in zip(client_means(task), TAU, strict=True):
            a = momenta(tau, b).sum(0)
            copies = list(server)
            q = [torch.zeros_like(copy) for copy in copies]
            for k in range(tau):
                for j, d in enumerate(directions(m, *copies)):
                    copies[j] = copies[j] - LOCAL["xyz"[j]] * (a[k] if local else 1.0) * d
                    q[j] = q[j] + a[k] * d
            sums.append(q)
            norms.append(float(a.abs().sum()) if l1_norm else tau)
        rho = sum(p * norm for p, norm in zip(WEIGHTS, norms, strict=True))
        for j, name in enumerate("xyz"):
            step = torch.zeros_like(server[j])
            for p, q, norm in zip(WEIGHTS, sums, norms, strict=True):
                step = step + p * (rho * q[j] / norm if robust else q[j])
            server[j] = server[j] - SERVER[name] * step
        server[2] = project_to_ball(server[2], 1000.0)
    return server[0]


@pytest.mark.parametrize("mode", ["stack", "loop"])
@pytest.mark.parametrize("b", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("method", [SimFBO, ShroFBO])
def test_rounds_are_those_of_equations_3_to_8(method: type[SimFBO], b: float, mode: str) -> None:
    task = load_quadratic()
    algorithm = method(**STEPS, coefficient_momentum=b)
    options = {"weights": WEIGHTS, "mode": mode, "environment": {"local_steps": TAU}}
    x = iterate(task, algorithm, 6, **options).state.x["x"]
    robust = method is ShroFBO
    torch.testing.assert_close(x, printed_rounds(task, b, robust, 6), rtol=0, atol=1e-13)
    if b:
        assert (x - printed_rounds(task, b, robust, 6, local=False)).norm() > 1e-3
        without = printed_rounds(task, b, robust, 6, l1_norm=False)
        assert ((x - without).norm() > 1e-3) == robust  # SimFBO is not normalised


# One client on the real line: g(y; (a, b)) = a y^2 / 2 - b y and f = 0; a batch is a pair (a, b).
START = 1.0
LR = 0.1
ZERO = torch.zeros(1, dtype=torch.float64)
LINE = fb.Problem(
    upper=lambda x, y, batch: 0 * (x["x"].sum() + y["y"].sum()),
    lower=lambda x, y, batch: (batch[0] * y["y"] ** 2 / 2 - batch[1] * y["y"]).sum(),
    x={"x": ZERO},
    y={"y": ZERO},
)


def reply_of(phase: Phase, samples: list[tuple[float, float]]) -> float:
    """What a client replies about y, from one step on each sample."""
    y = fb.Tree(y=ZERO + START)
    steps = torch.tensor(len(samples), dtype=torch.float64)
    carry = phase.start(Message(x=fb.Tree(x=ZERO), y=y, z=fb.Tree(y=ZERO), steps=steps))
    for k, sample in enumerate(samples):
        data = tuple(torch.tensor(number, dtype=torch.float64) for number in sample)
        step = phase.step if k else phase.first
        carry = step(carry, Oracle(LINE), fb.Batch(train=data, val=data))
    reply = phase.finish(carry)
    return float(reply["qy" if "qy" in reply else "hy"]["y"])


def test_no_coefficients_give_variance_reduction() -> None:
    """Two clients whose gradients agree wherever eq. (3) and (4) evaluate any.

    So the sums agree, whatever the coefficients. STORM's do not: it evaluates the old point on the
    new sample, where the two clients differ.
    """
    lr = {"lr_x": LR, "lr_y": LR, "lr_z": LR}
    slope = 2.0 * START - 0.5  # the first gradient, on the sample (2, 0.5)

    def samples(a_0: float, curvature: float) -> list[tuple[float, float]]:
        """The second sample has the slope 0.3 at the second point, for every curvature."""
        second_point = START - LR * a_0 * slope
        return [(2.0, 0.5), (curvature, curvature * second_point - 0.3)]

    for b in (0.0, 0.5, 0.9):
        a_0 = coefficient(b, 2)
        descend = Descend(**lr, coefficient_momentum=b)
        sums = [reply_of(descend, samples(a_0, curvature)) for curvature in (1.0, 3.0)]
        assert sums == pytest.approx([a_0 * slope + 0.3] * 2, abs=1e-14)
        mean = DescendMean(**lr, coefficient_momentum=b)
        means = [reply_of(mean, samples(a_0, curvature)) for curvature in (1.0, 3.0)]
        assert means == pytest.approx([(a_0 * slope + 0.3) / (a_0 + 1)] * 2, abs=1e-14)

    storm = asfbo.DescendStorm(**lr, momentum_weight=0.25)
    flat, steep = (reply_of(storm, samples(1.0, curvature)) for curvature in (1.0, 3.0))
    # Of h = (m_0 + m_1) / 2 the old point's slope has the weight -(1 - beta) / 2.
    assert flat - steep == pytest.approx(0.75 / 2 * (3.0 - 1.0) * LR * slope)


def heavy_ball(tau: int, b: float, curvature: float) -> tuple[list[float], float]:
    """The points of momentum steps on a y^2 / 2 - y / 2, and the sum of the momenta."""
    y = START
    m = 0.0
    points = []
    total = 0.0
    for _ in range(tau):
        points.append(y)
        m = b * m + curvature * y - 0.5
        y = y - LR * m
        total += m
    return points, total


def test_steps_with_the_coefficients_of_momentum_are_not_momentum_steps() -> None:
    """Section 2.3 of SimFBO: the sum is that of momentum, but of gradients at other points."""
    tau = 4
    b = 0.9
    descend = Descend(lr_x=LR, lr_y=LR, lr_z=LR, coefficient_momentum=b)

    # Without curvature all gradients are equal, and so are the sums.
    _, total = heavy_ball(tau, b, curvature=0.0)
    assert reply_of(descend, [(0.0, 0.5)] * tau) == pytest.approx(total)

    points, total = heavy_ball(tau, b, curvature=1.0)
    at_its_points = [coefficient(b, tau - k) * (y - 0.5) for k, y in enumerate(points)]
    assert sum(at_its_points) == pytest.approx(total)
    # Steps as printed are longer at first: by a_0 = 3.4.
    assert reply_of(descend, [(1.0, 0.5)] * tau) < 0.9 * total
