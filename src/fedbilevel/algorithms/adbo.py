"""SDBO and ADBO: consensus within a polyhedron of cutting planes, with and without a barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.algorithms.registry import register
from fedbilevel.algorithms.shared import UpperGradients
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.schedules import Step
from fedbilevel.core.settings import Count, NonNegative
from fedbilevel.core.tree import Tree, dot, zeros_like
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.phase import Message, Number, Phase


class ClientCopy(TypedDict):
    """What the server keeps of a client.

    Attributes:
        x: The client's copy x_i.
        y: The client's copy y_i.
        known_y: The y_i of its last reply that the server has used: y, or with
            `compat="reference"` the one before, from a plane to the client's next reply.
        theta: The multiplier theta_i of x_i = x.
        b: The client's part b_il of the planes l, stacked along axis 0.
        lam_b: sum_l lambda_l b_il, as it was when the client got its task.
        weight: w_i = n p_i.
        last_heard: The iteration of the client's last reply, -1 before the first.
    """

    x: Tree
    y: Tree
    known_y: Tree
    theta: Tree
    b: Tree
    lam_b: NotRequired[Tree]
    weight: float
    last_heard: int


class State(NamedTuple):
    """The server's x and y, the planes with their multipliers, and the clients' copies.

    Attributes:
        x: The upper variable.
        y: The lower variable.
        a: The coefficients of x in the planes, stacked along axis 0.
        c: The coefficients of y in the planes, stacked likewise.
        kappa: The constants of the planes.
        lam: The multipliers of the planes.
        clients: The copies; empty before the first iteration.
        idle: The clients that wait for a task.
        t: The iteration.
    """

    x: Tree
    y: Tree
    a: Tree
    c: Tree
    kappa: Tensor
    lam: Tensor
    clients: list[ClientCopy]
    idle: list[int]
    t: int = 0


class LowerResponseStep(Phase):
    """One step of y'_i on the lower level with consensus as a penalty; replies with y'_i.

    The first message of a plane holds x and the y_i to start from; the client remembers x and the
    path y_i, ..., y'_i, and the next messages continue it.
    """

    name = "settle"
    batch = "train"
    remembers = True
    summed = False
    reply: ClassVar = {"y": "y"}

    lr_y: Number
    penalty: NonNegative

    def start(self, m: Message) -> Any:
        """Return x, the server's y', phi_i, and the path so far."""
        if hasattr(m, "x"):
            return m.x, m.y, zeros_like(m.y), (m.y_i,)
        return m.memory["x"], m.y, m.phi, m.memory["path"]

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        """Append y'_i - lr_y (grad_y g_i + phi_i + mu (y'_i - y')) to the path."""
        x, y, phi, path = c
        y_i = path[-1]
        d = oracle.lower_gradient_y(x, y_i, batch) + phi + self.penalty * (y_i - y)
        return x, (*path, y_i - self.lr_y * d)

    def finish(self, c: Any) -> dict[str, Any]:
        """Reply with the end of the path, and remember the path."""
        x, path = c
        return {"y": path[-1], "memory": {"x": x, "path": path}}


class PlaneGradient(LowerResponseStep):
    """The last step of y'_i, and a_i = d/dx ||y_i - y'_i(x)||^2, backwards through all steps.

    y_i is the start of the path, unless the message has another as `known_y`.
    """

    name = "cut"
    reply: ClassVar = {"y": "y", "a": "x"}

    def start(self, m: Message) -> Any:
        """Start as `LowerResponseStep`, with y_i besides."""
        carry = super().start(m)
        path = carry[-1]
        return *carry, getattr(m, "known_y", path[0])

    def step(self, c: Any, oracle: Oracle, batch: Batch) -> Any:
        """Take the step, and differentiate."""
        *carry, y_i = c
        x, path = super().step(carry, oracle, batch)
        r = y_i - path[-1]
        a = zeros_like(x)
        for point in reversed(path[:-1]):
            cross, hessian = oracle.products(x, point, r, batch)
            a = a + 2 * self.lr_y * cross
            r = r - self.lr_y * (hessian + self.penalty * r)
        return {"y": path[-1], "a": a}

    def finish(self, c: Any) -> dict[str, Any]:
        """Reply with both, and forget the path."""
        return {**c, "memory": {}}


