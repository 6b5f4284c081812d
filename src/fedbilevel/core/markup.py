"""How objects show themselves: trees in one line, tables in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from torch import Tensor

SHOWN_NAMES = 4  # of a tree's tensors


def describe_tree(tree: Mapping[str, Tensor]) -> str:
    """Return the names and shapes of a tree's tensors; of many, the first few.

    Args:
        tree: The tree.

    Examples:
        >>> import torch
        >>> describe_tree({"w": torch.zeros(3, 2), "b": torch.zeros(2)})
        '{w: (3, 2), b: (2,)}'
    """
    shown = [f"{name}: {tuple(tensor.shape)}" for name, tensor in tree.items()]
    if len(shown) > SHOWN_NAMES:
        shown = [*shown[:SHOWN_NAMES], f"{len(shown) - SHOWN_NAMES} more"]
    return f"{{{', '.join(shown)}}}"


def html_table(
    rows: Iterable[Sequence[object]], headings: Sequence[str] = (), caption: str = ""
) -> str:
    """Return a table for a notebook, with all texts escaped.

    Args:
        rows: The cells of each row; the first one is its name.
        headings: The headings of the columns.
        caption: The title of the table.

    Examples:
        >>> "&lt;5&gt;</td>" in html_table([["x", "<5>"]])
        True
    """
    left = 'style="text-align:left"'
    parts = ["<table>"]
    if caption:
        parts.append(f"<caption>{escape(caption)}</caption>")
    if headings:
        cells = "".join(f"<th {left}>{escape(heading)}</th>" for heading in headings)
        parts.append(f"<thead><tr>{cells}</tr></thead>")
    parts.append("<tbody>")
    for name, *others in rows:
        cells = "".join(f"<td {left}>{escape(str(cell))}</td>" for cell in others)
        parts.append(f"<tr><th {left}>{escape(str(name))}</th>{cells}</tr>")
    parts.append("</tbody></table>")
    return "".join(parts)
