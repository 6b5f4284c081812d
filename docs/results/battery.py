"""Runs the experiments of docs/results/README.md, and collects their curves.

    python docs/results/battery.py ID... --out FOLDER [--jobs 16] [--gpu-jobs 4] [--time-limit S]
    python docs/results/battery.py ID... --out FOLDER --collect docs/results/curves

The first command runs the members of the experiments that have no curve yet (`--again`: all;
`--only TEXT`: those with it in their label), each in a process of its own with one thread: networks
with convolutions on the GPU, `--gpu-jobs` of them side by side, if this is above 0, the others on
cores. What the verdicts need most comes first. Where methods are tuned, the trials of the search
come before the members. At the time limit it stops all of them after their current iteration, and
says what is left and how long that will take; called again, it skips finished members and resumes
the others to the bit. The second command writes a file ID.csv.xz per experiment, which `fedbilevel
report` draws and tables.py reads.

On a machine that keeps nothing, a slice of ten minutes is

    python docs/results/battery.py ID... --out runs/battery --prepare --gpu-jobs 4      # here
    python docs/results/battery.py ID... --out runs/battery --unpack KIT --gpu-jobs 4 \\
        --time-limit 540 --pack $OUT                                                    # there

with the archives of the slice before in KIT, and FEDBILEVEL_DATA at a folder that travels, too
(CIFAR-10 takes 18 MB, MNIST 11, Covertype 5, the small Omniglot 4). Prepared members run where
pydantic is not installed; pure Python packages that they need travel in FOLDER/packages. The
archives keep within 8 files of 16 MiB, 64 together; what does not fit is named, and begins again.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from costs import seconds_left
from luggage import pack, unpack
from member import run_member
from members import BATTERY
from plan import Plan, is_finished, prepare, read_toml

from fedbilevel.runs import folder as folders

GRACE_S = 30.0  # what a member that is stopped has for its current iteration
PURE_PACKAGES = ("tomli_w", "filelock")
PRELOADED = ["torch", "fedbilevel.algorithms", "fedbilevel.tasks", "fedbilevel.runs.recorder"]


class Queue:
    """Runs what is due, some of it side by side, until all is finished or the time is up.

    Args:
        plan: What there is to run.
        jobs: How many members run on cores at once.
        gpu_jobs: How many run on the GPU at once.
    """

    def __init__(self, plan: Plan, jobs: int, gpu_jobs: int) -> None:
        self.plan = plan
        self.room = {"cpu": jobs, "cuda": gpu_jobs}
        self.needs = needs(plan)
        self.running: dict[Path, BaseProcess] = {}
        self.failed: list[Path] = []
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def run(self, is_over: Callable[[float], bool]) -> None:
        """Run members until none is left, or the slice is over.

        Args:
            is_over: Says after so many seconds whether it is.
        """
        started = time.monotonic()
        try:
            self.fill()
            while self.running:
                elapsed = time.monotonic() - started
                if is_over(elapsed):
                    print(f"{elapsed:6.0f} s  {len(self.running)} are stopped", flush=True)
                    return
                ended = self.ended()
                for path in ended:
                    status = "finished" if is_finished(path) else "FAILED"
                    print(f"{elapsed:6.0f} s  {status}  {path}", flush=True)
                if ended:
                    self.fill()
                time.sleep(0.1)
        finally:
            stop(self.running.values())

    def fill(self) -> None:
        """Start members for which there is room."""
        due = [path for path in self.plan.due() if path not in (*self.running, *self.failed)]
        due.sort(key=self.rank)
        for path in due:
            config = read_toml(path / folders.CONFIG)
            if self.has_room(path, config["device"]):
                process = self.context.Process(target=run_member, args=(path,))
                process.start()
                self.running[path] = process

    def has_room(self, path: Path, device: str) -> bool:
        """Whether a member can be started beside those that run."""
        if any(self.is_alone(other) for other in self.running):
            return False
        if self.is_alone(path):
            return not self.running
        devices = [read_toml(other / folders.CONFIG)["device"] for other in self.running]
        return devices.count(device) < self.room[device]

    def is_alone(self, path: Path) -> bool:
        """Whether nothing may run beside a member."""
        member, _ = self.plan.members.get(path, (None, 0))
        return member is not None and member.alone

    def rank(self, path: Path) -> tuple[float, ...]:
        """Return where a run stands in the queue: by need, then seed, then how soon it ends."""
        _, seed = self.plan.members.get(path, (None, -1))
        curve = curve_of(self.plan, path)
        left = seconds_left(path, curve)
        begun = (path / folders.CHECKPOINT).exists()
        return self.needs.get(curve, 0), not begun, seed, math.inf if math.isnan(left) else left

    def ended(self) -> list[Path]:
        """Return the runs whose processes have ended, and forget them."""
        ended = [path for path, process in self.running.items() if not process.is_alive()]
        for path in ended:
            del self.running[path]
            if not is_finished(path):
                self.failed.append(path)
        return ended

    def print_left(self) -> None:
        """Print what is left, and how long it will take."""
        totals = {"cpu": 0.0, "cuda": 0.0}
        unknown = 0
        due = sorted(self.plan.due(), key=self.rank)
        for path in due:
            seconds = seconds_left(path, curve_of(self.plan, path))
            if math.isnan(seconds):
                unknown += 1
                continue
            totals[read_toml(path / folders.CONFIG)["device"]] += seconds
        minutes = {d: totals[d] / 60 / max(1, self.room[d]) for d in totals}
        waiting = sum(not (path / folders.CONFIG).exists() for path in self.plan.members)
        print(f"{len(due)} runs are left, {waiting} of them wait for a search")
        print(f"  on cores: {minutes['cpu']:.1f} min with {self.room['cpu']} side by side")
        print(f"  on the GPU: {minutes['cuda']:.1f} min if {self.room['cuda']} share it as one")
        if unknown:
            print(f"  and {unknown} runs of which nothing is measured")
        for path in due[:20]:
            seconds = seconds_left(path, curve_of(self.plan, path))
            print(f"    {seconds:7.0f} s  {path.relative_to(self.plan.out)}")


def curve_of(plan: Plan, path: Path) -> str:
    """Return the curve that a run folder is for, also for a trial: as "ID/label"."""
    if path in plan.members:
        return f"{path.parts[-3]}/{plan.members[path][0].label}"
    name, label = plan.searches[path.parent]
    return f"{name}/{label}"


def needs(plan: Plan) -> dict[str, int]:
    """Return how much the verdicts need each curve: 0 most, 3 not at all.

    A curve that no verdict names is needed as much as the verdicts of its experiment need it.
    """
    from papers import VERDICTS
    from verdicts import NOT_COMPARABLE, NOT_JUDGED

    order = {NOT_JUDGED: 0, NOT_COMPARABLE: 1}
    of_curves: dict[str, int] = {}
    of_experiments: dict[str, int] = {}
    for verdict in VERDICTS:
        need = order.get(verdict.shown(), 2)
        of_experiments[verdict.id] = min(need, of_experiments.get(verdict.id, 3))
        for curve in {curve for _, curves in verdict.values for curve in curves}:
            of_curves[curve] = min(need, of_curves.get(curve, 3))
    found = {}
    for path in plan.members:
        curve = curve_of(plan, path)
        experiment, _ = curve.split("/", 1)
        found[curve] = of_curves.get(curve, of_experiments.get(experiment, 3))
    return found


def curves_of(ids: Iterable[str], text: str) -> list[str]:
    """Return the curves of experiments as "ID/label/seed", those with a text in their label."""
    members = [(name, member) for name in ids for member in BATTERY[name] if text in member.label]
    return [f"{name}/{member.label}/{seed}" for name, member in members for seed in member.seeds]


def missing(curves: Iterable[str]) -> list[str]:
    """Return those of some curves that are not committed."""
    from curve_files import load

    found = []
    for curve in curves:
        name, label, seed = curve.split("/")
        if int(seed) not in {run.seed for run in load(name, label)}:
            found.append(curve)
    return found


def stop(processes: Iterable[BaseProcess]) -> None:
    """Let members end after their current iteration, or kill them after a while."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()  # it resumes from its last checkpoint
            process.join()


