"""SimFBO and ShroFBO (Yang, Xiao and Ji 2023): our tables and figures, and a verdict per claim."""

from __future__ import annotations

from itertools import product

from cells import (
    TARGETS,
    Row,
    Table,
    at,
    best,
    final,
    final_number,
    last_rounds,
    of_seeds,
    scales,
    to,
    to_of_seeds,
)
from panels import PARTITIONS, Bars, Panel
from verdicts import REFUTED, REPRODUCED, Verdict, pairs


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


TABLES: dict[str, Table] = {
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
        "Each alone on an idle machine, three seeds (`battery.py simfbo-fig5`):",
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
}

FIGURES: dict[str, list[Panel] | list[Bars]] = {
    "simfbo-fig2": [
        Panel(
            f"{title}, tuned",
            {
                m: f"simfbo-fig2/{m} {partition} tuned"
                for m in ("unifbo", "simfbo", "aggitd", "fednest", "lfednest")
            },
            limits=(0.7, 1.0),
            log=True,
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
            "against running time, one seed",
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
            limits=(0.65, 0.88),
        ),
        Panel(
            "equal steps, tau redrawn",
            {"shrofbo": "shrofbo-fig4/shrofbo", "simfbo": "shrofbo-fig4/simfbo equal"},
            limits=(0.65, 0.88),
        ),
        Panel(
            "equal steps, tau fixed",
            {m: f"shrofbo-fig4/{m} equal fixed" for m in ("shrofbo", "simfbo")},
            limits=(0.65, 0.88),
        ),
    ],
}

VERDICTS = [
    Verdict(
        "simfbo-fig2",
        "SimFBO, Fig. 2 and 3",
        "SimFBO is fastest and ends highest on MNIST",
        REPRODUCED,
        "rounds to 90% on shards, tuned: simfbo {}, aggitd {}, fednest {}, lfednest {}",
        pairs(
            to(0.9),
            *(f"simfbo-fig2/{m} shards tuned" for m in ("simfbo", "aggitd", "fednest", "lfednest")),
        ),
    ),
    Verdict(
        "simfbo-fig2-cnn",
        "SimFBO, Fig. 2 right",
        "SimFBO trains a CNN on CIFAR-10 best",
        REPRODUCED,
        "test accuracy: simfbo {}, lfednest {}, aggitd {}, fednest {}",
        pairs(
            final(), *(f"simfbo-fig2-cnn/{m}" for m in ("simfbo", "lfednest", "aggitd", "fednest"))
        ),
    ),
    Verdict(
        "simfbo-fig2-cnn",
        "SimFBO, Fig. 2 right",
        "AggITD trains it too; LFedNest does not converge",
        REFUTED,
        "test accuracy: aggitd {}, lfednest {}",
        pairs(final(), *(f"simfbo-fig2-cnn/{m}" for m in ("aggitd", "lfednest"))),
    ),
    Verdict(
        "simfbo-fig5",
        "SimFBO, Fig. 5",
        "SimFBO is fastest in running time",
        REPRODUCED,
        "seconds to 80%, one seed: simfbo {}, lfednest {}, aggitd {}, fednest {}",
        pairs(
            to(0.8, "wall_s"),
            *(f"simfbo-fig5/{m}" for m in ("simfbo", "lfednest", "aggitd", "fednest")),
        ),
    ),
    Verdict(
        "shrofbo-fig4",
        "SimFBO, Fig. 4",
        "ShroFBO ends highest of five where clients take unequal numbers of steps",
        REPRODUCED,
        "last 50 rounds: shrofbo {}, simfbo {}; at equal steps simfbo {}; with fixed numbers of "
        "steps {} and {}",
        pairs(
            last_rounds(50),
            *(
                f"shrofbo-fig4/{label}"
                for label in (
                    "shrofbo",
                    "simfbo",
                    "simfbo equal",
                    "shrofbo equal fixed",
                    "simfbo equal fixed",
                )
            ),
        ),
    ),
]
