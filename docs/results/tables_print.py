"""The tables of figures in print's own setting, many of which are to be run; see tables.py."""

from __future__ import annotations

from itertools import product

from cells import (
    Row,
    Table,
    at,
    final,
    final_number,
    growth,
    per,
    searched,
    to,
    total_growth,
)
from members import FEW_SHOT, GOSSIP

FEW_SHOT_PRINT = {  # 5-way 1-shot and 5-shot, 20-way 1-shot and 5-shot
    "rabo": (76.05, 89.12, 54.97, 77.41),
    "rafbo": (75.09, 88.57, 51.37, 71.16),
    "static": (72.34, 85.09, 42.99, 51.01),
    "oap": (73.58, 86.16, 45.45, 51.92),
    "fedrolex": (73.74, 86.95, 47.25, 55.29),
    "fiarse": (74.33, 87.78, 49.52, 55.87),
    "fedmbo": (82.66, 93.69, 63.18, 81.64),
    "protonet": (80.76, 89.33, 60.05, 78.01),
    "maml": (81.46, 92.01, 61.36, 78.35),
}
COLUMNS = ("5-way 1-shot", "5-way 5-shot", "20-way 1-shot", "20-way 5-shot")
CLIENTS_PRINT = {10: "76.05%", 20: "75.81%", 30: "74.39%", 50: "72.76%"}
LINEAR_SYSTEM = "afbo, linear system (ours)"


def delay_rows(experiment: str, with_inner: str) -> list[Row]:
    """Return rows with the curves of outer delays alone, and of inner ones, too.

    Args:
        experiment: The experiment with outer delays alone.
        with_inner: The curves with both, with {} in the place of the method.
    """
    rows = []
    for method in ("afbo", "simfbo", "prometheus"):  # no exchange in an inner loop
        both = with_inner.format(method)
        name = {"afbo": LINEAR_SYSTEM, "prometheus": "prometheus, on a ring"}.get(method, method)
        rows.append(Row((name,), [both, both]))
    for method in ("fednest", "sdbo", "adbo", "afbo printed"):
        name = {"afbo printed": "afbo as printed"}.get(method, method)
        rows.append(Row((name,), [f"{experiment}/{method} outer", with_inner.format(method)]))
    return rows


def few_shot_rows() -> list[Row]:
    """Return the methods of Table II, each with its four curves."""
    rows = []
    for method in FEW_SHOT:
        printed = ", ".join(f"{value:.2f}" for value in FEW_SHOT_PRINT[method])
        rows.append(Row((method, printed), [f"rabo-table2/{method} {c}" for c in COLUMNS]))
    return rows


LOSS_TUNING = {
    "rabo": "rabo, 10 terms x 0.1",
    "rafbo": "rafbo, 10 terms x 0.1",
    "rabo-3x0.02": "rabo, 3 terms x 0.02",
    "rafbo-3x0.02": "rafbo, 3 terms x 0.02",
    **{name: name for name in ("static", "oap", "fedrolex", "fiarse")},
    "fedmbo": "fedmbo, full models",
    "fedavg": "fedavg, full models, untuned loss",
}

TABLES: dict[str, Table] = {
    "aggitd-fig7": Table(
        ["data, hidden units", "method"],
        [
            Row((f"{data}, 16", method), [f"aggitd-fig7/{method} {data}"])
            for data, method in product(("digits", "mnist"), GOSSIP)
        ],
        {
            "scales x, y": searched,
            "GFLOP to 85%": to(0.85, "flops", scale=1e-9, digits=2),
            "gradients": to(0.85, "gradients"),
            "MB sent": to(0.85, "bytes", scale=1e-6, digits=2),
            "iterations": to(0.85, "iteration"),
            "GFLOP per iteration": per("iteration", "flops", 1e9, 4),
            "MB per iteration": per("iteration", "bytes", 1e6, 3),
            "accuracy at the end": final(),
        },
    ),
    "aggitd-cnn-batch-10": Table(
        ["data", "method"],
        [
            Row((partition, method), [f"aggitd-cnn/{method} mnist cnn {partition} batch=10"])
            for partition, method in product(("iid", "shards"), ("aggitd", "fednest", "lfednest"))
        ],
        {"training accuracy after 2000 rounds": final("train_accuracy"), "test accuracy": final()},
    ),
    "simfbo-fig5-alone": Table(
        ["method"],
        [
            Row((method,), [f"simfbo-fig5/{method} alone"])
            for method in ("simfbo", "aggitd", "fednest", "lfednest")
        ],
        {
            "seconds to 80%": to(0.8, "wall_s"),
            "85%": to(0.85, "wall_s"),
            "90%": to(0.9, "wall_s"),
            "at the end": final(),
        },
    ),
    "afbo-fig5": Table(
        ["method"],
        delay_rows("afbo-fig5", "afbo-fig1/{} shards"),
        {
            "seconds to 85%, outer delays": to(0.85, "virtual_s"),
            "inner ones, too": to(0.85, "virtual_s", 1),
            "grows by": growth(0.85, "virtual_s"),
            "to 88%, outer delays": to(0.88, "virtual_s"),
            "inner, too": to(0.88, "virtual_s", 1),
            "seconds in all grow by": total_growth("virtual_s"),
            "accuracy at the end": final(curve=1),
        },
    ),
    "afbo-fig6": Table(
        ["method"],
        delay_rows("afbo-fig6", "afbo-fig3/{} plain"),
        {
            "seconds to 65%, outer delays": to(0.65, "virtual_s"),
            "inner ones, too": to(0.65, "virtual_s", 1),
            "to 67%, outer delays": to(0.67, "virtual_s"),
            "inner, too": to(0.67, "virtual_s", 1),
            "seconds in all, outer delays": final_number("virtual_s", 0),
            "with inner ones": final_number("virtual_s", 0, curve=1),
            "accuracy at the end": final(curve=1),
        },
    ),
    "rabo-table2-resnet12": Table(
        ["ResNet-12, three seeds", "print, %"],
        few_shot_rows(),
        {column: final(digits=1, curve=index) for index, column in enumerate(COLUMNS)},
    ),
    "rabo-fig3-resnet12": Table(
        ["", "C_x*"],
        [
            Row((method, str(count)), [f"rabo-fig3/{method} C={count}"])
            for method, count in product(("rabo", "rafbo"), (1, 2))
        ],
        {f"{rounds} rounds": at(rounds) for rounds in (50, 100, 150, 200)},
    ),
    "rabo-table3-resnet12": Table(
        ["clients", "print, rabo, 1-shot"],
        [
            Row(
                (str(clients), printed),
                [
                    f"rabo-table3/{method} {clients} clients {shots}-shot"
                    for shots, method in product((1, 5), ("rabo", "rafbo"))
                ],
            )
            for clients, printed in CLIENTS_PRINT.items()
        ],
        {
            "rabo, 1-shot": final(),
            "rafbo, 1-shot": final(curve=1),
            "rabo, 5-shot": final(curve=2),
            "rafbo, 5-shot": final(curve=3),
        },
    ),
    "rabo-fig5-cifar10": Table(
        ["ResNet-18, CIFAR-10"],
        [Row((name,), [f"rabo-fig5/{label} cifar10"]) for label, name in LOSS_TUNING.items()],
        {
            "balanced accuracy after 200 rounds": at(200, "balanced_accuracy"),
            "after 400 rounds": at(400, "balanced_accuracy"),
            "TFLOP per iteration": per("iteration", "flops", 1e12, 3),
        },
    ),
}
