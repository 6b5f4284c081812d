"""The claims of docs/errata.md about printed formulas, typed out with plain tensors."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev
from torch.nn import functional as F

import fedbilevel as fb
from tests.support.cases import zero_of
from tests.support.conformance import iterate

EYE = torch.eye(4, dtype=torch.float64)


def load_quadratic(**options: Any) -> Any:
    return fb.tasks.load("quadratic", **{"clients": 6, "condition": 3.0, "seed": 2} | options)


def matrices(task: Any) -> list[tuple[Tensor, ...]]:
    """A, B, c, e, t, D of each client: d2yy g is A, and d2xy g is -B'."""
    return [tuple(part[0] for part in (*client.train, *client.val)) for client in task.clients]


def upper_gradients(m: tuple[Tensor, ...], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """grad_x f and grad_y f of one client."""
    *_, e, t, D = m
    return x - t + D.T @ y, y - e + D @ x


def mean_of_local_hypergradients(task: Any, x: Tensor) -> Tensor:
    """Eq. (7) of RABO, averaged at y = y*(x): each client inverts its own Hessian."""
    y = task.y_star({"x": x})["y"]
    local = []
    for m in matrices(task):
        f_x, f_y = upper_gradients(m, x, y)
        local.append(f_x + m[1].T @ torch.linalg.solve(m[0], f_y))
    return torch.stack(local).mean(0)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a, b, dim=0))


# ASFBO and LA-ASFBO


def momenta(tau: int, beta: float, storm: bool) -> Tensor:
    """The momenta m_0 .. m_{tau-1}, each a row of coefficients.

    Column k is for the gradient at point k on batch k, column tau + k for the gradient at point k
    on batch k + 1, which only STORM evaluates.
    """
    rows = torch.zeros(tau, 2 * tau, dtype=torch.float64)
    rows[0, 0] = 1
    for k in range(1, tau):
        rows[k] = (1 - beta) * rows[k - 1]
        if storm:
            rows[k, k] += 1
            rows[k, tau + k - 1] -= 1 - beta
        else:
            rows[k, k] += beta
    return rows


@pytest.mark.parametrize("tau", [1, 2, 7, 15])
@pytest.mark.parametrize("beta", [0.01, 0.25, 0.9])
def test_lemma_1_of_asfbo_is_right_and_its_coefficients_sum_to_tau(beta: float, tau: int) -> None:
    printed = [(1 - (1 - beta) ** tau) / beta]
    printed += [1 - (1 - beta) ** (tau - k) for k in range(1, tau)]
    unrolled = momenta(tau, beta, storm=False).sum(0)
    torch.testing.assert_close(unrolled[:tau], torch.tensor(printed, dtype=torch.float64))
    assert sum(printed) == pytest.approx(tau)


def test_storms_coefficients_sum_to_tau_and_their_l1_norm_does_not() -> None:
    tau = 10  # the mean number of steps of the paper's experiments
    beta = 0.25  # and their momentum
    a = momenta(tau, beta, storm=True).sum(0)
    assert float(a.sum()) == pytest.approx(tau)
    assert float(a.abs().sum()) == pytest.approx(47.4, abs=0.1)
    # Were all batches one, every point would count once.
    torch.testing.assert_close(a[:tau] + a[tau:], torch.ones(tau, dtype=torch.float64))


def test_a_momentum_step_is_not_its_coefficient_times_the_gradient() -> None:
    """Eq. (108) of ASFBO moves by a^(k) times the gradient at step k.

    The sums over k agree, the steps do not: the first step moves by the first gradient alone, whose
    coefficient is 3.8.
    """
    rows = momenta(10, 0.25, storm=False)[:, :10]
    printed = torch.diag(rows.sum(0))
    torch.testing.assert_close(rows.sum(0), printed.sum(0))
    assert float(rows[0, 0]) == 1
    assert float(printed[0, 0]) == pytest.approx(3.77, abs=0.01)


