"""ASFBO and LA-ASFBO (2025): our table and figure, and a verdict per claim."""

from __future__ import annotations

from itertools import product

from cells import TARGETS, Row, Table, final, final_number, last_rounds, scales, to
from panels import PARTITIONS, Bars, Panel
from verdicts import REFUTED, REPRODUCED, Verdict, pairs

TABLES: dict[str, Table] = {
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
}

FIGURES: dict[str, list[Panel] | list[Bars]] = {
    "asfbo-fig1": [
        Panel(
            f"{title}, tuned",
            {
                m: f"asfbo-fig1/{m} {partition} tuned"
                for m in ("la-asfbo", "asfbo", "shrofbo", "simfbo", "fednest", "lfednest")
            },
            limits=(0.7, 0.98),
            log=True,
        )
        for partition, title in PARTITIONS.items()
    ],
}

VERDICTS = [
    Verdict(
        "asfbo-fig1",
        "ASFBO, Fig. 1",
        "LA-ASFBO is ahead of ASFBO, and ASFBO of the rest",
        REFUTED,
        "rounds to 90% on shards, tuned: la-asfbo {}, asfbo {}, simfbo {}, shrofbo {}",
        pairs(
            to(0.9),
            *(f"asfbo-fig1/{m} shards tuned" for m in ("la-asfbo", "asfbo", "simfbo", "shrofbo")),
        ),
    ),
    Verdict(
        "asfbo-fig1",
        "ASFBO, Fig. 1",
        "LFedNest fails on label shards",
        REPRODUCED,
        "after 200 rounds: {}",
        pairs(final(), "asfbo-fig1/lfednest shards paper"),
    ),
]
