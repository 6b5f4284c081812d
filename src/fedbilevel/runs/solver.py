"""`solve`: run an algorithm on a problem and its clients, in one call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel import algorithms
from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks, devices, ranks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.problem import Problem
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.runs.callbacks import Callback
from fedbilevel.runs.clients import EvaluateClient
from fedbilevel.runs.metric import Metric, Metrics
from fedbilevel.runs.result import Result
from fedbilevel.runs.run import Evaluate, Run
from fedbilevel.runs.simulation import simulated_federation

log = logging.getLogger("fedbilevel")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `fb.solve`; it ends a loop around it, as any `KeyboardInterrupt` does.

    Args:
        result: The outcome up to the last finished iteration, with the status "interrupted".

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> try:
        ...     result = fb.solve(task.problem, task.clients, "simfbo", rounds=5)
        ... except fb.Interrupted as interrupted:
        ...     result = interrupted.result
        >>> result.status
        'completed'
    """

    def __init__(self, result: Result) -> None:
        super().__init__(result.reason)
        self.result = result


def solve(
    problem: Problem,
    clients: Sequence[ClientData],
    algorithm: str | Algorithm | None = None,
    *,
    rounds: int,
    environment: Environment | None = None,
    weights: str | Sequence[float] = "uniform",
    seed: int = 0,
    device: str = "cpu",
    federation: Federation | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    every: int = 1,
    evaluate_client: EvaluateClient | None = None,
    metric: Metric | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | Sequence[str] = (),
    progress: bool | None = None,
) -> Result:
    """Solve a federated bilevel problem.

    With client weights p_i and the clients' losses f_i and g_i, the problem is

        min_x F(x, y*(x))   with   y*(x) = argmin_y G(x, y),
        F = sum_i p_i f_i   and   G = sum_i p_i g_i.

    Args:
        problem: The two losses f and g, and where x and y start.
        clients: The data of each client.
        algorithm: The name of a registered algorithm, which then has its default settings, or an
            algorithm such as `fb.algorithms.SimFBO(lr_x=0.1)`; "simfbo" by default.
        rounds: The budget of communication rounds; no iteration starts once it is reached.
        environment: The conditions under which clients take part: participation, local steps, batch
            size, delays and so on. By default all clients take part in each round, with one local
            step on all of their data.
        weights: The weights p_i: "uniform", "samples" (in proportion to the training samples), or
            one number per client.
        seed: The seed of all random draws; a run with the same seed repeats exactly.
        device: "cpu", "cuda", "cuda:N", or "auto" for a GPU if there is one.
        federation: The federation to use instead of a simulated one. `environment`, `weights`,
            `seed` and `device` are those of the federation then, and `environment` must not be
            given.
        out: A folder in which the run is recorded: metrics, checkpoint and summary. `fb.load_run`
            reads it.
        resume: Whether to resume the run in `out`, if there is one, from its last checkpoint.
        evaluate: A function of x and y that returns numbers by name, which are added to the
            metrics.
        every: The number of rounds between two evaluations. There is one at the start, one after
            the first iteration that reaches another multiple of `every`, and one at the end.
        evaluate_client: A function of one client's own x and y and of its number that returns
            numbers by name. Their mean over clients is added to the metrics under that name, and
            what else is known of their distribution under "name_median", "name_worst", "name_p10"
            and "name_spread"; see `fedbilevel.runs.clients`.
        metric: The metric that the run is judged by, such as `fb.Metric("rmse", "minimize")`; by
            default the test accuracy if it is measured, else the upper loss.
        callbacks: What is called after each iteration and each evaluation, such as
            `fb.callbacks.EarlyStopping(patience=5)`.
        track: Experiment trackers that get all metrics: "tensorboard", "mlflow", "wandb", or
            several of them. They need the extra `track`.
        progress: Whether to show a bar; by default on a terminal and in a notebook.

    Returns:
        The final x and y, the metrics of each evaluation, and how the run ended.

    Raises:
        ValueError: If an argument has a wrong value, if arguments contradict each other, or if the
            algorithm does not solve such a problem.
        TypeError: If an argument has a wrong type.
        FileExistsError: If `out` holds a run and `resume` is false.
        ClientError: If a loss fails on a client's data; the message names the client.
        Interrupted: If the user presses Ctrl-C. It is a `KeyboardInterrupt`, and its `result` holds
            x and y after the last finished iteration. In a notebook, `solve` returns that result
            instead, and the next `solve` of the same cell raises, so that a loop ends.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> environment = fb.Environment(participation=2, local_steps=3)
        >>> result = fb.solve(
        ...     task.problem, task.clients, "simfbo", rounds=10, environment=environment, every=5
        ... )
        >>> result.status
        'completed'
        >>> [metrics["round"] for metrics in result.history]
        [0, 5, 10]
    """
    if resume and out is None:
        raise ValueError("resume is True but out is not given; out names the folder of the run")
    _raise_in_interrupted_cell()
    checks.instance("problem", problem, Problem)
    if isinstance(algorithm, str):
        method = algorithms.get(algorithm)()
    else:
        method = algorithm or algorithms.SimFBO()
        checks.instance("algorithm", method, Algorithm)  # type: ignore[type-abstract]
    if federation is None:
        device = ranks.local_device(devices.resolve_device(device))
        federation = simulated_federation(
            problem.to(device), clients, environment, weights=weights, seed=seed, device=device
        )
    elif environment is not None:
        raise ValueError("federation is given and so is environment; a federation has its own")
    checks.integer("rounds", rounds, least=0)
    checks.integer("every", every, least=1)
    run = Run(
        method,
        federation,
        {"rounds": rounds},
        evaluate,
        {"rounds": every},
        evaluate_client=evaluate_client,
        metric=metric,
        callbacks=callbacks,
    )
    folder = None
    if out is not None:
        folder = Path(out)
    if track:
        from fedbilevel.runs.track import trackers  # needs more packages than PyTorch

        run.callbacks += trackers(track, folder, _description(run))
    if progress is not False:
        _add_progress(run, progress)
    evaluations: Iterable[Metrics] = run
    if folder is not None:
        from fedbilevel.runs.recorder import Recorder  # needs more packages than PyTorch

        evaluations = Recorder(run, folder, _description(run), resume)
    for _ in evaluations:
        pass
    if run.status == "interrupted" and not _returns_in_notebook(run.result):
        raise Interrupted(run.result)
    return run.result


