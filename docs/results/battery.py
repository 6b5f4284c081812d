"""Runs the experiments of docs/results/README.md, and collects their curves.

    python docs/results/battery.py ID... --out FOLDER [--jobs 16] [--time-limit SECONDS]
    python docs/results/battery.py ID... --out FOLDER --collect docs/results/curves

The first command runs the members of the experiments (`--list` shows them), each in a process of
its own with one thread, the longest first. At the time limit it stops them after their current
iteration; called again, it skips finished members and resumes the others. The second writes a file
ID.csv.xz per experiment, which `fedbilevel report` draws and tables.py reads.

`--prepare` writes the config of every member and runs nothing. Members in a prepared folder also
run where pydantic is not installed.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedbilevel.runs import folder as folders
from fedbilevel.runs.folder import RunFolder

HERE = Path(__file__).parent
EXTRA = "extra.json"  # what a member measures once, at its end
GRACE_S = 30.0  # what a member that is stopped has for its current iteration

PARTITIONS = ("iid", "shards")


@dataclass(frozen=True)
class Member:
    """Runs of one algorithm under one label, a seed each."""

    label: str
    experiment: str
    algorithm: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2)

    def command(self) -> str:
        """Return the command that runs the first seed."""
        words = ["fedbilevel run", self.experiment, "--algorithm", self.algorithm]
        words += ["--seed", str(self.seeds[0])]
        for key, value in self.overrides.items():
            words += ["--set", f"'{key}={_toml(value)}'"]
        return " ".join(words)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def aggitd_table2() -> Iterator[Member]:
    """Declare both batch sizes; labels without one are of batch 64."""
    methods = ("aggitd", "fednest", "fednest-reference")
    for batch, partition, tau, method in product((64, 10), PARTITIONS, (1, 5), methods):
        overrides: dict[str, Any] = {
            "data.partition": partition,
            "environment.local_steps": tau,
            "environment.batch_size": batch,
        }
        if method == "fednest-reference" and partition == "shards":
            overrides["data.validation"] = 0.2
        label = f"{method} {partition} tau={tau}" + (f" batch={batch}" if batch != 64 else "")
        yield Member(label, "aggitd-table2", method, overrides)


def aggitd_epochs() -> Iterator[Member]:
    """Declare Table 2 with tau in epochs on x, as its appendix says."""
    for batch, partition, tau in product((64, 10), PARTITIONS, (1, 5)):
        overrides = {
            "data.partition": partition,
            "environment.batch_size": batch,
            "algorithm.upper_steps": f"{tau} epochs",
        }
        label = f"aggitd {partition} tau={tau} epochs batch={batch}"
        yield Member(label, "aggitd-table2", "aggitd", overrides)


def aggitd_fig3() -> Iterator[Member]:
    """Declare the ratios; at 0.1 aggitd and fednest are those of aggitd-table2."""
    for ratio, method in product((0.1, 0.2, 0.5), ("aggitd", "fednest", "lfednest")):
        if ratio > 0.1 or method == "lfednest":
            overrides = {"environment.participation": ratio}
            yield Member(f"{method} C={ratio}", "aggitd-fig3", method, overrides)


def aggitd_fig4() -> Iterator[Member]:
    """Declare the SGD type; the SVRG type is that of aggitd-table2 and aggitd-fig3."""
    for partition, method in product(PARTITIONS, ("aggitd", "fednest", "lfednest")):
        overrides: dict[str, Any] = {"data.partition": partition}
        if method == "lfednest" and partition == "iid":
            overrides |= {"algorithm.lr_x": 0.01, "algorithm.lr_y": 0.003}
        yield Member(f"{method} sgd {partition}", "aggitd-fig4", method, overrides)


def simfbo_fig2() -> Iterator[Member]:
    """Declare tuned and papers' settings; aggitd and fednest with the latter: aggitd-table2."""
    for partition in PARTITIONS:
        for method in ("simfbo", "lfednest"):
            overrides = {"data.partition": partition}
            yield Member(f"{method} {partition} paper", "simfbo-fig2", method, overrides)
        for method in ("unifbo", "simfbo", "lfednest", "aggitd", "fednest"):
            file = f"docs/results/simfbo-fig2-{partition}-tuned.toml"
            yield Member(f"{method} {partition} tuned", file, method, seeds=(1, 2, 3))


