"""A bilevel problem: two losses, the variables they depend on, and who owns these variables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData, Data, describe, named_tensors, repack
from fedbilevel.core.markup import describe_tree, html_table
from fedbilevel.core.precision import DERIVATIVES, PRECISIONS, Derivatives, Precision
from fedbilevel.core.submodels import count_units
from fedbilevel.core.tree import Tree

Loss = Callable[..., Tensor]
Owner = Literal["server", "client"]
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A federated bilevel problem: two losses and the point where a run starts.

    The problem is

        min_x Phi(x) = F(x, y*(x))    with    y*(x) = argmin_y G(x, y),
        F = sum_i p_i f_i,   G = sum_i p_i g_i,

    where f_i is the upper loss on the validation data of client i, g_i the lower loss on its
    training data and p_i its weight. Variables belong to the server, which shares them with all
    clients, unless `owner` says that each client has its own: with client-owned y, for example,

        Phi(x) = sum_i p_i f_i(x, y_i*(x))    with    y_i*(x) = argmin_y g_i(x, y).

    A loss is a function of `(x, y, batch)`, or of
    `(x, y, batch, rng)` if it draws random numbers, and returns the mean over the samples of the
    batch as a 0-d tensor. `batch` has the structure of one side of `ClientData`.

    Args:
        upper: The upper loss f.
        lower: The lower loss g, strongly convex in y for the hypergradient to exist.
        x: The initial upper variables, floating tensors by name.
        y: The initial lower variables; x and y have no name in common and the same dtype.
        lower_level: "shared": all clients have one y. "private": every batch is an episode with
            its own y*(x; batch). Sample j of a client's training data then belongs to sample j of
            its validation data, a batch takes the same samples from both sides, and both losses
            receive the same `rng`.
        project_x: Maps x to the closest feasible point. It is applied to the server's x and to the
            clients' local copies of it.
        embed: The part of the losses that depends on x alone, such as the features that a backbone
            computes: a function of `(x, data)` or `(x, data, rng)` that returns data. The losses
            then receive embedded data, and several y can be evaluated at one x without running the
            backbone again. With a shared lower level and without `rng`, `embed` must process every
            sample independently, because it may receive many batches at once.
        axes: Names for the dimensions of tensors, for example
            `{"conv1.weight": ("c1", None, None, None)}`. In submodels, dimensions of one name are
            cut together and those named None are never cut. `fedbilevel.nets.axes` finds the axes
            of a module.
        owner: "client" for each variable of x or y, by name, that every client has for itself, such
            as the head of a personal model. It starts from the given value, stays with the client
            and is never sent. Variables that are not named belong to the "server".
        derivatives: How second derivatives are computed. "exact": by differentiating twice.
            "unfused": likewise, but attention and recurrent layers run in PyTorch's unfused
            kernels; the fused ones can be differentiated only once. "differences": by differences
            of the lower loss at two points, which has first derivatives only. "auto": the first of
            these that works on the first client's data, chosen before the first round. First
            derivatives are the same in all of them.
        micro_batch: The most samples of a side on which a loss is evaluated at once, so that a
            larger batch fits into memory: losses and derivatives on it are means over parts. Both
            losses must be means over samples. None: batches are evaluated as a whole.

    Raises:
        TypeError: A loss is not callable or takes another number of arguments, x or y is not a
            non-empty dict of floating tensors, or their dtypes differ.
        ValueError: `lower_level` or `derivatives` is unknown, x and y share a name, hold values
            that are not finite, or do not fit `axes`; `owner` names no variable, or leaves the
            server none; `micro_batch` is below 1, or the lower level is private.

    Examples:
        Ridge regression whose regularisation is tuned on validation data:

        >>> import torch
        >>> import fedbilevel as fb
        >>> def upper(x, y, batch):
        ...     inputs, targets = batch
        ...     return ((inputs @ y["w"] - targets) ** 2).mean()
        >>> def lower(x, y, batch):
        ...     return upper(x, y, batch) + x["log_ridge"].exp() * (y["w"] ** 2).sum()
        >>> problem = fb.Problem(
        ...     upper, lower, x={"log_ridge": torch.tensor(0.0)}, y={"w": torch.zeros(2)}
        ... )
        >>> data = (torch.eye(2), torch.ones(2))
        >>> clients = [fb.ClientData(train=data, val=data) for _ in range(3)]
        >>> fb.solve_lower(problem, clients, problem.x)
        {'w': tensor([0.3333, 0.3333])}
    """

    upper: Loss
    lower: Loss
    x: Mapping[str, Tensor]
    y: Mapping[str, Tensor]
    lower_level: Literal["shared", "private"] = "shared"
    project_x: Callable[[Tree], Tree] | None = None
    embed: Callable[..., Data] | None = None
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    owner: Mapping[str, Owner] = field(default_factory=dict)
    derivatives: Derivatives = "auto"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("lower_level", self.lower_level, ("shared", "private"))
        checks.one_of("derivatives", self.derivatives, DERIVATIVES)
        for name in ("upper", "lower"):
            loss = getattr(self, name)
            if not callable(loss):
                raise TypeError(
                    f"{name} is {loss!r}; "
                    "it must be a function of (x, y, batch) or (x, y, batch, rng)"
                )
            with_rng = _with_rng(f"the {name} loss", loss, ("x", "y", "batch"))
            object.__setattr__(self, name, with_rng)
        if self.embed is not None:
            object.__setattr__(self, "embed", _with_rng("embed", self.embed, ("x", "data")))
        for name in ("x", "y"):
            object.__setattr__(self, name, _detached_copy(name, getattr(self, name)))
        for shared in self.x.keys() & self.y.keys():
            raise ValueError(
                f"x and y share the name {shared!r}; every tensor belongs to one level"
            )
        if len({value.dtype for value in [*self.x.values(), *self.y.values()]}) > 1:
            raise TypeError("x and y hold tensors of several dtypes; all must have the same")
        count_units(self.axes, {**self.x, **self.y})
        self._check_owners()
        if self.micro_batch is not None:
            checks.integer("micro_batch", self.micro_batch, least=1)
            if self.lower_level == "private":
                raise ValueError(
                    "micro_batch is set and lower_level is 'private'; it must be 'shared', because "
                    "an episode cannot be split"
                )

    def _check_owners(self) -> None:
        variables = {**self.x, **self.y}
        for name, owner in self.owner.items():
            checks.one_of("owner names the variable", name, variables)
            checks.one_of(f"owner[{name!r}]", owner, ("server", "client"))
        if self.client_names == variables.keys():
            raise ValueError(
                "owner gives every variable to the clients; the server must own at least one"
            )
        if self.client_names and self.lower_level == "private":
            raise ValueError(
                f"owner gives {min(self.client_names)!r} to the clients and lower_level is "
                "'private'; it must be 'shared' for variables that clients keep"
            )

    @functools.cached_property
    def client_names(self) -> frozenset[str]:
        """The names of the variables that belong to the clients."""
        return frozenset(name for name, owner in self.owner.items() if owner == "client")

    @functools.cached_property
    def client_levels(self) -> tuple[str, ...]:
        """The levels, "x" and "y", that have variables which belong to the clients."""
        return tuple(level for level in ("x", "y") if self.client_names & vars(self)[level].keys())

    @functools.cached_property
    def sent(self) -> tuple[Tree, Tree]:
        """Trees with the shapes of what is sent of x and of y: the server's part of each."""
        return self.server_part(self.x), self.server_part(self.y)

    def server_part(self, tree: Mapping[str, Tensor]) -> Tree:
        """The variables of a tree, shaped like x or y, that belong to the server."""
        return Tree({name: t for name, t in tree.items() if name not in self.client_names})

    def client_part(self, tree: Mapping[str, Tensor]) -> Tree:
        """The variables of a tree, shaped like x or y, that belong to a client."""
        return Tree({name: t for name, t in tree.items() if name in self.client_names})

    def join_parts(
        self, level: str, server: Mapping[str, Tensor], client: Mapping[str, Tensor]
    ) -> Tree:
        """A whole tree, shaped like x or y, of the server's and a client's part of it.

        Args:
            level: "x" or "y".
            server: The server's part.
            client: The client's part, or more, which is then taken instead of the server's; what
                nobody has is taken from the start.

        Returns:
            A tree with the names of the level, in their order.
        """
        whole = vars(self)[level]
        if not client and not self.client_names:
            return Tree(server)
        return Tree({n: client[n] if n in client else server.get(n, whole[n]) for n in whole})

    def client_point(
        self, x: Tree, y: Tree, own: Mapping[str, Mapping[str, Tensor]]
    ) -> tuple[Tree, Tree]:
        """The whole x and y of one client.

        Args:
            x: The server's part of x.
            y: The server's part of y.
            own: What the client has kept: its parts of "x" and "y"; what is missing is at its
                start.

        Returns:
            x and y.
        """
        return self.join_parts("x", x, own.get("x", {})), self.join_parts("y", y, own.get("y", {}))

    def __repr__(self) -> str:
        x = describe_tree(self.x)
        y = describe_tree(self.y)
        return f"Problem(x: {x}; y: {y}; lower level: {self.lower_level})"

    def _repr_html_(self) -> str:
        rows = [("x", describe_tree(self.x)), ("y", describe_tree(self.y))]
        rows.append(("lower level", self.lower_level))
        if self.project_x is not None:
            rows.append(("x is projected by", getattr(self.project_x, "__name__", "a function")))
        if self.embed is not None:
            rows.append(("embedding", "depends on x and the data alone"))
        if self.axes:
            axes = {axis for named in self.axes.values() for axis in named if axis}
            rows.append(("axes that submodels cut", ", ".join(sorted(axes))))
        return html_table(rows, caption="Problem")

    @property
    def embeds_samples(self) -> bool:
        """Whether samples can be embedded one by one, before batches are drawn from them."""
        return isinstance(self.embed, _IgnoresRng) and self.lower_level == "shared"

    @property
    def start(self) -> tuple[Tree, Tree]:
        """The initial x and y of the server as trees; `x` and `y` have those of the clients too."""
        return self.server_part(self.x), self.server_part(self.y)

    @functools.cached_property
    def sent_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """For "x" and "y", the shape of each tensor that is sent, by name."""
        shapes = {}
        for name, variable in zip("xy", self.sent, strict=True):
            shapes[name] = {key: tuple(tensor.shape) for key, tensor in variable.items()}
        return shapes

    def to(self, device: str) -> Problem:
        """A copy of this problem with x and y on another device.

        Args:
            device: The name of a PyTorch device.

        Returns:
            The new problem; this one is unchanged.
        """
        return replace(
            self,
            x={name: tensor.to(device) for name, tensor in self.x.items()},
            y={name: tensor.to(device) for name, tensor in self.y.items()},
        )

    def with_precision(self, precision: Precision) -> Problem:
        """This problem, evaluated in another precision.

        What is computed in bfloat16, by `torch.autocast`, is converted back to the dtype of x. With
        "bf16", everything that is computed from features, such as Hessian products, is therefore as
        exact as before.

        Args:
            precision: "fp32" and "tf32" leave the problem unchanged ("tf32" is a setting of the
                device); "bf16" runs `embed` in bfloat16, and "bf16-all" the losses too.

        Returns:
            The problem to run.

        Raises:
            ValueError: The precision is unknown, or it is "bf16" and the problem has no `embed`.
        """
        if checks.one_of("precision", precision, PRECISIONS) in ("fp32", "tf32"):
            return self
        rounded = self
        if self.embed is not None:
            rounded = replace(rounded, embed=self._in_bfloat16(self.embed))
        elif precision == "bf16":
            raise ValueError(
                f"precision is {precision!r}, but this problem has no embed to round; "
                "it must be 'fp32', 'tf32' or 'bf16-all'"
            )
        if precision == "bf16-all":
            upper = self._in_bfloat16(self.upper)
            rounded = replace(rounded, upper=upper, lower=self._in_bfloat16(self.lower))
        return rounded

    def _in_bfloat16(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A loss or `embed` in bfloat16, with its results in the dtype of x."""
        example = next(iter(self.x.values()))
        if isinstance(fn, _IgnoresRng):
            fn = fn.fn

        def to_dtype_of_x(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.bfloat16:
                return tensor.to(example.dtype)
            return tensor

        @functools.wraps(fn)  # its signature tells whether it takes `rng`
        def call(*args: Any) -> Any:
            with torch.autocast(example.device.type, torch.bfloat16):
                result = fn(*args)
            return pytree.tree_map_only(Tensor, to_dtype_of_x, result)

        return call

    def project(self, x: Tree) -> Tree:
        """The feasible point closest to x: `project_x(x)`, or x itself without constraints.

        Args:
            x: A point.

        Returns:
            The projected point.
        """
        if self.project_x is None:
            return x
        return Tree(self.project_x(x))

    def validated(self, client: ClientData) -> ClientData:
        """The data of a client, unless they do not fit the lower level.

        Args:
            client: The data of one client.

        Returns:
            `client`, unchanged.

        Raises:
            ValueError: The lower level is private and the two sides differ in length.
        """
        if self.lower_level == "private" and client.size("train") != client.size("val"):
            raise ValueError(
                f"train holds {client.size('train')} samples and val {client.size('val')}; with a "
                "private lower level they belong together, so both must hold the same number"
            )
        return client

    def check(self, client: ClientData, device: str = "cpu", samples: int | None = None) -> None:
        """Evaluate both losses once, so that a wrong one is refused before a run starts.

        Args:
            client: The data of one client.
            device: Where to evaluate; x and y must be there already.
            samples: How many samples of each side to use; None means all.

        Raises:
            TypeError: A loss does not return a 0-d floating tensor.
            ValueError: A loss is not finite, or draws from PyTorch's global generator, which would
                make runs impossible to repeat.
        """
        x, y = Tree(self.x), Tree(self.y)
        key = torch.zeros((), dtype=torch.int64, device=device)
        client = self.validated(client)
        levels = (("upper", self.upper, client.val), ("lower", self.lower, client.train))
        for name, loss, side in levels:
            data = repack(side, [tensor[:samples].to(device) for _, tensor in named_tensors(side)])
            states = _generator_states(device)
            if self.embed is not None:
                data = self.embed(x, data, key)
            value = loss(x, y, data, key)
            if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
                got = repr(value)
                if isinstance(value, Tensor):
                    got = describe(value)
                raise TypeError(
                    f"the {name} loss must return a 0-d floating tensor (the mean over the batch), "
                    f"got {got}"
                )
            if not all(map(torch.equal, states, _generator_states(device))):
                raise ValueError(
                    f"the {name} loss draws from torch's global generator; give it a fourth "
                    "argument `rng` to draw from (fedbilevel.nets.Dropout does), so that runs can "
                    "be repeated"
                )
            if not bool(torch.isfinite(value)):
                raise ValueError(
                    f"the {name} loss is {float(value)} at the start; it must be finite"
                )


def _generator_states(device: str) -> list[Tensor]:
    """The states of PyTorch's global generators that a loss on this device could draw from."""
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(device))
    return states