def _add_progress(run: Run, wanted: bool | None) -> None:
    """Add a bar if it is wanted, or if somebody may be looking."""
    try:
        from fedbilevel.runs.progress import ShowProgress, is_interactive
    except ImportError:  # without rich, a simulation runs all the same
        if wanted:
            raise
        return
    if wanted or is_interactive():
        run.callbacks.append(ShowProgress())


# The notebook's cell, by its number, in which `solve` was interrupted last.
_interrupted_cell: int | None = None


def _current_cell() -> int | None:
    """Return the number of the notebook's cell that is running, `None` outside of notebooks."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell: Any = ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return int(shell.execution_count)


def _returns_in_notebook(result: Result) -> bool:
    """Whether an interrupted result is returned, because this is a notebook; it is said then."""
    global _interrupted_cell
    _interrupted_cell = _current_cell()
    if _interrupted_cell is None:
        return False
    log.warning("%s; the result holds what is there", result.reason)
    return True


def _raise_in_interrupted_cell() -> None:
    """End a loop of a notebook's cell in which an earlier `solve` was interrupted."""
    if _interrupted_cell is not None and _interrupted_cell == _current_cell():
        raise KeyboardInterrupt("an earlier solve of this cell was interrupted")


def _description(run: Run) -> dict[str, object]:
    """Describe a run that was started from Python, for config.toml.

    The losses of such a run are Python functions, so its config.toml cannot start it again.
    """
    fed = run.fed
    device = fed.device
    if ranks.size() > 1:
        device = device.split(":")[0]  # each rank has its own number
    return {
        "title": "started from Python",
        "task": {"name": "python"},
        "algorithm": {"name": run.algorithm.name, **_settings_table(run.algorithm)},
        "environment": _settings_table(fed.environment),
        "rounds": run.limits["rounds"],
        "every": run.every,
        "seed": fed.seed,
        "device": device,
        "runtime": dict(fed.runtime),
    }


def _settings_table(settings: object) -> dict[str, object]:
    """Return the fields of a dataclass as TOML can hold them."""
    table: dict[str, object] = {}
    for name, value in vars(settings).items():
        if isinstance(value, (list, tuple)):
            table[name] = [_plain(entry) for entry in value]
        else:
            table[name] = _plain(value)
    return table


def _plain(value: object) -> object:
    """Return a plain value as it is, and anything else, such as a schedule, as its `repr`."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return repr(value)
