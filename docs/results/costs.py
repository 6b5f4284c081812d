"""How long runs take: measured while they run, or from costs.csv before they have begun.

    python docs/results/costs.py ID...

measures the operations of an iteration of each member that has no curve, and its seconds on one
core where the network has no convolutions. It writes them to costs.csv.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from curve_files import load
from members import BATTERY, Member
from plan import CONVOLUTIONAL, is_finished, resolved

from fedbilevel.runs import folder as folders

HERE = Path(__file__).parent
FILE = HERE / "costs.csv"
ITERATIONS = 2  # that are measured
START_S = 5.0  # of a process: imports and data
# Operations per second on an H200 in float32. RABO on ResNet-12 with five widths: 0.416 TFLOP in
# 40.7 ms; SimFBO on LeNet-5, 10 clients with 10 steps of batch 64: 0.041 in 15.8 ms. The cases are
# those of benchmarks/gpu.py.
GPU_RATE = {"resnet12": 10.2e12, "resnet18": 10.2e12, "conv4": 10.2e12, "cnn": 2.6e12}
HEADER = ("id", "label", "network", "rounds", "virtual_s", "flops", "cpu_s")


class Cost(NamedTuple):
    """What some iterations of a member cost.

    Attributes:
        network: The network, empty for linear models.
        rounds: The rounds that were measured.
        virtual_s: The virtual seconds that these took.
        flops: Their operations, at the full size of data.
        cpu_s: Their seconds on one core, NaN where the data was smaller.
    """

    network: str
    rounds: int
    virtual_s: float
    flops: float
    cpu_s: float

    def of_run(self, config: Mapping[str, Any]) -> tuple[float, float]:
        """Return the operations of a run, and its seconds on a GPU or on a core."""
        parts = config["rounds"] / self.rounds
        limits = config.get("stop", {})
        if "virtual_s" in limits and self.virtual_s:
            parts = min(parts, limits["virtual_s"] / self.virtual_s)
        flops = parts * self.flops
        if self.network in GPU_RATE:
            return flops, START_S + flops / GPU_RATE[self.network]
        return flops, START_S + parts * self.cpu_s


# Before a run has begun.


@cache
def measured() -> dict[str, Cost]:
    """Return the costs in costs.csv by curve."""
    costs: dict[str, Cost] = {}
    if not FILE.exists():
        return costs
    with FILE.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            numbers = (float(row[key]) for key in ("virtual_s", "flops", "cpu_s"))
            cost = Cost(row["network"], int(row["rounds"]), *numbers)
            costs[f"{row['id']}/{row['label']}"] = cost
    return costs


def expected_seconds(curve: str, config: Mapping[str, Any]) -> float:
    """Return how long a run takes that has not begun: by costs.csv, or by its committed curve.

    It is NaN if nothing like it was measured.
    """
    limits = config.get("stop", {})
    if "wall_s" in limits:
        return START_S + float(limits["wall_s"])
    cost = measured().get(curve)
    if cost is not None:
        return cost.of_run(config)[1]
    seconds = [float(run["wall_s"][-1]) for run in load(*curve.split("/", 1))]
    return START_S + statistics.fmean(seconds) if seconds else float("nan")


# While it runs.


def progress(path: Path) -> float:
    """Return the part of a run that is done, by its limit that is closest."""
    history = last_row(path)
    config = tomllib.loads((path / folders.CONFIG).read_text())
    limits = {"rounds": config["rounds"], **config.get("stop", {})}
    units = {"rounds": "round", "virtual_s": "virtual_s", "wall_s": "wall_s", "bytes": "bytes_up"}
    parts = [history.get(units[u], 0.0) / limits[u] for u in units if u in limits]
    return max(parts, default=0.0)


def seconds_so_far(path: Path) -> float:
    """Return the seconds that a run has taken, without evaluations."""
    return float(last_row(path).get("wall_s", 0.0))


def last_row(path: Path) -> dict[str, Any]:
    """Return the last evaluation of a run, empty before the first."""
    file = path / folders.METRICS
    if not file.exists():
        return {}
    lines = file.read_text().splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


def seconds_left(path: Path, curve: str) -> float:
    """Return how long a run still takes: by its own pace, by that of its siblings, or by costs.csv.

    Args:
        path: Its folder.
        curve: Its curve, as "ID/label".
    """
    if is_finished(path):
        return 0.0
    done = progress(path)
    if done > 0:
        return seconds_so_far(path) * (1 - done) / done
    totals = []
    for sibling in path.parent.glob("*"):
        if (sibling / folders.METRICS).exists():
            part = 1.0 if is_finished(sibling) else progress(sibling)
            if part > 0:
                totals.append(seconds_so_far(sibling) / part)
    if totals:
        return START_S + statistics.fmean(totals)
    return expected_seconds(curve, tomllib.loads((path / folders.CONFIG).read_text()))


# Measuring.


def measure(member: Member) -> Cost:
    """Run a few iterations of a member, after one in which code is prepared.

    Operations of convolutions do not depend on that: one iteration counts them.
    """
    from member import build_run

    config = resolved(member, {"seed": 0, "every": 1_000_000})
    network = config["task"].get("model", "")
    factor = 1.0
    if network == "resnet18":
        config, factor = shrunk(config)
    _, run = build_run(config)
    iterations = 1
    if network not in CONVOLUTIONAL:
        run.advance()
        iterations = ITERATIONS
    before = run.fed.ledger.totals()
    now = run.fed.now
    started = time.process_time()
    for _ in range(iterations):
        run.advance()
    seconds = time.process_time() - started
    after = run.fed.ledger.totals()
    flops = factor * (after["flops"] - before["flops"])
    rounds = int(after["rounds"] - before["rounds"])
    if network in CONVOLUTIONAL:
        seconds = float("nan")
    return Cost(network, rounds, run.fed.now - now, flops, seconds)


def shrunk(config: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return a config of one client with mini-batches of two, and how many times less it computes.

    All clients have the same capacity, and operations are in proportion to samples.
    """
    environment = dict(config["environment"])
    data = {**config["data"], "clients": 1, "samples": 2000, "test_samples": 20}
    factor = config["data"]["clients"] * environment["batch_size"] / 2
    environment["batch_size"] = 2
    return {**config, "environment": environment, "data": data}, factor