class _IgnoresRng(Generic[T]):
    """A function without `rng`, callable with `rng` as an additional last argument."""

    def __init__(self, fn: Callable[..., T]) -> None:
        self.fn = fn

    def __call__(self, *args: object) -> T:
        return self.fn(*args[:-1])


def _with_rng(name: str, fn: Callable[..., T], arguments: tuple[str, ...]) -> Callable[..., T]:
    """`fn`, callable with these arguments and `rng`, whether or not it takes `rng`."""
    if isinstance(fn, _IgnoresRng):
        return fn
    count = 0
    for parameter in inspect.signature(fn).parameters.values():
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        required = parameter.default is parameter.empty
        if positional and (required or parameter.name == "rng"):
            count += 1
    if count == len(arguments):
        return _IgnoresRng(fn)
    if count != len(arguments) + 1:
        plain = ", ".join(arguments)
        raise TypeError(f"{name} takes {count} arguments; it must take ({plain}) or ({plain}, rng)")
    return fn


def _detached_copy(name: str, value: object) -> Tree:
    """Initial variables as a tree that shares neither memory nor a graph with the user's."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"{name} is {type(value).__name__}; it must be a non-empty dict of tensors")
    for key, tensor in value.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name}[{key!r}] must be a floating tensor, got {describe(tensor)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{name}[{key!r}] holds NaN or infinity at the start; it must be finite"
            )
    return Tree({key: tensor.detach().clone() for key, tensor in value.items()})
