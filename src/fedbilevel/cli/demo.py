"""`fedbilevel demo`: which of six sites spoil a model, what that costs, what weights win back."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli import options

if TYPE_CHECKING:
    from fedbilevel.algorithms import Algorithm
    from fedbilevel.core.client_data import ClientData
    from fedbilevel.tasks.sites import Sites

PAGE = "sites.html"
PICTURE = "sites.png"


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Which sites are bad, and who is trusted.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the page and the picture.")] = Path(
        "runs/demo"
    ),
    quiet: options.Quiet = False,
) -> None:
    """Show which of six real sites spoil a model, and repair it.

    The data are those of the RAND Health Insurance Experiment: did a person see a physician in a
    year? At two of the six sites, 40% of the answers in the training data are flipped.
    """
    from fedbilevel.experiments import config as configs

    source, table = configs.read("sites")
    overrides = {"seed": seed}
    learning = configs.resolve(source, table, overrides=overrides)
    averaging = configs.resolve(source, table, algorithm="fedavg", overrides=overrides)

    from fedbilevel import solve, value
    from fedbilevel.core.weighting import WEIGHTS
    from fedbilevel.experiments.runner import load_task
    from fedbilevel.report import write_value_page

    def say(line: str = "") -> None:
        if not quiet:
            print(line, flush=True)

    began = time.monotonic()
    task: Sites = load_task(learning)  # type: ignore[assignment]
    records = sum(client.size("train") for client in task.clients)
    trusted = sum(client.size("val") for client in task.clients)
    say(f"Six sites, {records:,} records of people, did they see a physician? At two sites, 40% of")
    say(f"the answers are flipped. {trusted:,} other samples are trusted. Which sites are bad?")
    say()
    result = value(
        task.problem, task.clients, weights="samples", groups=task.groups, names=task.names
    )
    out.mkdir(parents=True, exist_ok=True)
    result.save_figure(out / PICTURE)
    say(str(result))
    say()
    bad = " and ".join(task.names[site] for site in task.bad)
    say(f"The truth: {bad}. One hypergradient, {time.monotonic() - began:.1f} s so far.")
    say(f"picture: {out / PICTURE}")
    say()

    losses: dict[str, float] = {}
    rounds = learning.experiment.rounds
    assert rounds is not None
    for name, clients in task.baselines.items():
        losses[name] = _test_loss_of_fedavg(task, clients, averaging.algorithm, rounds)
    learnt = solve(
        task.problem,
        task.clients,
        learning.algorithm,
        rounds=rounds,
        weights="samples",
        seed=seed,
        every=rounds,
        evaluate=task.evaluate,
    )
    assert task.evaluate is not None
    losses["learnt weights"] = task.evaluate(learnt.x, task.refit(learnt.x))["test_loss"]
    everyone, alone, clean = task.baselines
    losses = {name: losses[name] for name in (everyone, alone, "learnt weights", clean)}
    say("log loss on people of the test, who were never used:")
    for name, loss in losses.items():
        say(f"  {name:22} {loss:.4f}")
    shown = ", ".join(
        f"{name} {float(w):.2f}" for name, w in zip(task.names, learnt.x[WEIGHTS], strict=True)
    )
    say(f"learnt weights: {shown}")
    gap = losses[everyone] - losses[clean]
    won = (losses[everyone] - losses["learnt weights"]) / gap
    sentence = (
        f"Bad labels cost FedAvg {gap:.4f}; learnt weights (SimFBO) win back {won:.0%} of it. Each "
        "of these models, in the end, is fitted to the trusted samples too."
    )
    say(sentence)
    result.save_figure(out / PICTURE, losses)
    notes = (
        f"Data: RAND Health Insurance Experiment, six sites, {records:,} training records; "
        f"at {bad}, 40% of the answers are flipped. {trusted:,} samples of other people are "
        "trusted.\n\n"
        f"{sentence}\n\nLearnt weights: {shown}.\n\n"
        "The value of a site is how much the loss on trusted samples would rise without it, to "
        "first order. The intervals are by bootstrap over the people of the trusted samples, and "
        "hold for all sites together."
    )
    write_value_page("Which of my partners help?", result, out / PAGE, losses, notes)
    say(f"page: {out / PAGE} ({time.monotonic() - began:.0f} s)")
    sys.stdout.flush()


def _test_loss_of_fedavg(
    task: Sites, clients: list[ClientData], method: Algorithm, rounds: int
) -> float:
    """Return the loss on the test people of FedAvg on some clients."""
    from fedbilevel import solve

    assert task.evaluate is not None
    result = solve(
        task.plain,
        clients,
        method,
        rounds=rounds,
        weights="samples",
        every=rounds,
        evaluate=task.evaluate,
    )
    return float(result.history[-1]["test_loss"])