def shrofbo_fig4() -> Iterator[Member]:
    """Declare the papers' steps, tuned ones, and equal ones for shrofbo and simfbo."""
    for method in ("shrofbo", "simfbo", "aggitd", "fednest", "lfednest"):
        yield Member(method, "shrofbo-fig4", method)
    for method in ("shrofbo", "simfbo", "unifbo"):
        file = "docs/results/shrofbo-fig4-tuned.toml"
        yield Member(f"{method} tuned", file, method, seeds=(1, 2, 3))
    yield Member("unifbo", "shrofbo-fig4", "unifbo", seeds=(1, 2, 3))
    equal = {}
    for name, step in (("x", 0.01), ("y", 0.03), ("z", 0.02)):
        equal |= {f"algorithm.lr_{name}": step, f"algorithm.server_lr_{name}": step}
    fixed = {"environment.local_steps": {"clients": [*range(1, 11)]}}
    # With the steps of its paper, shrofbo above is the run with equal steps and redrawn tau.
    yield Member("simfbo equal", "shrofbo-fig4", "simfbo", equal)
    for method in ("shrofbo", "simfbo"):
        yield Member(f"{method} equal fixed", "shrofbo-fig4", method, equal | fixed)


def asfbo_fig1() -> Iterator[Member]:
    """Declare the papers' and the tuned settings."""
    methods = ("la-asfbo", "asfbo", "shrofbo", "simfbo", "fednest", "lfednest")
    for partition, method in product(PARTITIONS, methods):
        overrides = {"data.partition": partition}
        yield Member(f"{method} {partition} paper", "asfbo-fig1", method, overrides)
        file = f"docs/results/asfbo-fig1-{partition}-tuned.toml"
        yield Member(f"{method} {partition} tuned", file, method, seeds=(1, 2, 3))


AFBO_METHODS = ("afbo", "simfbo", "fednest", "sdbo", "adbo")


def afbo_cleaning(experiment: str) -> Iterator[Member]:
    """Declare hyper-cleaning on both partitions, under the delays of the experiment."""
    for partition, method in product(PARTITIONS, AFBO_METHODS):
        overrides = {"data.partition": partition}
        yield Member(f"{method} {partition}", experiment, method, overrides)


def afbo_printed() -> Iterator[Member]:
    """Declare AFBO's printed estimator, its products charged and free, for as long as simfbo."""
    printed = {
        "rounds": 10_000,
        "stop.virtual_s": 1800.0,
        "algorithm.hypergradient": "printed",
        "algorithm.neumann_lr": 0.05,
        "algorithm.inner_rounds": 5,
        "algorithm.server_lr_x": 25_000.0,  # x moves in every fifth iteration
    }
    for partition, (label, aphe) in product(PARTITIONS, (("", "clients"), (" free", "server"))):
        overrides = printed | {"data.partition": partition, "algorithm.aphe": aphe}
        yield Member(f"afbo printed{label} {partition}", "afbo-fig1", "afbo", overrides)


def afbo_regularization(conditions: Mapping[str, Mapping[str, Any]]) -> Iterator[Member]:
    """Declare regularization on Covertype under each of the conditions."""
    for (condition, overrides), method in product(conditions.items(), AFBO_METHODS):
        yield Member(f"{method} {condition}", "afbo-fig3", method, overrides)


def afbo_fig7() -> Iterator[Member]:
    """Declare AFL; "full" estimates hypergradients on all samples. afbo: afbo-fig1."""
    for partition, method in product(PARTITIONS, ("afl", "afl-cd")):
        overrides = {"data.partition": partition}
        yield Member(f"{method} {partition}", "afbo-fig7", method, overrides)
    for partition in PARTITIONS:
        overrides = {"data.partition": partition, "algorithm.hypergradient_batch": "full"}
        yield Member(f"afl {partition} full", "afbo-fig7", "afl", overrides)


