"""What verdicts.md says of each figure of the papers; tables.py writes it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from cells import (
    NOT_RUN,
    Cell,
    Row,
    at,
    episodes_at,
    final,
    growth,
    last_rounds,
    share,
    swing,
    to,
    total_growth,
)

REPRODUCED = "reproduced"
VARIANT = "reproduced by our variant only"
REFUTED = "refuted"
NOT_COMPARABLE = "not comparable"
VERDICTS_IN_ORDER = (REPRODUCED, VARIANT, REFUTED, NOT_COMPARABLE, NOT_RUN)


class Verdict(NamedTuple):
    """A verdict on one claim.

    Args:
        id: The experiment, which has a section on the results page; empty if it has none.
        place: Where print makes the claim.
        claim: The claim.
        verdict: One of the above. It is shown as "not run yet" while a curve is missing; NOT_RUN
            also stands until somebody has judged the runs.
        number: What was measured; "{}" stands for the values.
        values: Cells with the curves that they are about.
    """

    id: str
    place: str
    claim: str
    verdict: str
    number: str
    values: tuple[tuple[Cell, tuple[str, ...]], ...] = ()

    def measured(self) -> str:
        """Return the number with its values."""
        values = [cell(Row((), curves)) or NOT_RUN for cell, curves in self.values]
        return self.number.format(*values)

    def shown(self) -> str:
        """Return the verdict, unless it rests on runs that are missing."""
        return NOT_RUN if NOT_RUN in self.measured() else self.verdict


def pairs(cell: Cell, *curves: str) -> tuple[tuple[Cell, tuple[str, ...]], ...]:
    """Return one cell for several curves."""
    return tuple((cell, (curve,)) for curve in curves)


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
    Verdict(
        "aggitd-table2",
        "FBO-AggITD, Table 2",
        "AggITD needs fewer rounds to 90% than FedNest, and ends higher",
        REPRODUCED,
        "shards, tau = 5, batch 64: {} against {} rounds, {} against {}",
        (
            *pairs(to(0.9), *(f"aggitd-table2/{m} shards tau=5" for m in ("aggitd", "fednest"))),
            *pairs(final(), *(f"aggitd-table2/{m} shards tau=5" for m in ("aggitd", "fednest"))),
        ),
    ),
    Verdict(
        "aggitd-table2",
        "FBO-AggITD, Table 2",
        "by a factor of 2.5 to 3.1 (tau = 5: 3.1 for iid data, 2.5 for shards)",
        NOT_COMPARABLE,
        "factor at tau = 5: {} for iid data and {} for shards with batch 64, {} and {} with "
        "batch 10; {} and {} if AggITD has batch 64 and tau in epochs, and FedNest is its "
        "published code with batch 10, which come closest to print's counts; print gives no "
        "batch size, and iterations cost 5 and 10 rounds",
        tuple(
            (growth(0.9, "round"), tuple(curve.format(partition) for curve in curves))
            for curves in (
                ("aggitd-table2/aggitd {} tau=5", "aggitd-table2/fednest {} tau=5"),
                (
                    "aggitd-table2/aggitd {} tau=5 batch=10",
                    "aggitd-table2/fednest {} tau=5 batch=10",
                ),
                (
                    "aggitd-epochs/aggitd {} tau=5 epochs batch=64",
                    "aggitd-table2/fednest-reference {} tau=5 batch=10",
                ),
            )
            for partition in ("iid", "shards")
        ),
    ),
    Verdict(
        "aggitd-table2",
        "FBO-AggITD, Table 2",
        "more local work, tau = 5, needs fewer rounds than tau = 1",
        REPRODUCED,
        "aggitd, iid data, batch 64: {} against {}",
        pairs(to(0.9), *(f"aggitd-table2/aggitd iid tau={tau}" for tau in (5, 1))),
    ),
    Verdict(
        "aggitd-fig3",
        "FBO-AggITD, Fig. 1 and 3",
        "AggITD is ahead of FedNest, and FedNest of LFedNest, at every participation",
        REPRODUCED,
        "accuracy after 2000 rounds at C = 0.5: {}, {}, {}",
        pairs(final(), *(f"aggitd-fig3/{m} C=0.5" for m in ("aggitd", "fednest", "lfednest"))),
    ),
    Verdict(
        "aggitd-fig4",
        "FBO-AggITD, Fig. 4",
        "the SGD type swings more than the SVRG type",
        REFUTED,
        "aggitd, swing of SGD against SVRG: iid {} and {}, shards {} and {}",
        pairs(
            swing(),
            "aggitd-fig4/aggitd sgd iid",
            "aggitd-table2/aggitd iid tau=1",
            "aggitd-fig4/aggitd sgd shards",
            "aggitd-table2/aggitd shards tau=1",
        ),
    ),
    Verdict(
        "aggitd-cnn",
        "FBO-AggITD, Fig. 6",
        "AggITD trains a CNN on MNIST to 97.6% (iid) and 96.7% (shards)",
        NOT_COMPARABLE,
        "training accuracy at batch 64: {} and {}; print gives no batch size",
        pairs(
            final("train_accuracy"),
            *(f"aggitd-cnn/aggitd mnist cnn {partition}" for partition in ("iid", "shards")),
        ),
    ),
    Verdict(
        "aggitd-cnn",
        "FBO-AggITD, Fig. 6",
        "FedNest and LFedNest fail there on label shards",
        REPRODUCED,
        "training accuracy: fednest {}, lfednest {}",
        pairs(
            final("train_accuracy"),
            *(f"aggitd-cnn/{m} mnist cnn shards" for m in ("fednest", "lfednest")),
        ),
    ),
    Verdict(
        "aggitd-cnn",
        "FBO-AggITD, Fig. 5",
        "on CIFAR-10 FedNest does not converge, AggITD is not satisfactory",
        NOT_COMPARABLE,
        "test accuracy of the CNN {} and {}, of the MLP {} and {}; our images are re-encoded",
        pairs(
            final(),
            *(
                f"aggitd-cnn/{m} cifar10 {n} iid"
                for n in ("cnn", "mlp")
                for m in ("fednest", "aggitd")
            ),
        ),
    ),
    Verdict(
        "simfbo-fig5",
        "FBO-AggITD, Fig. 7",
        "AggITD's running time is comparable to FedNest's",
        REPRODUCED,
        "seconds to 85%, one seed: aggitd {}, fednest {}",
        pairs(to(0.85, "wall_s"), "simfbo-fig5/aggitd", "simfbo-fig5/fednest"),
    ),
    Verdict(
        "aggitd-fig7",
        "FBO-AggITD, Fig. 7",
        "a gossip method is much slower",
        REPRODUCED,
        "digits, 16 hidden units, tuned alike: DSBO needs {} times AggITD's operations to 85%, and "
        "sends {} times its bytes; on print's network the matrices do not fit",
        tuple(
            (growth(0.85, cost), ("aggitd-fig7/aggitd digits", "aggitd-fig7/dsbo digits"))
            for cost in ("flops", "bytes")
        ),
    ),
    Verdict(
        "rabo-table2",
        "RABO, Table II, 5-way",
        "RABO and RAFBO are above four methods with submodels",
        REPRODUCED,
        "at equal operations (at equal rounds not with 5 shots): ResNet-12, 1-shot, one seed, at "
        "the end: rabo {}, rafbo {}; fiarse, next, {}",
        pairs(
            episodes_at(None),
            *(f"rabo-table2/{m} resnet12 1" for m in ("rabo", "rafbo", "fiarse")),
        ),
    ),
    Verdict(
        "rabo-table2",
        "RABO, Table II",
        "the same with 20 ways; MAML",
        NOT_RUN,
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
        "Conv-4 instead of ResNet-12, one seed, with 10, 20, 30 and 50 clients: {}, {}, {}, {}",
        pairs(
            episodes_at(150),
            "rabo-table2/rabo conv4 1",
            *(f"rabo-table3-conv4/rabo-{clients}" for clients in (20, 30, 50)),
        ),
    ),
    Verdict(
        "afbo-fig1",
        "AFBO, Fig. 1 and 2",
        "AFBO is first in time",
        VARIANT,
        "seconds to 90% on MNIST, shards: with a linear system {}, as printed {}, the same with "
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
        "time to 67% grows by {} (afbo) and {} (simfbo)",
        tuple(
            (growth(0.67, "virtual_s"), (f"afbo-fig3/{m} plain", f"afbo-fig3/{m} slow"))
            for m in ("afbo", "simfbo")
        ),
    ),
    Verdict(
        "afbo-fig3",
        "AFBO, Fig. 3 and 4",
        "stragglers do not harm ADBO",
        REFUTED,
        "its time for 250 rounds grows by {}",
        ((total_growth("virtual_s"), ("afbo-fig3/adbo plain", "afbo-fig3/adbo slow")),),
    ),
    Verdict(
        "afbo-fig5",
        "AFBO, Fig. 5",
        "delays in inner loops slow FedNest, ADBO and SDBO, and not AFBO (MNIST, not iid)",
        NOT_RUN,
        "time for all rounds grows by {} (fednest), {} (sdbo), {} (adbo); our variant of AFBO has "
        "no exchange in an inner loop",
        tuple(
            (total_growth("virtual_s"), (f"afbo-fig5/{m} outer", f"afbo-fig1/{m} shards"))
            for m in ("fednest", "sdbo", "adbo")
        ),
    ),
    Verdict(
        "afbo-fig5",
        "AFBO, Fig. 5",
        "nor AFBO as printed (MNIST, not iid)",
        NOT_RUN,
        "time to 85% grows by {}",
        (
            (
                growth(0.85, "virtual_s"),
                ("afbo-fig5/afbo printed outer", "afbo-fig1/afbo printed shards"),
            ),
        ),
    ),
    Verdict(
        "afbo-fig6",
        "AFBO, Fig. 6",
        "delays in inner loops slow FedNest, ADBO and SDBO, and not AFBO (Covertype)",
        NOT_COMPARABLE,
        "time for all rounds grows by {} (fednest), {} (sdbo), {} (adbo), whose planes are one "
        "exchange each; our variant of AFBO has none in an inner loop; print does not say which "
        "exchanges it delays",
        tuple(
            (total_growth("virtual_s"), (f"afbo-fig6/{m} outer", f"afbo-fig3/{m} plain"))
            for m in ("fednest", "sdbo", "adbo")
        ),
    ),
    Verdict(
        "afbo-fig6",
        "AFBO, Fig. 6",
        "nor AFBO as printed (Covertype)",
        NOT_RUN,
        "time to 65% grows by {}",
        (
            (
                growth(0.65, "virtual_s"),
                ("afbo-fig6/afbo printed outer", "afbo-fig3/afbo printed plain"),
            ),
        ),
    ),
    Verdict(
        "afbo-fig6",
        "AFBO, Fig. 5 and 6",
        "Prometheus degrades too",
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
        "print does not say which",
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


def blocks(results: str) -> dict[str, str]:
    """Return the generated parts of verdicts.md: the count and the table.

    Args:
        results: The text of the results page, to whose sections the table links.
    """
    anchors = {}
    for title, name in re.findall(r"^### ((\S+): .*)$", results, flags=re.MULTILINE):
        anchors[name] = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    counts = Counter(verdict.shown() for verdict in VERDICTS)
    count = ", ".join(f"{name}: {counts[name]}" for name in VERDICTS_IN_ORDER if counts[name])
    lines = ["| print | claim | verdict | measured | section |", "| --- | --- | --- | --- | --- |"]
    for verdict in VERDICTS:
        section = ""
        if verdict.id:
            section = f"[{verdict.id}](README.md#{anchors[verdict.id]})"
            if (Path(__file__).parent / f"{verdict.id}.png").exists():
                section += f", [figure]({verdict.id}.png)"
        cells = (
            verdict.place,
            verdict.claim,
            f"**{verdict.shown()}**",
            verdict.measured(),
            section,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return {"count": f"{len(VERDICTS)} claims. {count}.", "verdicts": "\n".join(lines)}
