"""RABO and RAFBO (Li et al.): our tables and figures, and a verdict per claim."""

from __future__ import annotations

from itertools import product

from cells import Row, Table, at, episodes_at, final, final_number, per, share
from curve_files import load
from members import FEW_SHOT
from panels import Bars, Mark, Panel
from verdicts import NOT_COMPARABLE, NOT_JUDGED, REFUTED, REPRODUCED, Verdict, pairs

FEW_SHOT_REPORTED = {  # in percent, in the order of COLUMNS
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
SUBMODELS = ("static", "oap", "fedrolex", "fiarse")
ONE_SEED = [method for method in FEW_SHOT if method != "maml"]  # of the older runs
COLUMNS = ("5-way 1-shot", "5-way 5-shot", "20-way 1-shot", "20-way 5-shot")
CLIENTS_CURVES = {
    10: "rabo-table2/rabo conv4 1",
    **{clients: f"rabo-table3-conv4/rabo-{clients}" for clients in (20, 30, 50)},
}
CLIENTS_REPORTED = {10: 76.05, 20: 75.81, 30: 74.39, 50: 72.76}  # in percent, 1-shot
LOSS_TUNING = {
    "rabo": "rabo, 10 terms x 0.1",
    "rafbo": "rafbo, 10 terms x 0.1",
    "rabo cg": "rabo, conjugate gradients",
    "rafbo cg": "rafbo, conjugate gradients",
    "rabo-3x0.02": "rabo, 3 terms x 0.02",
    "rafbo-3x0.02": "rafbo, 3 terms x 0.02",
    **{name: name for name in SUBMODELS},
    "fedmbo": "fedmbo, full models",
    "fedavg": "fedavg, full models, untuned loss",
}


def few_shot_rows() -> list[Row]:
    """Return the methods of Table II, each with its four curves."""
    rows = []
    for method in FEW_SHOT:
        reported = ", ".join(f"{value:.2f}" for value in FEW_SHOT_REPORTED[method])
        rows.append(Row((method, reported), [f"rabo-table2/{method} {c}" for c in COLUMNS]))
    return rows


def few_shot_panels() -> list[Panel]:
    """ResNet-12 with 5 ways, against operations, with the accuracies of Table II."""
    panels = []
    for index, shots in enumerate((1, 5)):
        curves = {m: f"rabo-table2/{m} resnet12 {shots}" for m in ("rabo", "rafbo", *SUBMODELS)}
        marks = {m: [Mark(FEW_SHOT_REPORTED[m][index] / 100)] for m in curves}
        panels.append(Panel(f"5-way {shots}-shot", curves, "flops", marks=marks, log=True))
    return panels


def costs_per_iteration(column: str) -> dict[str, float]:
    """What an iteration costs in rabo-fig4, in percent of RABO on full models."""

    def cost(label: str) -> float:
        [run] = load("rabo-fig4", f"{label} shots=5")
        return float(run[column][-1])

    full = cost("rabo-full")
    return {name: 100 * cost(name) / full for name in ("rabo", "rafbo")}


TABLES: dict[str, Table] = {
    "rabo-table2": Table(
        ["ResNet-12", "reported, 1-shot", "reported, 5-shot"],
        [
            Row(
                (method, *(f"{value:.2f}%" for value in FEW_SHOT_REPORTED[method][:2])),
                [f"rabo-table2/{method} resnet12 {shots}" for shots in (1, 5)],
            )
            for method in ONE_SEED
        ],
        {
            "1-shot, 100 rounds": episodes_at(100),
            "1-shot, at the end": episodes_at(None),
            "5-shot, 100 rounds": episodes_at(100, 1),
            "5-shot, at the end": episodes_at(None, 1),
        },
    ),
    "rabo-table2-conv4": Table(
        ["Conv-4, 32 channels"],
        [
            Row((method,), [f"rabo-table2/{method} conv4 {n}" for n in (1, 5)])
            for method in ONE_SEED
        ],
        {
            "1-shot, 50 rounds": episodes_at(50),
            "1-shot, 150 rounds": episodes_at(150),
            "1-shot, at the end": episodes_at(None),
            "5-shot, 50 rounds": episodes_at(50, 1),
            "5-shot, 150 rounds": episodes_at(150, 1),
            "5-shot, at the end": episodes_at(None, 1),
        },
    ),
    "rabo-table2-resnet12": Table(
        ["ResNet-12, three seeds", "reported, %"],
        few_shot_rows(),
        {column: final(digits=1, curve=index) for index, column in enumerate(COLUMNS)},
        "All four columns, all nine methods, 200 rounds (`battery.py rabo-table2`):",
    ),
    "rabo-fig4": Table(
        ["", "reported, operations"],
        [
            Row((name, reported), [f"rabo-fig4/{label} shots={n}" for n in (5, 1)])
            for name, label, reported in (
                ("fedmbo, full models", "fedmbo", "100%"),
                ("rabo-full, its steps on full models", "rabo-full", ""),
                ("rabo, five capacities", "rabo", "26.7%"),
                ("rafbo, five capacities", "rafbo", "17.8%"),
            )
        ],
        {
            "TFLOP per iteration, 5-shot": per("iteration", "flops", 1e12, 3),
            "of fedmbo's TFLOP": share("iteration", "flops", "rabo-fig4/fedmbo shots=5"),
            "1-shot, of fedmbo's TFLOP": share("iteration", "flops", "rabo-fig4/fedmbo shots=1", 1),
            "MB per iteration": per("iteration", "bytes", 1e6, 0),
            "of fedmbo's MB": share("iteration", "bytes", "rabo-fig4/fedmbo shots=5"),
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
        ["", "reported, operations", "reported, bytes"],
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
            "of fedmbo's GFLOP": share("iteration", "flops", "rabo-fig5/fedmbo"),
            "MB per iteration": per("iteration", "bytes", 1e6, 1),
            "of fedmbo's MB": share("iteration", "bytes", "rabo-fig5/fedmbo"),
        },
    ),
    "rabo-fig5-cifar10": Table(
        ["ResNet-18, CIFAR-10"],
        [
            Row((name,), [f"rabo-fig5/{label} cifar10"])
            for label, name in LOSS_TUNING.items()
            if not label.endswith("cg")
        ],
        {
            "balanced accuracy after 200 rounds": at(200, "balanced_accuracy"),
            "after 400 rounds": at(400, "balanced_accuracy"),
            "TFLOP per iteration": per("iteration", "flops", 1e12, 3),
        },
        "In the paper's setting (`battery.py rabo-fig5 --only cifar10`):",
    ),
    "rabo-fig3": Table(
        ["", "C_x*"],
        [
            Row((method, count), [f"rabo-fig3-conv4/{method}-C{count}"])
            for method, count in product(("rabo", "rafbo"), "12")
        ],
        {f"{rounds} rounds": episodes_at(rounds) for rounds in (50, 100, 150, 200)},
    ),
    "rabo-fig3-resnet12": Table(
        ["", "C_x*"],
        [
            Row((method, str(count)), [f"rabo-fig3/{method} C={count}"])
            for method, count in product(("rabo", "rafbo"), (1, 2))
        ],
        {f"{rounds} rounds": at(rounds) for rounds in (50, 100, 150, 200)},
        "With ResNet-12 (`battery.py rabo-fig3`):",
    ),
    "rabo-table3": Table(
        ["clients", "reported"],
        [
            Row((str(clients), f"{reported}%"), [CLIENTS_CURVES[clients]])
            for clients, reported in CLIENTS_REPORTED.items()
        ],
        {"rabo, 150 rounds": episodes_at(150)},
    ),
    "rabo-table3-resnet12": Table(
        ["clients", "reported, rabo, 1-shot"],
        [
            Row(
                (str(clients), f"{reported}%"),
                [
                    f"rabo-table3/{method} {clients} clients {shots}-shot"
                    for shots, method in product((1, 5), ("rabo", "rafbo"))
                ],
            )
            for clients, reported in CLIENTS_REPORTED.items()
        ],
        {
            "rabo, 1-shot": final(),
            "rafbo, 1-shot": final(curve=1),
            "rabo, 5-shot": final(curve=2),
            "rafbo, 5-shot": final(curve=3),
        },
        "With ResNet-12, RAFBO and 5-shot (`battery.py rabo-table3`):",
    ),
}

FIGURES: dict[str, list[Panel] | list[Bars]] = {
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
            "operations per iteration",
            costs_per_iteration("flops"),
            {"rabo": 26.7, "rafbo": 17.8},
            "% of full models",
        ),
        Bars(
            "bytes per iteration",
            costs_per_iteration("bytes"),
            {"rabo": 26.7, "rafbo": 26.7},
            "% of full models",
        ),
    ],
    "rabo-table3": [
        Panel(
            "RABO, Conv-4, 5-way 1-shot, one seed",
            {f"{clients} clients": curve for clients, curve in CLIENTS_CURVES.items()},
            marks={
                f"{clients} clients": [Mark(reported / 100, 150)]
                for clients, reported in CLIENTS_REPORTED.items()
            },
        )
    ],
    "rabo-fig5": [
        Panel(
            "MNIST, long-tailed, MLP",
            {m: f"rabo-fig5/{m}" for m in ("rabo", "rafbo", *SUBMODELS, "fedmbo", "fedavg")},
            y="balanced_accuracy",
            limits=(0.4, 0.9),
        )
    ],
}

