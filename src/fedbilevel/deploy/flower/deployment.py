"""Flower's processes: a SuperLink with our server on it, and nodes; started, watched and ended together.

Only Flower's own commands are used, so that everything here can also be done by hand (docs/deploy.md).
"""

from __future__ import annotations

import ctypes
import json
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import tomli_w

from fedbilevel.core import checks
from fedbilevel.deploy.flower.keys import CA, CLIENTS, SERVER, SERVER_KEY

LOOPBACK = ("127.0.0.1", "::1", "localhost")
START_S = 60.0
CONNECTION = "fedbilevel"
SERVER_APP = "fedbilevel.deploy.flower.app:app"
APP = f"""
[project]
name = "fedbilevel-app"
version = "1.0.0"
description = "Modules of the installed package; no code of its own"
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
"""


class DeploymentError(OSError):
    """A process that did not do its part, in one sentence."""


class Deployment:
    """A SuperLink and what belongs to it; leaving the context ends every process that was started in it.

    keys: a folder made by `fedbilevel keys`; with it connections are encrypted and nodes need a key of their own.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int | None = None, keys: Path | None = None
    ) -> None:
        self.host, self.port, self.keys = host, port or free_port(), keys and keys.resolve()
        if self.keys:
            for name in (CA, SERVER, SERVER_KEY):
                if not (self.keys / name).is_file():
                    raise FileNotFoundError(
                        f"{self.keys} has no {name}; `fedbilevel keys {self.keys}` makes one"
                    )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """Where nodes on this machine and our own commands find the SuperLink."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="fedbilevel-"))
        (self.folder / "home").mkdir()
        trust = {"root-certificates": str(self.keys / CA)} if self.keys else {"insecure": True}
        connection = {"address": self.address, **trust}
        superlink = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        (self.folder / "home/config.toml").write_text(tomli_w.dumps(superlink), "utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes.values()):  # the SuperLink last
            end(process)
        for report in self.folder.glob(
            "report-*.json"
        ):  # a server outlives its SuperLink by some seconds
            pid = read_report(report).get("pid", 0)
            with suppress(OSError):
                if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        return {**surroundings(), "FLWR_HOME": str(self.folder / "home")}

    def start(self, name: str, command: Sequence[Any]) -> subprocess.Popen[bytes]:
        """A process of this deployment; what it prints goes to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(map(str, command)),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us to pass on
                preexec_fn=_die_with_parent,
            )
        self.processes[name] = process
        return process

    def superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink and wait until it answers."""
        command: list[Any] = [tool("flower-superlink"), "--host", self.host, "--port", self.port]
        command += ["--disable-runtime-dependency-installation"]
        if self.keys:
            command += ["--ssl-ca-certfile", self.keys / CA, "--ssl-certfile", self.keys / SERVER]
            command += ["--ssl-keyfile", self.keys / SERVER_KEY, "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        process = self.start("superlink", command)
        trust = ssl.create_default_context(cafile=self.keys / CA) if self.keys else None
        url = f"http{'s' if self.keys else ''}://{self.address}/health"
        until = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5, context=trust):
                    break
            except OSError as error:
                if isinstance(
                    reason := getattr(error, "reason", None), ssl.SSLCertVerificationError
                ):
                    why = f"{self.keys / SERVER} is not for it ({reason.verify_message})"  # type: ignore[operator]
                    raise DeploymentError(
                        f"the SuperLink is at {self.address}, but {why}"
                    ) from None
            if process.poll() is not None or time.monotonic() > until:
                raise DeploymentError(f"the SuperLink did not start: {self.last_line('superlink')}")
            time.sleep(0.1)
        for key in sorted((self.keys / CLIENTS).glob("*.pub")) if self.keys else ():
            self.flwr("supernode", "register", key, CONNECTION, "--name", key.stem)
        return process

    def flwr(self, *arguments: str | Path) -> str:
        command = [tool("flwr"), *map(str, arguments)]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise DeploymentError(f"`flwr {' '.join(map(str, arguments))}` failed: {said[-300:]}")
        return done.stdout

    def submit(self, server: str = SERVER_APP, **job: Any) -> Path:
        """Start a run on the SuperLink; returns the file in which the server will report."""
        report = self.folder / f"report-{time.monotonic_ns()}.json"
        app = self.folder / "app"
        write_app(app, server)
        given = " ".join(
            f"{key.replace('_', '-')}={_toml(value)}"
            for key, value in {**job, "report": str(report)}.items()
        )
        self.flwr("run", app, CONNECTION, "--run-config", given)
        return report

    def node(
        self, partition: int, *, warm: bool = True, options: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A node on this machine, as `fedbilevel join` starts one."""
        command = [
            sys.executable,
            "-m",
            "fedbilevel.cli",
            "join",
            self.address,
            "--partition",
            partition,
        ]
        command += (
            ["--ca", self.keys / CA, "--key", self.keys / CLIENTS / f"client-{partition}"]
            if self.keys
            else []
        )
        command += ["--warm"] if warm else []
        command += [part for key, value in (options or {}).items() for part in (f"--{key}", value)]
        return self.start(f"client-{partition}", list(map(str, command)))

    def check(self) -> None:
        """Whether everything that was started is still up."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise DeploymentError(f"{name} has ended: {self.last_line(name)}")

    def last_line(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
        return next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )


def node_command(
    address: str,
    partition: int,
    *,
    ca: Path | None,
    key: Path | None,
    plain: bool,
    settings: Mapping[str, str],
) -> list[str]:
    """Flower's own command for a stock SuperNode."""
    command = [
        tool("flower-supernode"),
        "--superlink",
        address,
        "--port",
        str(free_port()),
        "--max-retries",
        "10",
    ]
    command += ["--insecure"] if plain else ["--root-certificates", str(ca)] if ca else []
    command += ["--auth-supernode-private-key", str(key)] if key else []
    given = {"partition-id": partition, **settings}
    return [
        *command,
        "--node-config",
        " ".join(f"{name}={_toml(value)}" for name, value in given.items()),
    ]


def write_app(folder: Path, server: str = SERVER_APP) -> None:
    """The folder that `flwr run` wants."""
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(APP.replace(SERVER_APP, server), "utf-8")


def check_plain(host: str, secured: bool, plain: bool) -> None:
    """Connections that leave the machine are encrypted unless one says otherwise."""
    if not secured and not plain and host not in LOOPBACK:
        raise ValueError(
            f"the address is {host!r} and no keys are given; give what `fedbilevel keys` makes, "
            "or --plain for connections that anyone on the way can read and forge"
        )


def read_report(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text("utf-8")))
    return {}


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end(process: subprocess.Popen[bytes], patience_s: float = 5.0) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tool(name: str) -> str:
    """One of Flower's commands, from the environment we run in."""
    here = Path(sys.executable).parent / name
    found = str(here) if here.exists() else shutil.which(name)
    if found is None:
        raise DeploymentError(
            f"{name} is not installed; `pip install 'fedbilevel[flower]'` brings it"
        )
    return found


def surroundings() -> dict[str, str]:
    """What Flower's processes find around them: above all its own commands."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address is {address!r}; it must be host:port")
    return host.strip("[]"), checks.integer("port", int(port), least=1, most=65535)


def _toml(value: Any) -> str:
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()


def _die_with_parent() -> None:
    """Linux sends this process SIGTERM when the one that started it dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
