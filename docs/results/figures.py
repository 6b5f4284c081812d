"""Draws the figures of the experiments from their curves, with print's values as crosses.

    python docs/results/figures.py [ID ...]

It writes ID.png beside this file. A curve is the mean over seeds and a band from the least to the
greatest; it begins where all seeds have begun, and ends where the first of them ends. Print's
values are drawn where print gives numbers; most of its figures have curves only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from cells import HERE, Run, load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedbilevel.report._curves import LIGHT, curve_style
from fedbilevel.report._figure import LINE_STYLES, STYLE

SUBMODELS = ("rabo", "rafbo", "static", "oap", "fedrolex", "fiarse")
PARTITIONS = {"iid": "iid", "shards": "label shards"}
AXIS_NAMES = {
    "round": "communication rounds",
    "virtual_s": "virtual seconds",
    "wall_s": "seconds",
    "flops": "TFLOP",
    "bytes": "MB",
    "test_accuracy": "test accuracy",
    "train_accuracy": "training accuracy",
    "balanced_accuracy": "balanced test accuracy",
    "auc": "AUC of the weights",
}
UNITS = {"flops": 1e12, "bytes": 1e6}


class Mark(NamedTuple):
    """A value that print gives for a curve: y at x; without an x, at the end of the curve."""

    y: float
    x: float | None = None


@dataclass(frozen=True)
class Panel:
    """Curves under one title, by the names that the legend has for them.

    A name that several panels of a figure share has one colour in all of them.
    """

    title: str
    curves: Mapping[str, str]
    x: str = "round"
    y: str = "test_accuracy"
    marks: Mapping[str, Sequence[Mark]] = field(default_factory=dict)
    limits: tuple[float, float] | None = None  # of the y axis
    log: bool = False  # the x axis


@dataclass(frozen=True)
class Bars:
    """Bars under one title, with print's values."""

    title: str
    values: Mapping[str, float]
    printed: Mapping[str, float]
    unit: str


TABLE2 = {  # rounds to 90% and final accuracy at tau = 5
    ("aggitd", "iid"): (195, 0.9461),
    ("aggitd", "shards"): (305, 0.9388),
    ("fednest", "iid"): (610, 0.9348),
    ("fednest", "shards"): (760, 0.9287),
}
AFBO_NAMES = {
    "afbo": "afbo, linear system (ours)",
    "simfbo": "simfbo",
    "fednest": "fednest",
    "sdbo": "sdbo",
    "adbo": "adbo",
}


def table2_panel(partition: str) -> Panel:
    """Rounds to 90% at tau = 5, in the settings that come closest to print."""
    marks = {}
    for method, name in (("aggitd", "aggitd, tau in epochs"), ("fednest", "fednest-reference")):
        rounds, final = TABLE2[method, partition]
        marks[name] = [Mark(0.9, rounds), Mark(final)]
    curves = {
        "aggitd, tau in epochs": f"aggitd-epochs/aggitd {partition} tau=5 epochs batch=64",
        "aggitd, tau in steps": f"aggitd-table2/aggitd {partition} tau=5",
        "fednest-reference": f"aggitd-table2/fednest-reference {partition} tau=5 batch=10",
        "fednest": f"aggitd-table2/fednest {partition} tau=5 batch=10",
    }
    return Panel(PARTITIONS[partition], curves, marks=marks, limits=(0.6, 0.97))


def cleaning_panels(experiment: str, extra: Mapping[str, str], y: str) -> list[Panel]:
    """Hyper-cleaning on both partitions, against virtual time."""
    panels = []
    for partition, title in PARTITIONS.items():
        named = {name: f"{experiment}/{m} {partition}" for m, name in AFBO_NAMES.items()}
        named |= {name: f"{experiment}/{label} {partition}" for name, label in extra.items()}
        limits = (0.6, 0.93) if y == "test_accuracy" else None
        panels.append(Panel(title, named, x="virtual_s", y=y, limits=limits, log=True))
    return panels


def delay_panels(experiment: str, with_inner: str, limits: tuple[float, float]) -> list[Panel]:
    """Curves under outer delays alone, and under inner ones, too."""
    names = AFBO_NAMES | {"afbo printed": "afbo as printed", "prometheus": "prometheus"}
    both = {name: with_inner.format(m) for m, name in names.items()}
    outer = both | {
        names[m]: f"{experiment}/{m} outer" for m in ("fednest", "sdbo", "adbo", "afbo printed")
    }
    titles = {"delays of the outer loop": outer, "and of inner loops": both}
    return [
        Panel(title, curves, x="virtual_s", limits=limits, log=True)
        for title, curves in titles.items()
    ]