def mnist_single_loop() -> Iterator[Member]:
    """Declare the single-loop family at the papers' settings."""
    yield Member("simfbo iid", "mnist", "simfbo", {"rounds": 80})
    for method in ("asfbo", "la-asfbo"):
        overrides = {"rounds": 70, "data.partition": "shards"}
        yield Member(f"{method} shards", "mnist", method, overrides)


def mnist_first_order() -> Iterator[Member]:
    """Declare simfbo and its counterpart of first order, tuned equally."""
    for method in ("simfbo", "memfbo"):
        file = "docs/results/mnist-first-order-tuned.toml"
        yield Member(method, file, method, seeds=(1, 2, 3))


def unifbo_mnist() -> Iterator[Member]:
    """Declare UniFBO with its defaults."""
    for partition in PARTITIONS:
        overrides = {"rounds": 100, "data.partition": partition}
        yield Member(f"unifbo {partition}", "mnist", "unifbo", overrides, seeds=range(5))


def hyper_cleaning() -> Iterator[Member]:
    """Declare SimFBO on digits and on parts of MNIST."""
    yield Member("digits", "hyper-cleaning", "simfbo", seeds=[0])
    steps = {"lr_x": 500.0, "lr_y": 0.05, "lr_z": 0.02, "server_lr_y": 0.05, "server_lr_z": 0.02}
    mnist = {"data.name": "mnist"} | {f"algorithm.{key}": step for key, step in steps.items()}
    sizes: dict[str, dict[str, Any]] = {
        "MNIST 60000 iid": {"rounds": 500, "batch": 64, "server_lr_x": 9000.0},
        "MNIST 12000 shards": {"rounds": 500, "batch": 64, "server_lr_x": 1800.0},
        "MNIST 3000 iid": {"rounds": 100, "batch": 32, "server_lr_x": 3000.0},
    }
    for label, size in sizes.items():
        _, samples, partition = label.split()
        overrides = mnist | {
            "data.samples": int(samples),
            "data.partition": partition,
            "rounds": size["rounds"],
            "environment.batch_size": size["batch"],
            "algorithm.server_lr_x": size["server_lr_x"],
        }
        yield Member(label, "hyper-cleaning", "simfbo", overrides, seeds=[0])


def rabo_fig5() -> Iterator[Member]:
    """Declare loss tuning on MNIST, also with conjugate gradients for the indirect term."""
    mnist = {
        "rounds": 200,
        "every": 20,
        "data.name": "mnist",
        "data.samples": 20000,
        "task.model": "mlp",
    }
    for method in ("rabo", "rafbo", "rabo-3x0.02", "rafbo-3x0.02"):
        yield Member(method, "rabo-fig5", method, mnist)
    for method in ("static", "oap", "fedrolex", "fiarse", "fedmbo", "fedavg"):
        yield Member(method, "rabo-fig5", method, mnist)
    for method in ("rabo", "rafbo"):
        cg = {"algorithm.solver": "cg", "algorithm.neumann_steps": 10}
        yield Member(f"{method} cg", "rabo-fig5", method, mnist | cg)


def rabo_fig4() -> Iterator[Member]:
    """Declare two rounds of ResNet-12; costs do not depend on the seed."""
    for shots, method in product((5, 1), ("fedmbo", "rabo-full", "rabo", "rafbo")):
        overrides = {"rounds": 2, "every": 2, "task.shots": shots, "task.episodes": 2}
        yield Member(f"{method} shots={shots}", "rabo-fig4", method, overrides, seeds=[0])


