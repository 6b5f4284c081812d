"""The battery: its members can be run, in slices, and methods of a figure are tuned alike."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent.parent / "docs" / "results"
sys.path.insert(0, str(RESULTS))  # scripts beside the page, which import each other

import battery  # noqa: E402
import costs  # noqa: E402
import luggage  # noqa: E402
import plan as plans  # noqa: E402
import search  # noqa: E402
from collecting import collect  # noqa: E402
from member import build_run  # noqa: E402
from members import BATTERY, Member  # noqa: E402
from plan import Plan  # noqa: E402
from search import Point, Search  # noqa: E402

from fedbilevel.report._curve_files import read_runs  # noqa: E402
from fedbilevel.runs import folder as folders  # noqa: E402

# Members


def test_every_member_is_a_run_that_can_be_resolved() -> None:
    for group in BATTERY.values():
        for member in group:
            config = plans.resolved(member, {})
            assert config.get("label", config["algorithm"]["name"]) == member.algorithm
            assert config["runtime"]["threads"] == 1


IN_PRINTS_SETTING = (
    "aggitd-fig7",
    "aggitd-cnn",
    "afbo-fig3",
    "afbo-fig5",
    "afbo-fig6",
    "rabo-table2",
    "rabo-fig3",
    "rabo-table3",
    "rabo-fig5",
)
DIFFERENT = {  # the last member of each experiment and algorithm
    (member.experiment, member.algorithm): member
    for name in IN_PRINTS_SETTING
    for member in BATTERY[name]
}


@pytest.mark.parametrize("key", DIFFERENT, ids="-".join)
def test_members_run_on_small_data(key: tuple[str, str]) -> None:
    config = plans.resolved(DIFFERENT[key], {"seed": 0}, smoke=True)
    _, run = build_run(config)
    run.advance()
    assert run.fed.ledger.rounds > 0


def test_only_networks_with_convolutions_go_to_the_gpu() -> None:
    devices = {
        (name, member.label): plans.resolved(member, {}, gpu=True)["device"]
        for name in ("aggitd-table2", "rabo-fig5")
        for member in BATTERY[name]
    }
    assert devices["aggitd-table2", "aggitd iid tau=1"] == "cpu"
    assert devices["rabo-fig5", "rabo"] == "cpu"
    assert devices["rabo-fig5", "rabo cifar10"] == "cuda"


# Slices


SMALL = {
    "rounds": 60,
    "every": 2,
    "task.hidden": 8,
    "data.clients": 4,
    "environment.participation": 2,
    "environment.local_steps": 2,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment with a member that is tuned, one that is not, and a search of two trials."""
    group = [
        Member("plain", "digits", "simfbo", SMALL, seeds=[0]),
        Member("tuned", "digits", "shrofbo", SMALL | {"rounds": 6}, seeds=[0], tuned="shrofbo"),
    ]
    limits = {"rounds": 4, "every": 2}
    monkeypatch.setitem(BATTERY, "tiny", group)
    declared = Search(trials=2, target=0.9, cost="round", limits=limits)
    monkeypatch.setitem(search.SEARCHES, "tiny", declared)


def run_slice(out: Path, is_over: Callable[[float], bool] = lambda elapsed: False) -> None:
    plan = Plan.of(["tiny"], out)
    plans.prepare(plan)
    queue = battery.Queue(plan, jobs=2, gpu_jobs=0)
    queue.run(is_over)
    assert not queue.failed


def evaluations(path: Path) -> list[dict[str, Any]]:
    """What a run has recorded, without its time."""
    lines = (path / folders.METRICS).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "wall_s"} for line in lines]


