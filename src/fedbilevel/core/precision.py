"""The precision of products and of second derivatives, and what PyTorch must be told for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

Precision = Literal["fp32", "tf32", "bf16", "bf16-all"]
"""How exact the matrix products and convolutions of clients are.

- "fp32": in the dtype of x, which is float32 as a rule. Nothing is rounded further.
- "tf32": operands are rounded to 10 bits of mantissa, on GPUs that have TF32 only.
- "bf16": the backbone (`Problem.embed`) runs in bfloat16, with 7 bits; the losses of its features,
  and with them all second derivatives in y, are exact.
- "bf16-all": the losses run in bfloat16 too.
"""

Compile = bool | Literal["auto"]
"""Whether client steps on a GPU go through PyTorch's compiler: all, none, or, with "auto", those
that have run for about as long as compiling them takes."""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Derivatives = Literal["auto", "exact", "unfused", "differences"]
"""How second derivatives of the lower loss are computed; see `Problem`."""

DERIVATIVES: tuple[Derivatives, ...] = get_args(Derivatives)


def products_in(precision: Precision, device: str) -> AbstractContextManager[None]:
    """A context in which products and convolutions on a GPU use TF32 only if they should.

    By default PyTorch lets convolutions use TF32 and matrix products not. Both are settings of the
    whole process, and are restored at the end.

    Args:
        precision: "tf32" allows TF32; any other precision does not.
        device: Where the products are computed; on a CPU nothing is set.

    Returns:
        The context.

    Examples:
        >>> import torch
        >>> with products_in("fp32", device="cuda"):
        ...     torch.backends.cudnn.allow_tf32
        False
    """
    if device == "cpu":
        return nullcontext()
    return _tf32(precision == "tf32")


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    import torch  # here, so that the schema of experiments knows the names without it

    products = torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
