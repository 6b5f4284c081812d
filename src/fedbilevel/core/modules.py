"""`split_module`: the parameters of a PyTorch module as upper, lower and frozen variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fedbilevel.core import checks
from fedbilevel.core.tree import Tree

Names = str | Sequence[str]


class _Parts(NamedTuple):
    """What a `SplitModule` unpacks to."""

    apply: Callable[..., Any]
    x: Tree
    y: Tree


class SplitModule(_Parts):
    """A module as a function of two parts of its parameters; `split_module` returns it.

    It unpacks to `apply, x, y`.

    Attributes:
        apply: `apply(x, y, *inputs, **options)` calls the module with the parameters in x and y.
        x: The upper part of the parameters (a backbone).
        y: The lower part of the parameters (a head).
    """

    _module: nn.Module  # the user's

    def state_dict(
        self,
        x: Mapping[str, Tensor],
        y: Mapping[str, Tensor],
        statistics_of: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]:
        """Return a state of the module that was split, with x and y in it.

        Frozen parameters and buffers are those of the module, and tied parameters have one value
        under all their names, so that `module.load_state_dict` takes it as it is.

        Args:
            x: The upper part, for example that of `Result.personal`.
            y: The lower part.
            statistics_of: Batches of inputs whose means and variances become the running statistics
                of BatchNorm layers: those of one client for a personal model. Without batches, the
                statistics are the module's.

        Returns:
            The state, on the devices of its parts.

        Raises:
            ValueError: A name is missing or unknown, or a shape is another one.

        Examples:
            >>> import torch
            >>> import fedbilevel as fb
            >>> net = fb.nets.mlp(4, 3, 2)
            >>> split = fb.split_module(net, lower="head.")
            >>> doubled = 2 * split.y
            >>> net.load_state_dict(split.state_dict(split.x, doubled))
            <All keys matched successfully>
            >>> bool((net.get_parameter("head.weight") == doubled["head.weight"]).all())
            True
        """
        for level, given, wanted in (("x", x, self.x), ("y", y, self.y)):
            for name in sorted(given.keys() ^ wanted.keys()):
                problem = "is missing" if name in wanted else "is no parameter of this level"
                raise ValueError(f"{level}[{name!r}] {problem}; it must have {', '.join(wanted)}")
            for name, tensor in wanted.items():
                if given[name].shape != tensor.shape:
                    raise ValueError(
                        f"{level}[{name!r}] has shape {tuple(given[name].shape)}; "
                        f"it must have {tuple(tensor.shape)}"
                    )
        values = {**x, **y}
        state = dict(self._module.state_dict())
        first_names = {id(value): name for name, value in self._module.named_parameters()}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if first_names[id(parameter)] in values:
                state[name] = values[first_names[id(parameter)]]
        if statistics_of:
            state = _with_statistics(self._module, state, statistics_of)
        return state


def split_module(
    module: nn.Module,
    lower: Names | None = None,
    buffers: Literal["freeze", "batch"] | None = None,
    *,
    upper: Names | None = None,
    frozen: Names = (),
) -> SplitModule:
    """Split the parameters of a module into upper, lower and frozen ones, by name.

    Names are given by their beginning ("head."), or by a pattern with `*`, `?` or `[...]` that the
    whole name matches ("*.bias"); or several of these. Frozen parameters, which are also those with
    `requires_grad=False`, keep their values, belong to neither level and are never sent. If the
    module has frozen parameters or buffers, it must be on the device of the run already.

    The running statistics of BatchNorm belong to neither level, and no client sends any: to average
    them would change the problem silently. A module with such statistics is therefore refused
    unless `buffers` says what becomes of them. Other buffers, such as the positions of a
    transformer, stay as they are.

    Parameters keep their names, and tied parameters are one variable. The outcome of a run loads
    into the module: `module.load_state_dict(split.state_dict(result.x, result.y))`.

    Args:
        module: The module; it is neither changed nor moved.
        lower: Which parameters become y (a head, or adapters). None: all that are neither upper
            nor frozen.
        buffers: "freeze" takes a copy of the module in evaluation mode and never changes its
            buffers. "batch" normalises every batch by its own statistics, which makes the losses
            depend on the batch size; `SplitModule.state_dict` then estimates the module's
            statistics, on the inputs of everybody or, for personal ones, of one client. None
            refuses a module with running statistics.
        upper: Which parameters become x (a backbone); `()` means none. None: all that are neither
            lower nor frozen.
        frozen: Which parameters keep their values.

    Returns:
        `SplitModule(apply, x, y)`: a function that calls the module with given parameters, and
        the parameters of the two levels.

    Raises:
        ValueError: The module has running statistics and `buffers` is None, a parameter belongs to
            two parts or to none, or a part that was asked for is empty.

    Examples:
        >>> import torch
        >>> from collections import OrderedDict
        >>> import fedbilevel as fb
        >>> net = torch.nn.Sequential(
        ...     OrderedDict(backbone=torch.nn.Linear(3, 4), head=torch.nn.Linear(4, 1))
        ... )
        >>> apply, x, y = fb.split_module(net, lower="head.")
        >>> list(y)
        ['head.weight', 'head.bias']
        >>> apply(x, y, torch.ones(5, 3)).shape
        torch.Size([5, 1])
        >>> apply, x, y = fb.split_module(net, lower="*.bias", upper=(), frozen="*.weight")
        >>> list(x), list(y)
        ([], ['backbone.bias', 'head.bias'])
    """
    given = module
    module = _with_settled_buffers(module, buffers)
    values = {name: value.detach() for name, value in module.named_parameters()}
    fixed = _selected(frozen, values)
    fixed |= {name for name, value in module.named_parameters() if not value.requires_grad}
    free = [name for name in values if name not in fixed]
    in_x, in_y = _levels(lower, upper, free)
    held = {name: values[name] for name in values if name in fixed}

    def apply(x: Tree, y: Tree, *inputs: Any, **options: Any) -> Any:
        with _without_fast_path():
            return functional_call(module, {**held, **x, **y}, inputs, options)

    x = Tree({name: values[name] for name in free if name in in_x})
    y = Tree({name: values[name] for name in free if name in in_y})
    split = SplitModule(apply, x, y)
    split._module = given
    return split


def _levels(
    lower: Names | None, upper: Names | None, free: Sequence[str]
) -> tuple[set[str], set[str]]:
    """The names of the parameters of x and of y, among those that are not frozen."""
    if lower is None and upper is None:
        raise ValueError("neither lower nor upper is given; one of them must name parameters")
    if upper is None:
        in_y = _selected(lower or "", free)
        in_x = set(free) - in_y
    else:
        in_x = _selected(upper, free)
        in_y = set(free) - in_x
        if lower is not None:
            in_y = _selected(lower, free)
    for name in free:
        if (name in in_x) == (name in in_y):
            where = "both lower and upper" if name in in_x else "neither lower nor upper"
            raise ValueError(
                f"parameter {name!r} is in {where}; it must be in one of them, or frozen"
            )
    x_may_be_empty = upper is not None and not _patterns(upper)
    if not in_y or not (in_x or x_may_be_empty):
        asked = f"lower={lower!r}" if lower is not None else f"upper={upper!r}"
        count = len(in_y) if lower is not None else len(in_x)
        raise ValueError(
            f"{asked} selects {count} of {len(free)} parameters ({', '.join(free)}); "
            "it must select some and leave some"
        )
    return in_x, in_y


def _patterns(names: Names) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _selected(names: Names, among: Iterable[str]) -> set[str]:
    """The parameters whose names begin with one of these, or match one with wildcards."""
    found = set()
    for pattern in _patterns(names):
        wild = any(sign in pattern for sign in "*?[")
        for name in among:
            if (wild and fnmatchcase(name, pattern)) or (not wild and name.startswith(pattern)):
                found.add(name)
    return found


def _with_settled_buffers(module: nn.Module, buffers: str | None) -> nn.Module:
    """The module, or a copy whose running statistics are settled as `buffers` says."""
    if buffers is not None:
        checks.one_of("buffers", buffers, ("freeze", "batch"))
    statistics = []
    for prefix, part in module.named_modules():
        if isinstance(part, _NormBase):
            statistics += [name for name, _ in part.named_buffers(prefix, recurse=False)]
    if statistics and buffers is None:
        shown = ", ".join(statistics[:3])
        if len(statistics) > 3:
            shown += ", ..."
        raise ValueError(
            f"the module has buffers ({shown}); pass buffers='freeze' to keep them unchanged, "
            "'batch' to normalise each batch by itself, or use layers without buffers (GroupNorm "
            "instead of BatchNorm)"
        )
    if buffers is None:
        return module
    module = deepcopy(module).eval()
    if buffers == "batch":
        for part in module.modules():
            if isinstance(part, _NormBase):
                part.running_mean = None
                part.running_var = None
                part.num_batches_tracked = None
    return module


def _with_statistics(
    module: nn.Module, state: Mapping[str, Tensor], batches: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The state with the running statistics of these inputs; every batch counts the same."""
    module = deepcopy(module).eval()
    module.load_state_dict(state)
    for part in module.modules():
        if isinstance(part, _NormBase):
            part.reset_running_stats()
            part.momentum = None  # the mean over all batches
            part.train()
    with torch.no_grad():
        for inputs in batches:
            module(inputs)
    return dict(module.state_dict())


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """PyTorch's transformer layers without their path for inference, which has no derivatives."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
