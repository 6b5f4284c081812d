"""The page of a report about 200 runs with 1,000 evaluations each: its size, and how fast it is.

`python -m benchmarks.pages` writes the runs through the recorder, with metrics made up instead of
measured, writes their page, opens it in Chromium and changes its horizontal axis. It needs
playwright and a Chromium on the path. `--seeds 5` makes five seeds each of 40 settings instead of
200 settings; with `--keep FOLDER` runs and page stay there.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel import report
from fedbilevel.runs.metric import Metrics
from fedbilevel.runs.recorder import Recorder

RUNS = 200
EVALUATIONS = 1000
CLIENTS = 40
REPEATS = 3
LIBRARY_BYTES = 4_815_765  # plotly.js 4.1.1
METHODS = ("simfbo", "shrofbo", "fedbio", "asfbo")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")


class MadeUp(fb.Run):
    """A run whose evaluations are made up: noisy curves that depend on its step sizes."""

    def __iter__(self) -> Iterator[Metrics]:
        lr_x, lr_y = self.algorithm.lr_x, self.algorithm.lr_y
        method = METHODS.index(self.algorithm.name)
        rng = np.random.default_rng([self.fed.seed, method, round(1e6 * lr_x), round(1e6 * lr_y)])
        speed = 3 + 40 * lr_x * rng.uniform(0.8, 1.2)
        top = 0.97 - 2 * abs(lr_x - 0.05) - 0.01 * method
        self.advance()  # so that the phases have costs
        wall_s = 0.0
        for k in range(EVALUATIONS):
            progress = 1 - np.exp(-speed * k / EVALUATIONS)
            noise = float(rng.normal(0, 0.02 * (1.05 - progress)))
            wall_s += 0.4 * rng.uniform(0.8, 1.3)
            accuracy = float(np.clip(0.1 + (top - 0.1) * progress + noise, 0, 1))
            of_clients = np.clip(accuracy + rng.normal(0, 0.08, CLIENTS), 0, 1)
            self.client_metrics.latest = {
                client: {"test_accuracy": float(value)} for client, value in enumerate(of_clients)
            }
            distribution = self.client_metrics.summary()["test_accuracy"]
            self.history.append(
                {
                    "round": k,
                    "iteration": k,
                    "bytes_up": 31_400 * k,
                    "bytes_down": 15_700 * k,
                    "samples": 3200 * k,
                    "gradients": 50 * k,
                    "flops": 4e9 * k,
                    "peak_bytes": 6_000_000 * (k > 0),
                    "virtual_s": 1.7 * k * lr_y,
                    "wall_s": wall_s,
                    "upper_loss": 2.3 * float(np.exp(-0.8 * speed * k / EVALUATIONS)) + abs(noise),
                    "lower_loss": 1.9 * float(np.exp(-speed * k / EVALUATIONS)) + 0.05,
                    "hypergradient_norm": float(np.exp(rng.normal(-5 * progress, 0.1))),
                    "test_accuracy": float(of_clients.mean()),
                    "test_accuracy_median": distribution["median"],
                    "test_accuracy_p10": distribution["p10"],
                    "test_accuracy_worst": distribution["worst"],
                    "test_accuracy_spread": distribution["spread"],
                }
            )
            yield self.history[-1]


def write_runs(folder: Path, seeds: int) -> None:
    """Write the run folders: a sweep of two step sizes for four methods."""
    task = fb.tasks.load("quadratic", clients=CLIENTS)
    for index in range(RUNS // seeds):
        name = METHODS[index % len(METHODS)]
        settings: dict[str, Any] = {
            "lr_x": 0.002 * (1 + index // 8),
            "lr_y": 0.1 + 0.1 * (index // 4 % 2),
        }
        for seed in range(seeds):
            fed = fb.simulated_federation(task.problem, task.clients, seed=seed)
            method = fb.algorithms.get(name)(**settings)
            run = MadeUp(method, fed, limits={}, evaluate_client=lambda x, y, client: {})
            config = {
                "seed": seed,
                "rounds": EVALUATIONS,
                "algorithm": {"name": name, **settings},
                "task": {"name": "quadratic", "clients": CLIENTS},
                "environment": {"participation": 0.5, "batch_size": 32},
            }
            for _ in Recorder(run, folder / f"trial-{index:03}" / f"seed-{seed}", config):
                pass


PAINTED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
CHANGE_AXIS = """async (position) => {
    document.querySelectorAll("[name=axis]")[position].click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
}"""


def measure(page: Path) -> dict[str, list[float]]:
    """Return the seconds that the page takes to open, and to show another axis, once per axis.

    Both end when what is on the screen has been drawn; the rest is drawn later. Each is also
    counted as the CPU time of the page's thread, which other work on the machine does not change.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    found: dict[str, list[float]] = {"open": [], "open, CPU": [], "axis": [], "axis, CPU": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for _ in range(REPEATS):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            tab.set_default_timeout(120_000)
            session = tab.context.new_cdp_session(tab)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})

            def cpu_seconds(session: Any = session) -> float:
                metrics = session.send("Performance.getMetrics")["metrics"]
                return next(each["value"] for each in metrics if each["name"] == "TaskDuration")

            started = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector(".chart .xtitle")
            tab.evaluate(PAINTED)
            found["open"].append(time.perf_counter() - started)
            found["open, CPU"].append(cpu_seconds())
            for position in range(1, tab.locator("[name=axis]").count()):
                tab.wait_for_selector("body[aria-busy=false]")
                before = cpu_seconds()
                started = time.perf_counter()
                tab.evaluate(CHANGE_AXIS, position)
                found["axis"].append(time.perf_counter() - started)
                found["axis, CPU"].append(cpu_seconds() - before)
            tab.close()
        browser.close()
    return found


def main() -> None:
    """Write the runs and their page, and print what opening it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "runs").exists():
            write_runs(folder / "runs", options.seeds)
        started = time.perf_counter()
        report.write_page([folder / "runs"], folder / "page.html")
        print(f"written in {time.perf_counter() - started:.1f} s")
        size = (folder / "page.html").stat().st_size - LIBRARY_BYTES
        print(f"{size / 1e6:.2f} MB beside the plotting library")
        for name, times in measure(folder / "page.html").items():
            print(f"{name}: {statistics.median(times):.2f} s, at most {max(times):.2f} s")


if __name__ == "__main__":
    main()