def copy_packages(to: Path) -> None:
    """Copy the pure Python packages that a machine with little installed may lack."""
    import importlib.util

    for name in PURE_PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        ignored = shutil.ignore_patterns("__pycache__")
        source = Path(spec.origin).parent
        shutil.copytree(source, to / name, ignore=ignored, dirs_exist_ok=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"of {', '.join(BATTERY)}, or all")
    parser.add_argument("--out", type=Path, default=Path("runs/battery"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--gpu-jobs", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="S")
    parser.add_argument("--again", action="store_true", help="also members that have a curve")
    parser.add_argument("--only", default="", metavar="TEXT", help="members with it in their label")
    parser.add_argument("--smoke", action="store_true", help="two rounds on small data")
    parser.add_argument("--prepare", action="store_true", help="only write configs")
    parser.add_argument("--left", action="store_true", help="only say what is left")
    parser.add_argument("--list", action="store_true", help="only print the members' commands")
    parser.add_argument("--collect", type=Path, metavar="CURVES", help="only write curves there")
    parser.add_argument("--unpack", type=Path, metavar="KIT", help="first unpack archives there")
    parser.add_argument("--pack", type=Path, metavar="KIT", help="at the end pack run folders")
    options = parser.parse_args(arguments)
    unknown = set(options.ids) - BATTERY.keys() - {"all"}
    if unknown or not options.ids:
        parser.error(f"{sorted(unknown)} is not one of {', '.join(BATTERY)}")
    if "all" in options.ids:
        options.ids = list(BATTERY)
    return options


def main() -> None:
    """Run, prepare, list or collect what the command line says."""
    options = parse(sys.argv[1:])
    if options.collect:
        from collecting import collect

        collect(options.ids, options.out, options.collect)
        return
    wanted = curves_of(options.ids, options.only)
    if not options.again:
        wanted = missing(wanted)
    plan = Plan.of(options.ids, options.out, wanted)
    if options.list:
        for member, _ in plan.members.values():
            print(f"{member.label}: {member.command()}")
        return
    if options.unpack:
        unpack(sorted(options.unpack.glob("runs-*.tar.gz")), options.out)
    packages = options.out / "packages"
    sys.path.append(str(packages))  # after what is installed
    prepare(plan, gpu=options.gpu_jobs > 0, smoke=options.smoke)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    queue = Queue(plan, options.jobs, options.gpu_jobs)
    if options.prepare:
        copy_packages(packages)
    elif not options.left:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # members stop, too
        queue.run(lambda elapsed: elapsed > options.time_limit)
    queue.print_left()
    if options.pack:
        packed = pack(options.out, options.pack)
        for path in packed.left:
            print(f"does not fit, and begins again: {path}")


if __name__ == "__main__":
    main()
