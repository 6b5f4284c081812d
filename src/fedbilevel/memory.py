"""How the process keeps memory."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 10_000  # new objects after which the collector looks at them; Python's 700 are what one round makes
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


@contextmanager
def at_rest() -> Iterator[None]:
    """Within, the garbage collector leaves alone what was there before, and looks at the rest less often.

    PyTorch and the data are some 300,000 objects that stay; tasks in flight may be more. A round makes enough new ones
    to have all of those looked at over and over, which took as long as everything else that the host does. Only cycles
    wait for the collector: what is let go without being in one is freed at once.
    """
    if gc.get_freeze_count() or not gc.get_threshold()[0]:
        yield
        return
    young, *older = before = gc.get_threshold()
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(max(young, YOUNG), *older)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def keep_freed() -> None:
    """Let glibc keep what is freed for the next step, unless the user has set it up otherwise (MALLOC_...).

    It gives large tensors back to the system at once, and pages that are touched for the first time cost more than the
    arithmetic on them. Other C libraries are left as they are.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for parameter, size in ((MMAP_THRESHOLD, 1 << 30), (TRIM_THRESHOLD, (1 << 31) - 1), (TOP_PAD, 1 << 26)):
        mallopt(parameter, size)
