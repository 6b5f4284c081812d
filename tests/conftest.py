"""One thread a process: the problems here are small, and threads that wait for each other are slower than one."""

import logging  # noqa: I001  (fedbilevel before torch: it says how torch's threads wait)
import signal

import fedbilevel  # noqa: F401
import pytest
import torch

torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and every process that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _log_level() -> None:
    """Commands that were called in this process (`--quiet`) have set the level for the process."""
    logging.getLogger("fedbilevel").setLevel(logging.NOTSET)