# ResNet-12 on episodes is measured already: operations per round are in rabo-table2.csv, for five
# ways. They are in proportion to the images of an episode, 20 per way, and to the squares of the
# capacities. An iteration of maml has as many as SHARE_OF_MAML times those of protonet, counted
# with Conv-4.
FIVE_CAPACITIES = sum(4.0**-k for k in range(5)) / 5
SHARE_OF_MAML = 1.69


def known_flops(name: str, member: Member) -> float | None:
    """Return the operations of a round of few-shot learning with ResNet-12; None of others."""
    if name not in ("rabo-table2", "rabo-fig3", "rabo-table3"):
        return None
    method = member.algorithm.split("-")[0]
    factor = float(member.overrides.get("task.ways", 5)) / 5
    shots = int(member.overrides.get("task.shots", 5 if name == "rabo-fig3" else 1))
    if name == "rabo-fig3":
        factor *= 0.25**2 / FIVE_CAPACITIES
    if method == "maml":
        method = "protonet"
        factor *= SHARE_OF_MAML
    runs = load("rabo-table2", f"{method} resnet12 {shots}")
    runs = runs or load("rabo-table2", f"{method} resnet12 1")
    return factor * float(runs[0]["flops"][-1] / runs[0]["round"][-1])


def main(ids: Iterable[str]) -> None:
    """Measure the members of experiments that are not in costs.csv yet, and add them to it."""
    rows = dict(measured())
    for name in ids:
        for member in BATTERY[name]:
            curve = f"{name}/{member.label}"
            if curve in rows or load(name, member.label):
                continue
            flops = known_flops(name, member)
            if flops is None:
                rows[curve] = measure(member)
            else:
                rows[curve] = Cost("resnet12", 1, 0.0, flops, float("nan"))
            print(curve, rows[curve], flush=True)
            write(rows)


def write(costs: Mapping[str, Cost]) -> None:
    """Write costs.csv."""
    with FILE.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(HEADER)
        for curve, cost in sorted(costs.items()):
            name, label = curve.split("/", 1)
            numbers = (f"{cost.virtual_s:.3g}", f"{cost.flops:.4g}", f"{cost.cpu_s:.3g}")
            writer.writerow((name, label, cost.network, cost.rounds, *numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