PARETO = {"model": "pareto", "mean": 1.0, "shape": 1.5}
STRAGGLERS = {"clients": 5, "slowdown": 5.0}
BATTERY: dict[str, list[Member]] = {
    "aggitd-table2": [*aggitd_table2()],
    "aggitd-epochs": [*aggitd_epochs()],
    "aggitd-fig3": [*aggitd_fig3()],
    "aggitd-fig4": [*aggitd_fig4()],
    "simfbo-fig2": [*simfbo_fig2()],
    "shrofbo-fig4": [*shrofbo_fig4()],
    "asfbo-fig1": [*asfbo_fig1()],
    "afbo-fig1": [*afbo_cleaning("afbo-fig1"), *afbo_printed()],
    "afbo-fig3": [
        *afbo_regularization({"plain": {}, "slow": {"environment.stragglers": STRAGGLERS}})
    ],
    "afbo-fig5": [*afbo_cleaning("afbo-fig5")],
    "afbo-fig6": [*afbo_regularization({"pareto": {"environment.delay": PARETO}})],
    "afbo-fig7": [*afbo_fig7()],
    "mnist-single-loop": [*mnist_single_loop()],
    "mnist-first-order": [*mnist_first_order()],
    "unifbo-mnist": [*unifbo_mnist()],
    "hyper-cleaning": [*hyper_cleaning()],
    "rabo-fig5": [*rabo_fig5()],
    "rabo-fig4": [*rabo_fig4()],
}

# Seconds per round and per local step of it on one core, for the order of the members.
PACE = {
    "aggitd": (0.05, 0.0),
    "fednest": (0.03, 0.0),
    "lfednest": (0.1, 0.05),
    "asfbo": (0.0, 0.05),
    "la-asfbo": (0.0, 0.1),
}
OTHER_PACE = (0.02, 0.02)
COLUMNS = (
    "round",
    "iteration",
    "virtual_s",
    "wall_s",
    "bytes_up",
    "bytes_down",
    "gradients",
    "flops",
    "peak_bytes",
    "test_accuracy",
    "test_accuracy_ci95",
    "train_accuracy",
    "balanced_accuracy",
    "upper_loss",
    "auc",
    "f1",
    "all_labels",
    "correct_labels",
    "learnt_weights",
)
WHOLE = {"round", "iteration", "bytes_up", "bytes_down", "gradients", "flops", "peak_bytes"}


def runs_of(ids: Iterable[str], out: Path) -> dict[Path, tuple[Member, int]]:
    """Return the members of experiments by their folders, with their seeds."""
    runs = {}
    for name in ids:
        for member in BATTERY[name]:
            for seed in member.seeds:
                label = member.label.replace(" ", "-")
                runs[out / name / label / f"seed-{seed}"] = (member, seed)
    return runs


def prepare(runs: Mapping[Path, tuple[Member, int]], smoke: bool) -> None:
    """Write the resolved config of each member that has none."""
    for path, (member, seed) in runs.items():
        if (path / folders.CONFIG).exists():
            continue
        import tomli_w

        from fedbilevel.experiments import config as configs

        source = member.experiment
        if source.endswith(".toml"):
            source = str(HERE / Path(source).name)
        overrides = {**member.overrides, "seed": seed, "runtime.threads": 1, "device": "cpu"}
        if smoke:
            overrides.pop("rounds", None)  # or they would have priority
        config = configs.resolve(
            *configs.read(source), algorithm=member.algorithm, overrides=overrides, smoke=smoke
        )
        path.mkdir(parents=True, exist_ok=True)
        text = tomli_w.dumps(folders.without_none(config.table))
        folders.write_atomically(path / folders.CONFIG, text)


def is_finished(path: Path) -> bool:
    """Whether the run in a folder has completed or diverged."""
    if not (path / folders.SUMMARY).exists():
        return False
    summary = json.loads((path / folders.SUMMARY).read_text())
    return summary["status"] in ("completed", "diverged")


def expected_seconds(path: Path) -> float:
    """Return roughly how long the run in a folder takes."""
    config = tomllib.loads((path / folders.CONFIG).read_text())
    steps = config["environment"]["local_steps"]
    if isinstance(steps, list):
        steps = sum(steps) / 2
    elif isinstance(steps, dict):
        steps = max(steps["clients"])
    per_round, per_step = PACE.get(config["algorithm"]["name"], OTHER_PACE)
    seconds: float = config["rounds"] * (per_round + per_step * steps)
    if config["environment"].get("batch_size") == 10:
        seconds *= 2  # an epoch has more batches
    if config["algorithm"].get("compat") == "reference":
        seconds *= 4
    if config["task"].get("model") == "resnet12" or path.parts[-3] == "hyper-cleaning":
        seconds += 300
    return seconds


