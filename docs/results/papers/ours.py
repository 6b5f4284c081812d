"""Runs that are about no figure of a paper: our tables and figures."""

from __future__ import annotations

from cells import TARGETS, Row, Table, best, final, final_number, per, to, to_median, to_of_seeds
from panels import PARTITIONS, Bars, Panel

CLEANING = {
    "MNIST, all 60,000, iid": "MNIST 60000 iid",
    "MNIST, 12,000, shards": "MNIST 12000 shards",
    "MNIST, 3,000, iid": "MNIST 3000 iid",
    "digits": "digits",
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
    "hyper-cleaning": Table(
        ["data"],
        [Row((name,), [f"hyper-cleaning/{label}"]) for name, label in CLEANING.items()],
        {
            "rounds": final_number("round", 0),
            "AUC": final_number("auc"),
            "F1": final_number("f1"),
            "all labels": final("all_labels", 1),
            "correct labels only": final("correct_labels", 1),
            "learnt weights": final("learnt_weights", 1),
        },
    ),
}

FIGURES: dict[str, list[Panel] | list[Bars]] = {
    "hyper-cleaning": [
        Panel(
            "do the learnt weights find the wrong labels?",
            {name: f"hyper-cleaning/{label}" for name, label in CLEANING.items()},
            y="auc",
            limits=(0.7, 1.0),
        )
    ],
}