def covertype_panel(title: str, name: str, condition: str) -> Panel:
    """Regularization on Covertype under one condition, against virtual time."""
    curves = {shown: f"{name}/{m} {condition}" for m, shown in AFBO_NAMES.items()}
    return Panel(title, curves, x="virtual_s", limits=(0.5, 0.7), log=True)


def few_shot_panels() -> list[Panel]:
    """ResNet-12 with 5 ways, against operations, with the accuracies of Table II."""
    printed = {
        "rabo": (0.7605, 0.8912),
        "rafbo": (0.7509, 0.8857),
        "static": (0.7234, 0.8509),
        "oap": (0.7358, 0.8616),
        "fedrolex": (0.7374, 0.8695),
        "fiarse": (0.7433, 0.8778),
    }
    panels = []
    for index, shots in enumerate((1, 5)):
        curves = {m: f"rabo-table2/{m} resnet12 {shots}" for m in printed}
        marks = {m: [Mark(accuracies[index])] for m, accuracies in printed.items()}
        panels.append(Panel(f"5-way {shots}-shot", curves, "flops", marks=marks, log=True))
    return panels


def costs_per_iteration(column: str) -> dict[str, float]:
    """What an iteration costs in rabo-fig4, in percent of RABO on full models."""

    def cost(label: str) -> float:
        [run] = load("rabo-fig4", f"{label} shots=5")
        return float(run[column][-1])

    full = cost("rabo-full")
    return {name: 100 * cost(name) / full for name in ("rabo", "rafbo")}


