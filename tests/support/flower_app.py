"""A server that runs several experiments over the nodes of one run, and saves how each ended.

On request it then sends messages that no server should send, and saves the answers.
"""

import json
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedbilevel.deploy.flower.warm_node import patch_flower_pull_backoff
from fedbilevel.deploy.flower.wire import encode
from fedbilevel.runs import checkpoint
from fedbilevel.runs.folder import write_atomically
from tests.support.flower import real_federation, resolve_config

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiments in the file that the run config names."""
    patch_flower_pull_backoff()
    run_config = context.run_config
    report = Path(str(run_config["report"]))
    try:
        run_experiments(grid, Path(str(run_config["experiment"])), Path(str(run_config["out"])))
    except Exception as error:
        write_atomically(report, json.dumps({"status": "failed", "error": repr(error)}))
        raise
    write_atomically(report, json.dumps({"status": "completed"}))


def run_experiments(grid: Grid, file: Path, out: Path) -> None:
    experiments = json.loads(file.read_text())
    for name, table in experiments["tables"].items():
        fed, run = real_federation(grid, resolve_config(table))
        while fed.ledger.rounds < table["rounds"]:
            run.advance()
        state = run.state._asdict()
        trees = {part: state[part] for part in ("x", "y", "z") if part in state}
        checkpoint.save(out / f"{name}.safetensors", {"state": trees, **fed.snapshot()})
    if experiments["send_nonsense"]:
        known = {"job": fed.transport.job, "table": fed.transport.table}
        unknown_phase = {**known, "phase": {"phase": "nonsense"}, "number": 1, "steps": 1}
        answers = [
            send_task(grid, **unknown_phase),
            send_task(grid, **{**unknown_phase, "job": "../../etc"}),
            send_task(grid, job=""),
        ]
        (out / "answers.json").write_text(json.dumps(answers))


def send_task(grid: Grid, **values: object) -> str:
    """Send a task to some node, and return the reason for which it refuses it."""
    node = min(info.node_id for info in grid.get_nodes())
    (message_id,) = grid.push_messages([Message(encode(**values), node, "train", ttl=30)])
    while not (replies := list(grid.pull_messages([message_id]))):
        time.sleep(0.05)
    if replies[0].has_error():
        return str(replies[0].error.reason)
    return "accepted"