VERDICTS = [
    Verdict(
        "rabo-table2",
        "RABO, Table II, 5-way",
        "RABO and RAFBO are above four methods with submodels (judged at equal operations)",
        REPRODUCED,
        "ResNet-12, one seed; 1-shot: rabo {}, rafbo {}; next, fiarse {}; 5-shot: rabo {}, rafbo "
        "{}; next, fedrolex {}; at equal rounds this does not hold with 5 shots",
        pairs(
            episodes_at(None),
            *(f"rabo-table2/{m} resnet12 1" for m in ("rabo", "rafbo", "fiarse")),
            *(f"rabo-table2/{m} resnet12 5" for m in ("rabo", "rafbo", "fedrolex")),
        ),
    ),
    Verdict(
        "rabo-table2",
        "RABO, Table II, 20-way",
        "RABO and RAFBO are above four methods with submodels, and below MAML",
        NOT_JUDGED,
        "20-way 1-shot: rabo {}, rafbo {}, fiarse {}, maml {}",
        pairs(
            final(digits=1),
            *(f"rabo-table2/{m} 20-way 1-shot" for m in ("rabo", "rafbo", "fiarse", "maml")),
        ),
    ),
    Verdict(
        "rabo-fig3",
        "RABO, Fig. 3",
        "C_x* = 2 is better than 1",
        REPRODUCED,
        "Conv-4 instead of ResNet-12, one seed, 200 rounds: rabo {} against {}, rafbo {} against "
        "{}",
        pairs(
            episodes_at(200),
            *(f"rabo-fig3-conv4/{m}-C{count}" for m in ("rabo", "rafbo") for count in (2, 1)),
        ),
    ),
    Verdict(
        "rabo-fig4",
        "RABO, Fig. 4",
        "submodels send 26.7% of FedMBO's bytes",
        REPRODUCED,
        "{}",
        pairs(share("round", "bytes", "rabo-fig4/fedmbo shots=5"), "rabo-fig4/rabo shots=5"),
    ),
    Verdict(
        "rabo-fig4",
        "RABO, Fig. 4",
        "RABO computes 26.7% of what full models do",
        REPRODUCED,
        "{} of RABO on full models",
        pairs(share("iteration", "flops", "rabo-fig4/rabo-full shots=5"), "rabo-fig4/rabo shots=5"),
    ),
    Verdict(
        "rabo-fig4",
        "RABO, Fig. 4",
        "RAFBO computes less, 17.8%",
        REFUTED,
        "{} of RABO's operations",
        pairs(share("iteration", "flops", "rabo-fig4/rabo shots=5"), "rabo-fig4/rafbo shots=5"),
    ),
    Verdict(
        "rabo-fig5",
        "RABO, Fig. 5",
        "RABO and RAFBO are above methods with submodels, by 9.97 and 5.53 points on average",
        NOT_COMPARABLE,
        "MNIST and an MLP instead of CIFAR-10 and ResNet-18, balanced accuracy: rabo {}, rafbo {}, "
        "static {}, oap {}, fedrolex {}, fiarse {}",
        pairs(
            at(200, "balanced_accuracy"),
            *(f"rabo-fig5/{m}" for m in ("rabo", "rafbo", "static", "oap", "fedrolex", "fiarse")),
        ),
    ),
    Verdict(
        "rabo-fig5",
        "RABO, Fig. 6",
        "an iteration costs RABO 1/2 and RAFBO 1/4 of FedMBO's operations",
        REFUTED,
        "{} and {} (MNIST, MLP)",
        pairs(
            share("iteration", "flops", "rabo-fig5/fedmbo"),
            "rabo-fig5/rabo-3x0.02",
            "rabo-fig5/rafbo-3x0.02",
        ),
    ),
    Verdict(
        "rabo-table3",
        "RABO, Table III",
        "accuracy falls with the number of clients",
        NOT_COMPARABLE,
        "at equal rounds (150) with 10, 20, 30 and 50 clients, ten of them per round: {}, {}, {}, "
        "{}; Conv-4 instead of ResNet-12, one seed",
        pairs(episodes_at(150), *CLIENTS_CURVES.values()),
    ),
]
