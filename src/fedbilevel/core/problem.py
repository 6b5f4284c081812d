"""What is to be solved: two losses and where they start (`Problem`), and who holds which data (`ClientData`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbilevel.core import checks
from fedbilevel.core.submodels import units
from fedbilevel.core.tree import Tree

Data = tuple[Tensor, ...] | dict[str, Tensor]
Loss = Callable[..., Tensor]


class Batch(NamedTuple):
    """What a loss is evaluated on; an unused side is `()`. `rng` is the key of a loss's own randomness."""

    train: Data = ()
    val: Data = ()
    rng: Tensor | tuple[()] = ()


def _kind(value: Any) -> str:
    """What a value is, in a word or two: never its contents, which may fill a screen."""
    return (
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def leaves(data: Data) -> list[tuple[str, Tensor]]:
    """The tensors of one side of the data, with the names a reader knows them by."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    return [(repr(key) if isinstance(key, str) else str(key), value) for key, value in items]


def like(data: Data, values: list[Tensor]) -> Data:
    """`values` in the form (tuple or dict) of `data`."""
    return dict(zip(data, values, strict=True)) if isinstance(data, dict) else tuple(values)


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's training (lower-level) and validation (upper-level) tensors; the leading axis counts samples."""

    train: Data
    val: Data

    def __post_init__(self) -> None:
        for side in ("train", "val"):
            data = getattr(self, side)
            if not isinstance(data, (tuple, dict)) or not data:
                raise TypeError(
                    f"{side} is {type(data).__name__}; it must be a non-empty tuple or dict of tensors"
                )
            lengths = set()
            for name, value in leaves(data):
                if not isinstance(value, Tensor) or value.ndim == 0:
                    raise TypeError(
                        f"{side}[{name}] must be a tensor whose leading axis counts samples, got {_kind(value)}"
                    )
                if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                    raise ValueError(
                        f"{side}[{name}] holds NaN or infinity; every number in the data must be finite"
                    )
                lengths.add(len(value))
            if len(lengths) > 1:
                raise ValueError(
                    f"{side} holds tensors of {sorted(lengths)} samples; all must have the same number"
                )
            if lengths == {0}:
                raise ValueError(
                    f"{side} is empty; a client needs at least one sample on each side"
                )

    def size(self, side: str) -> int:
        return self.forms[side][0]

    @functools.cached_property
    def forms(self) -> dict[str, tuple[int, str]]:
        """Of each side, how many samples there are and what one is, in words: they are compared often."""
        sides = {"train": leaves(self.train), "val": leaves(self.val)}
        return {
            side: (
                len(found[0][1]),
                str([(name, *tensor.shape[1:], tensor.dtype) for name, tensor in found]),
            )
            for side, found in sides.items()
        }


@dataclass(frozen=True, eq=False)
class Problem:
    """min_x F(x, y*(x)) with y*(x) = argmin_y G(x, y); F and G are means of the clients' `upper` and `lower` losses.

    A loss takes (x, y, batch), or (x, y, batch, rng) if it draws random numbers, and returns the mean over the batch as
    a 0-d tensor. x and y are dicts of tensors and hold where the search starts. `project_x` maps x to the closest point
    that is allowed; it is applied to the server's x and to the clients' local copies.

    lower_level: "shared", one y for all clients, or "private": every batch is an episode with its own y*(x; batch).
    Then sample j of a client's training data and of its validation data belong together, a batch draws the same samples
    on both sides, and both losses are given the same `rng`.
    embed: (x, data) or (x, data, rng) -> data, what depends on x alone (a backbone's features). The losses are then
    given embedded data, and many y can be tried at one x without running the backbone again. With a shared lower level
    and without rng it must treat every sample by itself: it is given many batches at once, or all of a client's data.
    axes: names for the dimensions of tensors, {"conv1.weight": ("c1", None, None, None)}: those of one name are cut
    together in submodels, None is never cut (`fedbilevel.submodels`; `fedbilevel.nets.axes` finds them).
    """

    upper: Loss
    lower: Loss
    x: Mapping[str, Tensor]
    y: Mapping[str, Tensor]
    lower_level: Literal["shared", "private"] = "shared"
    project_x: Callable[[Tree], Tree] | None = None
    embed: Callable[..., Data] | None = None
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of("lower_level", self.lower_level, ("shared", "private"))
        for name in ("upper", "lower"):
            loss = getattr(self, name)
            if not callable(loss):
                raise TypeError(
                    f"{name} is {loss!r}; it must be a function of (x, y, batch) or (x, y, batch, rng)"
                )
            object.__setattr__(self, name, _with_rng(f"the {name} loss", loss, ("x", "y", "batch")))
        if self.embed is not None:
            object.__setattr__(self, "embed", _with_rng("embed", self.embed, ("x", "data")))
        for name in ("x", "y"):
            object.__setattr__(self, name, _variable(name, getattr(self, name)))
        for shared in self.x.keys() & self.y.keys():
            raise ValueError(
                f"x and y share the name {shared!r}; every tensor belongs to one level"
            )
        if len({value.dtype for value in [*self.x.values(), *self.y.values()]}) > 1:
            raise TypeError("x and y hold tensors of several dtypes; all must have the same")
        units(self.axes, {**self.x, **self.y})

    @property
    def embeds_samples(self) -> bool:
        """Whether samples can be embedded before batches are drawn of them."""
        return isinstance(self.embed, _WithoutRng) and self.lower_level == "shared"

    @property
    def start(self) -> tuple[Tree, Tree]:
        return Tree(self.x), Tree(self.y)

    def to(self, device: str) -> Problem:
        moved = {name: Tree(getattr(self, name)).map(lambda t: t.to(device)) for name in ("x", "y")}
        return replace(self, **moved)  # type: ignore[arg-type]

    def rounded(self, precision: str) -> Problem:
        """This problem with its backbone in another precision; what comes of the features is as exact as before."""
        if checks.one_of("precision", precision, ("fp32", "bf16")) == "fp32":
            return self
        if self.embed is None:
            raise ValueError(
                f"precision is {precision!r}, but this problem names no embed to round; it must be 'fp32'"
            )
        embed, exact = self.embed, next(iter(self.x.values())).dtype

        def rounded(x: Tree, data: Data, rng: Any) -> Data:
            with torch.autocast(leaves(data)[0][1].device.type, torch.bfloat16):
                found = embed(x, data, rng)
            back = {torch.bfloat16: exact}
            return like(
                found,
                [tensor.to(back.get(tensor.dtype, tensor.dtype)) for _, tensor in leaves(found)],
            )

        if isinstance(embed, _WithoutRng):
            return replace(self, embed=lambda x, data: rounded(x, data, ()))
        return replace(self, embed=rounded)

    def project(self, x: Tree) -> Tree:
        return x if self.project_x is None else Tree(self.project_x(x))

    def paired(self, client: ClientData) -> ClientData:
        """A client's data; refused where its sides belong together and do not fit."""
        if (
            self.lower_level == "private"
            and (sizes := [client.size("train"), client.size("val")])[0] != sizes[1]
        ):
            raise ValueError(
                f"train holds {sizes[0]} samples and val {sizes[1]}; with a private lower level they belong together, "
                "so both must hold as many"
            )
        return client

    def check(self, client: ClientData, device: str = "cpu", samples: int | None = None) -> None:
        """Evaluate both losses once, on the first `samples`, so that a wrong one is refused before anything runs."""
        (x, y), key, client = (
            self.start,
            torch.zeros((), dtype=torch.int64, device=device),
            self.paired(client),
        )
        for name, loss, data in (
            ("upper", self.upper, client.val),
            ("lower", self.lower, client.train),
        ):
            there = like(data, [tensor[:samples].to(device) for _, tensor in leaves(data)])
            before = _generators(device)
            value = loss(x, y, self.embed(x, there, key) if self.embed else there, key)
            if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
                got = (
                    f"{value.dtype} of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else repr(value)
                )
                raise TypeError(
                    f"the {name} loss must return a 0-d floating tensor (the mean over the batch), got {got}"
                )
            if not all(map(torch.equal, before, _generators(device))):
                raise ValueError(
                    f"the {name} loss draws from torch's global generator; give it a fourth argument `rng` to draw "
                    "from (fedbilevel.nets.Dropout does), so that runs can be repeated"
                )
            if not bool(torch.isfinite(value)):
                raise ValueError(
                    f"the {name} loss is {float(value)} at the start; it must be finite"
                )


def _generators(device: str) -> list[Tensor]:
    """The states of the global generators a loss might draw from."""
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.startswith("cuda") else []),
    ]


