"""The server process: a `ServerApp` that runs an experiment and writes its run folder."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbilevel import configure_process
from fedbilevel.deploy.flower.client import ENDS
from fedbilevel.deploy.flower.deployment import is_running
from fedbilevel.deploy.flower.transport import FlowerTransport, flower_federation
from fedbilevel.deploy.flower.warm_node import patch_flower_pull_backoff
from fedbilevel.deploy.flower.wire import one_line
from fedbilevel.diagnostics.value import value
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.config import Config
from fedbilevel.experiments.runner import build_run, load_task
from fedbilevel.federation import Federation
from fedbilevel.federation.replies import log
from fedbilevel.runs.folder import write_atomically
from fedbilevel.runs.recorder import Recorder
from fedbilevel.tasks import Task

app = ServerApp()

LAUNCHER_POLL_S = 1.0
VALUE = "value.json"  # what clients are worth
SERVER_LOG = "server.log"  # in the run folder: joined clients, refused replies, lost tasks


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config names; `flwr run` starts it.

    The keys of the run config are those in `deployment.APP_PYPROJECT`. With `report`, the process
    writes its id and then how the run ended to that file, in JSON. With `launcher`, the process
    ends when the process of this id does, so that nobody holds the run folder of a dead run.
    """
    configure_process()
    run_config = context.run_config
    if launcher := int(str(run_config["launcher"])):
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    folder = Path(str(run_config["out"]))
    report = None
    if run_config["report"]:
        report = Path(str(run_config["report"]))
        write_atomically(report, json.dumps({"pid": os.getpid()}))
    reason = ""
    try:
        if run_config.get("value"):
            status = run_value(grid, run_config, folder)
        else:
            status = run_experiment(grid, run_config, folder)
    except Exception as error:
        status = "failed"
        reason = one_line(error) or type(error).__name__
        log.error("%s", reason)
        if report is None:
            raise
    if report is not None:
        write_atomically(
            report, json.dumps({"pid": os.getpid(), "status": status, "error": reason})
        )


def run_experiment(grid: Grid, run_config: Mapping[str, object], folder: Path) -> str:
    """Run an experiment over a grid, and write its run folder.

    Args:
        grid: Flower's connection to the nodes.
        run_config: `experiment`, a name or a TOML file; `clients`, 0 for those of the task;
            `data-dir`, empty for the default folder; `resume`.
        folder: The run folder.

    Returns:
        The status of the run: "completed", "diverged" or "interrupted".
    """
    config, task, fed = _build(grid, run_config)
    run = build_run(config, task, fed)
    resume = bool(run_config["resume"])
    recorder = Recorder(run, folder, config.table, resume, config.experiment.checkpoint_every)
    folder.mkdir(parents=True, exist_ok=True)
    _log_to(folder / SERVER_LOG)
    if threading.current_thread() is threading.main_thread():
        # SIGINT stays Flower's: with it, Flower tells a server that its SuperLink is gone.
        signal.signal(signal.SIGTERM, lambda *_: run.stop())
    for _ in recorder:
        pass
    log.info("%s after %d rounds", run.status, fed.ledger.rounds)
    if isinstance(fed.transport, FlowerTransport) and run.status in ENDS:
        fed.transport.farewell(run.status, run.result.x, run.result.y)
    return run.status


def run_value(grid: Grid, run_config: Mapping[str, object], folder: Path) -> str:
    """Run `fb.value` over a grid, and write `VALUE` in a folder.

    Args:
        grid: Flower's connection to the nodes.
        run_config: As of `run_experiment`, and `value`, a JSON file with the options of
            `fb.value`.
        folder: Where to write.

    Returns:
        "completed".
    """
    _, task, fed = _build(grid, run_config)
    folder.mkdir(parents=True, exist_ok=True)
    options = json.loads(Path(str(run_config["value"])).read_text("utf-8"))
    result = value(task.problem, federation=fed, **options)
    write_atomically(folder / VALUE, json.dumps(result.to_dict()))
    return "completed"


def _build(grid: Grid, run_config: Mapping[str, object]) -> tuple[Config, Task, Federation]:
    """Resolve the experiment, load its task, and set up the federation over a grid."""
    patch_flower_pull_backoff()
    place, table = configs.read(str(run_config["experiment"]))
    config = configs.resolve(place, table)
    config.load_task.check_for_nodes()
    experiment = config.experiment
    data_dir = None
    if run_config["data-dir"]:
        data_dir = Path(str(run_config["data-dir"]))
    task = load_task(config, data_dir)
    fed = flower_federation(
        grid,
        task.problem.to(experiment.device),
        int(str(run_config["clients"])) or len(task.clients),
        config.environment,
        config.table,
        config.conduct,
        weights=experiment.weights,
        seed=experiment.seed,
        device=experiment.device,
    )
    return config, task, fed


def _end_with(launcher: int) -> None:
    """End this process, wherever it hangs, once the process that launched it has ended."""
    while is_running(launcher):
        time.sleep(LAUNCHER_POLL_S)
    log.error("the process that launched this server has ended; --resume continues the run")
    os._exit(1)


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
