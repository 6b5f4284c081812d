"""The runs of docs/results/README.md, by experiment: what battery.py runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

PARTITIONS = ("iid", "shards")


@dataclass(frozen=True)
class Member:
    """Runs of one algorithm under one label, a seed each.

    Args:
        label: What its curve is called.
        experiment: The experiment, or a file beside this one.
        algorithm: The algorithm, as the experiment calls it.
        overrides: Other settings.
        seeds: The seeds.
        alone: Whether nothing may run beside it, because its time is measured.
        tuned: The label in `search.SEARCHES` whose best scales its step sizes are multiplied by.
    """

    label: str
    experiment: str
    algorithm: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2)
    alone: bool = False
    tuned: str = ""

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


def afbo_cleaning(delay: Mapping[str, Any]) -> Iterator[Member]:
    """Declare hyper-cleaning on both partitions, under the delays of afbo-fig1 or others."""
    for partition, method in product(PARTITIONS, AFBO_METHODS):
        overrides = {"data.partition": partition, **delay}
        yield Member(f"{method} {partition}", "afbo-fig1", method, overrides)


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


PRINTED = {"afbo-printed": "afbo printed", "afbo-printed-free": "afbo printed free"}
NO_INNER_DELAY = {"environment.inner_delay": {"model": "constant", "mean": 1e-6}}


def until(virtual_s: float) -> dict[str, Any]:
    """Return what ends a run of the printed method, whose iterations are many rounds, in time."""
    return {"rounds": 10_000, "stop.virtual_s": virtual_s}


def afbo_fig3_printed() -> Iterator[Member]:
    """Declare the printed method, charged and free, and Prometheus, with and without stragglers."""
    conditions = {"plain": {}, "slow": {"environment.stragglers": STRAGGLERS}}
    for condition, overrides in conditions.items():
        times = {"plain": (900.0, 300.0), "slow": (3000.0, 600.0)}[condition]
        for (method, label), seconds in zip(PRINTED.items(), times, strict=True):
            limits = overrides | until(seconds)
            yield Member(f"{label} {condition}", "afbo-fig6", method, limits)
        yield Member(f"prometheus {condition}", "afbo-fig6", "prometheus", overrides)


def afbo_inner(experiment: str, virtual_s: float) -> Iterator[Member]:
    """Declare delays of the outer loop alone; with inner ones, too: afbo-fig1 and afbo-fig3.

    simfbo, afl, Prometheus and the linear-system variant of AFBO have no exchange in an inner loop,
    so that their runs are the same. The printed method with free products takes no time then.
    """
    for method in ("fednest", "sdbo", "adbo"):
        yield Member(f"{method} outer", experiment, method, NO_INNER_DELAY)
    overrides = NO_INNER_DELAY | until(virtual_s)
    yield Member("afbo printed outer", experiment, "afbo-printed", overrides)


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
    """Declare loss tuning on CIFAR-10 with ResNet-18 as printed, and on MNIST with an MLP.

    On MNIST also with conjugate gradients for the indirect term.
    """
    mnist = {
        "rounds": 200,
        "every": 20,
        "data.name": "mnist",
        "data.samples": 20000,
        "task.model": "mlp",
    }
    submodels = ("static", "oap", "fedrolex", "fiarse")
    for method in ("rabo", "rafbo", "rabo-3x0.02", "rafbo-3x0.02", *submodels, "fedmbo", "fedavg"):
        yield Member(method, "rabo-fig5", method, mnist)
        yield Member(f"{method} cifar10", "rabo-fig5", method)
    for method in ("rabo", "rafbo"):
        cg = {"algorithm.solver": "cg", "algorithm.neumann_steps": 10}
        yield Member(f"{method} cg", "rabo-fig5", method, mnist | cg)


FEW_SHOT = ("rabo", "rafbo", "static", "oap", "fedrolex", "fiarse", "fedmbo", "protonet", "maml")
FEW_SHOT_RUN = {"rounds": 200, "every": 50}  # the paper gives no number of rounds


def rabo_table2() -> Iterator[Member]:
    """Declare all four columns of Table II with ResNet-12, for all nine methods."""
    for ways, shots, method in product((5, 20), (1, 5), FEW_SHOT):
        overrides = {"task.ways": ways, "task.shots": shots, "environment.batch_size": ways}
        label = f"{method} {ways}-way {shots}-shot"
        yield Member(label, "rabo-table2", method, overrides | FEW_SHOT_RUN)


def rabo_fig3() -> Iterator[Member]:
    """Declare both coverages with ResNet-12."""
    for method, count in product(("rabo", "rafbo"), (1, 2)):
        yield Member(f"{method} C={count}", "rabo-fig3", f"{method}-C{count}", FEW_SHOT_RUN)


def rabo_table3() -> Iterator[Member]:
    """Declare the numbers of clients with ResNet-12."""
    for clients, shots, method in product((10, 20, 30, 50), (1, 5), ("rabo", "rafbo")):
        overrides = {"data.clients": clients, "task.shots": shots}
        label = f"{method} {clients} clients {shots}-shot"
        yield Member(label, "rabo-table3", method, overrides | FEW_SHOT_RUN)


def rabo_fig4() -> Iterator[Member]:
    """Declare two rounds of ResNet-12; costs do not depend on the seed."""
    for shots, method in product((5, 1), ("fedmbo", "rabo-full", "rabo", "rafbo")):
        overrides = {"rounds": 2, "every": 2, "task.shots": shots, "task.episodes": 2}
        yield Member(f"{method} shots={shots}", "rabo-fig4", method, overrides, seeds=[0])


def aggitd_cnn() -> Iterator[Member]:
    """Declare Fig. 6 at batch 10, which the paper may have used; batch 64 was run before."""
    for partition, method in product(PARTITIONS, ("aggitd", "fednest", "lfednest")):
        overrides = {"data.partition": partition, "environment.batch_size": 10}
        yield Member(f"{method} mnist cnn {partition} batch=10", "aggitd-cnn", method, overrides)


GOSSIP = ("aggitd", "fednest", "dsbo", "prometheus")
DIGITS = {"data.name": "digits", "data.clients": 10, "environment.batch_size": 32}


def aggitd_fig7() -> Iterator[Member]:
    """Declare methods with and without a server: tuned alike on digits, and on MNIST."""
    for method in GOSSIP:
        digits = DIGITS | {"rounds": 300 if method in ("aggitd", "fednest") else 60}
        yield Member(f"{method} digits", "aggitd-fig7", method, digits, tuned=f"{method} digits")
        yield Member(f"{method} mnist", "aggitd-fig7", method, {"rounds": 300})


def simfbo_fig5() -> Iterator[Member]:
    """Declare a minute of every method, alone on the machine: time is what it measures."""
    for method in ("simfbo", "aggitd", "fednest", "lfednest"):
        yield Member(f"{method} alone", "simfbo-fig5", method, alone=True)


PARETO = {"environment.delay": {"model": "pareto", "mean": 1.0, "shape": 1.5}}
STRAGGLERS = {"clients": 5, "slowdown": 5.0}
BATTERY: dict[str, list[Member]] = {
    "aggitd-table2": [*aggitd_table2()],
    "aggitd-epochs": [*aggitd_epochs()],
    "aggitd-fig3": [*aggitd_fig3()],
    "aggitd-fig4": [*aggitd_fig4()],
    "aggitd-cnn": [*aggitd_cnn()],
    "aggitd-fig7": [*aggitd_fig7()],
    "simfbo-fig2": [*simfbo_fig2()],
    "simfbo-fig5": [*simfbo_fig5()],
    "shrofbo-fig4": [*shrofbo_fig4()],
    "asfbo-fig1": [*asfbo_fig1()],
    "afbo-fig1": [
        *afbo_cleaning({}),
        *afbo_printed(),
        Member("prometheus shards", "afbo-fig5", "prometheus"),
        Member("prometheus iid", "afbo-fig5", "prometheus", {"data.partition": "iid"}),
    ],
    "afbo-fig3": [
        *afbo_regularization({"plain": {}, "slow": {"environment.stragglers": STRAGGLERS}}),
        *afbo_fig3_printed(),
    ],
    "afbo-fig5": [*afbo_inner("afbo-fig5", 600.0)],
    "afbo-fig6": [*afbo_inner("afbo-fig6", 200.0)],
    "afbo-fig7": [*afbo_fig7()],
    "afbo-pareto": [*afbo_cleaning(PARETO)],
    "afbo-pareto-covertype": [*afbo_regularization({"pareto": PARETO})],
    "mnist-single-loop": [*mnist_single_loop()],
    "mnist-first-order": [*mnist_first_order()],
    "unifbo-mnist": [*unifbo_mnist()],
    "hyper-cleaning": [*hyper_cleaning()],
    "rabo-table2": [*rabo_table2()],
    "rabo-fig3": [*rabo_fig3()],
    "rabo-table3": [*rabo_table3()],
    "rabo-fig5": [*rabo_fig5()],
    "rabo-fig4": [*rabo_fig4()],
}