FIGURES: dict[str, list[Panel] | list[Bars]] = {
    "aggitd-table2": [table2_panel(partition) for partition in PARTITIONS],
    "aggitd-fig3": [
        Panel(
            f"{percent}% of the clients per round",
            {
                m: f"aggitd-table2/{m} shards tau=1"
                if percent == 10 and m != "lfednest"
                else f"aggitd-fig3/{m} C={percent / 100}"
                for m in ("aggitd", "fednest", "lfednest")
            },
            limits=(0.5, 0.95),
        )
        for percent in (10, 20, 50)
    ],
    "aggitd-fig4": [
        Panel(
            title,
            {
                f"{method}, {kind}": f"{name}/{method} {label}"
                for method in ("aggitd", "fednest")
                for kind, name, label in (
                    ("SVRG", "aggitd-table2", f"{partition} tau=1"),
                    ("SGD", "aggitd-fig4", f"sgd {partition}"),
                )
            },
            limits=(0.7, 0.95),
        )
        for partition, title in PARTITIONS.items()
    ],
    "aggitd-cnn": [
        Panel(
            f"LeNet-5 on MNIST, {title}",
            {
                m: f"aggitd-cnn/{m} mnist cnn {partition}"
                for m in ("aggitd", "fednest", "fednest-reference", "lfednest")
            },
            y="train_accuracy",
            marks={"aggitd": [Mark(final)]},
        )
        for (partition, title), final in zip(PARTITIONS.items(), (0.976, 0.967), strict=True)
    ],
    "aggitd-fig7": [
        Panel(
            f"digits, 16 hidden units: {what}",
            {m: f"aggitd-fig7/{m} digits" for m in ("aggitd", "fednest", "dsbo", "prometheus")},
            x=cost,
            log=True,
        )
        for cost, what in (("flops", "operations"), ("bytes", "bytes sent"))
    ],
    "simfbo-fig2": [
        Panel(
            f"{title}, tuned",
            {
                m: f"simfbo-fig2/{m} {partition} tuned"
                for m in ("unifbo", "simfbo", "aggitd", "fednest", "lfednest")
            },
            limits=(0.6, 1.0),
        )
        for partition, title in PARTITIONS.items()
    ],
    "simfbo-fig2-cnn": [
        Panel(
            "LeNet-5 on CIFAR-10, iid",
            {m: f"simfbo-fig2-cnn/{m}" for m in ("simfbo", "aggitd", "fednest", "lfednest")},
        )
    ],
    "simfbo-fig5": [
        Panel(
            "running time, one seed",
            {m: f"simfbo-fig5/{m}" for m in ("simfbo", "aggitd", "fednest", "lfednest")},
            x="wall_s",
        )
    ],
    "shrofbo-fig4": [
        Panel(
            "the papers' steps, tau redrawn",
            {
                m: f"shrofbo-fig4/{m}"
                for m in ("shrofbo", "simfbo", "aggitd", "fednest", "lfednest")
            },
            limits=(0.5, 0.9),
        ),
        Panel(
            "equal steps, tau redrawn",
            {"shrofbo": "shrofbo-fig4/shrofbo", "simfbo": "shrofbo-fig4/simfbo equal"},
            limits=(0.5, 0.9),
        ),
        Panel(
            "equal steps, tau fixed",
            {m: f"shrofbo-fig4/{m} equal fixed" for m in ("shrofbo", "simfbo")},
            limits=(0.5, 0.9),
        ),
    ],
    "asfbo-fig1": [
        Panel(
            f"{title}, tuned",
            {
                m: f"asfbo-fig1/{m} {partition} tuned"
                for m in ("la-asfbo", "asfbo", "shrofbo", "simfbo", "fednest", "lfednest")
            },
            limits=(0.6, 1.0),
        )
        for partition, title in PARTITIONS.items()
    ],
    "rabo-table2": few_shot_panels(),
    "rabo-fig3": [
        Panel(
            "Conv-4, 5-way 5-shot, one seed",
            {
                f"{method}, C_x* = {least}": f"rabo-fig3-conv4/{method}-C{least}"
                for method in ("rabo", "rafbo")
                for least in (1, 2)
            },
        )
    ],
    "rabo-fig4": [
        Bars(
            "operations, % of full models",
            costs_per_iteration("flops"),
            {"rabo": 26.7, "rafbo": 17.8},
            "%",
        ),
        Bars(
            "bytes, % of full models",
            costs_per_iteration("bytes"),
            {"rabo": 26.7, "rafbo": 26.7},
            "%",
        ),
    ],
    "rabo-table3": [
        Panel(
            "RABO, Conv-4, 5-way 1-shot, one seed",
            {"10 clients": "rabo-table2/rabo conv4 1"}
            | {f"{n} clients": f"rabo-table3-conv4/rabo-{n}" for n in (20, 30, 50)},
            marks={
                f"{n} clients": [Mark(accuracy, 150)]
                for n, accuracy in ((10, 0.7605), (20, 0.7581), (30, 0.7439), (50, 0.7276))
            },
        )
    ],
    "rabo-fig5": [
        Panel(
            "MNIST, long-tailed, MLP",
            {
                m: f"rabo-fig5/{m}"
                for m in (
                    "rabo",
                    "rafbo",
                    "static",
                    "oap",
                    "fedrolex",
                    "fiarse",
                    "fedmbo",
                    "fedavg",
                )
            },
            y="balanced_accuracy",
        )
    ],
    "afbo-fig1": cleaning_panels(
        "afbo-fig1",
        {
            "afbo as printed": "afbo printed",
            "afbo as printed, products free": "afbo printed free",
        },
        "test_accuracy",
    ),
    "afbo-fig3": [
        covertype_panel("even clients", "afbo-fig3", "plain"),
        covertype_panel("5 stragglers at 5 times the time", "afbo-fig3", "slow"),
    ],
    "afbo-fig5": delay_panels("afbo-fig5", "afbo-fig1/{} shards", (0.5, 0.93)),
    "afbo-fig6": delay_panels("afbo-fig6", "afbo-fig3/{} plain", (0.5, 0.7)),
    "afbo-pareto": cleaning_panels("afbo-pareto", {}, "test_accuracy"),
    "afbo-pareto-covertype": [
        covertype_panel("Pareto delays in every exchange", "afbo-pareto-covertype", "pareto")
    ],
    "afbo-fig7": [
        Panel(
            title,
            {
                "afbo, linear system (ours)": f"afbo-fig1/afbo {partition}",
                "afl, one mini-batch": f"afbo-fig7/afl {partition}",
                "afl, all samples": f"afbo-fig7/afl {partition} full",
            },
            y=y,
            limits=limits,
        )
        for y, limits in (("test_accuracy", (0.7, 0.92)), ("auc", (0.5, 1.0)))
        for partition, title in PARTITIONS.items()
    ],
    "hyper-cleaning": [
        Panel(
            "MNIST, do the learnt weights find the wrong labels?",
            {
                label: f"hyper-cleaning/MNIST {label}"
                for label in ("60000 iid", "12000 shards", "3000 iid")
            },
            y="auc",
        )
    ],
}


