"""The list of commands, and `main`, which runs one of them and explains errors."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from fedbilevel import __version__, configure_process
from fedbilevel.cli.advise import advise
from fedbilevel.cli.check import check
from fedbilevel.cli.compare import compare
from fedbilevel.cli.demo import demo
from fedbilevel.cli.listing import list_
from fedbilevel.cli.report import export, report
from fedbilevel.cli.run import run
from fedbilevel.cli.serve import join, keys, serve
from fedbilevel.cli.state import state
from fedbilevel.cli.tune import tune
from fedbilevel.cli.value import value
from fedbilevel.core import checks
from fedbilevel.core.extras import EXTRA_OF, missing_package

# Each command with the arguments of its example.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "demo": (demo, "--seed 1"),
    "run": (run, "digits --algorithm la-asfbo --set algorithm.lr_x=0.02 --out runs/first"),
    "compare": (compare, "digits --algorithms simfbo,la-asfbo --seeds 5 --out runs/digits"),
    "tune": (tune, "digits --algorithm simfbo --trials 8 --rounds 50 --out runs/tune"),
    "check": (check, "digits --set data.partition=iid"),
    "advise": (advise, "digits --goal bytes"),
    "value": (value, "sites --leave-one-out --figure sites.pdf"),
    "report": (report, "runs/digits --figure digits.pdf"),
    "export": (export, "runs/first --out model.safetensors"),
    "list": (list_, "algorithms --verbose"),
    "serve": (serve, "digits --clients 3 --host 0.0.0.0 --keys keys --out runs/real"),
    "join": (join, "10.0.0.1:8000 --partition 0 --client-data hospital:load --ca ca.crt ..."),
    "keys": (keys, "keys --clients 3 --host fl.example.org"),
    "state": (state, "--remove --older-than 30"),
}


class Command(TyperCommand):
    """A command whose help shows every text, whichever releases of typer and click are installed.

    Flower pins typer below 0.21, where click 8.5 drops the texts of arguments, and where brackets
    are escaped for Rich, which does not print this help.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        hints = get_type_hints(COMMANDS[str(name)][0], include_extras=True)
        for parameter in self.params:
            if not parameter.help:
                (information,) = hints[str(parameter.name)].__metadata__
                parameter.help = information.help

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: typer writes arguments together with the options."""

    def get_help(self, ctx: Any) -> str:
        """Return the help, with its brackets as they are."""
        return super().get_help(ctx).replace("\\[", "[")


app = typer.Typer(
    name="fedbilevel",
    help="Federated bilevel optimization: run algorithms, compare them, report what they cost.",
    epilog="Example: fedbilevel compare digits --out runs/digits",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _name, (_command, _example) in COMMANDS.items():
    app.command(_name, cls=Command, epilog=f"Example: fedbilevel {_name} {_example}")(_command)

# The base of all usage errors: click's, or that of newer releases of typer, which bring their own.
ClickException: Any = typer.BadParameter.mro()[2]


def main(arguments: list[str] | None = None) -> None:
    """Run a command, and exit with its exit code.

    An error is printed as one line on stderr, with exit code 2. With FEDBILEVEL_DEBUG=1 it is
    raised instead, which shows the traceback.

    Args:
        arguments: The command and its arguments. None: those of this process.
    """
    configure_process()
    atexit.register(gc.freeze)  # what is left of PyTorch need not be traversed before it is freed
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        sys.exit(_built_command().main(arguments or ["--help"], standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if os.environ.get("FEDBILEVEL_DEBUG"):
            raise
        if _is_first_process():
            sys.stderr.write(f"error: {checks.one_line(_explain(error))}\n")
        sys.exit(2)


@functools.cache  # for processes that call `main` again and again, tests above all
def _built_command() -> Any:
    return typer.main.get_command(app)


def _is_first_process() -> bool:
    """Whether this is the process of `torchrun` that prints, or `torchrun` has not started it."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def _explain(error: Exception) -> str:
    explained: list[type[Exception]] = [ValueError, TypeError, OSError]
    # This does not import PyTorch: a ClientError can only come from a module that is imported.
    federation = sys.modules.get("fedbilevel.federation")
    if federation is not None:
        explained.append(federation.ClientError)
    if isinstance(error, ClickException):
        return _explain_usage(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in EXTRA_OF:
            return missing_package(package, error, EXTRA_OF[package])
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, tuple(explained)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (FEDBILEVEL_DEBUG=1 shows where)"


def _explain_usage(error: Any) -> str:
    """Say what a missing argument is; keep one suggestion, because click and typer both make it."""
    text, *suggestions = str(error.format_message()).split(" Did you mean")
    parameter = getattr(error, "param", None)
    if suggestions:
        return f"{text} Did you mean{suggestions[0]}"
    if text.startswith("Missing") and parameter is not None:
        return f"{text} {parameter.help or ''}"
    return text


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedbilevel {__version__}")
        raise typer.Exit


@app.callback()
def _check_processes(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and context.invoked_subcommand != "run":
        if not _is_first_process():
            raise typer.Exit(2)
        raise ValueError(
            f"torchrun has started {processes} processes, but only `fedbilevel run` can use "
            f"several, not `fedbilevel {context.invoked_subcommand}`"
        )
