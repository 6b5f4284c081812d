"""Flower's processes: a SuperLink with our server on it, and nodes, started and stopped together.

Only Flower's own commands are used; docs/deploy.md does the same by hand.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import tomli_w

from fedbilevel.core import checks
from fedbilevel.deploy.flower.keys import CA, CLIENTS, SERVER, SERVER_KEY, check_server

log = logging.getLogger("fedbilevel")  # not that of a module that imports PyTorch

LOOPBACK = ("127.0.0.1", "::1", "localhost")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
MAX_RESTARTS = 3  # of a node on this machine
CONNECTION = "fedbilevel"  # name of the SuperLink in Flower's configuration
SERVER_APP = "fedbilevel.deploy.flower.app:app"
APP_PYPROJECT = f"""
[project]
name = "fedbilevel-app"
version = "1.0.0"
description = "Names modules of the installed package and holds no code"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "{SERVER_APP}"
clientapp = "fedbilevel.deploy.flower.client:app"

[tool.flwr.app.config]
experiment = "digits"
out = "runs/flower"
clients = 0
resume = false
data-dir = ""
report = ""
launcher = 0
value = ""
"""


class DeploymentError(OSError):
    """A process of a deployment failed; the text is one sentence that says which and why."""


class Deployment:
    """A SuperLink, the server on it, and nodes on this machine.

    It is a context manager: leaving it stops every process that was started in it.

    Args:
        host: Where the SuperLink listens; "0.0.0.0" is everywhere.
        port: Its port. None: a free one.
        keys: A folder made by `fedbilevel keys`. With it, connections are encrypted and nodes need
            a registered key. None: neither.

    Attributes:
        folder: Temporary folder with Flower's state and the logs of the processes.
        processes: The processes that were started, by name.
        nodes: The commands of the nodes among them, by name.

    Raises:
        FileNotFoundError: The folder of keys is incomplete.
        ValueError: The certificate of the server, or that of the authority, has expired.

    Examples:
        >>> with Deployment() as deployment:  # doctest: +SKIP
        ...     deployment.start_superlink()
        ...     report = deployment.submit(experiment="digits", out="runs/real", clients=2)
        ...     deployment.start_node(0)
        ...     deployment.start_node(1)
        ...     while "status" not in read_report(report):
        ...         deployment.check_processes()
        ...         time.sleep(1)
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int | None = None, keys: Path | None = None
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self.keys = keys
        if keys is not None:
            self.keys = keys.resolve()
            for name in (CA, SERVER, SERVER_KEY):
                if not (self.keys / name).is_file():
                    raise FileNotFoundError(
                        f"{self.keys} has no {name}; `fedbilevel keys {self.keys}` makes one"
                    )
            check_server(self.keys)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: dict[str, Sequence[object]] = {}
        self.restarts: Counter[str] = Counter()

    @property
    def address(self) -> str:
        """Where nodes on this machine, and our own commands, reach the SuperLink."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        if ":" in host:
            return f"[{host}]:{self.port}"
        return f"{host}:{self.port}"

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="fedbilevel-"))
        connection: dict[str, object] = {"address": self.address}
        if self.keys is not None:
            connection["root-certificates"] = str(self.keys / CA)
        else:
            connection["insecure"] = True
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        home = self.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(tomli_w.dumps(config), "utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes.values()):  # the SuperLink last
            stop_process(process)
        # A server outlives its SuperLink by some seconds. Where there is no /proc to make sure that
        # its process id was not reused, it is left to end by itself.
        for report in self.folder.glob("report-*.json"):
            pid = read_report(report).get("pid", 0)
            with suppress(OSError):
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the processes."""
        return {**process_environment(), "FLWR_HOME": str(self.folder / "home")}

    def start_process(self, name: str, command: Sequence[object]) -> subprocess.Popen[bytes]:
        """Start a process of this deployment.

        On Linux it ends when this process dies, however that dies; elsewhere only when the
        deployment is left.

        Args:
            name: Name in `processes`, and of the file to which its output goes.
            command: The command and its arguments.

        Returns:
            The process.

        Raises:
            DeploymentError: This is not a POSIX system, whose process groups are needed.
        """
        if os.name != "posix":
            raise DeploymentError(
                f"a deployment needs the process groups of POSIX, which {sys.platform} lacks; "
                "start Flower's own commands by hand (docs/deploy.md)"
            )
        die_with_parent: Callable[[], None] | None = None
        if sys.platform == "linux":
            die_with_parent = _die_with_parent
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process only, which stops the others
                preexec_fn=die_with_parent,
            )
        self.processes[name] = process
        return process

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink, wait until it answers, and register the keys of the clients.

        Returns:
            The process.

        Raises:
            DeploymentError: It does not answer, or its certificate is not valid for its address.
        """
        command: list[object] = [flower_command("flower-superlink")]
        command += ["--host", self.host, "--port", self.port]
        command += ["--disable-runtime-dependency-installation"]
        if self.keys is not None:
            command += ["--ssl-ca-certfile", self.keys / CA]
            command += ["--ssl-certfile", self.keys / SERVER]
            command += ["--ssl-keyfile", self.keys / SERVER_KEY, "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        process = self.start_process("superlink", command)
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._superlink_answers():
            if process.poll() is not None or time.monotonic() > give_up_at:
                reason = self.last_log_line("superlink")
                raise DeploymentError(f"the SuperLink did not start: {reason}")
            time.sleep(0.1)
        if self.keys is not None:
            for key in sorted((self.keys / CLIENTS).glob("*.pub")):
                self.flwr("supernode", "register", key, CONNECTION, "--name", key.stem)
        return process

    def _superlink_answers(self) -> bool:
        url = f"http://{self.address}/health"
        context = None
        if self.keys is not None:
            url = f"https://{self.address}/health"
            context = ssl.create_default_context(cafile=self.keys / CA)
        try:
            with urllib.request.urlopen(url, timeout=5, context=context):
                return True
        except OSError as error:
            reason = getattr(error, "reason", None)
            if self.keys is not None and isinstance(reason, ssl.SSLCertVerificationError):
                raise DeploymentError(
                    f"the SuperLink is at {self.address}, "
                    f"for which {self.keys / SERVER} is not valid ({reason.verify_message})"
                ) from None
            return False

    def flwr(self, *arguments: str | Path) -> str:
        """Run Flower's command `flwr` with these arguments, and return what it prints."""
        done = subprocess.run(
            [flower_command("flwr"), *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            output = " ".join((done.stderr or done.stdout).split())
            command = " ".join(map(str, arguments))
            raise DeploymentError(f"`flwr {command}` failed: {output[-300:]}")
        return done.stdout

    def submit(self, server: str = SERVER_APP, **run_config: object) -> Path:
        """Start a run on the SuperLink.

        Args:
            server: The `ServerApp`, as `module:variable`.
            **run_config: Values for the keys of `[tool.flwr.app.config]` in `APP_PYPROJECT`, with
                underscores for hyphens.

        Returns:
            The file in which the server reports its process id and how the run ended; read it with
            `read_report`.
        """
        report = self.folder / f"report-{time.monotonic_ns()}.json"
        app = self.folder / "app"
        write_app(app, server)
        given = {key.replace("_", "-"): value for key, value in run_config.items()}
        self.flwr(
            "run",
            app,
            CONNECTION,
            "--run-config",
            _key_values(given | {"report": str(report), "launcher": os.getpid()}),
        )
        return report

    def start_node(
        self, partition: int, *, warm: bool = True, options: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a node on this machine with `fedbilevel join`.

        Args:
            partition: Index of the client.
            warm: Whether it is a warm node, or a stock SuperNode.
            options: More options of `fedbilevel join`, without the leading hyphens.

        Returns:
            The process.
        """
        command: list[object] = [sys.executable, "-m", "fedbilevel.cli", "join", self.address]
        command += ["--partition", partition]
        if self.keys is not None:
            key = self.keys / CLIENTS / f"client-{partition}"
            command += ["--ca", self.keys / CA, "--key", key]
        if warm:
            command += ["--warm"]
        for name, value in (options or {}).items():
            command += [f"--{name}", value]
        self.nodes[f"client-{partition}"] = command
        return self.start_process(f"client-{partition}", command)

    def check_processes(self) -> None:
        """Raise a `DeploymentError` if a process that was started has ended before the study."""
        for name, process in self.processes.items():
            ended_with_study = name.startswith("client-") and process.poll() == 0
            if process.poll() is not None and not ended_with_study:
                raise DeploymentError(f"{name} has ended: {self.last_log_line(name)}")

    def restart_nodes(self, needed: int) -> None:
        """Start nodes again that have ended, each `MAX_RESTARTS` times.

        A restarted client is sent the task again that it had when it ended.

        Args:
            needed: How many nodes must be left.

        Raises:
            DeploymentError: Fewer are left, or another process has ended.
        """
        # A node ends with 0 when it has heard that the study has ended.
        ended = [name for name in self.nodes if self.processes[name].poll() not in (None, 0)]
        for name in ended:
            if self.restarts[name] < MAX_RESTARTS:
                self.restarts[name] += 1
                log.warning("%s has ended and is started again: %s", name, self._last_words(name))
                self.start_process(name, self.nodes[name])
            elif len(self.nodes) - 1 >= needed:
                log.warning("%s has ended again; the run goes on without it", name)
                del self.nodes[name]
                del self.processes[name]
        self.check_processes()

    def _last_words(self, name: str) -> str:
        """Say how a process ended."""
        code = self.processes[name].returncode
        if code < 0:
            return f"{signal.Signals(-code).name}"
        return self.last_log_line(name)

    def last_log_line(self, name: str) -> str:
        """Return the last line that a process printed."""
        path = self.folder / f"{name}.log"
        if path.exists():
            for line in reversed(path.read_text("utf-8", "replace").split("\n")):
                if line.strip():
                    return line.strip()
        return "it printed nothing"


def supernode_command(
    address: str,
    partition: int,
    *,
    ca: Path | None,
    key: Path | None,
    plain: bool,
    settings: Mapping[str, str],
) -> list[str]:
    """Return the command that starts a stock SuperNode.

    Args:
        address: Host:port of the SuperLink.
        partition: Index of the client.
        ca: Certificate of the authority that signed the server's certificate.
        key: Private key of the node.
        plain: Whether to connect without encryption.
        settings: More of `client.NODE_CONFIG`.

    Returns:
        The command and its arguments.
    """
    command = [flower_command("flower-supernode"), "--superlink", address]
    command += ["--port", str(free_port()), "--max-retries", "10"]
    if plain:
        command += ["--insecure"]
    elif ca is not None:
        command += ["--root-certificates", str(ca)]
    if key is not None:
        command += ["--auth-supernode-private-key", str(key)]
    return [*command, "--node-config", _key_values({"partition-id": partition, **settings})]


def write_app(folder: Path, server: str = SERVER_APP) -> None:
    """Write the app folder that `flwr run` needs: one `pyproject.toml` that names our modules.

    Args:
        folder: Where to write; created if it does not exist.
        server: The `ServerApp`, as `module:variable`.
    """
    folder.mkdir(exist_ok=True)
    text = APP_PYPROJECT.replace(SERVER_APP, server)
    (folder / "pyproject.toml").write_text(text, "utf-8")


def check_encryption(host: str, secured: bool, plain: bool) -> None:
    """Refuse connections that leave this machine unencrypted, unless that is asked for.

    Args:
        host: Where the SuperLink is.
        secured: Whether certificates or keys are given.
        plain: Whether an unencrypted connection is asked for.

    Raises:
        ValueError: Neither holds, and the host is not this machine.
    """
    if not secured and not plain and host not in LOOPBACK:
        raise ValueError(
            f"the address is {host!r} and no keys are given; give the keys of `fedbilevel keys`, "
            "or --plain for connections that anyone on the way can read and forge"
        )


def read_report(path: Path) -> dict[str, Any]:
    """Read the report of a server (see `Deployment.submit`); empty if there is none yet."""
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text("utf-8")))
    return {}


def is_running(pid: int) -> bool:
    """Return whether a process exists and, where /proc tells, is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)  # no signal is sent, but the process must exist
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def stop_process(process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop a process and its process group: with SIGTERM, and after the timeout with SIGKILL."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def flower_command(name: str) -> str:
    """Return the path of one of Flower's commands, preferably in the environment of this Python."""
    path = shutil.which(name, path=process_environment()["PATH"])
    if path is None:
        raise DeploymentError(
            f"{name} is not installed; `pip install 'fedbilevel[flower]'` installs it"
        )
    return path


def process_environment() -> dict[str, str]:
    """Return the environment variables for Flower's processes, with its commands on the path."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def free_port() -> int:
    """Return a port of this machine on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into its parts; an IPv6 host is in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address is {address!r}; it must be host:port")
    return host.strip("[]"), checks.integer("port", int(port), least=1, most=65535)


def _key_values(values: Mapping[str, object]) -> str:
    """Format values as Flower's commands want them: key=value with spaces between, in TOML."""
    parts = []
    for key, value in values.items():
        text = tomli_w.dumps({"value": value}).partition("=")[2].strip()
        parts.append(f"{key}={text}")
    return " ".join(parts)


def _die_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent dies; runs between fork and exec."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
