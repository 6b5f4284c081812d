"""Real federations from the command line: `serve`, `join` and `run --federation flower|ray`."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbilevel.cli.progress import FollowedFile
from fedbilevel.deploy.flower import client, warm_node
from fedbilevel.deploy.flower.app import SERVER_LOG, VALUE, run_experiment
from fedbilevel.deploy.flower.deployment import (
    Deployment,
    DeploymentError,
    is_running,
    process_environment,
    read_report,
    supernode_command,
)
from fedbilevel.experiments.config import Config
from fedbilevel.runs.folder import METRICS, SUMMARY, check_writable, without_none
from fedbilevel.runs.progress import Progress

MONITOR_POLL_S = 0.1
STOP_TIMEOUT_S = 600.0  # in which a server that is asked to stop must end its iteration
# A SuperNode that has stayed up once was connected. One that was killed and restarted is refused
# until its old session has expired, about a minute later.
SUPERNODE_STABLE_S = 20.0
SUPERNODE_TIMEOUT_S = 90.0
SUPERNODE_POLL_S = 0.2
FAREWELL_REPLY_S = 2.0  # in which a SuperNode sends the answer to the server's farewell


class RunMonitor:
    """Follows a run that a server on a SuperLink writes, and shows its metrics and warnings.

    Args:
        report: The file in which the server reports (see `Deployment.submit`).
        folder: The run folder.
        progress: Shows the metrics.
        min_replies: How many nodes of this machine the run needs.

    Attributes:
        stop_requests: How often the user has asked to stop. The first time, the server may end its
            iteration, if it has begun one; the second time, it is not waited for.
    """

    def __init__(self, report: Path, folder: Path, progress: Progress, min_replies: int) -> None:
        self.report = report
        self.folder = folder
        self.progress = progress
        self.min_replies = min_replies
        self.stop_requests = 0
        self._began = False
        # Metrics of a resumed run are shown again, warnings are not.
        self._metrics = FollowedFile(folder / METRICS)
        self._log = FollowedFile(folder / SERVER_LOG, at_end=True)

    def wait(self, deployment: Deployment) -> dict[str, Any]:
        """Wait until the run has ended, and return the last report of the server.

        Raises:
            DeploymentError: A process of the deployment has ended before the run. Nodes that end
                after it began are started again.
        """
        asked_to_stop_at = 0.0
        while True:
            report = read_report(self.report)
            self._show_news()
            if "status" in report:
                return report
            if self._began:
                deployment.restart_nodes(self.min_replies)
            else:
                deployment.check_processes()
            if "pid" in report and not is_running(report["pid"]):
                report = read_report(self.report)  # the last one may have been written meanwhile
                if "status" in report:
                    return report
                return {"status": "failed", "error": "the server was killed"}
            if self.stop_requests and not self._began:
                return {"status": "interrupted", "error": "interrupted before clients were present"}
            if self.stop_requests and "pid" in report:
                if not asked_to_stop_at:
                    asked_to_stop_at = time.monotonic()
                    os.kill(report["pid"], signal.SIGTERM)
                elif self.stop_requests > 1 or time.monotonic() - asked_to_stop_at > STOP_TIMEOUT_S:
                    reason = "interrupted within a round, which --resume repeats"
                    return {"status": "interrupted", "error": reason}
            time.sleep(MONITOR_POLL_S)

    def _show_news(self) -> None:
        for line in self._metrics.new_lines():
            with suppress(ValueError):
                self.progress.show(json.loads(line))
        for line in self._log.new_lines():
            self._began = self._began or line.rstrip().endswith(" clients are present")
            if " WARNING " in line or " ERROR " in line:
                text = line.strip().split(" ", 3)[-1]  # without date, time and level
                logging.getLogger("fedbilevel").warning("%s", text)


@contextmanager
def _stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM."""
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def serve(
    config: Config,
    title: str,
    folder: Path,
    *,
    deployment: Deployment,
    clients: int | None,
    resume: bool,
    data_dir: Path | None,
    quiet: bool,
    start_nodes: Callable[[Deployment], None] | None = None,
) -> dict[str, Any]:
    """Run an experiment on a SuperLink of its own, and show its progress.

    Args:
        config: The experiment.
        title: What the progress is called.
        folder: The run folder.
        deployment: Where the SuperLink will be; it is started and stopped here.
        clients: The number of clients. None: that of the task.
        resume: Whether to resume the run in the folder.
        data_dir: Folder of the data sets. None: the default folder.
        quiet: Whether to show no progress.
        start_nodes: Starts nodes on this machine. None: nodes join from elsewhere.

    Returns:
        The summary of the run.

    Raises:
        DeploymentError: A process has failed, or the run left no summary.
        KeyboardInterrupt: The user has asked twice to stop, and the iteration was given up.
    """
    config.load_task.check_for_nodes()
    folder = folder.resolve()
    check_writable(folder, config.table, resume)
    monitor: RunMonitor | None = None
    stop_requests = 0

    def stop() -> None:
        nonlocal stop_requests
        stop_requests += 1
        if monitor is None:
            raise KeyboardInterrupt
        monitor.stop_requests = stop_requests

    with (
        Progress(title, config.experiment.rounds, quiet) as progress,
        deployment,
        _stop_signals(stop),
    ):
        deployment.start_superlink()
        experiment = _write_experiment(deployment.folder, config)
        report = deployment.submit(
            experiment=str(experiment),
            out=str(folder),
            resume=resume,
            clients=clients or 0,
            data_dir=_absolute(data_dir),
        )
        monitor = RunMonitor(report, folder, progress, config.environment.min_replies)
        if start_nodes is not None:
            start_nodes(deployment)
        else:
            host = deployment.host.replace("0.0.0.0", "HOST")
            command = f"fedbilevel join {host}:{deployment.port} --partition NUMBER"
            progress.say(f"clients join with: {command}")
        outcome = monitor.wait(deployment)
    if outcome["status"] == "interrupted" and not (folder / SUMMARY).exists():
        logging.getLogger("fedbilevel").warning("%s", outcome["error"])
        raise KeyboardInterrupt
    if outcome["status"] == "failed" or not (folder / SUMMARY).exists():
        killed = "the server was killed; --resume continues from its last checkpoint"
        raise DeploymentError(outcome.get("error") or killed)
    return _read_summary(folder)


