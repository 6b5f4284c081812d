"""AFBO (Li et al.): our tables and figures, and a verdict per claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from cells import (
    Row,
    Table,
    best,
    final,
    final_number,
    growth,
    growth_per_round,
    of_seeds,
    to,
    to_of_seeds,
)
from panels import PARTITIONS, Bars, Panel
from verdicts import NOT_COMPARABLE, REFUTED, VARIANT, Verdict, pairs

SECONDS = {
    "seconds to 85%": to(0.85, "virtual_s"),
    "to 88%": to(0.88, "virtual_s"),
    "to 90%": to(0.9, "virtual_s"),
}
SLOWER = growth_per_round("virtual_s")
LINEAR_SYSTEM = "afbo, linear system (ours)"
NAMES = {
    "afbo": LINEAR_SYSTEM,
    "simfbo": "simfbo",
    "fednest": "fednest",
    "sdbo": "sdbo",
    "adbo": "adbo",
    "afbo printed": "afbo as published",
    "afbo printed free": "the same, products free",
    "prometheus": "prometheus, on a ring",
}
WITHOUT_PUBLISHED = ("afbo", "simfbo", "fednest", "sdbo", "adbo")


def partition_rows(experiment: str, methods: Sequence[str]) -> list[Row]:
    """Return the rows of an experiment on both partitions."""
    return [
        Row((partition, NAMES[method]), [f"{experiment}/{method} {partition}"])
        for partition, method in product(PARTITIONS, methods)
    ]


def inner_delay_rows(experiment: str, with_inner: str) -> list[Row]:
    """Return rows with the curves of outer delays alone, and of inner ones, too.

    Args:
        experiment: The experiment with outer delays alone.
        with_inner: The curves with both, with {} in the place of the method.
    """
    rows = []
    for method in ("afbo", "simfbo", "prometheus"):  # no exchange in an inner loop
        both = with_inner.format(method)
        rows.append(Row((NAMES[method],), [both, both]))
    for method in ("fednest", "sdbo", "adbo", "afbo printed"):
        curves = [f"{experiment}/{method} outer", with_inner.format(method)]
        rows.append(Row((NAMES[method],), curves))
    return rows


def time_panel(
    title: str, curves: str, methods: Sequence[str], limits: tuple[float, float]
) -> Panel:
    """Methods against virtual time.

    Args:
        title: The title.
        curves: Their curves, with {} in the place of the method.
        methods: The methods.
        limits: Those of the accuracy.
    """
    named = {NAMES[method]: curves.format(method) for method in methods}
    return Panel(title, named, x="virtual_s", limits=limits, log=True)


def inner_delay_panels(
    experiment: str, with_inner: str, limits: tuple[float, float]
) -> list[Panel]:
    """Curves under outer delays alone, and under inner ones, too; arguments as above."""
    methods = [method for method in NAMES if method != "afbo printed free"]
    both = time_panel("delays of the outer and inner loops", with_inner, methods, limits)
    outer = {
        NAMES[method]: f"{experiment}/{method} outer"
        for method in ("fednest", "sdbo", "adbo", "afbo printed")
    }
    return [
        replace(both, title="delays of the outer loop", curves={**both.curves, **outer}),
        both,
    ]


TABLES: dict[str, Table] = {
    "afbo-fig1": Table(
        ["data", "method"],
        partition_rows("afbo-fig1", list(NAMES)),
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
            Row((label.replace("printed", "published"),), [f"afbo-printed/{label} shards"])
            for label in (
                "simfbo",
                LINEAR_SYSTEM,
                "afbo as printed, K = 5",
                "afbo as printed, K = 5, products free",
            )
        ],
        {"seconds to 90%": to(0.9, "virtual_s"), "of seeds 0, 1, 2": to_of_seeds(0.9, "virtual_s")},
    ),
    "afbo-fig3": Table(
        ["method"],
        [
            Row((name,), [f"afbo-fig3/{method} plain", f"afbo-fig3/{method} slow"])
            for method, name in NAMES.items()
        ],
        {
            "seconds to 65%": to(0.65, "virtual_s"),
            "seconds to 67%": to(0.67, "virtual_s"),
            "to 67% with stragglers": to(0.67, "virtual_s", 1),
            "grows by": growth(0.67, "virtual_s"),
            "time of a round grows by": SLOWER,
            "accuracy at the end": final(),
            "with stragglers": final(curve=1),
        },
    ),
    "afbo-fig5": Table(
        ["method"],
        inner_delay_rows("afbo-fig5", "afbo-fig1/{} shards"),
        {
            "seconds to 85%, outer delays": to(0.85, "virtual_s"),
            "inner ones, too": to(0.85, "virtual_s", 1),
            "grows by": growth(0.85, "virtual_s"),
            "to 88%, outer delays": to(0.88, "virtual_s"),
            "inner, too": to(0.88, "virtual_s", 1),
            "time of a round grows by": SLOWER,
            "accuracy at the end": final(curve=1),
        },
    ),
    "afbo-fig6": Table(
        ["method"],
        inner_delay_rows("afbo-fig6", "afbo-fig3/{} plain"),
        {
            "seconds to 65%, outer delays": to(0.65, "virtual_s"),
            "inner ones, too": to(0.65, "virtual_s", 1),
            "to 67%, outer delays": to(0.67, "virtual_s"),
            "inner, too": to(0.67, "virtual_s", 1),
            "time of a round grows by": SLOWER,
            "accuracy at the end": final(curve=1),
        },
    ),
    "afbo-pareto": Table(
        ["data", "method"],
        [
            Row(row.cells, [*row.curves, row.curves[0].replace("pareto", "fig1")])
            for row in partition_rows("afbo-pareto", WITHOUT_PUBLISHED)
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
        [
            Row((NAMES[method],), [f"afbo-pareto-covertype/{method} pareto"])
            for method in WITHOUT_PUBLISHED
        ],
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
                    LINEAR_SYSTEM: "afbo-fig1/afbo {}",
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
}

FIGURES: dict[str, list[Panel] | list[Bars]] = {
    "afbo-fig1": [
        time_panel(title, f"afbo-fig1/{{}} {partition}", list(NAMES), (0.6, 0.93))
        for partition, title in PARTITIONS.items()
    ],
    "afbo-fig3": [
        time_panel("even clients", "afbo-fig3/{} plain", list(NAMES), (0.5, 0.7)),
        time_panel("5 of 18 take 5 times as long", "afbo-fig3/{} slow", list(NAMES), (0.5, 0.7)),
    ],
    "afbo-fig5": inner_delay_panels("afbo-fig5", "afbo-fig1/{} shards", (0.5, 0.93)),
    "afbo-fig6": inner_delay_panels("afbo-fig6", "afbo-fig3/{} plain", (0.5, 0.7)),
    "afbo-pareto": [
        time_panel(title, f"afbo-pareto/{{}} {partition}", WITHOUT_PUBLISHED, (0.6, 0.93))
        for partition, title in PARTITIONS.items()
    ],
    "afbo-pareto-covertype": [
        time_panel(
            "Pareto delays in every exchange",
            "afbo-pareto-covertype/{} pareto",
            WITHOUT_PUBLISHED,
            (0.5, 0.7),
        )
    ],
    "afbo-fig7": [
        Panel(
            title,
            {
                LINEAR_SYSTEM: f"afbo-fig1/afbo {partition}",
                "afl, one mini-batch": f"afbo-fig7/afl {partition}",
                "afl, all samples": f"afbo-fig7/afl {partition} full",
            },
            y=y,
            limits=limits,
        )
        for y, limits in (("test_accuracy", (0.8, 0.92)), ("auc", (0.5, 1.0)))
        for partition, title in PARTITIONS.items()
    ],
}

VERDICTS = [
    Verdict(
        "afbo-fig1",
        "AFBO, Fig. 1 and 2",
        "AFBO is first in time",
        VARIANT,
        "seconds to 90% on MNIST, shards: with a linear system {}, as published {}, the same with "
        "products free {}, simfbo {}",
        pairs(
            to(0.9, "virtual_s"),
            *(
                f"afbo-fig1/{m} shards"
                for m in ("afbo", "afbo printed", "afbo printed free", "simfbo")
            ),
        ),
    ),
    Verdict(
        "afbo-fig3",
        "AFBO, Fig. 3 and 4",
        "stragglers harm synchronous methods and not AFBO",
        VARIANT,
        "time to 67% grows by {} (our variant of AFBO), {} (as published, if its products are "
        "free) and {} (simfbo); a round of AFBO as published takes {} times as long",
        tuple(
            (cell, (f"afbo-fig3/{m} plain", f"afbo-fig3/{m} slow"))
            for m, cell in (
                ("afbo", growth(0.67, "virtual_s")),
                ("afbo printed free", growth(0.67, "virtual_s")),
                ("simfbo", growth(0.67, "virtual_s")),
                ("afbo printed", SLOWER),
            )
        ),
    ),
    Verdict(
        "afbo-fig3",
        "AFBO, Fig. 3 and 4",
        "stragglers do not harm ADBO",
        REFUTED,
        "with them, a round takes {} times as long",
        ((SLOWER, ("afbo-fig3/adbo plain", "afbo-fig3/adbo slow")),),
    ),
    Verdict(
        "afbo-fig5",
        "AFBO, Fig. 5",
        "delays in inner loops slow FedNest, ADBO and SDBO, and not AFBO (MNIST, not iid)",
        NOT_COMPARABLE,
        "a round takes {} times as long (fednest), {} (sdbo), {} (adbo), whose planes are one "
        "exchange each; our variant of AFBO has none in an inner loop; the paper does not say "
        "which exchanges it delays",
        tuple(
            (SLOWER, (f"afbo-fig5/{m} outer", f"afbo-fig1/{m} shards"))
            for m in ("fednest", "sdbo", "adbo")
        ),
    ),
    Verdict(
        "afbo-fig5",
        "AFBO, Fig. 5",
        "delays in inner loops do not slow AFBO as published (MNIST, not iid)",
        REFUTED,
        "a round takes {} times as long: its inner rounds and products are exchanges with all "
        "clients",
        ((SLOWER, ("afbo-fig5/afbo printed outer", "afbo-fig1/afbo printed shards")),),
    ),
    Verdict(
        "afbo-fig6",
        "AFBO, Fig. 6",
        "delays in inner loops slow FedNest, ADBO and SDBO, and not AFBO (Covertype)",
        NOT_COMPARABLE,
        "a round takes {} times as long (fednest), {} (sdbo), {} (adbo), whose planes are one "
        "exchange each; our variant of AFBO has none in an inner loop; the paper does not say "
        "which exchanges it delays",
        tuple(
            (SLOWER, (f"afbo-fig6/{m} outer", f"afbo-fig3/{m} plain"))
            for m in ("fednest", "sdbo", "adbo")
        ),
    ),
    Verdict(
        "afbo-fig6",
        "AFBO, Fig. 6",
        "delays in inner loops do not slow AFBO as published (Covertype)",
        REFUTED,
        "a round takes {} times as long: its inner rounds and products are exchanges with all "
        "clients",
        ((SLOWER, ("afbo-fig6/afbo printed outer", "afbo-fig3/afbo printed plain")),),
    ),
    Verdict(
        "afbo-fig6",
        "AFBO, Fig. 5 and 6",
        "delays in inner loops slow Prometheus, too",
        NOT_COMPARABLE,
        "its lower levels are private and its clients exchange once per iteration, so that there "
        "is no inner exchange to delay; accuracy on Covertype {}",
        pairs(final(), "afbo-fig3/prometheus plain"),
    ),
    Verdict(
        "afbo-fig7",
        "AFBO, Fig. 7 (iid)",
        "AFL ends lower than AFBO",
        NOT_COMPARABLE,
        "accuracy: afbo {}, afl {} with one mini-batch per hypergradient, {} with all samples; "
        "the paper does not say which",
        pairs(final(), "afbo-fig1/afbo iid", "afbo-fig7/afl iid", "afbo-fig7/afl iid full"),
    ),
    Verdict(
        "afbo-fig7",
        "AFBO, Fig. 8 (not iid)",
        "AFL ends lower than AFBO",
        VARIANT,
        "accuracy: afbo {}, afl {}; with hypergradients of all samples afl {}",
        pairs(
            final(), "afbo-fig1/afbo shards", "afbo-fig7/afl shards", "afbo-fig7/afl shards full"
        ),
    ),
]