def run_all(paths: Iterable[Path], jobs: int, time_limit: float, device: str) -> None:
    """Run the members that are not finished, until all are or the time is up."""
    waiting = [path for path in paths if not is_finished(path)]
    waiting.sort(key=expected_seconds)
    running: dict[Path, subprocess.Popen[bytes]] = {}
    started = time.monotonic()
    total = len(waiting)
    done = 0
    try:
        while waiting or running:
            elapsed = time.monotonic() - started
            if elapsed > time_limit:
                print(f"time limit: {len(running)} stopped, {len(waiting)} not started")
                return
            while waiting and len(running) < jobs:
                path = waiting.pop()
                running[path] = start_member(path, device)
            for path, process in list(running.items()):
                if process.poll() is not None:
                    del running[path]
                    done += 1
                    status = "finished" if is_finished(path) else "FAILED"
                    print(f"{elapsed:6.0f} s  {done}/{total}  {status}  {path}", flush=True)
            time.sleep(0.1)
    finally:
        stop(running.values())


def start_member(path: Path, device: str) -> subprocess.Popen[bytes]:
    """Start the process of a member; its errors go to error.log in its folder."""
    command = [sys.executable, __file__, "--member", str(path), "--device", device]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with (path / "error.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **threads})


def stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Let members end after their current iteration, or kill them after a while."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # it resumes from its last checkpoint
            process.wait()


def run_member(path: Path, device: str) -> None:
    """Run the member in a folder, or resume it."""
    import shutil

    import torch

    from fedbilevel.runs.recorder import Recorder

    config = tomllib.loads((path / folders.CONFIG).read_text())
    config["device"] = device
    if device != "cpu":
        config["runtime"].pop("memory", None)
    torch.set_num_threads(1)
    task, run = build_run(config)
    signal.signal(signal.SIGTERM, lambda *_: run.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the battery stops its members itself
    recorder = Recorder(run, path, config, resume=True, checkpoint_every=20)
    for _ in recorder:
        pass
    if run.status == "interrupted":
        return
    if config["task"]["name"] == "hyper-cleaning" and path.parent.parent.name == "hyper-cleaning":
        extra = pooled_accuracies(task, run.result.x["weights"], config["task"]["ridge"])
        folders.write_atomically(path / EXTRA, json.dumps(extra))
    shutil.rmtree(path / "checkpoint")  # a finished run needs none, and many would be large


def build_run(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Build the task and the run of a resolved config, as `experiments.runner` does."""
    from fedbilevel import algorithms, tasks
    from fedbilevel.core.settings import build, declared_settings, read_arguments
    from fedbilevel.federation.environment import Environment
    from fedbilevel.runs.run import Run
    from fedbilevel.runs.simulation import simulated_federation

    data = dict(config.get("data", {}))
    if "name" in data:
        data["data"] = data.pop("name")
    arguments = {**config["task"], **data, "seed": config["seed"]}
    function = tasks.get(arguments.pop("name"))
    task = function(**read_arguments(declared_settings(function), "task", arguments))
    settings = dict(config["algorithm"])
    algorithm = build(algorithms.get(settings.pop("name")), "algorithm", settings)
    device = config["device"]
    runtime = config["runtime"]
    fed = simulated_federation(
        task.problem.to(device),
        task.clients,
        build(Environment, "environment", config["environment"]),
        weights=config["weights"],
        seed=config["seed"],
        device=device,
        mode=runtime["mode"],
        memory=runtime.get("memory"),
        precision=runtime["precision"],
    )
    limits = {"rounds": config["rounds"], **config.get("stop", {})}
    return task, Run(algorithm, fed, limits, task.evaluate, config["every"])


def pooled_accuracies(task: Any, weights: Any, ridge: float) -> dict[str, float]:
    """Return test accuracies of hyper-cleaning with the lower level of all clients solved.

    The lower level is solved with equal weights, with the correct labels only, and with the learnt
    weights, by L-BFGS in float64 for W = P A, where P makes the inputs' second moments nearly the
    identity.
    """
    import torch

    import fedbilevel as fb

    columns = zip(*(client.train for client in task.clients), strict=True)
    inputs, labels, positions = (torch.cat(column) for column in columns)
    inputs = inputs.flatten(1).double()
    batch = (inputs, labels, positions)
    eigenvalues, basis = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    P = basis / (eigenvalues + 1000 * ridge).sqrt()
    key = torch.tensor(0)  # the loss draws nothing

    def accuracy(x: Any) -> float:
        A = torch.zeros(len(P), 10, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [A], max_iter=400, tolerance_grad=1e-6, history_size=20, line_search_fn="strong_wolfe"
        )

        def closure() -> Any:
            optimizer.zero_grad()
            loss = task.problem.lower({"weights": x.double()}, {"classifier": P @ A}, batch, key)
            loss.backward()
            return loss

        optimizer.step(closure)
        y = fb.Tree(classifier=(P @ A).detach().float())
        return float(task.evaluate(fb.Tree(weights=x), y)["test_accuracy"])

    weights = weights.cpu()
    return {
        "all_labels": accuracy(torch.full_like(weights, 40.0)),
        "correct_labels": accuracy(torch.where(task.corrupted, -40.0, 40.0)),
        "learnt_weights": accuracy(weights),
    }


def collect(ids: Iterable[str], out: Path, curves: Path) -> None:
    """Write the curves of all finished members, a file per experiment."""
    curves.mkdir(parents=True, exist_ok=True)
    for name in ids:
        rows: list[dict[str, Any]] = []
        missing = []
        for path, (member, seed) in runs_of([name], out).items():
            if not is_finished(path):
                missing.append(f"{member.label} seed {seed}")
                continue
            rows += curve_rows(folders.read(path), member.label, seed)
        if rows:
            write_curves(curves / f"{name}.csv.xz", rows)
        print(f"{name}: {len(rows)} evaluations, {len(missing)} members missing {missing}")


def curve_rows(run: RunFolder, label: str, seed: int) -> Iterator[dict[str, Any]]:
    """Return the evaluations of a finished run; the last one says how it ended."""
    extra = {}
    if (run.path / EXTRA).exists():
        extra = json.loads((run.path / EXTRA).read_text())
    for index, evaluation in enumerate(run.history):
        is_last = index == len(run.history) - 1
        values = {**evaluation, **extra} if is_last else evaluation
        row: dict[str, Any] = {"label": label, "seed": seed}
        for column in COLUMNS:
            if values.get(column) is not None:
                row[column] = _number(column, values[column])
        if is_last:
            row["status"] = run.status
        yield row


def _number(column: str, value: float) -> str:
    """Return a number as text: counts and accuracies exactly, times and losses rounded."""
    if column in WHOLE:
        return str(round(value))
    if column.endswith("_s"):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if column in ("upper_loss", "auc", "f1", "test_accuracy_ci95"):
        return f"{value:.6g}"
    return repr(value)


def write_curves(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write evaluations as a compressed table, without empty columns."""
    used = set().union(*rows)
    columns = [name for name in ("label", "seed", *COLUMNS, "status") if name in used]
    with lzma.open(file, "wt", preset=9, newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Run, prepare, list or collect what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"of {', '.join(BATTERY)}, or all")
    parser.add_argument("--out", type=Path, default=Path("runs/battery"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="two rounds on small data")
    parser.add_argument("--prepare", action="store_true", help="only write configs")
    parser.add_argument("--list", action="store_true", help="only print the members' commands")
    parser.add_argument("--collect", type=Path, metavar="CURVES", help="only write curves there")
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        run_member(options.member, options.device)
        return
    unknown = set(options.ids) - BATTERY.keys() - {"all"}
    if unknown or not options.ids:
        parser.error(f"{sorted(unknown)} is not one of {', '.join(BATTERY)}")
    ids = list(BATTERY) if "all" in options.ids else options.ids
    runs = runs_of(ids, options.out)
    if options.list:
        for member, _ in runs.values():
            print(f"{member.label}: {member.command()}")
    elif options.collect:
        collect(ids, options.out, options.collect)
    else:
        prepare(runs, options.smoke)
        if not options.prepare:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # members stop, too
            run_all(runs, options.jobs, options.time_limit, options.device)


if __name__ == "__main__":
    main()