@register("sdbo")
@dataclass(frozen=True, kw_only=True)
class SDBO(Algorithm):
    """SDBO: synchronous cutting planes on a consensus form of the problem; a biased baseline.

    SDBO is `ADBO` with everyone in every iteration. Both are here for comparison. They do not solve
    the bilevel problem (see below); choose `SimFBO`, or `AFBO` without a barrier, for its solution.

    Clients have copies x_i, y_i and weights w_i = n p_i. Planes l have multipliers lambda_l,
    clients theta_i:

        y_i <- y_i - lr_y (grad_y f_i + sum_l lambda_l b_il),
        x_i <- x_i - lr_x (grad_x f_i + theta_i),
        x <- x - server_lr_x (sum_l lambda_l a_l - sum_i w_i theta_i),
        y <- y - server_lr_y sum_l lambda_l c_l,
        lambda_l <- max(0, lambda_l + lr_dual_planes (P_l - c1 lambda_l)),
        theta_i <- theta_i + lr_dual_consensus (x_i - x - c2 theta_i),

    P_l = <a_l, x> + sum_i w_i <b_il, y_i> + <c_l, y> + kappa_l. In iterations 0, `plane_every`,
    2 `plane_every`, ... planes with lambda_l < `prune_below` are dropped, and the tangent of

        h = sum_i w_i ||y_i - y'_i(x)||^2 + ||y - y'||^2

    is added. y'_i and y' are where K = `plane_steps` steps lead from y_i, y and phi_i = 0, with
    mu = `penalty`, and the old phi_i and y' on the right:

        y'_i <- y'_i - lr_y (grad_y g_i(x, y'_i) + phi_i + mu (y'_i - y')),
        y' <- y' + server_lr_y sum_i w_i (phi_i + mu (y'_i - y')),
        phi_i <- phi_i + lr_y (y'_i - y').

    Where it ends: planes are added until h = 0, where lambda balances grad_y f_i, so that
    sum_i w_i (grad_x f_i - d2xy g_i q_i) = 0 with

        q_i = lr_y sum_{k < K} (I - lr_y (d2yy g_i + mu))^k grad_y f_i.

    That is a Neumann sum of K terms, one at the published K = 1, with the client's own Hessian plus
    mu. The y_i agree by the penalty, exactly only as K grows. With constant steps the iterates come
    near that point; then planes add up, the multipliers grow with them and y oscillates, the later
    the smaller the steps.

    Cost per iteration: one round, 1 gradient per client; x_i and y_i go down, two gradients of the
    same sizes come up. A new plane takes K more rounds over all clients and 3K gradients per
    client; y' and phi_i go down in each (x, y and y_i in the first), y'_i comes up, and a_i with
    the last.

    Departures: this follows the published code, not the paper (recalled, not read: there planes
    end, h <= eps, and c1 and c2 decrease). Of the code's two workers it is the one for IJCNN1,
    which differentiates through all its steps; y' counts as constant in a. Defaults are the code's
    for hyper-cleaning. Corrected, unless `compat` is "reference":

    - a, b and c come from the same K steps (in the code a from one more, for which clients are
      asked once more).
    - theta_i starts at 0 (there at x).
    - A plane is put down at the y_i that its steps start from. (There clients take one more step
      before a plane, and the y'_i start from its y_i; but the plane, and lambda until a client's
      next reply, have the y_i of the reply before.)

    Ours: the server keeps the copies and takes the clients' steps, so that a task is p + d numbers
    down and up, for p numbers in x and d in y (there p + |P| down, |P| the number of planes, p + d
    up, and |P| d down with a plane); the weights w_i (there 1).

    References:
        Jiao, Yang, Wu, Song and Jian, "Asynchronous Distributed Bilevel Optimization", ICLR 2023.
        The synchronous form: Li, Zhu, Gong, Mao and Zhou, "Anarchic Federated Bilevel
        Optimization".

    Args:
        lr_x: Step size of the copies x_i, a number or a schedule.
        lr_y: Step size of the copies y_i, of y'_i and of phi_i.
        server_lr_x: Step size of x.
        server_lr_y: Step size of y and of y'.
        lr_dual_planes: Step size of the multipliers lambda_l of the planes.
        lr_dual_consensus: Step size of the multipliers theta_i of x_i = x.
        c1: Regularisation of lambda_l.
        c2: Regularisation of theta_i.
        penalty: The weight mu of y'_i = y' in the steps that make a plane.
        plane_every: Iterations between two planes.
        plane_steps: The number K of steps that make a plane.
        prune_below: Planes with a smaller multiplier are dropped when a plane is added.
        compat: "reference" for what the published code does, or None.

    Examples:
        The first iteration has a second round, which adds the first plane:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> result = fb.solve(task.problem, task.clients, "sdbo", rounds=10)
        >>> last = result.history[-1]
        >>> result.status, last["iteration"], last["planes"]
        ('completed', 9, 1.0)
    """

    solves = "local"

    lr_x: Step = 0.001
    lr_y: Step = 0.02
    server_lr_x: Step = 0.001
    server_lr_y: Step = 0.02
    lr_dual_planes: Step = 0.1
    lr_dual_consensus: Step = 0.001
    c1: NonNegative = 0.04
    c2: NonNegative = 0.002
    penalty: NonNegative = 1.0
    plane_every: Count = 50
    plane_steps: Count = 1
    prune_below: NonNegative = 1e-10
    compat: Literal["reference"] | None = None

    @property
    def as_coded(self) -> bool:
        """Whether to do as the published code does."""
        return self.compat == "reference"

    def init(self, problem: Problem) -> State:
        """Start at the problem's x and y, without planes."""
        x, y = problem.start
        none = next(iter(x.values())).new_zeros(0)
        return State(x, y, a=_no_rows(x), c=_no_rows(y), kappa=none, lam=none, clients=[], idle=[])

    def iterate(self, s: State, fed: Federation) -> State:
        """Let clients step, move x, y and the multipliers, and add a plane when one is due."""
        if not s.clients:
            s = self.first_copies(s, len(fed))
        s = self.exchange(s, fed)
        theta = _sum(client["weight"] * client["theta"] for client in s.clients)
        x = fed.problem.project(s.x - self.server_lr_x * (_combine(s.lam, s.a) - theta))
        y = s.y - self.server_lr_y * _combine(s.lam, s.c)
        of_clients = sum(
            client["weight"] * _products(client["b"], client["known_y"]) for client in s.clients
        )
        planes = _products(s.a, x) + of_clients + _products(s.c, y) + s.kappa
        lam = (s.lam + self.lr_dual_planes * (planes - self.c1 * s.lam)).clamp(min=0)
        clients = [self.consensus_step(client, x, s.t) for client in s.clients]
        s = s._replace(x=x, y=y, lam=lam, clients=clients)
        if s.t % self.plane_every == 0:
            s = self.add_plane(s, fed)
        fed.record(planes=len(s.lam))
        return s._replace(t=s.t + 1)

    def first_copies(self, s: State, count: int) -> State:
        """Return the state with the first copies of this many clients, all of them idle."""
        copy: ClientCopy = {
            "x": s.x,
            "y": s.y,
            "known_y": s.y,
            "theta": s.x if self.as_coded else zeros_like(s.x),
            "b": _no_rows(s.y),
            "weight": 1.0,
            "last_heard": -1,
        }
        return s._replace(clients=[copy] * count, idle=list(range(count)))

    def exchange(self, s: State, fed: Federation) -> State:
        """Ask everyone for gradients, and take the clients' steps."""
        s, tasks = _tasks_of_idle(s)
        r = fed.ask(UpperGradients(), s.idle, each=tasks)
        return self.step_copies(s._replace(idle=[]), r, fed)

    def step_copies(self, s: State, replies: Replies, fed: Federation) -> State:
        """Take the steps on x_i and y_i of the clients that answered."""
        clients = list(s.clients)
        for reply in replies:
            client = clients[reply.client]
            gx = reply.values["gx"]
            gy = reply.values["gy"]
            x = fed.problem.project(client["x"] - self.lr_x * (gx + client["theta"]))
            y = client["y"] - self.lr_y * (gy + client["lam_b"])
            clients[reply.client] = client | {
                "x": x,
                "y": y,
                "known_y": y,
                "weight": reply.weight,
                "last_heard": s.t,
            }
        return s._replace(clients=clients, idle=s.idle + replies.idle)

    def consensus_step(self, client: ClientCopy, x: Tree, t: int) -> ClientCopy:
        """Move theta_i of a client that has answered in iteration t."""
        if client["last_heard"] != t:
            return client
        gap = client["x"] - x - self.c2 * client["theta"]
        return {**client, "theta": client["theta"] + self.lr_dual_consensus * gap}

    def add_plane(self, s: State, fed: Federation) -> State:
        """Drop planes without a multiplier, and add the tangent of h at the current point.

        Clients whose replies are lost on the way are left out of the new plane.
        """
        s = self.finish_steps(s, fed)
        responses, a, y = self.lower_response(s, fed)
        b_of = {j: 2 * (s.clients[j]["known_y"] - y_j) for j, y_j in responses.items()}
        b = [b_of.get(j, zeros_like(s.y)) for j in range(len(fed))]
        c = 2 * (s.y - y)
        # kappa makes the plane's value here equal to h = (sum_i w_i ||b_i||^2 + ||c||^2) / 4.
        of_clients = sum(
            client["weight"] * dot(b_i, client["known_y"] - b_i / 4)
            for client, b_i in zip(s.clients, b, strict=True)
        )
        kappa = -dot(a, s.x) - of_clients - dot(c, s.y - c / 4)
        kept = s.lam >= self.prune_below

        def append(rows: Tensor, new: Tensor) -> Tensor:
            return torch.cat([rows[kept], new.unsqueeze(0)])

        return s._replace(
            a=s.a.map(append, a),
            c=s.c.map(append, c),
            kappa=append(s.kappa, kappa),
            lam=append(s.lam, torch.zeros_like(kappa)),
            clients=[
                client | {"b": client["b"].map(append, b_i)}
                for client, b_i in zip(s.clients, b, strict=True)
            ],
        )

    def finish_steps(self, s: State, fed: Federation) -> State:
        """Return the state that a plane is added to: as it is, or after one more step."""
        if not self.as_coded:
            return s
        return _with_known(self.exchange(s, fed), s.clients)

    def lower_response(self, s: State, fed: Federation) -> tuple[dict[int, Tree], Tree, Tree]:
        """Take the K steps of y'_i and y'; return the y'_i, a, and y'."""
        y = s.y
        asked = list(range(len(fed)))
        phis = {j: zeros_like(y) for j in asked}
        kinds = [LowerResponseStep] * self.plane_steps
        if not self.as_coded:
            kinds.pop()  # the last step comes with a
        message: dict[str, Any] = {"x": s.x, "each": [{"y_i": client["y"]} for client in s.clients]}
        responses = {}
        for kind in [*kinds, PlaneGradient]:
            r = fed.ask(kind(lr_y=self.lr_y, penalty=self.penalty), asked, y=y, **message)
            asked = [reply.client for reply in r]
            if self.as_coded and kind is PlaneGradient:
                break  # a is of one step more than the y'_i
            responses = {reply.client: reply.values["y"] for reply in r}
            y, phis = self.consensus_of_responses(y, phis, r)
            message = {"each": [{"phi": phis[j]} for j in asked]}
            if self.as_coded:
                for j, own in zip(asked, message["each"], strict=True):
                    own["known_y"] = s.clients[j]["known_y"]
        return {j: responses[j] for j in asked}, len(r) * r.mean("a"), y

    def consensus_of_responses(
        self, y: Tree, phis: Mapping[int, Tree], r: Replies
    ) -> tuple[Tree, dict[int, Tree]]:
        """Take a step of y' and of the phi_i of the clients that answered."""
        gaps = {reply.client: reply.values["y"] - y for reply in r}
        pull = _sum(
            reply.weight * (phis[reply.client] + self.penalty * gaps[reply.client]) for reply in r
        )
        moved = {j: phis[j] + self.lr_y * gap for j, gap in gaps.items()}
        return y + self.server_lr_y * pull, {**phis, **moved}