def value(
    config: Config,
    options: Mapping[str, object],
    *,
    deployment: Deployment,
    clients: int,
    data_dir: Path | None,
    start_nodes: Callable[[Deployment], None],
) -> dict[str, Any]:
    """Run `fb.value` on a SuperLink of its own.

    Args:
        config: The experiment, with the problem, the weights and the seed.
        options: The options of `fb.value`.
        deployment: Where the SuperLink will be; it is started and stopped here.
        clients: The number of clients.
        data_dir: Folder of the data sets. None: the default folder.
        start_nodes: Starts nodes on this machine.

    Returns:
        The result as plain values; `Value` takes them.

    Raises:
        DeploymentError: A process has failed.
    """
    config.load_task.check_for_nodes()
    with Progress("value", 0, quiet=True) as progress, deployment:
        deployment.start_superlink()
        folder = deployment.folder / "value"
        given = deployment.folder / "options.json"
        given.write_text(json.dumps(dict(options)), "utf-8")
        report = deployment.submit(
            experiment=str(_write_experiment(deployment.folder, config)),
            out=str(folder),
            clients=clients,
            data_dir=_absolute(data_dir),
            value=str(given),
        )
        start_nodes(deployment)
        outcome = RunMonitor(report, folder, progress, min_replies=clients).wait(deployment)
        if outcome["status"] == "failed":
            raise DeploymentError(outcome.get("error") or "the server was killed")
        return dict(json.loads((folder / VALUE).read_text("utf-8")))