def _with_rng(name: str, fn: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    """A function of these arguments as one of them and rng, whichever form the user gave."""
    if isinstance(fn, _WithoutRng):
        return fn
    count = len(
        [
            p
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            and (p.default is p.empty or p.name == "rng")
        ]
    )
    if count - len(arguments) not in (0, 1):
        plain = ", ".join(arguments)
        raise TypeError(f"{name} takes {count} arguments; it must take ({plain}) or ({plain}, rng)")
    return fn if count > len(arguments) else _WithoutRng(fn)


class _WithoutRng:
    """A function that is given `rng` last and has no use for it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args[:-1])


def _variable(name: str, value: Any) -> Tree:
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"{name} is {type(value).__name__}; it must be a non-empty dict of tensors")
    for key, tensor in value.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name}[{key!r}] must be a floating tensor, got {_kind(tensor)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{name}[{key!r}] holds NaN or infinity at the start; it must be finite"
            )
    return Tree({key: tensor.detach().clone() for key, tensor in value.items()})


class SplitModule(NamedTuple):
    """A module as a function of its two halves: `apply(x, y, *inputs)` runs it with those parameters."""

    apply: Callable[..., Any]
    x: Tree
    y: Tree


def split_module(
    module: nn.Module, lower: str, buffers: Literal["freeze"] | None = None
) -> SplitModule:
    """Split a module's parameters by name: those that start with `lower` (a head) are y, the rest (a backbone) is x.

    A module with buffers (BatchNorm's running statistics) is refused unless `buffers="freeze"`: then the module runs in
    evaluation mode with its buffers as they are. Averaging running statistics over clients, or leaving them to each
    client, changes what is optimized; neither happens silently here. GroupNorm and LayerNorm have no buffers.
    """
    held = [name for name, _ in module.named_buffers()]
    if held and buffers is None:
        raise ValueError(
            f"the module has buffers ({', '.join(held[:3])}{', ...' if len(held) > 3 else ''}); pass buffers='freeze' "
            "to keep them as they are, or use layers without (GroupNorm for BatchNorm)"
        )
    if buffers is not None:
        checks.one_of("buffers", buffers, ("freeze",))
        module = deepcopy(module).eval()
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    y = Tree({name: value for name, value in parameters.items() if name.startswith(lower)})
    x = Tree({name: value for name, value in parameters.items() if name not in y})
    if not x or not y:
        raise ValueError(
            f"lower={lower!r} selects {len(y)} of {len(parameters)} parameters ({', '.join(parameters)}); "
            "it must select some and leave some"
        )
    return SplitModule(lambda x, y, *inputs: functional_call(module, {**x, **y}, inputs), x, y)


def client_weights(
    weights: str | Sequence[float], clients: Sequence[ClientData]
) -> Sequence[float]:
    """p_i >= 0, summing to 1: "uniform", "samples" (in proportion to training samples), or one number a client."""
    n = len(clients)
    if isinstance(weights, str):
        if checks.one_of("weights", weights, ("uniform", "samples")) == "uniform":
            return _Uniform(n)
        values: Sequence[Any] = [clients[i].size("train") for i in range(n)]
    elif isinstance(weights, Sequence):
        values = weights
    else:
        raise TypeError(
            f"weights is {weights!r}; it must be 'uniform', 'samples' or a sequence with a number a client"
        )
    if len(values) != n:
        raise ValueError(f"weights has {len(values)} entries; there are {n} clients")
    total = sum(checks.non_negative("weights", value) for value in values)
    checks.positive("the sum of weights", total)
    return [value / total for value in values]


class _Uniform(Sequence[float]):
    """1/n for everyone, at no cost in n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(f"client {index} of {self.n}")
        return 1 / self.n
