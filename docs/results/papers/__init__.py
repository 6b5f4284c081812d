"""What the results page shows, a module per paper: tables, figures and verdicts."""

from __future__ import annotations

from cells import Table
from panels import Bars, Panel
from verdicts import Verdict

from papers import afbo, aggitd, asfbo, ours, rabo, simfbo

TABLES: dict[str, Table] = {}
FIGURES: dict[str, list[Panel] | list[Bars]] = {}
for module in (ours, simfbo, asfbo, aggitd, rabo, afbo):
    TABLES |= module.TABLES
    FIGURES |= module.FIGURES
VERDICTS: list[Verdict] = []
for paper in (simfbo, asfbo, aggitd, rabo, afbo):
    VERDICTS += paper.VERDICTS
