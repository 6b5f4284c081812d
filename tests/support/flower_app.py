"""A server that runs several experiments over the nodes of one run, and writes down where each ended; if told to, it
then sends nonsense, and writes down what is said to that."""

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedbilevel.deploy.flower import warm
from fedbilevel.deploy.flower.wire import encode
from fedbilevel.runs import checkpoint
from fedbilevel.runs.recorder import replace
from tests.support.flower import config, federation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    warm.quicken()
    report = Path(str(context.run_config["report"]))
    try:
        _run(
            grid, Path(str(context.run_config["experiment"])), Path(str(context.run_config["out"]))
        )
    except Exception as error:
        replace(report, json.dumps({"status": "failed", "error": repr(error)}))
        raise
    replace(report, json.dumps({"status": "completed"}))


def _answer(grid: Grid, **values: Any) -> str:
    """What a node says to a message that the server should not have sent."""
    node = min(info.node_id for info in grid.get_nodes())
    (sent,) = grid.push_messages([Message(encode(**values), node, "train", ttl=30)])
    while not (found := list(grid.pull_messages([sent]))):
        time.sleep(0.05)
    return str(found[0].error.reason) if found[0].has_error() else "done"


def _run(grid: Grid, experiments: Path, out: Path) -> None:
    jobs = json.loads(experiments.read_text())
    for name, table in jobs["tables"].items():
        fed, run = federation(grid, config(table))
        while fed.ledger.rounds < table["rounds"]:
            run.advance()
        trees = {key: value for key, value in run.state._asdict().items() if key in ("x", "y", "z")}
        checkpoint.save(out / f"{name}.safetensors", {"state": trees, **fed.snapshot()})
    if not jobs["nonsense"]:
        return
    here = fed.transport
    task = {
        "job": here.job,
        "table": here.table,
        "phase": {"phase": "nonsense"},
        "number": 1,
        "steps": 1,
    }
    told = [
        _answer(grid, **task),
        _answer(grid, **task | {"job": "../../etc"}),
        _answer(grid, job=""),
    ]
    (out / "told.json").write_text(json.dumps(told))
