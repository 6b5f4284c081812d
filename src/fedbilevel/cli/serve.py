"""`fedbilevel serve`, `join` and `keys`: federations over several machines."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides
from fedbilevel.cli.run import default_folder, finish, resolve_run


def serve(
    experiment: options.ExperimentName,
    clients: options.Clients = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the SuperLink.")] = 8000,
    keys: options.Keys = None,
    plain: options.Plain = False,
    algorithm: options.AlgorithmName = None,
    rounds: options.Rounds = None,
    seed: options.Seed = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    out: options.RunFolder = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out, if there is one.")
    ] = False,
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Run an experiment with clients on other machines.

    It starts a Flower SuperLink and our server on it.
    """
    from fedbilevel.deploy.flower.deployment import LOOPBACK, Deployment, check_encryption

    check_encryption(host, keys is not None, plain)
    title, config = resolve_run(
        experiment,
        clients,
        algorithm=algorithm,
        settings=set_,
        overrides=given_overrides(rounds=rounds, seed=seed),
    )

    from fedbilevel.cli import federation  # after what may be refused without PyTorch

    folder = out or default_folder(title)
    if host not in LOOPBACK:
        logging.getLogger("fedbilevel").warning(
            "whoever reaches port %d can submit code to this SuperLink: "
            "keep it behind a proxy (docs/deploy.md)",
            port,
        )
    summary = federation.serve(
        config,
        title,
        folder,
        deployment=Deployment(host, port, keys),
        clients=clients,
        resume=resume,
        data_dir=data_dir,
        quiet=quiet or json_,
    )
    finish(summary, folder, quiet, json_)


def join(
    address: Annotated[str, typer.Argument(help="host:port of the SuperLink.")],
    partition: Annotated[int, typer.Option(min=0, help="Number of this client, counted from 0.")],
    client_data: Annotated[
        str | None,
        typer.Option(
            help="module:function(partition) -> ClientData; by default the task loads its own data."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="The one task, as module:function, that the experiment may name."),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option("--warm", help="Keep one process up, for tasks that take less than seconds."),
    ] = False,
    ca: Annotated[
        Path | None,
        typer.Option(help="Certificate of the authority that signed the server's certificate."),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of this client.")] = None,
    plain: options.Plain = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "cpu",
    data_dir: options.DataDir = None,
) -> None:
    """Be a client of a federation; its data stays here."""
    from fedbilevel.deploy.flower.deployment import check_encryption, split_address

    host, _ = split_address(address)
    encrypted = ca is not None or key is not None
    check_encryption(host, encrypted, plain)

    from fedbilevel.cli import federation  # after what may be refused without PyTorch
    from fedbilevel.deploy.flower.client import Node
    from fedbilevel.experiments.parts import import_function

    if client_data:
        import_function("client-data", client_data)  # an error shows here, not in round 1
    data_folder = None
    if data_dir:
        data_folder = str(data_dir)
    node = Node(partition, client_data, task, data_folder, device)
    federation.join(address, node, ca=ca, key=key, plain=not encrypted, warm=warm)


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; files that exist are kept.")],
    clients: Annotated[int, typer.Option(min=0, help="How many clients should have a key.")] = 0,
    host: Annotated[
        list[str],
        typer.Option(help="Name or address by which clients reach the server; can be repeated."),
    ] = ["127.0.0.1", "localhost"],  # noqa: B006  (typer expects a list)
    days: Annotated[int, typer.Option(min=1, help="For how long certificates are valid.")] = 365,
) -> None:
    """Make certificates for a server and a key for every client.

    It prints the files that it has written. Delete a certificate or a key and run it again to
    renew or revoke it.
    """
    from fedbilevel.deploy.flower.keys import CA, SERVER, expiry, make

    for path in make(folder, clients, host, days):
        until = ""
        if path.name in (CA, SERVER):
            until = f" (valid until {expiry(path):%Y-%m-%d})"
        print(f"{path}{until}")