def test_the_reweighted_solution_is_not_stationary_for_the_real_problem() -> None:
    """Eq. (195) to (199) of ASFBO bound ||grad Phi|| by M ||grad Phi~|| for weights w != p.

    They take y* = y~* and z* = z~*. Where grad Phi~ = 0, grad Phi would have to vanish. With w = p
    (Theorem 2 of SimFBO) nothing is left to bound.
    """
    task = load_quadratic(clients=4)
    w = [1, 2, 3, 5]
    solution = task.x_star(weights=w)
    assert task.gradient(solution, weights=w)["x"].norm() < 1e-12
    assert task.gradient(solution)["x"].norm() > 0.1
    x = solution["x"]
    y = task.y_star(solution, weights=w)["y"]
    assert (task.y_star(solution)["y"] - y).norm() > 0.1
    A, _, _, e, _, D = task._means(w)
    z = torch.linalg.solve(A, y - e + D @ x)
    surrogates = torch.stack([upper_gradients(m, x, y)[0] + m[1].T @ z for m in matrices(task)])
    bound = torch.tensor(w).double() @ surrogates  # the right side of (195), and of SimFBO's (59)
    assert bound.norm() < 1e-11
    assert surrogates.mean(0).norm() > 0.1  # the left side


def adaptive_step(h: float, s: float, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Eq. (27) and (28) with the paper's settings for x: the new s, and the step size."""
    s = 0.75 * s + 0.25 * abs(h)
    gamma = 0.03 / (s + 0.001)
    if bounds:
        gamma = min(max(gamma, bounds[0]), bounds[1])
    return s, gamma


@pytest.mark.parametrize(("bounds", "settles"), [(None, False), ((0.01, 0.1), True)])
def test_asfbos_step_size_settles_only_within_its_bounds(bounds: Any, settles: bool) -> None:
    """On Phi = x^2 / 2: without bounds a step has about the length gamma_x at any gradient."""
    x = 1.0
    s = 0.0
    sizes = []
    for _ in range(2000):
        s, gamma = adaptive_step(x, s, bounds)
        x -= gamma * x
        sizes.append(abs(x))
    assert (max(sizes[-100:]) < 1e-12) == settles
    if not settles:
        assert max(sizes[-100:]) > 0.01


def test_an_adaptive_step_depends_on_the_gradient_it_scales() -> None:
    """Lemma 18 of ASFBO takes gamma^(t) out of the expectation.

    A gradient of mean 1/3 (-1 with probability 2/3, else 3) has an expected first step uphill, with
    the bounds of the paper.
    """
    outcomes = [(2 / 3, -1.0), (1 / 3, 3.0)]
    assert sum(p * h for p, h in outcomes) == pytest.approx(1 / 3)
    step = 0.0
    for p, h in outcomes:
        _, gamma = adaptive_step(h, 0.0, (0.01, 0.1))
        step += p * gamma * h
    assert step < -0.02


def test_a_softmax_head_on_full_rank_features_is_not_strongly_convex() -> None:
    """Adding one row to all rows of the head changes no probability.

    With 6 features there are 6 directions without curvature.
    """
    features = torch.eye(6, dtype=torch.float64).repeat(3, 1)
    labels = torch.arange(18) % 3
    head = 0.1 * torch.arange(18, dtype=torch.float64)
    hessian = jacrev(grad(lambda w: F.cross_entropy(features @ w.view(3, 6).T, labels)))(head)
    assert int((torch.linalg.eigvalsh(hessian) < 1e-12).sum()) == 6


# SimFBO and ShroFBO


def test_simfbos_bound_of_the_drift_lacks_a_factor_tau() -> None:
    """Proposition 3 bounds the mean square drift by eta^2 tau sigma_M1^2, but it grows as tau^2.

    g = y^2 / 2, f = y, no noise: mu = L_1 = L_f = 1, r_max = 2,
    sigma_M1^2 = L_f^2 + r_max^2 L_1^2 = 5.
    """
    eta = 1e-3

    def drift(tau: int) -> float:
        v = 0.0
        total = 0.0
        for _ in range(tau):
            total += v**2
            v -= eta * (v - 1)
        return total / tau

    assert drift(40) > 2.4 * 5 * eta**2 * 40
    assert drift(40) < 5 * eta**2 * 40**2
    assert drift(80) / drift(40) == pytest.approx(4, rel=0.1)


def test_the_derivative_of_v_star_goes_through_y_star() -> None:
    """Eq. (15) of SimFBO sets a partial derivative to zero, and eq. (16) loses terms in grad y*.

    g = y^2 / 2 - x y, f = y^2 / 2: y* = x, v* = x, so grad v* = 1; eq. (16) says
    d2yx F - v d3yyx G = 0.
    """
    x = torch.tensor(0.7, dtype=torch.float64)

    def g(x: Tensor, y: Tensor) -> Tensor:
        return y**2 / 2 - x * y

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y**2 / 2 + 0 * x

    f_y = grad(f, argnums=1)
    g_yy = grad(grad(g, argnums=1), argnums=1)

    def v_star(x: Tensor) -> Tensor:
        return f_y(x, x) / g_yy(x, x)

    assert float(grad(f_y)(x, x) - v_star(x) * grad(g_yy)(x, x)) == 0
    assert float(grad(v_star)(x)) == 1


def test_local_z_is_bounded_only_by_small_steps() -> None:
    """Proposition 1 of SimFBO: |v| <= 2 r needs eta L_1 <= 1, which is not assumed.

    Here mu = L_1 = L_f = r = 1.
    """

    def largest(eta: float) -> float:
        v = -1.0
        sizes = []
        for _ in range(20):
            v -= eta * (v - 1)
            sizes.append(abs(v))
        return max(sizes)

    assert largest(1.0) <= 2 < largest(2.2)


def test_the_step_on_x_is_not_independent_of_the_step_on_y() -> None:
    """Eq. (30) of SimFBO bounds E<y+ - y*(x), y*(x) - y*(x+)> with the mean of x+ - x.

    Two clients, one per round: g_i = (y - x - c_i)^2 / 2 and f_i = c_i x with c_i = +-1. Then
    y*(x) = x is linear, so that the second term of the bound is 0, and at y = y*(x), z = 0 the mean
    of x+ - x is 0, so that the first one is 0, too.
    """
    gamma = 0.1
    x = y = 0.5
    moves = []
    products = []
    for c in (1.0, -1.0):
        new_y = y - gamma * (y - x - c)
        new_x = x - gamma * c
        moves.append(new_x - x)
        products.append(2 * (new_y - x) * (x - new_x))
    assert sum(moves) == pytest.approx(0)
    assert sum(products) / 2 == pytest.approx(2 * gamma**2)


def test_redrawn_steps_leave_simfbo_without_one_reweighted_problem() -> None:
    """Theorem 1 of SimFBO: w_i = p_i tau_i / sum_j p_j tau_j, and Phi~ has these weights.

    Where tau_i is drawn for every round, so are w and Phi~, and their solutions lie apart. Only
    E[tau_i], and with it the mean of p_i tau_i, is equal for all clients.
    """
    task = load_quadratic(clients=2)
    solutions = {}
    for tau in itertools.product((1, 2, 3), repeat=2):
        w = torch.tensor(tau).double() / sum(tau)
        solutions[tau] = task.x_star(weights=w.tolist())["x"]
    apart = [(solutions[1, 3] - solutions[tau]).norm() for tau in ((1, 1), (2, 1), (3, 1))]
    assert min(apart) > 0.1
    real = task.x_star()["x"]
    torch.testing.assert_close(solutions[2, 2], real)
    assert (torch.stack(list(solutions.values())).mean(0) - real).norm() > 0.01


def test_shrofbo_solves_the_real_problem_up_to_a_drift_of_the_order_of_eta() -> None:
    """With fixed unequal tau_i a tenth of the local steps leaves a tenth of the distance."""
    task = load_quadratic(clients=4, seed=5)
    server_steps = {"server_lr_x": 0.05, "server_lr_y": 0.4, "server_lr_z": 0.4}

    def distance(eta: float) -> float:
        method = fb.algorithms.ShroFBO(lr_x=0.3 * eta, lr_y=eta, lr_z=eta, **server_steps)
        state = iterate(task, method, 250, environment={"local_steps": [1, 2, 3, 5]}).state
        return float((state.x["x"] - task.x_star()["x"]).norm())

    assert distance(0.05) == pytest.approx(0.04, rel=0.05)
    assert distance(0.05) / distance(0.005) == pytest.approx(10, rel=0.05)


def test_no_coefficient_makes_simfbos_local_step_a_momentum_step() -> None:
    """Eq. (3) of SimFBO moves along the gradient at the current point, whatever a is.

    The second step of momentum moves along a mixture with the first gradient, which has another
    direction.
    """
    curvature = torch.tensor([1.0, 4.0]).double()
    y = torch.ones(2).double()
    first = curvature * y
    second = curvature * (y - 0.2 * first)
    momentum = 0.25 * second + 0.75 * first
    assert abs(cosine(momentum, second)) < 0.9


# FedNest's published code


def test_an_unsquared_norm_curves_less_and_less_and_not_along_itself() -> None:
    """beta/2 ||w||, beta = .1, has the Hessian beta / (2 ||w||) (I - w w' / ||w||^2)."""
    for size in (1.0, 100.0):
        w = size * torch.tensor([0.6, 0.8, 0.0]).double()
        hessian = jacrev(grad(lambda w: 0.05 * w.norm()))(w)
        torch.testing.assert_close(hessian @ w, torch.zeros_like(w), rtol=0, atol=1e-12)
        assert float(torch.linalg.eigvalsh(hessian)[-1]) == pytest.approx(0.05 / size)


# ADBO's and FIARSE's published code


@pytest.mark.parametrize("K", [1, 5])
def test_adbos_plane_with_one_more_step_in_a_cuts_off_feasible_points(K: int) -> None:
    """b and kappa belong to the K-th step of the workers, a to step K + 1.

    g = (y - x)^2 / 2, from y = 0 and without a penalty: y'_K = s_K x with s_K = 1 - (1 - lr)^K, and
    h = (y - y'_K(x))^2. The tangent of h at x = 1, y = 0 is negative wherever h = 0. With the a of
    s_{K+1} it is positive beyond some x: the plane excludes points that it should not.
    """
    lr = 0.02  # the code's, for hyper-cleaning

    def share(k: int) -> float:
        return 1 - (1 - lr) ** k

    s = share(K)
    b = -2 * s

    def value(a: float, x: float) -> float:
        """The plane where h = 0, at y = y'_K(x)."""
        kappa = s**2 - a
        return a * x + b * s * x + kappa

    tangent = 2 * s**2
    as_coded = 2 * share(K + 1) ** 2
    assert all(value(tangent, x) < 0 for x in (-3.0, 0.0, 1.5, 3.0))
    assert value(as_coded, -3.0) < 0 < value(as_coded, 3.0)
    if K == 1:
        assert as_coded / tangent == pytest.approx((2 - lr) ** 2)


class Threshold(torch.autograd.Function):
    """A mask of a given dtype with the slope of FIARSE's paper."""

    @staticmethod
    def forward(ctx: Any, size: Tensor, threshold: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(size, threshold)
        return (size >= threshold).to(dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, None, None]:
        size, threshold = ctx.saved_tensors
        kept = size >= threshold
        return upstream[0] * kept * 2 * threshold / (size + threshold) ** 2, None, None


@pytest.mark.parametrize(
    ("dtype", "factors"), [(torch.float64, [1.375, 1.5, 0.0]), (torch.bool, [1.0, 1.0, 0.0])]
)
def test_a_boolean_mask_has_no_gradient(dtype: torch.dtype, factors: list[float]) -> None:
    """FIARSE's code returns the comparison itself, for which PyTorch never runs `backward`.

    What is left is the gradient of a fixed mask.
    """
    w = torch.tensor([-0.9, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    mask = Threshold.apply(w.abs(), w[1].detach(), dtype)
    assert mask.requires_grad == (dtype != torch.bool)
    (gradient,) = torch.autograd.grad((w * mask).sum(), w)
    torch.testing.assert_close(gradient, torch.tensor(factors).double())


# FBO-AggITD


def test_counts_of_table_2_fit_one_lower_round_only() -> None:
    """Accuracy is known after whole iterations only, so that their rounds divide every count.

    2N + 3 divides 5 and, with N = 1, 2N + T + 3 divides 10. N = 5 would need 13 and 13 + T.
    """
    assert math.gcd(530, 195, 520, 305) == 5 == 2 * 1 + 3
    assert math.gcd(1630, 610, 1380, 760) == 10 == 2 * 1 + 5 + 3


@pytest.mark.parametrize(("T", "N"), [(5, 5), (5, 1), (3, 9)])
def test_a_truncation_needs_the_factor_of_its_range(T: int, N: int) -> None:
    """Section 2.1 of AggITD: p_0 has the factor lambda T, but T' is drawn from {0 .. N-1}.

    The expectation is exact, over all T'.
    """
    lam = 0.1
    t = 0.3
    mean = sum(lam * T * (1 - lam * t) ** length for length in range(N)) / N
    intended = lam * sum((1 - lam * t) ** k for k in range(T))
    assert (mean == pytest.approx(intended)) == (T == N)


@pytest.mark.parametrize("kappa", [10, 100, 1000])
def test_n_of_the_order_of_kappa_leaves_a_constant_bias(kappa: int) -> None:
    """Corollary 1 of AggITD drops (1 - lambda mu)^{2N}.

    With lambda = 1/L and N = kappa that is e^-2, whatever K is.
    """
    assert (1 - 1 / kappa) ** (2 * kappa) == pytest.approx(math.exp(-2), rel=0.12)
    assert (1 - 1 / kappa) ** (2 * kappa * math.log(1e3)) < 1.1e-6


@functools.cache
def mean_square_gradient_of_aggitd(K: int, floor: bool) -> float:
    """The mean of |grad f|^2 over K iterations and 200 runs from the solution.

    g = (y - x)^2 / 2 + zeta y with zeta = +-4, f = softplus(y) - 0.3 y, one client, N = 1 and the
    estimator's expectation over Q; lambda = 1/2 = 1 / L_g and alpha = 1 / (4 sqrt K). beta is at
    its floor lambda / 10, or 8 alpha.
    """
    draws = torch.Generator().manual_seed(0)
    lam = 0.5
    alpha = 0.25 / math.sqrt(K)
    beta = lam / 10 if floor else 8 * alpha
    x = torch.full((200,), math.log(3 / 7), dtype=torch.float64)
    y = x
    total = 0.0
    for _ in range(K):
        total += float((x.sigmoid() - 0.3).square().mean())
        zeta = 8.0 * torch.randint(2, (200,), generator=draws) - 4
        y_next = y - beta * (y - x + zeta)
        h = lam * ((1 - lam) * (y.sigmoid() - 0.3) + y_next.sigmoid() - 0.3)
        x = x - alpha * h
        y = y_next
    return total / K


def test_the_floor_of_aggitds_lower_step_leaves_a_bias() -> None:
    """Theorem 1 of AggITD asks for beta >= lambda / 10, and eq. (47) sets beta ~ alpha.

    At K = 1600 both are the same beta. Then the mean square gradient falls as 1 / sqrt(K) with
    beta ~ alpha, and stalls with the floor: y keeps its variance, and grad f is not linear in y.
    """
    start = mean_square_gradient_of_aggitd(1600, floor=True)
    assert start == mean_square_gradient_of_aggitd(1600, floor=False)
    assert mean_square_gradient_of_aggitd(12800, floor=True) > 0.8 * start
    assert mean_square_gradient_of_aggitd(12800, floor=False) < 0.5 * start


# RABO and RAFBO


def test_rabo_as_printed_ascends() -> None:
    """Algorithm 1, lines 8, 10 and 18: y - beta mean (y_T - y_0) / beta mirrors the mean y_T."""
    clients = matrices(load_quadratic())
    beta = 0.3
    x = torch.ones(5, dtype=torch.float64)
    y = torch.ones(4, dtype=torch.float64)
    printed = []
    for A, B, c, *_ in clients:
        y_i = y
        for _ in range(5):
            y_i = y_i - beta * (A @ y_i - B @ x - c)
        printed.append((y_i - y) / beta)
    G = torch.stack(printed).mean(0)

    def lower(y: Tensor) -> float:
        losses = [y @ A @ y / 2 - y @ (B @ x + c) for A, B, c, *_ in clients]
        return float(torch.stack(losses).mean())

    assert lower(y - beta * G) > lower(y) > lower(y + beta * G)


POINTS = torch.stack([torch.sin(torch.arange(5, dtype=torch.float64) * k) for k in (1, 2, 3, 4, 6)])


def rafbo(
    m: tuple[Tensor, ...], x: Tensor, y: Tensor, mu: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2 on all coordinates.

    Returns the direct part, the indirect part as printed, which is added to it, and the true one.
    """
    A, B, c, *_ = m
    f_x, f_y = upper_gradients(m, x, y)

    def g_y(x: Tensor) -> Tensor:
        return A @ y - B @ x - c

    delta = [(g_y(x + mu * unit) - g_y(x)) / mu for unit in torch.eye(len(x), dtype=x.dtype)]
    return f_x, torch.stack([d @ f_y for d in delta]), B.T @ torch.linalg.solve(A, f_y)


@pytest.mark.parametrize(
    ("condition", "least", "uphill"), [(1.0, 0.9999, 17), (1.5, 0.95, 18), (30.0, 0.3, 20)]
)
def test_rafbo_as_printed_points_uphill(condition: float, least: float, uphill: int) -> None:
    """Cosines with the true hypergradient, at 20 points.

    With the sign turned it is 1 at condition number 1 and then decreases, for want of the inverse
    Hessian. As printed it is negative where the indirect part is the larger one.
    """
    indirect = []
    turned = []
    as_printed = []
    for seed in range(4):
        task = load_quadratic(clients=1, condition=condition, seed=seed)
        (m,) = matrices(task)
        for x in POINTS:
            direct, printed, true = rafbo(m, x, task.y_star({"x": x})["y"])
            whole = direct + true
            torch.testing.assert_close(whole, task.gradient({"x": x})["x"], rtol=0, atol=1e-8)
            indirect.append(cosine(printed, true))
            turned.append(cosine(direct - printed, whole))
            as_printed.append(cosine(direct + printed, whole))
    assert max(indirect) < -0.86
    assert min(turned) == pytest.approx(least, abs=0.005)
    assert sum(value < 0 for value in as_printed) == uphill


def test_rafbos_error_does_not_vanish_with_mu() -> None:
    """Lemma 3 bounds the square of the error by a multiple of mu^2."""
    task = load_quadratic(clients=1)
    (m,) = matrices(task)
    x = POINTS[0]
    y = task.y_star({"x": x})["y"]
    errors = []
    for mu in (1e-2, 1e-4, 1e-6):
        _, printed, true = rafbo(m, x, y, mu)
        errors.append((printed - true).norm())
    assert min(errors) > 0.5
    assert max(errors) - min(errors) < 1e-6


def test_the_mean_of_local_hypergradients_ends_elsewhere() -> None:
    """Eq. (7) of RABO: where it vanishes, the true gradient is about as large as at the start.

    On identical clients it is exact.
    """
    zero = torch.zeros(5, dtype=torch.float64)
    for seed in range(4):
        task = load_quadratic(seed=seed)
        end = zero_of(functools.partial(mean_of_local_hypergradients, task), 5)
        assert mean_of_local_hypergradients(task, end).norm() < 1e-12
        at_start = task.gradient({"x": zero})["x"].norm()
        assert task.gradient({"x": end})["x"].norm() > 0.5 * at_start > 0.4
    alike = load_quadratic(heterogeneity=0.0)
    local = mean_of_local_hypergradients(alike, POINTS[0])
    torch.testing.assert_close(local, alike.gradient({"x": POINTS[0]})["x"])


def test_with_masks_y_converges_to_the_masked_solution() -> None:
    """Lemma 4 of RABO has y go to the minimiser of the losses without masks.

    Two equal clients, so that delta_g = 0, without noise; one trains the first coordinate of y, the
    other the second. y contracts to the solution of eq. (2), (1, 1); the lemma's is (2/3, 2/3).
    """
    A = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
    b = torch.ones(2).double()
    masks = torch.eye(2).double()
    lemma = torch.linalg.solve(A, b)
    masked = torch.linalg.solve(sum(torch.diag(m) @ A @ torch.diag(m) for m in masks), b)
    torch.testing.assert_close(lemma, torch.full((2,), 2 / 3).double())
    torch.testing.assert_close(masked, torch.ones(2).double())
    y = lemma
    for _ in range(100):
        y = torch.stack([(m * y - 0.3 * m * (A @ (m * y) - b)).sum() for m in masks])
    torch.testing.assert_close(y, masked)


@pytest.mark.parametrize("s", [0.1, 0.5, 1.0, 4.0])
def test_rabos_conditions_on_beta_do_not_contract(s: float) -> None:
    """Theorem 1 of RABO, with s = 2 alpha L_y M_f.

    The proof needs (s + 2) (1 - beta mu) <= 1, so beta mu >= 1 - 1 / (s + 2). The printed condition
    has s for s + 2, and beta <= 1 / (2 l_g1) <= 1 / (2 mu) leaves no beta at all.
    """
    printed = max(1 - 1 / s, 0.01)
    assert (s + 2) * (1 - printed) - 1 > 0
    needed = 1 - 1 / (s + 2)
    assert (s + 2) * (1 - needed) - 1 == pytest.approx(0)
    assert needed > 1 / 2


def test_the_vs_loss_as_upper_objective_goes_to_zero_with_its_weights() -> None:
    """A classifier of biases: y*_k = log(w_k n_k) up to a constant, so Phi(c w) = c Phi(w)."""
    train = torch.tensor([60.0, 30.0, 10.0]).double()
    val = torch.tensor([0.5, 0.3, 0.2]).double()

    def vs_loss(w: Tensor, y: Tensor, share: Tensor) -> Tensor:
        return -(share * w * F.log_softmax(y, dim=0)).sum()

    def phi(w: Tensor) -> float:
        y = (w * train).log()
        slope = grad(lambda y: vs_loss(w, y, train))(y)
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)
        return float(vs_loss(w, y, val))

    w = torch.tensor([1.0, 2.0, 4.0]).double()
    assert phi(w) > 1
    assert phi(1e-6 * w) == pytest.approx(1e-6 * phi(w))


def test_one_head_for_shuffled_labels_learns_nothing() -> None:
    """Over all orders of 4 classes the cross-entropy of any logits is at least log 4.

    Equal logits reach it: a sample of class 0 has every label equally often.
    """
    orders = torch.tensor(list(itertools.permutations(range(4))))

    def loss(logits: Tensor) -> float:
        return float(F.cross_entropy(logits.expand(len(orders), 4), orders[:, 0]))

    assert loss(torch.zeros(4).double()) == pytest.approx(math.log(4))
    assert all(loss(logits) > math.log(4) + 1e-3 for logits in EYE - 0.2)


def test_capacity_is_a_width_ratio() -> None:
    """The printed shares of FedMBO's costs are means of r^2: 26.7% for five ratios, 25% for 1/2."""
    ratios = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    share = sum(r**2 for r in ratios) / 5
    assert share == pytest.approx(0.2664, abs=1e-4)
    assert sum(ratios) / 5 == pytest.approx(0.3875)
    whole_down_submodel_up = (1 + share) / 2
    assert whole_down_submodel_up == pytest.approx(0.633, abs=1e-3)


def test_improvements_of_rabos_table_ii() -> None:
    """RABO 9.43 and RAFBO 6.59 points over the mean of the four submodel baselines, as printed."""
    baselines = [
        [72.34, 85.09, 42.99, 51.01],
        [73.58, 86.16, 45.45, 51.92],
        [73.74, 86.95, 47.25, 55.29],
        [74.33, 87.78, 49.52, 55.87],
    ]
    mean = float(torch.tensor(baselines).mean())
    rabo_mean = float(torch.tensor([76.05, 89.12, 54.97, 77.41]).mean())
    rafbo_mean = float(torch.tensor([75.09, 88.57, 51.37, 71.16]).mean())
    assert rabo_mean - mean == pytest.approx(9.43, abs=0.005)
    assert rafbo_mean - mean == pytest.approx(6.59, abs=0.005)


# AFBO


@pytest.mark.parametrize("m", [2, 18, 100])
def test_afbos_fixed_number_of_factors_keeps_little(m: int) -> None:
    """(m / L) (I - H / L)^m v against H^-1 v, along the eigenvectors of H, t = eigenvalue / L."""
    (client,) = matrices(load_quadratic(clients=1, condition=30.0))
    H = client[0]
    L = 1.25
    values, vectors = torch.linalg.eigh(H)
    t = values / L
    factor = EYE - H / L
    powers = [torch.linalg.matrix_power(factor, u) for u in range(m + 1)]

    def kept(estimate: Tensor) -> Tensor:
        return torch.diag(vectors.T @ estimate @ H @ vectors)

    fixed = kept(m / L * powers[m])
    torch.testing.assert_close(fixed, m * t * (1 - t) ** m)
    most = (m / (m + 1)) ** (m + 1)
    assert fixed.max() <= most + 1e-12 < 0.37
    best = torch.tensor(1 / (m + 1), dtype=torch.float64)
    assert float(m * best * (1 - best) ** m) == pytest.approx(most)
    total = kept(1 / L * sum(powers[:m]))
    torch.testing.assert_close(total, 1 - (1 - t) ** m)
    mean_over_lengths = torch.stack([m / L * powers[u] for u in range(m)]).mean(0)
    torch.testing.assert_close(kept(mean_over_lengths), total)


def test_a_remembered_gradient_needs_smaller_steps() -> None:
    """Lemma 4.2 of AFBO has no delay in it.

    g = y^2 / 2, beta = 1 / (2 l) as it allows, no noise, every client heard each tenth round
    (rho_M = 10, as in the experiments): |y| grows fourfold where the lemma halves it ten times.
    """
    y = 1.0
    for _ in range(3):
        remembered = y
        for _ in range(10):
            y -= 0.5 * remembered
    assert y == (1 - 10 * 0.5) ** 3
    assert abs(y) > 1 > 0.5**30


@pytest.mark.parametrize(
    ("beta", "converges"),
    [
        (lambda eta, T: 0.1 * eta / T, False),
        (lambda eta, T: 0.1, True),
        (lambda eta, T: 5 * eta / 5, True),
    ],
    ids=["as in the theorem", "constant", "a_2 eta / K"],
)
def test_afbos_lower_step_needs_a_lower_bound(beta: Any, converges: bool) -> None:
    """Theorem 4.1 of AFBO bounds beta from above only, by a_2 eta / T with T the outer rounds.

    g = (y - x)^2 / 2, f = sqrt(1 + (y - 1)^2): no noise, no delay, the exact inverse, K = 5 and
    eta = T^-1/2. With such a beta y stays where it was and x leaves for infinity, where grad f is
    1. With a constant beta, and with a_2 eta / K, the mean square gradient falls as T^-1/2.
    """

    def slope(u: float) -> float:
        return (u - 1) / math.hypot(1, u - 1)

    def mean_square_gradient(T: int) -> float:
        eta = T**-0.5
        step = beta(eta, T)
        x = y = 3.0
        total = 0.0
        for _ in range(T):
            total += slope(x) ** 2
            for _ in range(5):
                y -= step * (y - x)
            x -= eta * slope(y)
        return total / T

    early = mean_square_gradient(1000)
    late = mean_square_gradient(16000)
    if converges:
        assert late / early == pytest.approx(1 / 4, rel=0.05)
    else:
        assert 0.9 < early < late < 1


def test_afbos_rates_do_not_follow_from_its_theorem() -> None:
    """The terms of Theorem 4.1 with delays, all constants and delays 1, at Corollary 4.1's steps.

    For strongly convex f they are of order T^-1/2, not T^-1; for the others they grow with the
    number of clients m instead of falling.
    """

    def strongly_convex(T: float, m: int = 18) -> float:
        eta = T**-0.5
        return 6 * eta**2 / m * (m + 5) / eta  # C / (eta mu_f)

    def non_convex(T: float, m: int) -> float:
        return 3 * (m / T) ** 0.5 * (m + 4) / m

    assert strongly_convex(4e6) / strongly_convex(1e6) == pytest.approx(1 / 2)
    assert non_convex(1e6, 400) > 1.9 * non_convex(1e6, 100)


def test_a_linear_regulariser_leaves_no_lower_solution() -> None:
    """Logistic loss plus sum_j phi_j w_j, as printed in section V-B: no curvature, no minimum."""
    features = torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.3]]).double()
    labels = torch.tensor([1.0, -1.0]).double()
    phi = torch.tensor([1.0, -1.5, 2.0]).double()

    def loss(w: Tensor) -> Tensor:
        return F.softplus(-labels * (features @ w)).mean()

    def printed(w: Tensor) -> Tensor:
        return loss(w) + (phi * w).sum()

    def squared(w: Tensor) -> Tensor:
        return loss(w) + (phi.abs() * w**2).sum()

    def least_curvature(lower: Any) -> float:
        return float(torch.linalg.eigvalsh(jacrev(grad(lower))(0.1 * phi))[0])

    assert least_curvature(printed) == pytest.approx(0, abs=1e-12)
    assert least_curvature(squared) >= 2
    assert printed(-1e6 * phi) < -1e6 < 0 < squared(-1e6 * phi)
