"""`Report`: what `fb.check` measured, in words, and the settings that suit the problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedbilevel import algorithms
from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks
from fedbilevel.core.markup import html_table
from fedbilevel.federation.environment import Environment

ALIKE = 0.01  # the relative difference up to which clients count as alike
DRIFT = 1e-3  # the share of the initial hypergradient that local steps may cost
ADVISED = (
    "simfbo",
    "shrofbo",
    "asfbo",
    "la-asfbo",
    "unifbo",
    "fedbio",
    "fednest",
    "aggitd",
    "fedmbo",
)

Settings = dict[str, float | tuple[float, float]]


class Measures(NamedTuple):
    """The quantities that `fb.check` measures at the initial x.

    All but `mu`, `L`, `L_pooled`, `L_client` and `lower_spread` are those of the lower loss with a
    ridge, G + ridge/2 ||y - y_0||^2, at its approximate minimiser y. Vectors are compared by a
    relative spread between 0 (all clients have the same) and 1:

        sqrt(sum_i p_i ||v_i - v||^2 / sum_i p_i ||v_i||^2)    with    v = sum_i p_i v_i

    Attributes:
        mu: The smallest eigenvalue of d2yy G.
        L: The largest eigenvalue of d2yy G, at the initial y or at the y of the measurements.
        L_pooled: The same at the y of the measurements alone, to compare with `L_client`.
        L_client: The largest eigenvalue of a single client's d2yy g_i, at that y.
        lower_spread: The spread of the clients' grad_y g_i at the initial y.
        ridge: The ridge that was added.
        left: ||grad_y G|| at the y of the measurements, relative to the initial y.
        y_way: The distance from the initial y to the y of the measurements.
        z_norm: The norm of z* = [d2yy G]^-1 grad_y F.
        sizes: The number of entries of x and of y.
        hypergradient_norm: The norm of the hypergradient.
        curvature: The largest curvature of Phi, or of F - <grad_y G, z> in x if that is larger.
        lag: The largest value of 2 <dy, dz> / ||u||^2, where y* moves by dy and z* by dz when x
            moves by u.
        upper_spread: The spread of the clients' directions d_x.
        local_cosine: The cosine between the mean of the clients' own hypergradients and the true
            one; None where they do not exist.
        local_error: The relative distance between the two; None where they do not exist.
    """

    mu: float
    L: float
    L_pooled: float
    L_client: float
    lower_spread: float
    ridge: float
    left: float
    y_way: float
    z_norm: float
    sizes: tuple[int, int]
    hypergradient_norm: float
    curvature: float
    lag: float
    upper_spread: float
    local_cosine: float | None
    local_error: float | None

    @property
    def condition(self) -> float:
        """The condition number L / mu of the lower level; infinite unless mu > 0."""
        if self.mu > 0:
            return self.L / self.mu
        return math.inf

    @property
    def missing_ridge(self) -> float:
        """The ridge that a lower level needs to be strongly convex; 0 if it is.

        It makes the condition number at most 1,000, and is rounded up to two digits.
        """
        if self.mu > 1e-6 * self.L:
            return 0.0
        needed = max(0.0, -self.mu) + (abs(self.L) + abs(self.mu)) / 999
        digit = 10.0 ** (math.floor(math.log10(needed)) - 1)
        return math.ceil(needed / digit) * digit


class _StepLimits(NamedTuple):
    """The largest curvature of the lower level, and what limits the step size of x."""

    L: float
    by_curvature: float  # what the curvature of Phi allows
    by_lag: float  # what y and z allow, which follow x


class _LocalSteps(NamedTuple):
    """The numbers of local steps in an environment."""

    fewest: int
    mean: float
    most: int


@dataclass(frozen=True)
class Report:
    """What `fb.check` returns: measurements, warnings and settings that suit the problem.

    `print(report)` shows everything; `report.algorithm()` can be passed to `fb.solve`.

    Args:
        measured: The measured quantities; None if the losses cannot be used.
        warnings: What is wrong with the problem, one sentence each; empty if nothing is.
        rounds: The number of rounds that the settings are meant for.
        environment: The environment that the settings are meant for.
        where: On how many clients and at which point the problem was measured.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> report = fb.check(task.problem, task.clients)
        >>> report.warnings
        []
        >>> report.measured.sizes
        (5, 4)
        >>> report.recommended
        'simfbo'
        >>> report.algorithm("fednest").name
        'fednest'
    """

    measured: Measures | None
    warnings: list[str]
    rounds: int
    environment: Environment
    where: str

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The measurements: quantity, value, at which y it was measured, and what that means."""
        m = self.measured
        if m is None:
            return []
        convexity = "strongly convex"
        if m.missing_ridge:
            convexity = "not strongly convex"
        stationary = ""
        if not m.hypergradient_norm:
            stationary = "stationary"
        limits = self._step_limits()
        limit = "limits lr_x"
        if limits.by_curvature > limits.by_lag:
            limit = "y and z follow x slowly, which limits lr_x more"
        local, bias = _local_verdict(m)
        start = "initial y"
        end = "y*"
        largest_at = end
        if m.L_pooled < m.L:
            largest_at = start
        pooled = f"{m.L_pooled:.3g} for all clients together"
        apart = _apart(m.lower_spread)
        condition = _condition_verdict(m.condition)
        norm = f"{m.hypergradient_norm:.3g}"
        return [
            ("mu, smallest curvature of the lower level", f"{m.mu:.3g}", end, convexity),
            ("L, largest curvature of the lower level", f"{m.L:.3g}", largest_at, ""),
            ("largest curvature on a single client", f"{m.L_client:.3g}", end, pooled),
            ("condition number L / mu", f"{m.condition:.3g}", "", condition),
            ("norm of z* = [d2yy G]^-1 grad_y F", f"{m.z_norm:.3g}", end, "sets the radius of z"),
            ("norm of the hypergradient", norm, end, stationary),
            ("curvature of Phi", f"{m.curvature:.3g}", end, limit),
            ("clients' lower gradients apart", f"{m.lower_spread:.2%}", start, apart),
            (
                "clients' upper directions apart",
                f"{m.upper_spread:.2%}",
                end,
                _apart(m.upper_spread),
            ),
            ("mean of local hypergradients", local, end, bias),
        ]

    def __str__(self) -> str:
        lines = [self.where]
        for quantity, value, place, verdict in self.rows:
            line = f"{quantity}: {value}"
            if place:
                line += f" at {place}" if place == "y*" else f" at the {place}"
            if verdict:
                line += f" ({verdict})"
            lines.append(line)
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.measured:
            lines.append(f"recommended: {self.algorithm()}, because {self.reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [*self.rows, *[("warning", warning, "", "") for warning in self.warnings]]
        if self.measured:
            rows.append(("recommended", str(self.algorithm()), "", self.reason))
        return html_table(rows, ("", "measured", "at", "verdict"), self.where)

    @property
    def recommended(self) -> str:
        """The name of the method with the fewest rounds that solves heterogeneous problems."""
        steps = self._local_steps()
        if steps.fewest == steps.most:
            return "simfbo"
        return "shrofbo"

    @property
    def reason(self) -> str:
        """Why `recommended` is recommended.

        Raises:
            ValueError: Nothing was measured.
        """
        m = self._measures()
        reason = "one round per iteration, with the Hessian of all clients together"
        if self.recommended == "shrofbo":
            reason += ", and unbiased under unequal numbers of local steps"
        if m.local_error is None:
            return f"{reason}; local hypergradients, which other methods average, do not exist here"
        if m.local_error > ALIKE:
            return (
                f"{reason}; methods that average local hypergradients would be off by "
                f"{m.local_error:.0%}"
            )
        return f"{reason}; clients are alike: averages of local hypergradients would do as well"

    def algorithm(self, name: str | None = None) -> Algorithm:
        """A method with the settings that suit the problem.

        Args:
            name: The name of the method; None stands for the recommended one.

        Returns:
            The algorithm, ready for `fb.solve`.

        Raises:
            ValueError: Nothing was measured, or there is no advice for this method.
        """
        return algorithms.get(name or self.recommended)(**self.settings(name))

    def settings(self, name: str | None = None) -> Settings:
        """The step sizes and loop lengths that suit the problem, rounded to two digits.

        They are meant for gradients on all data of a client and the environment's local steps.
        With L the larger of the pooled curvature and the clients', and T the lower rounds per
        iteration, y and z step by 1 / L, and x steps by

            min(1 / (2 curvature), T / (L lag)),

        because x must not outrun y and z, which follow it.

        Args:
            name: The name of the method; None stands for the recommended one.

        Returns:
            Settings by name.

        Raises:
            ValueError: Nothing was measured, or there is no advice for this method.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> sorted(fb.check(task.problem, task.clients).settings("fedbio"))
            ['lr_x', 'lr_y', 'lr_z', 'radius']
        """
        name = checks.one_of("name", name or self.recommended, ADVISED)
        if name == "unifbo":
            settings = self._whitened()
        elif name in ("fednest", "aggitd", "fedmbo"):
            settings = self._double_loop(name)
        else:
            settings = self._single_loop(name)
        return {key: _rounded(value) for key, value in settings.items()}

    def _single_loop(self, name: str) -> Settings:
        """Settings of methods that move x, y and z together, once per round.

        The local steps of a round add up to one step of x, y and z. Where clients differ, local
        steps are short, because the drift of the clients biases the solution.
        """
        m = self._measures()
        limits = self._step_limits()
        steps = self._local_steps()
        step = 1 / limits.L
        lr = {"x": min(limits.by_curvature, limits.by_lag), "y": step, "z": step}
        spread = max(m.lower_spread, m.upper_spread)
        local = 1.0
        if steps.most > 1 and spread:
            local = min(1.0, DRIFT / (steps.most * spread))
        server_lr = {v: max(local, 1 / steps.mean) * lr_v for v, lr_v in lr.items()}
        settings: Settings = {}
        if name == "fedbio":
            settings |= {f"lr_{v}": lr_v for v, lr_v in server_lr.items()}
        else:
            settings |= {f"lr_{v}": local * lr_v for v, lr_v in lr.items()}
            settings |= {f"server_lr_{v}": lr_v for v, lr_v in server_lr.items()}
            settings |= self._damping()
        if name in ("asfbo", "la-asfbo"):
            for v, lr_v in server_lr.items():
                settings[f"server_lr_{v}_bounds"] = (lr_v / 10, lr_v)
        settings["radius"] = 10 * m.z_norm or 1.0
        return settings

    def _whitened(self) -> Settings:
        """Settings of a method whose steps adapt to the size of the directions.

        A step is as long as the distance to travel, in root mean square over the entries. The
        distances to y* and z* are measured; that of x is the length of a gradient step.
        """
        m = self._measures()
        limits = self._step_limits()
        distance_x = m.hypergradient_norm * min(limits.by_curvature, limits.by_lag)
        size_x, size_y = m.sizes
        settings: Settings = {
            "lr_x": (distance_x or 1.0) / math.sqrt(size_x),
            "lr_y": (m.y_way or 1.0) / math.sqrt(size_y),
            "lr_z": (m.z_norm or 1.0) / math.sqrt(size_y),
        }
        settings |= self._damping()
        settings["radius"] = 10 * m.z_norm or 1.0
        return settings

    def _double_loop(self, name: str) -> Settings:
        """Settings of methods with several lower rounds and a Neumann series per iteration.

        There are as many lower rounds as make the lag of y and z harmless, and kappa ln(10^4)
        terms of the series, within a tenth of all rounds. Where the length of the series is drawn
        at random, there are 3 kappa terms and x takes a tenth of its step: such methods converge
        to a neighbourhood.
        """
        m = self._measures()
        limits = self._step_limits()
        kappa = (limits.L + m.ridge) / (m.mu + m.ridge)
        terms_per_kappa = 3.0
        scale = 0.1
        if name == "fednest":
            terms_per_kappa = math.log(1e4)
            scale = 1.0
        most = max(1, self.rounds // 10)
        terms = min(math.ceil(kappa * terms_per_kappa), most)
        inner = min(math.ceil(max(1.0, limits.by_curvature / limits.by_lag)), most)
        loops = {"neumann_steps": terms, "inner_rounds": inner}
        if name == "aggitd":
            loops = {"inner_rounds": max(inner, terms)}
        lr_x = scale * min(limits.by_curvature, loops["inner_rounds"] * limits.by_lag)
        lr_y = 1 / limits.L
        if name != "fedmbo":
            tau = self._local_steps().most
            lr_x = lr_x / tau
            lr_y = lr_y / tau
            loops |= {"lower_steps": tau, "upper_steps": tau}
        return {"lr_x": lr_x, "lr_y": lr_y, "neumann_lr": 1 / limits.L, **loops}

    def _damping(self) -> Settings:
        """The damping of z that stands in for strong convexity, where it is missing."""
        ridge = self._measures().missing_ridge
        if ridge:
            return {"damping": ridge}
        return {}

    def _measures(self) -> Measures:
        if self.measured is None:
            raise ValueError(f"there are no settings for this problem: {self.warnings[-1]}")
        return self.measured

    def _step_limits(self) -> _StepLimits:
        m = self._measures()
        L = max(m.L, m.L_client, m.ridge)
        by_curvature = 1 / L
        if m.curvature:
            by_curvature = 0.5 / m.curvature
        by_lag = math.inf
        if m.lag:
            by_lag = 1 / (L * m.lag)
        return _StepLimits(L, by_curvature, by_lag)

    def _local_steps(self) -> _LocalSteps:
        steps = self.environment.local_steps
        if isinstance(steps, int):
            return _LocalSteps(steps, steps, steps)
        return _LocalSteps(min(steps), sum(steps) / len(steps), max(steps))


def _condition_verdict(condition: float) -> str:
    if condition < 100:
        return "easy"
    if condition < 1e4:
        return "slow"
    return "flat directions hardly move"


def _local_verdict(m: Measures) -> tuple[str, str]:
    """Value and verdict of the mean of the clients' own hypergradients."""
    if m.local_error is None:
        missing = "a client's own Hessian is not positive definite, or the hypergradient is zero"
        return "none", missing
    value = f"off by {m.local_error:.2%}, cosine {m.local_cosine:.3f}"
    if m.local_error <= ALIKE:
        return value, "alike"
    return value, "biased: methods that average them solve another problem"


def _apart(spread: float) -> str:
    if spread <= ALIKE:
        return "alike"
    if spread < 0.5:
        return "different"
    return "very different"


def _rounded(value: float | tuple[float, float]) -> float | tuple[float, float]:
    """Round to two digits; counts stay as they are."""
    if isinstance(value, tuple):
        low, high = value
        return float(f"{low:.2g}"), float(f"{high:.2g}")
    if isinstance(value, int):
        return value
    return float(f"{value:.2g}")
