"""From what was measured of a problem to verdicts in words and to settings that suit it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedbilevel import algorithms
from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks
from fedbilevel.federation.environment import Environment

ALIKE = 0.01  # relative difference up to which clients count as alike
DRIFT = 1e-3  # of the hypergradient at the start, that local steps may cost
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


class Measures(NamedTuple):
    """What `check` measured. `ridge` was added to the lower level for all that follows it."""

    mu: float  # the extreme eigenvalues of d2yy G
    L: float
    L_client: float  # the largest of a single client's
    lower_spread: float  # how far apart the clients' grad_y g_i are at the start, 0 to 1
    ridge: float
    left: float  # of ||grad_y G||, where the rest was measured
    y_way: float  # from the start's y to there
    z_norm: float
    sizes: tuple[int, int]  # how many numbers x and y hold
    hypergradient_norm: float
    curvature: float  # the largest of Phi, or of d_x with y and z held
    lag: float  # the largest of u -> 2 <dy, dz>: y* moves by dy and z* by dz when x moves by u
    upper_spread: float  # as lower_spread, of the clients' d_x
    local_cosine: (
        float | None
    )  # of the mean of local hypergradients with the true one; None where they do not exist
    local_error: float | None

    @property
    def condition(self) -> float:
        return self.L / self.mu if self.mu > 0 else math.inf

    @property
    def missing_ridge(self) -> float:
        """What makes the condition number at most 1,000 where there is no strong convexity, rounded up; else 0."""
        if self.mu > 1e-6 * self.L:
            return 0.0
        needed = max(0.0, -self.mu) + (abs(self.L) + abs(self.mu)) / 999
        digit = 10.0 ** (math.floor(math.log10(needed)) - 1)
        return math.ceil(needed / digit) * digit


@dataclass(frozen=True)
class Report:
    """What `fb.check` found: `measured` (None where nothing could be), `warnings`, and the settings they suggest."""

    measured: Measures | None
    warnings: list[str]
    rounds: int
    environment: Environment
    where: str

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What was measured, its value, and what it means."""
        if (m := self.measured) is None:
            return []
        convex = "not strongly convex" if m.missing_ridge else "strongly convex"
        slow = (
            "easy"
            if m.condition < 100
            else "slow"
            if m.condition < 1e4
            else "flat directions move hardly at all"
        )
        step = (
            "limits lr_x"
            if self._steps()[1] <= self._steps()[2]
            else "y and z follow x slowly, which limits lr_x more"
        )
        if m.local_error is None:
            local, bias = (
                "none",
                "a client's own Hessian is not positive definite, or the hypergradient is zero",
            )
        else:
            local = f"off by {m.local_error:.2%}, cosine {m.local_cosine:.3f}"
            bias = (
                "alike"
                if m.local_error <= ALIKE
                else "biased: methods that average them solve another problem"
            )
        return [
            ("mu, smallest curvature of the lower level", f"{m.mu:.3g}", convex),
            (
                "L, largest curvature of the lower level",
                f"{m.L:.3g}",
                f"{m.L_client:.3g} on a single client",
            ),
            ("condition number L / mu", f"{m.condition:.3g}", slow),
            ("norm of z* = [d2yy G]^-1 grad_y F", f"{m.z_norm:.3g}", "sets the radius of z"),
            (
                "norm of the hypergradient",
                f"{m.hypergradient_norm:.3g}",
                "stationary" if not m.hypergradient_norm else "",
            ),
            ("curvature of Phi", f"{m.curvature:.3g}", step),
            ("clients' lower gradients apart", f"{m.lower_spread:.2%}", _apart(m.lower_spread)),
            ("clients' upper directions apart", f"{m.upper_spread:.2%}", _apart(m.upper_spread)),
            ("mean of local hypergradients", local, bias),
        ]

    def __str__(self) -> str:
        lines = [
            f"{what}: {value}" + (f" ({verdict})" if verdict else "")
            for what, value, verdict in self.rows
        ]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.measured:
            lines.append(f"recommended: {self.algorithm()}, because {self.reason}")
        return "\n".join([self.where, *lines])

    @property
    def recommended(self) -> str:
        """The method of fewest rounds that solves the problem itself, whatever the clients' differences."""
        least, _, most = self._local_steps
        return "simfbo" if least == most else "shrofbo"

    @property
    def reason(self) -> str:
        m = self._measures
        steps = (
            ""
            if self.recommended == "simfbo"
            else ", and right under unequal numbers of local steps"
        )
        one = f"one round an iteration, with the Hessian of all clients together{steps}"
        if m.local_error is None:
            return f"{one}; local hypergradients, which other methods average, do not exist here"
        if m.local_error > ALIKE:
            return f"{one}; methods that average local hypergradients would be off by {m.local_error:.0%}"
        return f"{one}; clients are alike: averages of local hypergradients would do as well"

    def algorithm(self, name: str | None = None) -> Algorithm:
        """The recommended method, or another by name, with the settings that suit the problem."""
        return algorithms.get(name or self.recommended)(**self.settings(name))

    def settings(self, name: str | None = None) -> dict[str, Any]:
        """Step sizes and loop lengths to two digits, for everyone's data at once and the environment's local steps.

        With L the larger of the pooled curvature and the clients' own, and T lower rounds an iteration, y and z step by
        1 / L, and x by   min(1 / (2 curvature), T / (L lag)):   x must not outrun y and z, which follow it.
        """
        name = checks.one_of("name", name or self.recommended, ADVISED)
        if name == "unifbo":
            return _rounded(self._whitened())
        return _rounded(
            self._double_loop(name)
            if name in ("fednest", "aggitd", "fedmbo")
            else self._single_loop(name)
        )

    def _steps(self) -> tuple[float, float, float]:
        """L, the step of x that the curvature of Phi allows, and the one that the lag of y and z allows."""
        m = self._measures
        L = max(m.L, m.L_client, m.ridge)
        return (
            L,
            0.5 / m.curvature if m.curvature else 1 / L,
            1 / (L * m.lag) if m.lag else math.inf,
        )

    def _single_loop(self, name: str) -> dict[str, Any]:
        """A round's local steps together make one step of x, y and z.

        Where clients differ, local steps are short: as far as they drift apart, the method ends off.
        """
        m, (L, calm, close), (_, mean, most) = self._measures, self._steps(), self._local_steps
        lr = {"x": min(calm, close), "y": 1 / L, "z": 1 / L}
        spread = max(m.lower_spread, m.upper_spread)
        local = min(1.0, DRIFT / (most * spread)) if most > 1 and spread else 1.0
        server = {v: max(local, 1 / mean) * step for v, step in lr.items()}
        settings: dict[str, Any] = {f"lr_{v}": local * step for v, step in lr.items()}
        if name == "fedbio":
            settings = {f"lr_{v}": step for v, step in server.items()}
        else:
            settings |= {f"server_lr_{v}": step for v, step in server.items()} | self._damping
        if name in ("asfbo", "la-asfbo"):
            settings |= {f"server_lr_{v}_bounds": (step / 10, step) for v, step in server.items()}
        return {**settings, "radius": 10 * m.z_norm or 1.0}

    def _whitened(self) -> dict[str, Any]:
        """Steps that adapt to the size of the directions are as long as the way to go, in root mean square.

        To y* and z* it is known; that of x is what a gradient step would go.
        """
        m, (_, calm, close) = self._measures, self._steps()
        ways = {"x": m.hypergradient_norm * min(calm, close), "y": m.y_way, "z": m.z_norm}
        lr = {f"lr_{v}": (way or 1.0) / math.sqrt(m.sizes[v != "x"]) for v, way in ways.items()}
        return {**lr, **self._damping, "radius": 10 * m.z_norm or 1.0}

    @property
    def _damping(self) -> dict[str, float]:
        return {"damping": ridge} if (ridge := self._measures.missing_ridge) else {}

    def _double_loop(self, name: str) -> dict[str, Any]:
        """As many lower rounds as make the lag harmless, and a Neumann sum of kappa ln(10^4) terms, within the budget.

        Where its length is drawn at random, 3 kappa terms and a tenth of the step: these end in a neighbourhood.
        """
        m, (L, calm, close), (_, _, tau) = self._measures, self._steps(), self._local_steps
        kappa, most = (L + m.ridge) / (m.mu + m.ridge), max(1, self.rounds // 10)
        drawn = name != "fednest"
        terms = min(math.ceil(kappa * (3 if drawn else math.log(1e4))), most)
        inner = min(math.ceil(max(1.0, calm / close)), most)
        loops = (
            {"inner_rounds": max(inner, terms)}
            if name == "aggitd"
            else {"neumann_steps": terms, "inner_rounds": inner}
        )
        lr = {
            "lr_x": (0.1 if drawn else 1.0) * min(calm, loops["inner_rounds"] * close),
            "lr_y": 1 / L,
        }
        if name != "fedmbo":
            lr = {step: value / tau for step, value in lr.items()}
            loops |= {"lower_steps": tau, "upper_steps": tau}
        return {**lr, "neumann_lr": 1 / L, **loops}

    @property
    def _measures(self) -> Measures:
        if self.measured is None:
            raise ValueError(f"there are no settings for this problem: {self.warnings[-1]}")
        return self.measured

    @property
    def _local_steps(self) -> tuple[int, float, int]:
        """The fewest, the mean and the most."""
        steps = self.environment.local_steps
        each = [steps] if isinstance(steps, int) else steps
        return min(each), sum(each) / len(each), max(each)


def _apart(spread: float) -> str:
    return "alike" if spread <= ALIKE else "different" if spread < 0.5 else "very different"


def _rounded(settings: dict[str, Any]) -> dict[str, Any]:
    def two(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(two, value))
        return float(f"{value:.2g}") if isinstance(value, float) else value

    return {key: two(value) for key, value in settings.items()}