def simulate_on_ray(
    config: Config, folder: Path, resume: bool, data_dir: Path | None
) -> dict[str, Any]:
    """Run an experiment on Flower's simulation engine, with clients in processes of Ray.

    Args:
        config: The experiment.
        folder: The run folder.
        resume: Whether to resume the run in the folder.
        data_dir: Folder of the data sets. None: the default folder.

    Returns:
        The summary of the run.

    Raises:
        DeploymentError: Ray is not installed.
    """
    try:
        import ray  # noqa: F401
        from flwr.simulation import run_simulation
    except ImportError:
        raise DeploymentError(
            "Ray is not installed; `pip install 'fedbilevel[ray]'` installs it"
        ) from None
    config.load_task.check_for_nodes()
    folder = folder.resolve()
    check_writable(folder, config.table, resume)
    app = ServerApp()
    errors: list[Exception] = []  # Flower's engine logs an exception of the server and drops it
    with tempfile.TemporaryDirectory() as work:
        run_config = {
            "experiment": str(_write_experiment(Path(work), config)),
            "clients": 0,
            "resume": resume,
            "data-dir": _absolute(data_dir),
        }

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            try:
                run_experiment(grid, run_config, folder)
            except Exception as error:
                errors.append(error)

        settings = {}
        if data_dir is not None:
            settings["data-dir"] = _absolute(data_dir)
        task_name = config.table["task"]["name"]
        if ":" in task_name:
            settings["task"] = task_name
        run_simulation(
            app,
            _simulated_client_app(settings),
            len(config.load_task(data_dir).clients),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    if errors:
        raise errors[0]
    return _read_summary(folder)


def _simulated_client_app(settings: Mapping[str, str]) -> ClientApp:
    """Return our client app for the nodes of Flower's simulation engine.

    Such a node is told its partition only; the other settings of a node are added here.
    """

    def add_settings(
        message: Message, context: Context, answer: Callable[[Message, Context], Message]
    ) -> Message:
        context.node_config.update(settings)
        return answer(message, context)

    app = ClientApp(mods=[client.seal, add_settings])
    app.query()(client.hello)
    app.train()(client.task)
    app.evaluate()(client.evaluate)
    return app


def _write_experiment(folder: Path, config: Config) -> Path:
    path = folder / "experiment.toml"
    path.write_text(tomli_w.dumps(without_none(config.table)), "utf-8")
    return path


def _absolute(path: Path | None) -> str:
    """Return an absolute path for another process, empty for None."""
    if path is None:
        return ""
    return str(path.resolve())


def _read_summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / SUMMARY).read_text("utf-8")))


def join(
    address: str,
    node: client.Node,
    *,
    ca: Path | None,
    key: Path | None,
    plain: bool,
    warm: bool,
) -> None:
    """Be a client until the study has ended; one that was interrupted may be resumed.

    Args:
        address: Host:port of the SuperLink.
        node: Which client this is, and what it will run.
        ca: Certificate of the authority that signed the server's certificate.
        key: Private key of the node.
        plain: Whether to connect without encryption.
        warm: Whether this process becomes a warm node, or supervises a stock SuperNode.

    Raises:
        RefusedError: A warm node could not connect.
        DeploymentError: A stock SuperNode could not connect.
    """
    settings = {
        "client-data": node.client_data,
        "task": node.task,
        "data-dir": node.data_dir,
        "device": node.device,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as folder:
        ended = Path(folder, "ended")
        os.environ[client.ENDED_FILE] = str(ended)  # also for the processes of a SuperNode
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("fedbilevel").setLevel(logging.INFO)
        if warm:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            connection = warm_node.ConnectionSettings(address, ca, key, plain)
            warm_node.run_node(
                connection,
                client.app,
                {"partition-id": node.partition, **given},
                has_ended=ended.exists,
            )
        else:
            command = supernode_command(
                address, node.partition, ca=ca, key=key, plain=plain, settings=given
            )
            _supervise(command, ended.exists)
        print(f"the study has ended: {ended.read_text('utf-8')}")


def _supervise(command: list[str], has_ended: Callable[[], bool]) -> None:
    """Run a stock SuperNode until the study has ended, and restart it whenever it ends.

    It ends when its SuperLink does, and is refused for a while after it was killed. One that has
    never stayed up is given up.
    """
    process: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        if process is not None:
            _terminate(process)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    give_up_at = time.monotonic() + SUPERNODE_TIMEOUT_S
    stayed_up = False
    while True:
        started = time.monotonic()
        process = subprocess.Popen(command, env=process_environment(), stdin=subprocess.DEVNULL)
        while process.poll() is None:
            if has_ended():
                time.sleep(FAREWELL_REPLY_S)
                _terminate(process)
                return
            time.sleep(SUPERNODE_POLL_S)
        stayed_up = stayed_up or time.monotonic() - started > SUPERNODE_STABLE_S
        if not stayed_up and time.monotonic() > give_up_at:
            raise DeploymentError(f"the SuperNode ends at once, with code {process.returncode}")
        time.sleep(warm_node.RECONNECT_S)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