@pytest.mark.usefixtures("tiny")
def test_slices_that_travel_are_one_run_to_the_bit(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_slice(whole)
    first = tmp_path / "first"
    interrupted = first / "tiny" / "plain" / "seed-0"

    def has_begun(elapsed: float) -> bool:
        file = interrupted / folders.METRICS
        return file.exists() and len(file.read_text().splitlines()) > 3

    run_slice(first, has_begun)
    assert not plans.is_finished(interrupted)
    assert 3 < len(evaluations(interrupted)) < 31
    packed = luggage.pack(first, tmp_path / "kit")
    assert packed.left == []

    second = tmp_path / "second"
    luggage.unpack(packed.files, second)
    before = len(evaluations(second / "tiny" / "plain" / "seed-0"))
    assert before == len(evaluations(interrupted))
    run_slice(second)
    for path in ("plain/seed-0", "tuned/seed-0", "search/shrofbo/x0y0", "search/shrofbo/x1y0"):
        assert evaluations(second / "tiny" / path) == evaluations(whole / "tiny" / path)
    assert not list(second.rglob("checkpoint"))

    for name, out in (("a", whole), ("b", second)):
        collect(["tiny"], out, tmp_path / name)
    trials = [(tmp_path / name / "tiny-search.csv").read_text() for name in "ab"]
    assert trials[0] == trials[1]
    runs = read_runs([tmp_path / "b" / "tiny.csv.xz"])
    assert [run.status for run in runs] == ["completed", "completed"]
    assert [len(run.history) for run in runs] == [31, 4]
    # The tuned member has the scales of the better trial, and curves outlive their run folders.
    best = min(("x0y0", "x1y0"), key=lambda point: score(whole, point))
    steps = {}
    for path in (f"search/shrofbo/{best}", "tuned/seed-0"):
        steps[path] = plans.read_toml(whole / "tiny" / path / folders.CONFIG)["algorithm"]
    assert len({json.dumps(settings) for settings in steps.values()}) == 1
    collect(["tiny"], tmp_path / "nothing", tmp_path / "b")
    assert len(read_runs([tmp_path / "b" / "tiny.csv.xz"])) == 2


def score(out: Path, point: str) -> float:
    history = folders.read(out / "tiny" / "search" / "shrofbo" / point).history
    return search.SEARCHES["tiny"].score(history)


def make_run(path: Path, checkpoint: int = 0, rounds: int = 0, status: str = "") -> Path:
    """A run folder of 10 rounds with a checkpoint of so many bytes, after so many rounds."""
    (path / "checkpoint").mkdir(parents=True)
    (path / folders.CONFIG).write_text('rounds = 10\ndevice = "cpu"\n')
    if rounds:
        (path / folders.METRICS).write_text(json.dumps({"round": rounds, "wall_s": 2.0 * rounds}))
    if checkpoint:
        noise = random.Random(0).randbytes(checkpoint)  # which cannot be compressed
        (path / folders.CHECKPOINT).write_bytes(noise)
        (path / folders.PREVIOUS_CHECKPOINT).write_bytes(noise)
    if status:
        (path / folders.SUMMARY).write_text(json.dumps({"status": status}))
    return path


def test_what_is_worth_most_is_packed_within_the_limits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = make_run(out / "a" / "done" / "seed-0", rounds=10, status="completed")
    little = make_run(out / "a" / "little" / "seed-0", checkpoint=3000, rounds=1)
    much = make_run(out / "a" / "much" / "seed-0", checkpoint=3000, rounds=8)
    large = make_run(out / "a" / "large" / "seed-0", checkpoint=90_000, rounds=9)
    assert luggage.by_value([little, large, much, done]) == [done, much, little, large]
    sizes = [len(luggage.compressed(path, out)) for path in (done, much, little, large)]
    kib = {"file_mib": 8000 / 2**20, "all_mib": 1.0}
    packed = luggage.pack(out, tmp_path / "kit", **kib)
    assert packed.left == [large], "it is larger than a file"
    assert sum(file.stat().st_size for file in packed.files) == sum(sizes[:3])
    packed = luggage.pack(out, tmp_path / "kit", all_mib=(sizes[0] + sizes[1]) / 2**20)
    assert packed.left == [little, large]
    packed = luggage.pack(out, tmp_path / "kit", files=1, file_mib=(sum(sizes[:2])) / 2**20)
    assert (len(packed.files), packed.left) == (1, [little, large])
    luggage.unpack(packed.files, tmp_path / "there")
    name = much.relative_to(out) / folders.CHECKPOINT
    assert (tmp_path / "there" / name).read_bytes() == (out / name).read_bytes()
    assert not list((tmp_path / "there").rglob("previous*"))
    assert (tmp_path / "there" / "a" / "done" / "seed-0" / folders.SUMMARY).exists()


def test_how_long_a_run_still_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = make_run(tmp_path / "a" / "b" / "seed-0", rounds=4)
    waiting = make_run(tmp_path / "a" / "b" / "seed-1")
    finished = make_run(tmp_path / "a" / "b" / "seed-2", rounds=10, status="completed")
    assert costs.seconds_left(finished, "a/b") == 0
    assert costs.seconds_left(running, "a/b") == pytest.approx(12)  # 8 s for 4 of 10 rounds
    assert costs.seconds_left(waiting, "a/b") == pytest.approx(costs.START_S + 20)
    alone = make_run(tmp_path / "a" / "c" / "seed-0")
    known = {"a/c": costs.Cost("mlp", 2, 0.0, 1e9, 3.0)}
    monkeypatch.setattr(costs, "measured", lambda: known)
    assert costs.seconds_left(alone, "a/c") == pytest.approx(costs.START_S + 15)
    known["a/c"] = costs.Cost("resnet12", 2, 0.0, 10.2e12, float("nan"))
    assert costs.seconds_left(alone, "a/c") == pytest.approx(costs.START_S + 5)


def test_what_verdicts_need_most_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import papers
    import verdicts

    group = [Member(label, "digits", "simfbo", seeds=[0, 1]) for label in ("a", "b", "c")]
    monkeypatch.setitem(BATTERY, "tiny", group)

    def verdict(curve: str, shown: str) -> verdicts.Verdict:
        return verdicts.Verdict("", "", "", shown, "{}", verdicts.pairs(lambda row: "1", curve))

    found = [verdict("tiny/b", verdicts.NOT_JUDGED), verdict("tiny/c", verdicts.NOT_COMPARABLE)]
    monkeypatch.setattr(papers, "VERDICTS", found)
    plan = Plan.of(["tiny"], tmp_path)
    plans.prepare(plan)
    queue = battery.Queue(plan, jobs=1, gpu_jobs=0)
    ranked = sorted(plan.due(), key=queue.rank)
    order = [path.relative_to(tmp_path / "tiny").as_posix() for path in ranked]
    assert order[:2] == ["b/seed-0", "b/seed-1"]
    assert order[-2:] == ["a/seed-0", "a/seed-1"]


def test_nothing_runs_beside_a_member_whose_time_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [Member("a", "digits", "simfbo"), Member("b", "digits", "simfbo", alone=True)]
    monkeypatch.setitem(BATTERY, "tiny", group)
    plan = Plan.of(["tiny"], tmp_path)
    plans.prepare(plan)
    queue = battery.Queue(plan, jobs=2, gpu_jobs=0)
    (a, other, *_), (b, *_) = (
        [path for path in plan.members if path.parent.name == label] for label in "ab"
    )
    assert queue.has_room(b, "cpu")
    queue.running[a] = None  # type: ignore[assignment]
    assert queue.has_room(other, "cpu")
    assert not queue.has_room(b, "cpu")
    queue.running = {b: None}  # type: ignore[dict-item]
    assert not queue.has_room(a, "cpu")


# Tuning


def searched(cost: Callable[[Point], float], trials: int) -> dict[Point, float]:
    """Run a search on a function of the point."""
    scores: dict[Point, float] = {}
    while points := search.next_points(scores, trials):
        scores[points[0]] = cost(points[0])
    return scores


def test_a_search_walks_to_the_optimum_and_around_it() -> None:
    def bowl(point: Point) -> float:
        return (point.x - 2) ** 2 + (point.y + 1) ** 2

    scores = searched(bowl, 30)
    assert search.best_point(scores) == Point(2, -1)
    assert search.is_closed(scores)
    assert len(scores) < 20, "it does not try everything"


def test_a_search_that_runs_out_of_trials_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = searched(lambda point: -point.x, 6)
    assert len(scores) == 6
    assert not search.is_closed(scores)
    monkeypatch.setattr(search, "CURVES", tmp_path)
    trials = [search.Trial("m", point, 1e20, 0.1, "completed") for point in scores]
    search.write_trials(tmp_path / "a-search.csv", trials)
    assert search.summary("a", "m").endswith("of 6, not closed")
    assert search.summary("a", "other") == ""
    assert [trial.point for trial in search.read_trials("a")] == list(scores)


def test_trials_are_judged_by_their_cost_to_the_target_or_else_by_their_accuracy() -> None:
    declared = Search(trials=5, target=0.8, cost="flops", limits={})

    def history(*accuracies: float) -> list[dict[str, float]]:
        return [{"flops": 10.0 * i, "test_accuracy": a} for i, a in enumerate(accuracies)]

    assert declared.score(history(0.1, 0.8, 0.9)) == 10
    assert declared.score(history(0.1, 0.7)) < declared.score(history(0.1, 0.5))
    assert declared.score(history(0.1, 0.7)) > declared.score(history(*[0.1] * 50, 0.9))
