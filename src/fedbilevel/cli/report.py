"""`fedbilevel report` and `fedbilevel export`: what finished runs have to show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli.options import called_command


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Run folders, folders that hold some, or files of curves (.csv.xz)."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figure: Annotated[
        Path | None, typer.Option(help="Also write a figure for a paper: .pdf or .png.")
    ] = None,
) -> None:
    """Write a self-contained page about runs, and a figure."""
    from fedbilevel.report import write_figure, write_page

    _check_target("--out", out)
    if figure:  # first, because it may be refused for its type
        _check_target("--figure", figure)
        write_figure(folders, figure)
    write_page(folders, out, called_command())
    print(f"page: {out}")
    if figure:
        print(f"figure: {figure}")


def _check_target(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before another one is."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}; it must be a file in a folder that exists")


def export(
    folder: Annotated[
        Path,
        typer.Argument(help="A run folder; of a node, what `fedbilevel state` lists of the run."),
    ],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    client: Annotated[
        int | None,
        typer.Option(help="The client whose own model to write; by default the server's."),
    ] = None,
) -> None:
    """Write the trained module of a run, or a client's, as a file.

    In a real federation a client's own model is on its node, and is written there.
    """
    from safetensors.torch import save

    from fedbilevel.runs.folder import node_model
    from fedbilevel.runs.load import load_run

    _check_target("--out", out)
    if out.suffix != ".safetensors":
        raise ValueError(
            f"--out is {out}; the file is of safetensors, so it must end in .safetensors"
        )
    if client is not None and node_model(folder, client).is_file():
        out.write_bytes(node_model(folder, client).read_bytes())
    else:
        out.write_bytes(save(load_run(folder).state_dict(client)))
    print(f"written: {out}")