@register("adbo")
@dataclass(frozen=True, kw_only=True)
class ADBO(SDBO):
    """ADBO: SDBO without waiting for everyone, except for a new plane; a biased baseline.

    The updates are those of `SDBO`. An iteration ends when as many clients as the environment's
    participation have answered and no client's last reply is `max_delay` iterations old; only their
    theta_i move. A client's step uses lambda and theta_i as they were when it got its task. Choose
    `AFBO` for an asynchronous method that never waits for everyone, and for the true solution.

    Cost per iteration: that of `SDBO`; a further round for each reply that `max_delay` makes it
    wait for, and one with a new plane, for the replies under way.

    Departures: those of `SDBO`. Corrected: replies under way when a plane is due are taken in
    first, so that the plane is the tangent at the y_i of that moment (in the published code, and
    with `compat="reference"`, at those of the replies before, also of the clients that wait for a
    task: they get one before the plane).

    References:
        Jiao, Yang, Wu, Song and Jian, "Asynchronous Distributed Bilevel Optimization", ICLR 2023.

    Args:
        lr_x: Step size of the copies x_i, a number or a schedule.
        lr_y: Step size of the copies y_i, of y'_i and of phi_i.
        server_lr_x: Step size of x.
        server_lr_y: Step size of y and of y'.
        lr_dual_planes: Step size of the multipliers lambda_l of the planes.
        lr_dual_consensus: Step size of the multipliers theta_i of x_i = x.
        c1: Regularisation of lambda_l.
        c2: Regularisation of theta_i.
        penalty: The weight mu of y'_i = y' in the steps that make a plane.
        plane_every: Iterations between two planes.
        plane_steps: The number K of steps that make a plane.
        prune_below: Planes with a smaller multiplier are dropped when a plane is added.
        compat: "reference" for what the published code does, or None.
        max_delay: How many iterations old a client's last reply may become.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> environment = fb.Environment(participation=2, delay=fb.delays.LogNormal(1.0, 0.5))
        >>> result = fb.solve(
        ...     task.problem, task.clients, "adbo", rounds=10, environment=environment
        ... )
        >>> result.status
        'completed'
    """

    max_delay: Count = 15

    def exchange(self, s: State, fed: Federation) -> State:
        """Post tasks to idle clients, and take the steps of the next replies."""
        s, tasks = _tasks_of_idle(s)
        fed.post(UpperGradients(), s.idle, each=tasks)
        s = self.step_copies(s._replace(idle=[]), fed.collect(), fed)
        while len(s.idle) < len(fed) and self.oldest_reply(s) >= self.max_delay:
            s = self.step_copies(s, fed.collect(1), fed)
        return s

    def oldest_reply(self, s: State) -> int:
        """Return how many iterations ago the client that was heard least recently has answered."""
        return s.t - min(client["last_heard"] for client in s.clients)

    def finish_steps(self, s: State, fed: Federation) -> State:
        """Wait for the replies under way; as coded, idle clients get a task before."""
        before = s.clients
        if self.as_coded:
            s, tasks = _tasks_of_idle(s)
            fed.post(UpperGradients(), s.idle, each=tasks)
            s = s._replace(idle=[])
        busy = len(fed) - len(s.idle)
        if busy:
            s = self.step_copies(s, fed.collect(busy), fed)
        if self.as_coded:
            s = _with_known(s, before)
        return s


