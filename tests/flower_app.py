"""A server that runs several experiments over the nodes of one run, and writes down where each ended."""

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbilevel.federation.flower import warm
from fedbilevel.runs import checkpoint
from fedbilevel.runs.record import replace
from tests.flower import config, federation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    warm.quicken()
    report = Path(str(context.run_config["report"]))
    try:
        _run(grid, Path(str(context.run_config["experiment"])), Path(str(context.run_config["out"])))
    except Exception as error:
        replace(report, json.dumps({"status": "failed", "error": repr(error)}))
        raise
    replace(report, json.dumps({"status": "completed"}))


def _run(grid: Grid, experiments: Path, out: Path) -> None:
    for name, table in json.loads(experiments.read_text()).items():
        fed, run = federation(grid, config(table))
        while fed.ledger.rounds < table["rounds"]:
            run.advance()
        trees = {key: value for key, value in run.state._asdict().items() if key in ("x", "y", "z")}
        checkpoint.save(out / f"{name}.safetensors", {"state": trees, "ledger": fed.snapshot()["ledger"]})
