"""Mixture: how much should each owner of text count in training a model for one of them?

lower: sum_i w_i CE_i(y) + ridge/2 ||y||^2, over the training text of the owners,
upper: CE_target(y), on the validation text of the target owner.

y is a whole byte-level transformer, x the weights w on the simplex. Nobody shares text: an owner
needs to know its own weight and the model. The texts are Python sources of installed packages, one
package per owner, so that nothing is downloaded. The question is that of Xie et al., "DoReMi:
Optimizing Data Mixtures Speeds Up Language Model Pretraining", 2023, and Pan et al., "ScaleBiO:
Scalable Bilevel Optimization for LLM Data Reweighting", 2025, for owners that do not share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import root, uniform
from fedbilevel.core.tree import Tree, dot
from fedbilevel.core.weighting import project_to_simplex
from fedbilevel.tasks.task import Task

BYTES = 256
SHUFFLED = "shuffled:"  # before the name of a package: its bytes in random order
OWNERS = ("email", "asyncio", "json", "xml", "unittest", "torch", "shuffled:torch")


def mixture(
    *,
    owners: Sequence[str] = OWNERS,
    target: str = "unittest",
    characters: int = 200_000,
    context: int = 64,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    ridge: float = 1e-4,
    start: Sequence[float] | None = None,
    text: str | Path | None = None,
    digest: str | None = None,
    seed: int = 0,
) -> Task:
    """Build the task of weighing owners of text, x, for a transformer, y, and a target owner.

    Args:
        owners: Names of packages, each the text of one owner; "shuffled:NAME" are the bytes of a
            package in random order, which nobody can learn from.
        target: The owner whose validation text counts on the upper level.
        characters: The most bytes of text per owner; a tenth is for validation, a tenth for tests.
        context: The length of a window of text.
        width: The width of the transformer.
        depth: Its number of blocks.
        heads: The number of its attention heads, a divisor of the width.
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        start: The weights to start from, one per owner; None is uniform.
        text: A folder with a file NAME.txt per package, to be read instead of the packages, such
            as `write_texts` makes.
        digest: What the texts must hash to. The config of a run has it, so that the run is neither
            repeated nor resumed on other texts.
        seed: The seed of the initial parameters and of shuffled bytes.

    Returns:
        The task. Its metrics: `test_loss` of the target, and `weight NAME` of each owner.

    Note:
        While a model still learns how often each byte occurs, shuffled bytes serve it as well as
        text, and may gain weight. Weights mean something once it has learnt more than that.

    Raises:
        ValueError: An option is out of range, a package is not installed or short of text, or the
            texts have another digest.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("mixture", owners=["json", "xml"], target="json", width=8)
        >>> task.problem.x["weights"]
        tensor([0.5000, 0.5000])
    """
    checks.one_of("target", target, owners)
    checks.integer("context", context, least=2)
    checks.non_negative("ridge", ridge)
    texts = {name: read_text(name, characters, text, seed) for name in owners}
    found = hashlib.sha256(b"\0".join(texts.values())).hexdigest()[:16]
    if digest is not None and digest != found:
        raise ValueError(f"digest is {digest!r}, but the texts have {found!r}")
    n = len(owners)
    if start is None:
        weights = torch.full((n,), 1 / n)
    elif len(start) == n:
        weights = project_to_simplex(torch.tensor(start, dtype=torch.float32))
    else:
        raise ValueError(f"start has {len(start)} entries; there are {n} owners")
    clients = []
    test = torch.zeros(0)
    for number, name in enumerate(owners):
        windows = _windows(name, texts[name], context)
        tenth = max(len(windows) // 10, 1)
        train = windows[: -2 * tenth]
        val = torch.zeros(1, context + 1, dtype=torch.uint8)  # others have nothing to validate
        share = 0.0
        if name == target:
            val = windows[-2 * tenth : -tenth]
            test = windows[-tenth:]
            share = float(n)
        numbers = torch.full((len(train),), number)
        clients.append(ClientData((train, numbers), (val, torch.full((len(val),), share))))
    net = nets.seeded(lambda: Transformer(width, depth, heads, context), seed)

    def cross_entropy(y: Tree, windows: Tensor) -> Tensor:
        tokens = windows.long()
        outputs = functional_call(net, y, (tokens[:, :-1],))
        return F.cross_entropy(outputs.reshape(-1, BYTES), tokens[:, 1:].reshape(-1))

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        windows, share = batch
        return share.mean() * cross_entropy(y, windows)

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        windows, number = batch
        weight = x["weights"].gather(0, number[:1]).sum()
        return n * weight * cross_entropy(y, windows) + 0.5 * ridge * dot(y, y)

    def project(x: Tree) -> Tree:
        return Tree({"weights": project_to_simplex(x["weights"])})

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        total = 0.0
        with torch.no_grad():
            for windows in test.to(x["weights"].device).split(64):
                total += len(windows) * float(cross_entropy(y, windows))
        by_owner = {
            f"weight {name}": float(w) for name, w in zip(owners, x["weights"], strict=True)
        }
        return {"test_loss": total / len(test), **by_owner}

    y = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return Task(
        Problem(upper=upper, lower=lower, x={"weights": weights}, y=y, project_x=project),
        clients,
        evaluate,
        options={"digest": found},
    )


def read_text(name: str, characters: int, folder: str | Path | None = None, seed: int = 0) -> bytes:
    """Return the text of an owner: the sources of a package, one after another.

    Args:
        name: The package; "shuffled:NAME" for its bytes in random order.
        characters: The most bytes to return.
        folder: A folder with a file NAME.txt, to be read instead.
        seed: The seed of the random order.

    Returns:
        The text.

    Raises:
        ValueError: There is no such package or file.

    Examples:
        >>> len(read_text("json", characters=500))
        500
    """
    package = name.removeprefix(SHUFFLED)
    if folder is not None:
        file = Path(folder, f"{package}.txt")
        if not file.exists():
            raise ValueError(f"owner is {name!r}, but there is no {file}")
        text = file.read_bytes()[:characters]
    else:
        text = _sources(package, characters)
    if package == name:
        return text
    order = uniform(root(seed, "shuffled"), (len(text),), torch.float64).argsort()
    return bytes(torch.tensor(list(text), dtype=torch.uint8)[order].tolist())


def write_texts(names: Sequence[str], characters: int, folder: str | Path) -> None:
    """Write the texts of packages to files that `mixture` reads where they are not installed.

    Args:
        names: The packages.
        characters: The most bytes of each.
        folder: Where the files NAME.txt are written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        Path(folder, f"{name}.txt").write_bytes(_sources(name, characters))


