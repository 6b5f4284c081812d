"""What there is to run: the folders of members and of trials, their configs, and which are due."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import search
from members import BATTERY, Member
from search import SEARCHES, Point

from fedbilevel.runs import folder as folders

HERE = Path(__file__).parent
UNSCALED = "unscaled.toml"  # the config of a member or of trials before their scales are known
CONVOLUTIONAL = ("cnn", "conv4", "resnet12", "resnet18")


@dataclass(frozen=True)
class Plan:
    """The members of some experiments, with the searches that they wait for.

    Args:
        out: The folder with all run folders.
        members: The members by their folders, with their seeds.
        searches: The folders of searches, with the experiment and the label of each.
    """

    out: Path
    members: Mapping[Path, tuple[Member, int]]
    searches: Mapping[Path, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, ids: Iterable[str], out: Path, wanted: Iterable[str] | None = None) -> Plan:
        """Plan experiments.

        Args:
            ids: The experiments.
            out: The folder for their run folders.
            wanted: The curves to run, as "ID/label/seed"; all by default.
        """
        chosen = None if wanted is None else set(wanted)
        members = {}
        searches = {}
        for name in ids:
            for member in BATTERY[name]:
                for seed in member.seeds:
                    if chosen is not None and f"{name}/{member.label}/{seed}" not in chosen:
                        continue
                    members[out / name / slug(member.label) / f"seed-{seed}"] = (member, seed)
                    is_known = any(t.label == member.tuned for t in search.read_trials(name))
                    if member.tuned and not is_known:
                        searches[out / name / "search" / slug(member.tuned)] = (name, member.tuned)
        return cls(out, members, searches)

    def due(self) -> list[Path]:
        """Return the run folders that can be run now and are not finished, with their configs."""
        found = []
        for folder, (name, _) in self.searches.items():
            scores = scores_of(folder, SEARCHES[name])
            for point in search.next_points(scores, SEARCHES[name].trials):
                found.append(trial_folder(folder, point))
                scale(folder / UNSCALED, found[-1], point)
        for path, (member, _) in self.members.items():
            if member.tuned and not (path / folders.CONFIG).exists():
                name = path.parts[-3]
                folder = self.out / name / "search" / slug(member.tuned)
                scores = scores_of(folder, SEARCHES[name])
                if folder not in self.searches or search.next_points(scores, SEARCHES[name].trials):
                    continue
                scale(path / UNSCALED, path, search.best_point(scores))
            if not is_finished(path):
                found.append(path)
        return found

    def trials(self) -> Iterator[tuple[str, search.Trial]]:
        """Return the finished trials of all searches, with the experiment of each."""
        for folder, (name, label) in self.searches.items():
            for path in sorted(folder.glob("x*")):
                if is_finished(path):
                    run = folders.read(path)
                    history = run.history
                    accuracies = [row.get("test_accuracy") or 0.0 for row in history]
                    score = SEARCHES[name].score(history)
                    yield (
                        name,
                        search.Trial(label, point_of(path), score, max(accuracies), run.status),
                    )


def slug(label: str) -> str:
    """Return a label as the name of a folder."""
    return label.replace(" ", "-")


def trial_folder(folder: Path, point: Point) -> Path:
    """Return the folder of a trial; `point_of` is the way back."""
    return folder / f"x{point.x}y{point.y}"


def point_of(path: Path) -> Point:
    """Return the point of a trial."""
    x, _, y = path.name.removeprefix("x").partition("y")
    return Point(int(x), int(y))


def scores_of(folder: Path, declared: search.Search) -> dict[Point, float]:
    """Return the scores of the finished trials of a search."""
    return {
        point_of(path): declared.score(folders.read(path).history)
        for path in sorted(folder.glob("x*"))
        if is_finished(path)
    }


def scale(source: Path, path: Path, point: Point) -> None:
    """Write the config of a run folder that has none, from an unscaled one."""
    if not (path / folders.CONFIG).exists():
        write_config(path / folders.CONFIG, search.scaled(read_toml(source), point))


def is_finished(path: Path) -> bool:
    """Whether the run in a folder has completed or diverged."""
    if not (path / folders.SUMMARY).exists():
        return False
    summary = json.loads((path / folders.SUMMARY).read_text())
    return summary["status"] in ("completed", "diverged")


def read_toml(file: Path) -> dict[str, Any]:
    """Return the table in a file."""
    return tomllib.loads(file.read_text())


def write_config(file: Path, config: Mapping[str, Any]) -> None:
    """Write a resolved experiment."""
    import tomli_w

    file.parent.mkdir(parents=True, exist_ok=True)
    folders.write_atomically(file, tomli_w.dumps(folders.without_none(dict(config))))


# Preparing: from experiments to resolved configs, which needs the schema of experiments.


def prepare(plan: Plan, gpu: bool = False, smoke: bool = False) -> None:
    """Write the resolved config of each member and search that has none.

    Args:
        plan: What is to be run.
        gpu: Whether networks with convolutions run on a GPU.
        smoke: Whether to take two rounds on small data.
    """
    for path, (member, seed) in plan.members.items():
        name = path.parts[-3]
        if not member.tuned:
            file = path / folders.CONFIG
        else:
            file = path / UNSCALED
        if not file.exists():
            write_config(file, resolved(member, {"seed": seed}, gpu, smoke))
        if not member.tuned:
            continue
        if plan.out / name / "search" / slug(member.tuned) not in plan.searches:
            mine = [t for t in search.read_trials(name) if t.label == member.tuned]
            scale(file, path, search.best_point(search.scores_in(mine)))
    for folder, (name, label) in plan.searches.items():
        declared = SEARCHES[name]
        member = next(m for m in BATTERY[name] if m.tuned == label)
        if not (folder / UNSCALED).exists():
            limits = {**declared.limits, "seed": declared.seed}
            write_config(folder / UNSCALED, resolved(member, limits, gpu, smoke))


def resolved(
    member: Member, more: Mapping[str, Any], gpu: bool = False, smoke: bool = False
) -> dict[str, Any]:
    """Return the resolved config of a member, with further settings."""
    from fedbilevel.experiments import config as configs

    source = member.experiment
    if source.endswith(".toml"):
        source = str(HERE / Path(source).name)
    overrides = {**member.overrides, **more, "runtime.threads": 1, "device": "cpu"}
    if smoke:
        overrides.pop("rounds", None)  # or they would have priority
        overrides.pop("stop.virtual_s", None)
    table = configs.resolve(
        *configs.read(source), algorithm=member.algorithm, overrides=overrides, smoke=smoke
    ).table
    if gpu and table["task"].get("model") in CONVOLUTIONAL:
        table = {**table, "device": "cuda"}
        table["runtime"] = {k: v for k, v in table["runtime"].items() if k != "memory"}
    return dict(table)
