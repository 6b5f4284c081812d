"""One thread a process: the problems here are small, and threads that wait for each other are slower than one."""

import logging
import signal

import pytest

import fedbilevel

fedbilevel.configure_process()

import torch  # noqa: E402  (reads how its threads wait when it is imported)

torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and every process that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _log_level() -> None:
    """Commands that were called in this process (`--quiet`) have set the level for the process."""
    logging.getLogger("fedbilevel").setLevel(logging.NOTSET)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a group need the machine, or a fixture, for themselves: that they are kept together is not taken for
    granted."""
    if config.getoption("loadgroup", False):  # in a worker
        for item in items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError("pytest-xdist does not know this pytest's groups of tests")