def _sources(package: str, characters: int) -> bytes:
    spec = None
    if package.isidentifier():  # to find a package within another one would import that one
        spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"owner is {package!r}, which is not an installed package")
    text = b""
    for file in sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.py")):
        text += file.read_bytes()
        if len(text) >= characters:
            break
    return text[:characters]


def _windows(name: str, text: bytes, context: int) -> Tensor:
    """The text in windows of context + 1 bytes, which overlap by one."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(tokens) < 30 * (context + 1):
        raise ValueError(
            f"owner {name!r} has {len(tokens)} bytes of text; with context={context} it must have "
            f"at least {30 * (context + 1)}"
        )
    return tokens.unfold(0, context + 1, context).contiguous()


class Transformer(nn.Module):
    """A causal transformer on bytes, with PyTorch's own attention.

    Args:
        width: The width of a token.
        depth: The number of blocks.
        heads: The number of attention heads.
        context: The length of the longest input.
        symbols: The number of different tokens.
    """

    def __init__(
        self, width: int, depth: int, heads: int, context: int, symbols: int = BYTES
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        nn.init.normal_(self.symbols.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of each next token."""
        h = self.symbols(tokens) + self.positions[: tokens.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(h)))
        return scores


class Block(nn.Module):
    """Causal attention, then a layer of four times the width, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return the tokens after the block."""
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        h = h + self.out(attended.transpose(1, 2).flatten(-2))
        result: Tensor = h + self.narrow(F.gelu(self.widen(self.norm2(h))))
        return result