def _tasks_of_idle(s: State) -> tuple[State, list[dict[str, Tree]]]:
    """Return the tasks of the idle clients, and the state with the multipliers they will use."""
    clients = list(s.clients)
    tasks = []
    for j in s.idle:
        client = clients[j]
        clients[j] = client | {"lam_b": _combine(s.lam, client["b"])}
        tasks.append({"x": client["x"], "y": client["y"]})
    return s._replace(clients=clients), tasks


def _with_known(s: State, before: Iterable[ClientCopy]) -> State:
    """Return the state with the `known_y` of these earlier copies."""
    pairs = zip(s.clients, before, strict=True)
    return s._replace(clients=[client | {"known_y": old["known_y"]} for client, old in pairs])


def _no_rows(like: Tree) -> Tree:
    """Return the coefficients of no plane, for a variable of this shape."""
    return like.map(lambda t: t.new_zeros(0, *t.shape))


def _sum(trees: Iterable[Tree]) -> Tree:
    first, *rest = trees
    return sum(rest, start=first)


def _combine(lam: Tensor, rows: Tree) -> Tree:
    """Return sum_l lambda_l row_l."""
    return rows.map(lambda t: torch.tensordot(lam, t, 1))


def _products(rows: Tree, point: Tree) -> Tensor:
    """Return <row_l, point> for every l."""
    return torch.stack([rows[name].flatten(1) @ point[name].flatten() for name in rows]).sum(0)
