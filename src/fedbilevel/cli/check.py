"""What `fb.check` found, as a table with a piece of an experiment file, or as JSON."""

from __future__ import annotations

import json
import math
import sys

import tomli_w
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbilevel.diagnostics.advice import ADVISED, Report


def show(report: Report, title: str) -> None:
    if report.rows:
        table = Table("", "measured", "verdict", title=escape(title), caption=escape(report.where))
        for row in report.rows:
            table.add_row(*map(escape, row))
        (Console() if sys.stdout.isatty() else Console(width=140)).print(table)
    for warning in report.warnings:
        print(f"warning: {warning}")
    if report.measured:
        print(f"recommended: {report.recommended} ({report.reason})\n")
        print(tomli_w.dumps({"algorithms": {report.recommended: report.settings()}}), end="")


def as_json(report: Report) -> str:
    """Settings are those of every method there is advice on; what could not be measured is null."""
    m = report.measured
    return json.dumps(
        {
            "where": report.where,
            "measured": m
            and {**m._asdict(), "condition": m.condition if math.isfinite(m.condition) else None},
            "verdicts": {what: verdict for what, _, verdict in report.rows},
            "warnings": report.warnings,
            "recommended": report.recommended if m else None,
            "reason": report.reason if m else None,
            "settings": {name: report.settings(name) for name in ADVISED} if m else {},
        }
    )
