"""The server as Flower starts it: an experiment, run over a grid, written to a folder."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbilevel.deploy.flower import warm
from fedbilevel.deploy.flower.transport import flower_federation
from fedbilevel.deploy.flower.wire import one_line
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import load, run_of
from fedbilevel.federation.replies import log
from fedbilevel.runs.recorder import Recorder, replace

app = ServerApp()

LOG = "server.log"  # in the run's folder: who came and went, what was refused


@app.main()
def main(grid: Grid, context: Context) -> None:
    """A run as `flwr run` starts it; its settings are in `deployment.APP`."""
    job = context.run_config
    folder, report = Path(str(job["out"])), Path(str(job["report"])) if job["report"] else None
    if report:
        replace(report, json.dumps({"pid": os.getpid()}))
    try:
        status, why = run_job(grid, job, folder), ""
    except Exception as error:
        status, why = "failed", one_line(error) or type(error).__name__
        log.error("%s", why)
        if not report:
            raise
    if report:
        replace(report, json.dumps({"pid": os.getpid(), "status": status, "error": why}))


def run_job(grid: Grid, job: Mapping[str, Any], folder: Path) -> str:
    """Run the experiment that a job names, over this grid."""
    warm.quicken()
    place, table = configs.read(str(job["experiment"]))
    config = configs.resolve(place, table)
    task = load(config, Path(str(job["data-dir"])) if job["data-dir"] else None)
    experiment, clients = config.experiment, int(job["clients"]) or len(task.clients)
    fed = flower_federation(
        grid,
        task.problem.to(experiment.device),
        clients,
        config.environment,
        config.table,
        config.conduct,
        weights=experiment.weights,
        seed=experiment.seed,
        device=experiment.device,
    )
    run = run_of(config, task, fed)
    recorder = Recorder(run, folder, config.table, bool(job["resume"]), experiment.checkpoint_every)
    folder.mkdir(parents=True, exist_ok=True)
    lines = logging.FileHandler(folder / LOG, encoding="utf-8")
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    if threading.current_thread() is threading.main_thread():
        # SIGINT stays Flower's: with it a server is told that its SuperLink is gone.
        signal.signal(signal.SIGTERM, lambda *_: run.stop())
    for _ in recorder:
        pass
    log.info("%s after %d rounds", run.status, fed.ledger.rounds)
    return run.status