def mean_and_range(runs: Sequence[Run], panel: Panel) -> np.ndarray[Any, Any] | None:
    """Return the points of a curve: x, mean, least and greatest over its seeds."""
    kept = []
    for run in runs:
        x = run[panel.x]
        y = run[panel.y]
        known = np.isfinite(x) & np.isfinite(y)
        if panel.log:
            known &= x > 0
        if known.any():
            kept.append((x[known] / UNITS.get(panel.x, 1.0), y[known]))
    if not kept:
        return None
    start = max(xs[0] for xs, _ in kept)
    end = min(xs[-1] for xs, _ in kept)
    grid = np.unique(np.concatenate([xs for xs, _ in kept]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, xs, ys) for xs, ys in kept])
    return np.stack([grid, values.mean(0), values.min(0), values.max(0)])


def draw_panel(plot: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Draw curves; their colours are by their position in `names`."""
    for name, curve in panel.curves.items():
        points = mean_and_range(load(*curve.split("/", 1)), panel)
        if points is None:
            continue  # not run yet
        colour_index, dash = curve_style(names.index(name))
        colour = LIGHT[colour_index]
        x, mean, low, high = points
        plot.plot(x, mean, color=colour, linestyle=LINE_STYLES[dash])
        plot.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for mark in panel.marks.get(name, ()):
            at = x[-1] if mark.x is None else mark.x
            plot.plot(at, mark.y, "x", color=colour, markersize=5, clip_on=False, zorder=5)
    plot.set(title=panel.title, xlabel=AXIS_NAMES[panel.x], ylabel=AXIS_NAMES[panel.y])
    if panel.log:
        plot.set_xscale("log")
    if panel.limits:
        plot.set_ylim(panel.limits)


def draw_bars(plot: Axes, bars: Bars) -> None:
    """Draw bars, with print's values as crosses."""
    positions = np.arange(len(bars.values))
    plot.bar(positions, list(bars.values.values()), width=0.5, color=LIGHT[0])
    plot.plot(positions, [bars.printed[name] for name in bars.values], "x", color=LIGHT[1])
    plot.set_xticks(positions, list(bars.values))
    plot.set(title=bars.title, ylabel=bars.unit)


def draw(name: str) -> None:
    """Write one figure."""
    panels = FIGURES[name]
    names: dict[str, None] = {}
    for panel in panels:
        if isinstance(panel, Panel):
            names |= {n: None for n, curve in panel.curves.items() if load(*curve.split("/", 1))}
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    lines = -(-len(panels) // columns)
    width = {1: 4.5, 2: 7.0, 3: 8.0}[columns]
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(width, 0.5 + 2.1 * lines), layout="constrained")
        for number, panel in enumerate(panels, start=1):
            plot = canvas.add_subplot(lines, columns, number)
            if isinstance(panel, Bars):
                draw_bars(plot, panel)
            else:
                draw_panel(plot, panel, list(names))
        handles = []
        for index, label in enumerate(names):
            colour_index, dash = curve_style(index)
            style = {"color": LIGHT[colour_index], "linestyle": LINE_STYLES[dash]}
            handles.append(Line2D([], [], label=label, **style))
        if any(isinstance(panel, Bars) or panel.marks for panel in panels):
            style = {"color": "#333333", "linestyle": "none", "marker": "x"}
            handles.append(Line2D([], [], label="print", **style))
        canvas.legend(
            handles=handles,
            loc="outside upper center",
            ncols=2 if columns == 1 else 4,
            frameon=False,
        )
        canvas.savefig(HERE / f"{name}.png", dpi=150)


def main(names: Sequence[str]) -> None:
    """Draw the figures named, or all."""
    unknown = set(names) - FIGURES.keys()
    if unknown:
        raise SystemExit(f"{sorted(unknown)} is not one of {', '.join(FIGURES)}")
    for name in names or FIGURES:
        draw(name)
        print(Path(f"{name}.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
