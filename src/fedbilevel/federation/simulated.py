"""A federation on one machine: the clients of a round run as one stack under `vmap`, in chunks, or one by one."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedbilevel import checks
from fedbilevel.environment import Environment
from fedbilevel.federation.base import ClientError, Cost, Ledger, QuorumError, Replies, Reply
from fedbilevel.federation.batches import Batches, passes, shape
from fedbilevel.oracle import Oracle
from fedbilevel.phase import Epochs, Message, Phase
from fedbilevel.problem import ClientData, Problem, client_weights
from fedbilevel.rng import fold_in, integers, root, subset
from fedbilevel.trace import Flat, trace
from fedbilevel.tree import nbytes

if TYPE_CHECKING:
    from fedbilevel.algorithms.base import Algorithm

TRACE_FROM = 50  # iterations; a trace costs about as much as it saves in that many

Each = Sequence[Mapping[str, Any]] | None


class Assignment(NamedTuple):
    """One client's share of an exchange. `key`, from a number unique in the run, is the root of the client's draws."""

    place: int
    client: int
    steps: int
    each: Mapping[str, Any]
    key: Tensor


class Exchange(NamedTuple):
    """What all clients of one `ask` have in common."""

    phase: str
    role: Phase
    shared: Mapping[str, Any]
    place: str


Part = tuple[list[Assignment], dict[str, Any]]  # some clients' tasks, and the stack of their replies
Lift = Callable[[Callable[..., Any]], Callable[..., Any]]


class SimulatedFederation:
    """Runs an algorithm's phases on clients held in memory (any sequence; a lazy one is asked only for the cohort).

    mode: "stack" runs clients of equal batch shape together, in chunks that stay under `memory` bytes; "loop" runs them
    one by one, for debugging and for losses that `vmap` cannot take. Both see the same draws and agree to rounding.
    """

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[ClientData],
        algorithm: Algorithm,
        environment: Environment | None = None,
        *,
        weights: str | Sequence[float] = "uniform",
        seed: int = 0,
        device: str = "cpu",
        mode: Literal["stack", "loop"] = "stack",
        memory: int = 2**31,
    ) -> None:
        if len(clients) == 0:
            raise ValueError("clients is empty; a federation needs at least one")
        self.problem, self.clients = problem, clients
        self.algorithm = self.settings = algorithm
        self.environment = environment or Environment()
        self.environment.check(len(clients))
        self.weights = client_weights(weights, clients)
        self.seed, self.device, self.memory = checks.integer("seed", seed, least=0), device, memory
        self.mode = checks.one_of("mode", mode, ("stack", "loop"))
        algorithm.check(problem)
        on_client(0, "before round 1", lambda: problem.check(clients[0], device))
        self.ledger = Ledger()
        self.cohorts = 0
        self.draws = 0
        self.assignments = 0
        self._records: dict[str, list[float]] = defaultdict(list)
        self._footprints: dict[str, int] = {}
        self._traces: dict[Hashable, tuple[Flat, pytree.TreeSpec, int]] = {}

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def now(self) -> float:
        return self.ledger.virtual_s

    def sample(self) -> list[int]:
        key = fold_in(root(self.seed, "cohort"), self.cohorts)
        self.cohorts += 1
        return subset(key, len(self), self.environment.cohort(len(self)))

    def draw(self, count: int) -> int:
        key = fold_in(root(self.seed, "server"), self.draws)
        self.draws += 1
        return int(integers(key, 0, count - 1))

    def record(self, **values: float | Tensor) -> None:
        for name, value in values.items():
            self._records[name].append(float(value))

    def records(self) -> dict[str, float]:
        """The means of what was recorded since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._records.items()}
        self._records.clear()
        return means

    def snapshot(self) -> dict[str, Any]:
        """Everything but the state that the next iteration depends on or adds to."""
        return {
            "ledger": asdict(self.ledger),
            "cohorts": self.cohorts,
            "draws": self.draws,
            "assignments": self.assignments,
            "footprints": dict(self._footprints),  # chunks round differently: a resumed run must cut the same ones
            "records": {name: list(values) for name, values in self._records.items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.ledger = Ledger.load(snapshot["ledger"])
        self.cohorts, self.draws, self.assignments = (snapshot[name] for name in ("cohorts", "draws", "assignments"))
        self._footprints = dict(snapshot["footprints"])
        self._records = defaultdict(list, {name: list(values) for name, values in snapshot["records"].items()})

    def post(self, phase: str, clients: Sequence[int], *, each: Each = None, **shared: Any) -> None:
        raise RuntimeError("post needs the clock: a simulated federation without delays only has ask")

    def collect(self, count: int) -> Replies:
        raise RuntimeError("collect needs the clock: a simulated federation without delays only has ask")

    def ask(self, phase: str, clients: Sequence[int], *, each: Each = None, **shared: Any) -> Replies:
        role, cost = self.settings.phases[phase](self.settings), self.ledger.phase(phase)
        cost.rounds += 1
        exchange = Exchange(phase, role, shared, f"phase {phase!r}, round {self.ledger.rounds}")
        replies = Replies(phase, exchange.place, role.summed)
        work = self._assign(exchange, clients, each)
        for chunk in self._chunks(exchange, work):
            for part, values in self._run(exchange, chunk, cost):
                _validate(exchange, values, self.problem, len(part))
                cost.bytes_up += nbytes(values)
                replies.add([self._reply(w) for w in part], values)
        cost.bytes_down += sum(nbytes(shared) + nbytes(dict(w.each)) for w in work)
        self.ledger.refused_replies += len(replies.refused)
        needed = min(self.environment.min_replies, len(work))
        if len(replies) < needed:
            why = f" ({replies.refused[0]})" if replies.refused else ""
            raise QuorumError(
                f"{exchange.place}: {len(replies)} of {len(work)} replies were accepted, at least {needed} needed{why}"
            )
        return replies

    def _assign(self, exchange: Exchange, clients: Sequence[int], each: Each) -> list[Assignment]:
        """Key the draws of each task and say how many steps it takes."""
        for client in clients:
            checks.integer("client", client, least=0, most=len(self) - 1)
        if each is not None and len(each) != len(clients):
            raise ValueError(f"each has {len(each)} entries; it must have one for each of {len(clients)} clients")
        numbers = torch.arange(self.assignments, self.assignments + len(clients))
        self.assignments += len(clients)
        keys = fold_in(fold_in(root(self.seed, exchange.phase), numbers), torch.tensor(clients))
        taus = self._steps(exchange, fold_in(keys, 0), clients)
        own = each or [{}] * len(clients)
        parts = zip(range(len(clients)), clients, taus, own, fold_in(keys, 1), strict=True)
        return [Assignment(*part) for part in parts]

    def _reply(self, w: Assignment) -> Reply:
        return Reply(w.place, w.client, w.steps, len(self) * self.weights[w.client], staleness=0, values={})

    def _steps(self, exchange: Exchange, keys: Tensor, clients: Sequence[int]) -> list[int]:
        steps = exchange.role.steps
        if steps == "local":
            return self.environment.steps(keys, clients)
        if isinstance(steps, Epochs):
            return [passes(self._data(exchange, i), self._batch_size(exchange), steps.passes) for i in clients]
        return [steps] * len(clients)

    def _data(self, exchange: Exchange, client: int) -> ClientData:
        found = on_client(client, exchange.place, functools.partial(self.clients.__getitem__, client))
        return cast(ClientData, found)

    def _batch_size(self, exchange: Exchange) -> int | None:
        return None if exchange.role.full else self.environment.batch_size

    def _chunks(self, exchange: Exchange, work: list[Assignment]) -> Iterator[list[Assignment]]:
        """Tasks that can be stacked, as many as the memory allows; longest first, so that the stack can shrink."""
        groups: dict[Hashable, list[Assignment]] = defaultdict(list)
        for w in work:
            role, data = exchange.role, self._data(exchange, w.client)
            form = shape(data, role.batch, self._batch_size(exchange), isinstance(role.steps, Epochs))
            sent = pytree.tree_map(lambda t: getattr(t, "shape", ()), dict(w.each))
            groups[exchange.phase, form, repr(sent)].append(w)
        for kind, group in groups.items():
            alone = self.mode == "loop" or len(group) == 1
            size = 1 if alone else max(1, self.memory // self._footprint(kind, exchange, group))
            group.sort(key=lambda w: -w.steps)
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _footprint(self, form: Hashable, exchange: Exchange, group: list[Assignment]) -> int:
        """Bytes a client needs at most: two steps of the largest one are run, and everything allocated is added up."""
        if (name := repr(form)) not in self._footprints:
            largest = max(
                group, key=lambda w: self.clients[w.client].size("train") + self.clients[w.client].size("val")
            )
            with _Allocations() as allocations:
                self._alone(exchange, largest._replace(steps=min(2, largest.steps)), Cost())
            self._footprints[name] = max(allocations.bytes, 1)
        return self._footprints[name]

    def _run(self, exchange: Exchange, work: list[Assignment], cost: Cost) -> Iterable[Part]:
        """Run a chunk; if it fails as a stack, its members run one by one to name the one that does."""
        if len(work) == 1:
            return self._alone(exchange, work[0], cost)
        try:
            return list(self._run_stack(exchange, work, stacked, cost))
        except Exception as error:
            for w in work:
                self._alone(exchange, w, Cost())
            raise ClientError(
                f"{exchange.place}: every client runs by itself but not in a stack, because of "
                f"{type(error).__name__}: {_first_line(error)} (mode='loop' runs them one by one)"
            ) from error

    def _alone(self, exchange: Exchange, w: Assignment, cost: Cost) -> list[Part]:
        run = on_client(w.client, exchange.place, lambda: list(self._run_stack(exchange, [w], single, cost)))
        return cast(list[Part], run)

    def _run_stack(self, exchange: Exchange, work: list[Assignment], lift: Lift, cost: Cost) -> Iterator[Part]:
        """start, step, finish for a stack. Step k runs on the prefix of clients that take more than k steps."""
        role = exchange.role
        data, keys = [self.clients[w.client] for w in work], torch.stack([w.key for w in work])
        batches = Batches(
            *(data, keys, role.batch, self._batch_size(exchange)),
            draws=role.draws,
            epochs=isinstance(role.steps, Epochs),
            device=self.device,
        )
        dtype = next(iter(self.problem.x.values())).dtype
        steps = torch.tensor([w.steps for w in work], dtype=dtype, device=self.device)

        def tensor(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=dtype if isinstance(value, float) else None, device=self.device)

        each = pytree.tree_map(lambda *values: torch.stack([tensor(v) for v in values]), *(dict(w.each) for w in work))
        carry = lift(lambda each, steps: role.start(Message(**exchange.shared, **each, steps=steps)))(each, steps)
        active, done = len(work), []
        for k in range(work[0].steps):
            still = sum(w.steps > k for w in work)
            if still < active:
                done.append((work[still:active], pytree.tree_map(lambda t, still=still: t[still:], carry)))
                carry = pytree.tree_map(lambda t, still=still: t[:still], carry)
                active = still
            carry, gradients = self._step(exchange, k == 0, carry, batches.at(k, active), lift)
            cost.gradients += gradients * active
        cost.samples += batches.samples
        for part, final in [(work[:active], carry), *done]:
            yield part, lift(role.finish)(final)

    def _step(self, exchange: Exchange, first: bool, carry: Any, batch: Any, lift: Lift) -> tuple[Any, int]:
        """One step of a stack, and the gradient-equivalents each client spent on it.

        Once a run has shown to be long the step is traced, and replayed from then on. When, depends on the iteration
        alone: a resumed run makes the same choice, and so the same bits, as one that was never stopped.
        """
        values, form = pytree.tree_flatten((carry, batch))
        oracle, step = Oracle(self.problem), exchange.role.first if first else exchange.role.step
        after = form

        def flat(*values: Tensor) -> list[Tensor]:
            nonlocal after
            stepped = lift(lambda c, b: step(c, oracle, b))(*pytree.tree_unflatten(values, form))
            leaves, after = pytree.tree_flatten(stepped)
            return leaves

        moving = self.settings is not self.algorithm  # a schedule's numbers would be frozen into the trace
        if self.ledger.iterations < TRACE_FROM or lift is not stacked or moving:
            return pytree.tree_unflatten(flat(*values), after), oracle.gradients
        key = (exchange.phase, first, form, tuple((value.shape, value.stride(), value.dtype) for value in values))
        if key not in self._traces:
            run = trace(flat, values)
            self._traces[key] = (run, after, oracle.gradients)
        run, after, gradients = self._traces[key]
        return pytree.tree_unflatten(run(*values), after), gradients


def on_client(client: int, place: str, run: Callable[[], Any]) -> Any:
    """Run something of a client's; its error names the client and the place."""
    try:
        return run()
    except ClientError:
        raise
    except (ValueError, TypeError) as error:
        raise type(error)(f"client {client}, {place}: {_first_line(error)}") from error
    except Exception as error:
        raise ClientError(f"client {client}, {place}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or "no message"


def stacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, written for one client, over the leading axis of every tensor of its arguments."""

    def run(*args: Any) -> Any:
        values, form = pytree.tree_flatten(args)
        return vmap(lambda *values: fn(*pytree.tree_unflatten(values, form)))(*values)

    return run


def single(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a stack of one, without vmap."""

    def run(*args: Any) -> Any:
        return pytree.tree_map(lambda t: t.unsqueeze(0), fn(*pytree.tree_map(lambda t: t[0], args)))

    return run


def _validate(exchange: Exchange, values: Mapping[str, Any], problem: Problem, count: int) -> None:
    """A reply holds the names its phase declares, in their shapes."""
    phase, declared = exchange.phase, exchange.role.reply
    if values.keys() != declared.keys():
        raise TypeError(f"phase {phase!r} replied with {sorted(values)}; it declares {sorted(declared)}")
    for name, kind in declared.items():
        model = torch.zeros(()) if kind == "scalar" else getattr(problem, kind)
        if _shapes(values[name]) != {key: (count, *shape) for key, shape in _shapes(model).items()}:
            raise TypeError(f"phase {phase!r} replied with {name!r} of another shape than {kind!r}, which it declares")


def _shapes(value: Tensor | Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    items = {"": value} if isinstance(value, Tensor) else value
    return {key: tuple(tensor.shape) for key, tensor in items.items()}


class _Allocations(TorchDispatchMode):
    """Adds up the bytes of every new tensor: an upper bound of what a computation holds at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns):
            self.bytes += nbytes(result)
        return result
