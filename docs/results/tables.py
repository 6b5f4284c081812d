"""Computes the tables of README.md and verdicts.md from the curves.

    python docs/results/tables.py

It rewrites what stands between `<!-- table NAME -->` and `<!-- end NAME -->` on both pages and on
docs/howto/choose.md, and the figures of `fedbilevel advise` (see advice.py). A table
is a list of rows, each with the labels of its curves, and a list of columns, each a function of a
row (see cells.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import remaining
from cells import (
    HERE,
    Row,
    Table,
    against_print,
    at,
    best,
    episodes_at,
    final,
    final_number,
    growth,
    iterations_to,
    last_rounds,
    of_seeds,
    per,
    scales,
    share,
    swing,
    to,
    to_median,
    to_of_seeds,
    total_growth,
)
from tables_print import TABLES as PRINT_TABLES

PARTITIONS = {"iid": "iid", "shards": "shards"}
TABLE2_PRINT = {  # rounds to 90% and final accuracy of print; its fednest is also the reference's
    ("aggitd", "iid", 1): (530, 92.94),
    ("aggitd", "iid", 5): (195, 94.61),
    ("aggitd", "shards", 1): (520, 92.67),
    ("aggitd", "shards", 5): (305, 93.88),
    ("fednest", "iid", 1): (1630, 91.68),
    ("fednest", "iid", 5): (610, 93.48),
    ("fednest", "shards", 1): (1380, 91.46),
    ("fednest", "shards", 5): (760, 92.87),
}


def table2_rows(batch: str) -> list[Row]:
    """Return the rows of aggitd-table2 at one batch size."""
    rows = []
    methods = ("aggitd", "fednest", "fednest-reference")
    for method, partition, tau in product(methods, PARTITIONS, (1, 5)):
        rounds, accuracy = TABLE2_PRINT[method.removesuffix("-reference"), partition, tau]
        cells = (method, partition, str(tau), f"{rounds} ({accuracy}%)")
        curve = f"aggitd-table2/{method} {partition} tau={tau}{batch}"
        rows.append(Row(cells, [curve], rounds))
    return rows


TABLE2 = {
    "rounds to 90%": to(0.9),
    "outer iterations": iterations_to(0.9),
    "final accuracy": final(),
    "best accuracy": best(),
    "rounds / print": against_print(0.9),
}
TARGETS = {"to 80%": to(0.8), "90%": to(0.9), "93%": to(0.93), "95%": to(0.95)}
SECONDS = {
    "seconds to 85%": to(0.85, "virtual_s"),
    "to 88%": to(0.88, "virtual_s"),
    "to 90%": to(0.9, "virtual_s"),
}
AFBO_METHODS = ("afbo", "simfbo", "fednest", "sdbo", "adbo")
AFBO_OTHERS = {
    "afbo printed": "afbo as printed",
    "afbo printed free": "the same, products free",
    "prometheus": "prometheus, on a ring",
}
AFBO_NAMES = {"afbo": "afbo, linear system (ours)", **AFBO_OTHERS}


def sgd_curves(partition: str, method: str) -> list[str]:
    """Return the curves of the SVRG and of the SGD type."""
    svrg = f"aggitd-table2/{method} {partition} tau=1"
    if method == "lfednest":
        svrg = "aggitd-fig3/lfednest C=0.1"
    return [svrg, f"aggitd-fig4/{method} sgd {partition}"]


def participation_rows() -> list[Row]:
    """Return the rows of aggitd-fig3."""
    rows = []
    for ratio, method in product((0.1, 0.2, 0.5), ("aggitd", "fednest", "lfednest")):
        curve = f"aggitd-fig3/{method} C={ratio}"
        if ratio == 0.1 and method != "lfednest":
            curve = f"aggitd-table2/{method} shards tau=1"
        rows.append(Row((str(ratio), method), [curve]))
    return rows


def simfbo_fig2_rows() -> list[Row]:
    """Return the rows of simfbo-fig2."""
    rows = []
    methods = ("unifbo", "simfbo", "lfednest", "aggitd", "fednest")
    for partition, settings, method in product(PARTITIONS, ("tuned", "paper"), methods):
        curve = f"simfbo-fig2/{method} {partition} {settings}"
        if settings == "paper" and method in ("aggitd", "fednest"):
            curve = f"aggitd-table2/{method} {partition} tau=1"
        if settings == "tuned" or method != "unifbo":
            rows.append(Row((partition, settings.replace("paper", "papers'"), method), [curve]))
    return rows


def cleaning_rows(experiment: str, extra: Mapping[str, str]) -> list[Row]:
    """Return the rows of a hyper-cleaning experiment with delays."""
    methods = {method: AFBO_NAMES.get(method, method) for method in AFBO_METHODS} | extra
    rows = []
    for partition, (method, name) in product(PARTITIONS, methods.items()):
        rows.append(Row((partition, name), [f"{experiment}/{method} {partition}"]))
    return rows


def regularization_rows(condition: str, other: str | None = None) -> list[Row]:
    """Return the rows of an experiment on Covertype, under one or two conditions."""
    rows = []
    methods = AFBO_METHODS if condition == "pareto" else (*AFBO_METHODS, *AFBO_OTHERS)
    for method in methods:
        curves = [f"afbo-fig3/{method} {condition}"]
        if other:
            curves.append(f"afbo-fig3/{method} {other}")
        if condition == "pareto":
            curves = [f"afbo-pareto-covertype/{method} pareto"]
        rows.append(Row((AFBO_NAMES.get(method, method),), curves))
    return rows


CNN_PRINT = {
    ("mnist cnn iid", "aggitd"): "97.6%",
    ("mnist cnn shards", "aggitd"): "96.7%",
    ("mnist cnn shards", "fednest"): "fails",
    ("mnist cnn shards", "lfednest"): "fails",
    ("mnist cnn shards", "fednest-reference"): "fails",
}


def cnn_rows() -> list[Row]:
    """Return the rows of aggitd-cnn."""
    rows = []
    for condition in ("mnist cnn iid", "mnist cnn shards", "cifar10 cnn iid", "cifar10 mlp iid"):
        methods = ["aggitd", "fednest"]
        if condition.startswith("mnist"):
            methods += ["lfednest", "fednest-reference"]
        for method in methods:
            printed = CNN_PRINT.get((condition, method), "")
            if condition.startswith("cifar10"):
                printed = '"not satisfactory"' if method == "aggitd" else "does not converge"
            cells = (condition, method, printed)
            rows.append(Row(cells, [f"aggitd-cnn/{method} {condition}"]))
    return rows


FEW_SHOT_PRINT = {  # 1-shot and 5-shot
    "rabo": ("76.05%", "89.12%"),
    "rafbo": ("75.09%", "88.57%"),
    "static": ("72.34%", "85.09%"),
    "oap": ("73.58%", "86.16%"),
    "fedrolex": ("73.74%", "86.95%"),
    "fiarse": ("74.33%", "87.78%"),
    "fedmbo": ("82.66%", "93.69%"),
    "protonet": ("80.76%", "89.33%"),
}
CLIENTS_PRINT = {"10": "76.05%", "20": "75.81%", "30": "74.39%", "50": "72.76%"}
LOSS_TUNING = {
    "rabo": "rabo, 10 terms x 0.1",
    "rafbo": "rafbo, 10 terms x 0.1",
    "rabo cg": "rabo, conjugate gradients",
    "rafbo cg": "rafbo, conjugate gradients",
    "rabo-3x0.02": "rabo, 3 terms x 0.02",
    "rafbo-3x0.02": "rafbo, 3 terms x 0.02",
    **{name: name for name in ("static", "oap", "fedrolex", "fiarse")},
    "fedmbo": "fedmbo, full models",
    "fedavg": "fedavg, full models, untuned loss",
}

TABLES: dict[str, Table] = {
    "mnist-single-loop": Table(
        ["method", "data", "local steps"],
        [
            Row(("simfbo", "iid", "1"), ["mnist-single-loop/simfbo iid"]),
            Row(("asfbo", "shards", "5 to 15"), ["mnist-single-loop/asfbo shards"]),
            Row(("la-asfbo", "shards", "5 to 15"), ["mnist-single-loop/la-asfbo shards"]),
        ],
        {
            "rounds to 80%": to(0.8),
            "rounds to 90%": to(0.9),
            "of seeds 0, 1, 2": to_of_seeds(0.9),
            "best accuracy": best(),
            "gradients": final_number("gradients", 0),
        },
    ),
    "mnist-first-order": Table(
        ["method"],
        [Row((method,), [f"mnist-first-order/{method}"]) for method in ("simfbo", "memfbo")],
        {
            **TARGETS,
            "gradients to 90%": to(0.9, "gradients"),
            "gradients per round": per("round", "gradients", 1.0, 0),
            "after 200 rounds": final(),
        },
    ),
    "unifbo-mnist": Table(
        ["data"],
        [Row((partition,), [f"unifbo-mnist/unifbo {partition}"]) for partition in PARTITIONS],
        {
            "rounds to 80%": to_median(0.8),
            "90%": to_median(0.9),
            "93%": to_median(0.93),
            "95%": to_median(0.95),
            "97%": to_median(0.97),
            "accuracy after 100 rounds": final(),
        },
    ),
    "aggitd-table2": Table(
        ["method", "data", "tau", "print: rounds to 90% (final)"], table2_rows(""), TABLE2
    ),
    "aggitd-table2-batch-10": Table(
        ["method", "data", "tau", "print: rounds to 90% (final)"], table2_rows(" batch=10"), TABLE2
    ),
    "aggitd-epochs": Table(
        ["batch", "data", "tau in epochs", "print: rounds to 90% (final)"],
        [
            Row(
                (str(batch), partition, str(tau), "{} ({}%)".format(*printed)),
                [f"aggitd-epochs/aggitd {partition} tau={tau} epochs batch={batch}"],
                printed[0],
            )
            for batch, partition, tau in product((64, 10), PARTITIONS, (1, 5))
            for printed in [TABLE2_PRINT["aggitd", partition, tau]]
        ],
        TABLE2,
    ),
    "aggitd-indirect": Table(
        ["outer iteration"],
        [
            Row((str(iteration),), [f"aggitd-indirect/iteration {iteration}"])
            for iteration in (0, 10, 50, 100, 200)
        ],
        {
            "accuracy": final(),
            "estimated indirect / direct": final_number("estimated_by_direct", 4),
            "true indirect / direct": final_number("true_by_direct", 1),
            "estimated / true indirect": final_number("estimated_by_true", 4),
            "cosine of the step with the true hypergradient": final_number("cosine_step"),
            "of the direct term alone": final_number("cosine_direct"),
        },
    ),
    "aggitd-fig3": Table(
        ["C", "method"],
        participation_rows(),
        {
            "rounds to 80%": to(0.8),
            "rounds to 90%": to(0.9),
            "accuracy after 2000 rounds": final(),
            "best accuracy": best(),
            "swing": swing(),
        },
    ),
    "aggitd-fig4": Table(
        ["data", "method"],
        [
            Row((partition, method), sgd_curves(partition, method))
            for partition, method in product(PARTITIONS, ("aggitd", "fednest", "lfednest"))
            if (partition, method) != ("iid", "lfednest")
        ]
        + [Row(("iid", "lfednest, SGD only"), ["", "aggitd-fig4/lfednest sgd iid"])],
        {
            "rounds to 90%, SVRG": to(0.9),
            "SGD": to(0.9, curve=1),
            "final accuracy, SVRG": final(),
            "SGD ": final(curve=1),
            "swing, SVRG": swing(),
            "SGD  ": swing(1),
        },
    ),
    "aggitd-cnn": Table(
        ["data, network", "method", "print (training)"],
        cnn_rows(),
        {
            "training accuracy after 2000 rounds": final("train_accuracy"),
            "its best": best("train_accuracy"),
            "test accuracy": final(),
        },
    ),
    "simfbo-fig2": Table(
        ["data", "settings", "method"],
        simfbo_fig2_rows(),
        {
            "scales x, y": scales,
            **TARGETS,
            "after 1000 rounds": at(1000),
            "best in the run": best(),
        },
    ),
    "simfbo-fig2-cnn": Table(
        ["method"],
        [
            Row((method,), [f"simfbo-fig2-cnn/{method}"])
            for method in ("simfbo", "lfednest", "aggitd", "fednest", "fednest-reference")
        ],
        {
            "test accuracy after 2000 rounds": final(),
            "training accuracy": final("train_accuracy"),
            "best test accuracy": best(),
        },
    ),
    "simfbo-fig5": Table(
        ["method"],
        [
            Row((method,), [f"simfbo-fig5/{method}"])
            for method in ("simfbo", "lfednest", "aggitd", "fednest")
        ],
        {
            "seconds to 80%": to(0.8, "wall_s"),
            "85%": to(0.85, "wall_s"),
            "90%": to(0.9, "wall_s"),
            "95%": to(0.95, "wall_s"),
            "accuracy after 10 s": at(10, cost="wall_s"),
            "30 s": at(30, cost="wall_s"),
            "at the end": final(),
            "rounds": final_number("round", 0),
        },
    ),
    "shrofbo-fig4": Table(
        ["method"],
        [
            Row((method,), [f"shrofbo-fig4/{method}"])
            for method in ("shrofbo", "simfbo", "aggitd", "fednest", "lfednest")
        ],
        {
            "rounds to 80%": to(0.8),
            "mean accuracy of the last 50 rounds": last_rounds(50),
            "of seeds 0, 1, 2": of_seeds(last_rounds(50)),
            "best accuracy": best(),
            "mean upper loss of the last 50 rounds": last_rounds(50, "upper_loss"),
        },
    ),
    "shrofbo-fig4-tuned": Table(
        ["method"],
        [
            Row((name,), [f"shrofbo-fig4/{label}"])
            for name, label in (
                ("shrofbo, tuned", "shrofbo tuned"),
                ("simfbo, tuned", "simfbo tuned"),
                ("unifbo, tuned", "unifbo tuned"),
                ("unifbo, as it ships", "unifbo"),
            )
        ],
        {
            "scales x, y": scales,
            "rounds to 80%": to_of_seeds(0.8),
            "rounds to 85%": to_of_seeds(0.85),
            "mean accuracy of the last 50 rounds": of_seeds(last_rounds(50)),
            "best accuracy": best(),
            "mean upper loss of the last 50 rounds": last_rounds(50, "upper_loss"),
        },
    ),
    "shrofbo-fig4-equal": Table(
        ["local steps", "method"],
        [
            Row(("redrawn", "shrofbo"), ["shrofbo-fig4/shrofbo"]),
            Row(("redrawn", "simfbo"), ["shrofbo-fig4/simfbo equal"]),
            Row(("fixed, 1 to 10", "shrofbo"), ["shrofbo-fig4/shrofbo equal fixed"]),
            Row(("fixed, 1 to 10", "simfbo"), ["shrofbo-fig4/simfbo equal fixed"]),
        ],
        {
            "rounds to 80%": to_of_seeds(0.8),
            "mean accuracy of the last 50 rounds": last_rounds(50),
            "of seeds 0, 1, 2": of_seeds(last_rounds(50)),
            "mean upper loss of the last 50 rounds": last_rounds(50, "upper_loss"),
        },
    ),
    "asfbo-fig1": Table(
        ["data", "settings", "method"],
        [
            Row(
                (partition, settings.replace("paper", "papers'"), method),
                [f"asfbo-fig1/{method} {partition} {settings}"],
            )
            for partition, settings, method in product(
                PARTITIONS,
                ("tuned", "paper"),
                ("simfbo", "shrofbo", "la-asfbo", "asfbo", "lfednest", "fednest"),
            )
        ],
        {
            "scales x, y": scales,
            **TARGETS,
            "mean accuracy of the last 50 rounds": last_rounds(50),
            "mean upper loss of those": last_rounds(50, "upper_loss"),
            "gradients": final_number("gradients", 0),
        },
    ),
    "afbo-fig1": Table(
        ["data", "method"],
        cleaning_rows("afbo-fig1", AFBO_OTHERS),
        {
            **SECONDS,
            "accuracy at the end": final(),
            "best accuracy": best(),
            "AUC of the weights": final_number("auc"),
            "seconds in all": final_number("virtual_s", 0),
        },
    ),
    "afbo-printed": Table(
        ["method"],
        [
            Row((method,), [f"afbo-printed/{method} shards"])
            for method in (
                "simfbo",
                "afbo, linear system (ours)",
                "afbo as printed, K = 5",
                "afbo as printed, K = 5, products free",
            )
        ],
        {"seconds to 90%": to(0.9, "virtual_s"), "of seeds 0, 1, 2": to_of_seeds(0.9, "virtual_s")},
    ),
    "afbo-fig3": Table(
        ["method"],
        regularization_rows("plain", "slow"),
        {
            "seconds to 65%": to(0.65, "virtual_s"),
            "seconds to 67%": to(0.67, "virtual_s"),
            "to 67% with stragglers": to(0.67, "virtual_s", 1),
            "grows by": growth(0.67, "virtual_s"),
            "time for 250 rounds grows by": total_growth("virtual_s"),
            "accuracy after 250 rounds": final(),
            "with stragglers": final(curve=1),
        },
    ),
    "afbo-pareto": Table(
        ["data", "method"],
        [
            Row((*row.cells,), [*row.curves, row.curves[0].replace("pareto", "fig1")])
            for row in cleaning_rows("afbo-pareto", {})
        ],
        {
            **SECONDS,
            "accuracy after 400 rounds": final(),
            "seconds for 400 rounds": final_number("virtual_s", 0),
            "in afbo-fig1": final_number("virtual_s", 0, curve=1),
        },
    ),
    "afbo-pareto-covertype": Table(
        ["method"],
        regularization_rows("pareto"),
        {
            "seconds to 65%": to(0.65, "virtual_s"),
            "seconds to 67%": to(0.67, "virtual_s"),
            "accuracy after 250 rounds": final(),
            "seconds for 250 rounds": final_number("virtual_s", 0),
        },
    ),
    "afbo-fig7": Table(
        ["data", "method"],
        [
            Row((partition, name), [curve.format(partition)])
            for partition, (name, curve) in product(
                PARTITIONS,
                {
                    "afbo, linear system (ours)": "afbo-fig1/afbo {}",
                    "afl (AFA-CS)": "afbo-fig7/afl {}",
                    "afl-cd (AFA-CD)": "afbo-fig7/afl-cd {}",
                    "afl, hypergradients of all samples": "afbo-fig7/afl {} full",
                }.items(),
            )
        ],
        {
            "accuracy after 400 rounds": final(),
            "of seeds 0, 1, 2": of_seeds(final()),
            "upper loss": final_number("upper_loss"),
            "AUC of the weights": final_number("auc"),
        },
    ),
    "hyper-cleaning": Table(
        ["data"],
        [
            Row((name,), [f"hyper-cleaning/{label}"])
            for name, label in (
                ("MNIST, all 60,000, iid", "MNIST 60000 iid"),
                ("MNIST, 12,000, shards", "MNIST 12000 shards"),
                ("MNIST, 3,000, iid", "MNIST 3000 iid"),
                ("digits", "digits"),
            )
        ],
        {
            "rounds": final_number("round", 0),
            "AUC": final_number("auc"),
            "F1": final_number("f1"),
            "all labels": final("all_labels", 1),
            "correct labels only": final("correct_labels", 1),
            "learnt weights": final("learnt_weights", 1),
        },
    ),
    "rabo-table2": Table(
        ["ResNet-12", "print, 1-shot", "print, 5-shot"],
        [
            Row((method, *printed), [f"rabo-table2/{method} resnet12 {n}" for n in (1, 5)])
            for method, printed in FEW_SHOT_PRINT.items()
        ],
        {
            "1-shot, 100 rounds": episodes_at(100),
            "at the end": episodes_at(None),
            "5-shot, 100 rounds": episodes_at(100, 1),
            "at the end ": episodes_at(None, 1),
        },
    ),
    "rabo-table2-conv4": Table(
        ["Conv-4, 32 channels"],
        [
            Row((method,), [f"rabo-table2/{method} conv4 {n}" for n in (1, 5)])
            for method in FEW_SHOT_PRINT
        ],
        {
            "1-shot, 50 rounds": episodes_at(50),
            "150 rounds": episodes_at(150),
            "at the end": episodes_at(None),
            "5-shot, 50 rounds": episodes_at(50, 1),
            "150 rounds ": episodes_at(150, 1),
            "at the end ": episodes_at(None, 1),
        },
    ),
    "rabo-fig4": Table(
        ["", "print, operations"],
        [
            Row((name, printed), [f"rabo-fig4/{label} shots={n}" for n in (5, 1)])
            for name, label, printed in (
                ("fedmbo, full models", "fedmbo", "100%"),
                ("rabo-full, its steps on full models", "rabo-full", ""),
                ("rabo, five capacities", "rabo", "26.7%"),
                ("rafbo, five capacities", "rafbo", "17.8%"),
            )
        ],
        {
            "TFLOP per iteration, 5-shot": per("iteration", "flops", 1e12, 3),
            "of fedmbo's": share("iteration", "flops", "rabo-fig4/fedmbo shots=5"),
            "1-shot, of fedmbo's": share("iteration", "flops", "rabo-fig4/fedmbo shots=1", 1),
            "MB per iteration": per("iteration", "bytes", 1e6, 0),
            "of fedmbo's ": share("iteration", "bytes", "rabo-fig4/fedmbo shots=5"),
            "MB held by a client": final_number("peak_bytes", 0, 1e-6),
        },
    ),
    "rabo-fig5": Table(
        [""],
        [Row((name,), [f"rabo-fig5/{label}"]) for label, name in LOSS_TUNING.items()],
        {
            "balanced accuracy after 100 rounds": at(100, "balanced_accuracy"),
            "after 200 rounds": at(200, "balanced_accuracy"),
            "iterations": final_number("iteration", 0),
            "GFLOP": final_number("flops", 0, 1e-9),
            "GB": final_number("bytes", 2, 1e-9),
        },
    ),
    "rabo-fig6": Table(
        ["", "print: operations", "print: bytes"],
        [
            Row((method, operations, sent), [f"rabo-fig5/{label}"])
            for method, label, operations, sent in (
                ("fedmbo, 3 terms", "fedmbo", "100%", "100%"),
                ("rabo, 3 terms", "rabo-3x0.02", "50%", "25%"),
                ("rafbo, 3 terms", "rafbo-3x0.02", "25%", "25%"),
            )
        ],
        {
            "GFLOP per iteration": per("iteration", "flops", 1e9, 2),
            "of fedmbo's": share("iteration", "flops", "rabo-fig5/fedmbo"),
            "MB per iteration": per("iteration", "bytes", 1e6, 1),
            "of fedmbo's ": share("iteration", "bytes", "rabo-fig5/fedmbo"),
        },
    ),
    "rabo-fig3": Table(
        ["", "C_x*"],
        [
            Row((method, count), [f"rabo-fig3-conv4/{method}-C{count}"])
            for method, count in product(("rabo", "rafbo"), "12")
        ],
        {f"{rounds} rounds": episodes_at(rounds) for rounds in (50, 100, 150, 200)},
    ),
    "rabo-table3": Table(
        ["clients", "print"],
        [
            Row(
                (clients, printed),
                [
                    "rabo-table2/rabo conv4 1"
                    if clients == "10"
                    else f"rabo-table3-conv4/rabo-{clients}"
                ],
            )
            for clients, printed in CLIENTS_PRINT.items()
        ],
        {"rabo, 150 rounds": episodes_at(150)},
    ),
    **PRINT_TABLES,
}


def rendered(text: str, blocks: Mapping[str, object]) -> str:
    """Return a page with its generated parts computed again.

    Args:
        text: The page.
        blocks: The parts by name.

    Raises:
        ValueError: If a part of the page is not declared.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            raise ValueError(f"table {name} is not declared")
        return f"<!-- table {name} -->\n\n{blocks[name]}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end \1 -->", block, text, flags=re.DOTALL)


def blocks() -> dict[str, object]:
    """Return the generated parts of README.md by name: the tables, and what is to be run."""
    return {**TABLES, "to-be-run": remaining.table()}


def pages() -> dict[Path, str]:
    """Return the pages, and the figures of `fedbilevel advise`, as they should be."""
    import advice
    import verdicts  # it imports this module

    results = HERE / "README.md"
    text = results.read_text("utf-8")
    page = HERE / "verdicts.md"
    return {
        results: rendered(text, blocks()),
        page: rendered(page.read_text("utf-8"), verdicts.blocks(text)),
        advice.PAGE: rendered(advice.PAGE.read_text("utf-8"), advice.blocks()),
        advice.FIGURES: advice.figures(),
    }


def main() -> None:
    """Rewrite the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
