"""How this process uses memory and threads.

Nothing here happens on import. The command line calls `configure_process`; a library user may.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Allocations between two collections. One round allocates about as many objects as Python's
# default of 700.
YOUNG_OBJECTS = 10_000

M_TRIM_THRESHOLD = -1  # parameters of mallopt(3)
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3


def configure_process() -> None:
    """Configure this process for fast rounds, as the command line does.

    Waiting threads sleep instead of spinning (`OMP_WAIT_POLICY=PASSIVE`): on a shared machine,
    rounds were seen to take ten times as long with spinning threads. glibc keeps freed memory for
    the next step instead of returning it to the system, because touching fresh pages costs more
    than the arithmetic on them. Python collects garbage less often, which traverses the objects of
    PyTorch fewer times while they are imported. Whatever the user has set in the environment
    (`OMP_WAIT_POLICY`, `MALLOC_...`, `GLIBC_TUNABLES`) is left alone, and so are C libraries other
    than glibc, and a collector that is disabled.

    Call it before PyTorch is imported, because OpenMP reads its variable once, on loading.

    Warns:
        RuntimeWarning: PyTorch is already imported and `OMP_WAIT_POLICY` is not set. The allocator
            is configured all the same.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.configure_process()  # doctest: +SKIP
        >>> import torch
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        if "torch" in sys.modules:
            warnings.warn(
                "torch is already imported, so OMP_WAIT_POLICY can no longer be set; "
                "call configure_process first, or set the variable before Python starts",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    _keep_freed_memory()
    _collect_less_often()


def _collect_less_often() -> None:
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0: the user has disabled the collector
        gc.set_threshold(max(thresholds[0], YOUNG_OBJECTS), *thresholds[1:])


def _keep_freed_memory() -> None:
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, 1 << 26)


@contextmanager
def relaxed_garbage_collection() -> Iterator[None]:
    """Exclude all existing objects from garbage collection, and collect new ones less often.

    PyTorch and the data are about 300,000 objects that stay alive, and tasks in flight may be more.
    A round allocates enough to make Python traverse all of them every few rounds, which took as
    long as all other work of the host. Only reference cycles wait for the collector; other objects
    are freed at once as always. At the end of the `with` block everything is as before.

    Does nothing if the collector is disabled, or if another block is active already.

    Yields:
        Nothing.

    Examples:
        >>> with relaxed_garbage_collection():
        ...     gc.get_threshold()[0]
        10000
    """
    thresholds = gc.get_threshold()
    if gc.get_freeze_count() or not thresholds[0]:
        yield
        return
    gc.collect(1)
    gc.freeze()
    _collect_less_often()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
