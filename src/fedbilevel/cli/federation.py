"""Real federations from the command line: `serve`, `join`, `keys`, and `run --federation flower`."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbilevel.cli.progress import Progress
from fedbilevel.deploy.flower import client, deployment, warm
from fedbilevel.deploy.flower.app import LOG, run_job
from fedbilevel.deploy.flower.deployment import Deployment, DeploymentError
from fedbilevel.experiments.config import Config
from fedbilevel.runs.folder import METRICS, SUMMARY
from fedbilevel.runs.recorder import check_folder, without_none

PATIENCE_S = (
    90.0  # in which a SuperNode must stay up: the session of one that was killed lasts a minute
)
STOP_S = 600.0  # that a server has to end the iteration it is in


class Follower:
    """Watches a run that a server on a SuperLink writes: shows its metrics and its warnings, and knows how it ended."""

    def __init__(self, report: Path, folder: Path, progress: Progress) -> None:
        self.report, self.folder, self.progress = report, folder, progress
        self.places = {
            name: (folder / name).stat().st_size if (folder / name).exists() else 0
            for name in (LOG,)
        }
        self.stopping = 0

    def follow(self, site: Deployment) -> dict[str, Any]:
        """Wait for the end; what the server said last."""
        stopped_at = 0.0
        while True:
            said = deployment.read_report(self.report)
            self._show()
            if "status" in said:
                return said
            site.check()
            if "pid" in said and not deployment.alive(said["pid"]):
                said = deployment.read_report(self.report)
                return (
                    said
                    if "status" in said
                    else {"status": "failed", "error": "the server was killed"}
                )
            if self.stopping and "pid" in said:
                if not stopped_at:
                    stopped_at = time.monotonic()
                    os.kill(said["pid"], signal.SIGTERM)
                elif self.stopping > 1 or time.monotonic() - stopped_at > STOP_S:
                    return {
                        "status": "interrupted",
                        "error": "interrupted in a round; --resume repeats it",
                    }
            time.sleep(0.1)

    def _show(self) -> None:
        for line in self._lines(METRICS):
            with suppress(ValueError):
                self.progress.show(json.loads(line))
        for line in self._lines(LOG):
            if " WARNING " in line or " ERROR " in line:
                logging.getLogger("fedbilevel").warning("%s", line.strip().split(" ", 3)[-1])

    def _lines(self, name: str) -> list[str]:
        """Whole lines that were added."""
        path = self.folder / name
        if not path.exists():
            return []
        with path.open("rb") as file:
            start = self.places.get(name, 0)
            file.seek(start)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.places[name] = start + len(whole)
        return whole.decode("utf-8", "replace").splitlines()


@contextmanager
def _stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    config: Config,
    title: str,
    folder: Path,
    *,
    site: Deployment,
    clients: int | None,
    resume: bool,
    data_dir: Path | None,
    quiet: bool,
    local: Callable[[Deployment], None] | None = None,
) -> dict[str, Any]:
    """Run an experiment on a SuperLink of its own; `local` starts nodes on this machine. Returns the summary."""
    folder = folder.resolve()
    check_folder(folder, config.table, resume)
    stopped = [0]
    with Progress(title, config.experiment.rounds, quiet) as progress, site:
        follower: Follower | None = None

        def stop() -> None:
            stopped[0] += 1
            if follower is None:
                raise KeyboardInterrupt
            follower.stopping = stopped[0]

        with _stop_signals(stop):
            site.superlink()
            experiment = site.folder / "experiment.toml"
            experiment.write_text(tomli_w.dumps(without_none(config.table)), "utf-8")
            job: dict[str, Any] = {
                "experiment": str(experiment),
                "out": str(folder),
                "resume": resume,
            }
            job |= {
                "clients": clients or 0,
                "data_dir": str(data_dir.resolve()) if data_dir else "",
            }
            report = site.submit(**job)
            follower = Follower(report, folder, progress)
            if local:
                local(site)
            said = follower.follow(site)
    if said["status"] == "failed" or not (folder / SUMMARY).exists():
        raise DeploymentError(
            said.get("error") or "the server was killed; --resume goes on from its last checkpoint"
        )
    return dict(json.loads((folder / SUMMARY).read_text("utf-8")))


def simulate(config: Config, folder: Path, resume: bool, data_dir: Path | None) -> dict[str, Any]:
    """Run an experiment on Flower's simulation engine: its clients in processes of Ray, on one machine or many."""
    try:
        import ray  # noqa: F401
        from flwr.simulation import run_simulation
    except ImportError:
        raise DeploymentError(
            "Ray is not installed; `pip install 'fedbilevel[ray]'` brings it"
        ) from None
    folder = folder.resolve()
    check_folder(folder, config.table, resume)
    app, failed = ServerApp(), list[Exception]()
    with tempfile.TemporaryDirectory() as work:
        experiment = Path(work, "experiment.toml")
        experiment.write_text(tomli_w.dumps(without_none(config.table)), "utf-8")
        job: dict[str, Any] = {"experiment": str(experiment), "clients": 0, "resume": resume}
        job["data-dir"] = str(data_dir.resolve()) if data_dir else ""

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            try:
                run_job(grid, job, folder)
            except Exception as error:
                failed.append(error)

        clients = len(config.load_task(data_dir).clients)
        one_core: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        name = config.table["task"]["name"]
        own = {"data-dir": job["data-dir"] or None, "task": name if ":" in name else None}
        played = _played({key: value for key, value in own.items() if value})
        run_simulation(app, played, clients, backend_config=one_core)
    if failed:
        raise failed[0]
    return dict(json.loads((folder / SUMMARY).read_text("utf-8")))


def _played(settings: dict[str, str]) -> ClientApp:
    """Our client for nodes that Flower's simulation makes up, which have no settings of their own."""

    def told(
        message: Message, context: Context, answer: Callable[[Message, Context], Message]
    ) -> Message:
        context.node_config.update(settings)
        return answer(message, context)

    app = ClientApp(mods=[told])
    for route, handler in (
        (app.query, client.hello),
        (app.train, client.task),
        (app.evaluate, client.evaluate),
    ):
        route()(handler)
    return app


def join(
    address: str,
    node: client.Node,
    *,
    ca: Path | None,
    key: Path | None,
    plain: bool,
    stays_warm: bool,
) -> None:
    """Be a client until ended: a warm node in this process, or one of Flower's SuperNodes under our eyes."""
    if stays_warm:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("fedbilevel").setLevel(logging.INFO)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        settings = {"partition-id": node.partition, **_settings(node)}
        warm.serve(warm.Link(address, ca, key, plain), client.app, settings)
        return
    command = deployment.node_command(
        address, node.partition, ca=ca, key=key, plain=plain, settings=_settings(node)
    )
    _supervise(command)


def _settings(node: client.Node) -> dict[str, str]:
    given = {
        "client-data": node.client_data,
        "task": node.task,
        "data-dir": node.data_dir,
        "device": node.device,
    }
    return {name: value for name, value in given.items() if value is not None}


def _supervise(command: list[str]) -> None:
    """Flower's node ends when its SuperLink does, and is refused for a while after it was killed: start it again.

    One that never stayed up is given up after a while.
    """
    process: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    lasted, first = False, time.monotonic()
    while True:
        started = time.monotonic()
        process = subprocess.Popen(command, env=deployment.surroundings(), stdin=subprocess.DEVNULL)
        code = process.wait()
        lasted = lasted or time.monotonic() - started > 20
        if not lasted and time.monotonic() - first > PATIENCE_S:
            raise DeploymentError(f"the SuperNode ends at once, with code {code}")
        time.sleep(warm.RETRY_S)
