"""Settings of every test process.

Each has one thread: the problems are small, and threads that wait for each other would be slower.
"""

import logging
import signal

import pytest

import fedbilevel

fedbilevel.configure_process()

import torch  # noqa: E402  (the settings above must be made before it is imported)

torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and processes that tests interrupt would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _log_level() -> None:
    """Reset the log level, which a command with `--quiet` changes for the whole process."""
    logging.getLogger("fedbilevel").setLevel(logging.NOTSET)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that pytest-xdist keeps the tests of a group on one worker.

    They need the machine, or a fixture, to themselves.
    """
    if config.getoption("loadgroup", False):  # in a worker
        for item in items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError("pytest-xdist does not know this pytest's groups of tests")
