"""The report: curves over seeds, the ranked table, the page in a real browser, the figure."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from fedbilevel import report
from fedbilevel.report import _curves as curves
from fedbilevel.report._curves import (
    AXES,
    Spread,
    clients,
    curve,
    differences,
    group,
    ledger,
    logarithmic,
    rows,
)
from fedbilevel.report._page import page
from fedbilevel.runs import folder
from fedbilevel.runs.folder import RunFolder
from tests.support.synthetic_runs import write_comparison, write_run

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>&amp;"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)


def made(
    seed: int,
    x: list[float],
    y: list[float | None],
    metric: str = "test_accuracy",
    name: str = "fedbio",
) -> RunFolder:
    history = [
        {"round": a, "bytes_up": a, "bytes_down": a, metric: b} for a, b in zip(x, y, strict=True)
    ]
    config = {"seed": seed, "algorithm": {"name": name}}
    return RunFolder(Path(f"/runs/{name}/seed-{seed}"), config, history, None)


# Run folders


def test_a_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, evaluations=4)
    file = path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    assert [line["round"] for line in folder.read(path).history] == [0, 10, 20]


def test_a_damaged_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, evaluations=3)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:-5], lines[2]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        folder.read(path)


def test_a_run_without_a_summary_is_unfinished(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    assert folder.read(path).status == "completed"
    (path / "summary.json").unlink()
    assert folder.read(path).status == "unfinished"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.toml", "seed =", "config.toml is not TOML"),
        ("config.toml", "seed = 1", "algorithm is None, expected a table with a name"),
        (
            "config.toml",
            'algorithm = "fedbio"',
            "algorithm is 'fedbio', expected a table with a name",
        ),
        (
            "config.toml",
            'seed = "x"\n[algorithm]\nname = "fedbio"',
            "seed is 'x', expected an integer",
        ),
        ("summary.json", "{", "summary.json is not JSON"),
        ("summary.json", "[]", "summary.json is not a summary"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    (path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        folder.read(path)


def test_runs_are_found_once_at_or_below_the_paths(tmp_path: Path) -> None:
    write_comparison(tmp_path / "all", algorithms=2, seeds=2, evaluations=2)
    found = folder.find([tmp_path / "all", str(tmp_path / "all" / "fedbio" / "seed-1")])
    names = ["fedbio/seed-0", "fedbio/seed-1", "fedbioacc/seed-0", "fedbioacc/seed-1"]
    assert [str(path.relative_to((tmp_path / "all").resolve())) for path in found] == names


def test_paths_without_runs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no run: expected config\.toml and metrics\.jsonl"
    ):
        folder.find([tmp_path])
    with pytest.raises(FileNotFoundError, match="missing is not a folder"):
        folder.find([tmp_path / "missing"])


# Curves


def test_seeds_meet_on_the_grid_of_both_where_both_have_been() -> None:
    runs = [made(0, [0, 10, 20], [0, 1, 2]), made(1, [0, 5, 25], [0, 2, 4])]
    c = curve(runs, "round", "test_accuracy")
    assert c is not None
    np.testing.assert_allclose(c.x, [0, 5, 10, 20])
    np.testing.assert_allclose(c.mean, [0, 1.25, 1.75, 2.75])  # of 0 .5 1 2 and of 0 2 2.5 3.5
    np.testing.assert_allclose(c.low, [0, 0.5, 1, 2])
    np.testing.assert_allclose(c.high, [0, 2, 2.5, 3.5])
    sent = curve(runs, "bytes", "test_accuracy")
    assert sent is not None
    np.testing.assert_allclose(sent.x, [0, 10, 20, 40])


def test_missing_values_are_bridged_and_the_later_of_two_evaluations_at_one_place_counts() -> None:
    c = curve([made(0, [0, 0, 1, 2, 3], [9, 1, None, 3, float("nan")])], "round", "test_accuracy")
    assert c is not None
    assert (c.x.tolist(), c.mean.tolist()) == ([0, 2], [1, 3])
    assert curve([made(0, [0], [None])], "round", "test_accuracy") is None
    assert (
        curve([made(0, [0, 1], [1, 1]), made(1, [2, 3], [1, 1])], "round", "test_accuracy") is None
    )


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    x = list(range(5001))
    c = curve([made(0, x, x)], "round", "test_accuracy")  # type: ignore[arg-type]
    assert c is not None
    assert (c.x.size, c.x[0], c.x[-1]) == (curves.POINTS, 0, 5000)
    np.testing.assert_array_equal(c.x, c.mean)


def test_log_scale_is_for_positive_values_over_more_than_a_decade_and_a_half() -> None:
    def wide(*values: float) -> bool:
        c = curve([made(0, [0, 1], list(values))], "round", "test_accuracy")
        assert c is not None
        return logarithmic([c])

    assert wide(1, 100)
    assert not wide(1, 20)
    assert not wide(0, 100)
    assert not logarithmic([])


def test_labels_carry_the_folder_where_configurations_differ(tmp_path: Path) -> None:
    for place, rate in (("low", 0.1), ("high", 0.5)):
        for seed in (0, 1):
            algorithm = {"name": "fedbio", "lr_x": rate}
            write_run(
                tmp_path / place / "fedbio" / f"seed-{seed}", "fedbio", seed, 2, algorithm=algorithm
            )
    write_run(tmp_path / "low" / "mdbo" / "seed-0", "mdbo", 0, 2)
    groups = group(folder.read(path) for path in folder.find([tmp_path]))
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("fedbio (high)", 2),
        ("fedbio (low)", 2),
        ("mdbo", 1),
    ]
    assert differences(groups)["algorithm.lr_x"] == [0.5, 0.1, 0.1]
    assert differences(groups)["algorithm.local_steps"] == [None, None, 5]
    assert not {"seed", "data.name", "algorithm.name"} & differences(groups).keys()


def test_a_seed_run_twice_is_not_two_seeds(tmp_path: Path) -> None:
    for place in ("first", "again"):
        write_run(tmp_path / place, "fedbio", 0, 2)
    groups = group(folder.read(path) for path in folder.find([tmp_path]))
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("fedbio (again)", 1),
        ("fedbio (first)", 1),
    ]


# Table


def test_costs_to_targets() -> None:
    runs = [
        made(0, [0, 10, 20, 30], [0.1, 0.8, 0.79, 0.92]),
        made(1, [0, 10, 20, 30], [0.1, 0.5, 0.85, 0.88]),
    ]
    (row,) = rows(group(runs))
    assert row.cost["round"][0.8] == Spread(15.0, pytest.approx(np.sqrt(50)), 2)
    assert row.cost["bytes"][0.8] == Spread(30.0, pytest.approx(np.sqrt(200)), 2)
    assert row.cost["round"][0.9] == Spread(30.0, 0.0, 1)
    assert row.cost["round"][0.93] is None
    assert row.reached("round").keys() == {0.8}
    assert row.accuracy == Spread(
        pytest.approx(0.9), pytest.approx(np.std([0.92, 0.88], ddof=1)), 2
    )
    assert (row.loss, row.seeds, row.statuses) == (None, 2, {"unfinished": 2})


def test_rank_is_highest_target_then_cost_then_final_values() -> None:
    runs = [
        made(0, [0, 10, 20], [0.1, 0.85, 0.96], name="slow"),
        made(0, [0, 10, 20], [0.1, 0.96, 0.95], name="fast"),
        made(0, [0, 1, 20], [0.1, 0.85, 0.86], name="low"),
        made(0, [0, 1, 20], [0.1, 0.2, 0.3], name="lowest"),
    ]
    assert [row.label for row in curves.ranked(rows(group(runs)), "round")] == [
        "fast",
        "slow",
        "low",
        "lowest",
    ]
    losses = [
        made(0, [0, 1], [2, 0.5], "upper_loss", "b"),
        made(0, [0, 1], [2, 0.7], "upper_loss", "a"),
    ]
    assert [row.label for row in curves.ranked(rows(group(losses)), "round")] == ["b", "a"]


def test_ranked_reads_folders(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=3, seeds=2)
    table = report.ranked([tmp_path], "bytes")
    assert {row.label for row in table} == {"fedbio", "fedbioacc", "fednest"}
    assert all(row.statuses == {"completed": 2} for row in table)
    with pytest.raises(ValueError, match="axis is 'miles', expected one of round, bytes, "):
        report.ranked([tmp_path], "miles")


@pytest.mark.parametrize(
    ("axis", "spread", "text"),
    [
        ("round", Spread(120, 0, 1), "120"),
        ("round", Spread(7, 0, 1), "7"),
        ("round", Spread(12.5, 3.5, 2), "12.5 ± 3.5"),
        ("round", Spread(12345, 6.7, 2), "12,345 ± 7"),
        ("bytes", Spread(999, 0, 1), "999 B"),
        ("bytes", Spread(1_234_000, 100_000, 3), "1.23 ± 0.10 MB"),
        ("bytes", Spread(52e9, 1e9, 3), "52.0 ± 1.0 GB"),
        ("samples", Spread(944_000, 0, 1), "944 k"),
        ("flops", Spread(1.56e12, 4e10, 3), "1.56 ± 0.04 TFLOP"),
        ("flops", Spread(12, 0, 1), "12 FLOP"),
        ("wall_s", Spread(4321.5, 0, 1), "4,322 s"),
    ],
)
def test_costs_are_shown_in_readable_units(axis: str, spread: Spread, text: str) -> None:
    assert AXES[axis].show(spread) == text


def test_ledger_is_the_mean_over_finished_seeds(tmp_path: Path) -> None:
    for seed, phases in enumerate([{"lower": 10, "upper": 4}, {"lower": 20}]):
        path = write_run(tmp_path / f"seed-{seed}", "fedbio", seed, 2)
        summary = json.loads((path / "summary.json").read_text())
        columns = (
            "rounds",
            "bytes_up",
            "bytes_down",
            "samples",
            "gradients",
            "flops",
            "peak_bytes",
        )
        summary["ledger"] = {phase: dict.fromkeys(columns, cost) for phase, cost in phases.items()}
        (path / "summary.json").write_text(json.dumps(summary))
    (write_run(tmp_path / "seed-2", "fedbio", 2, 2) / "summary.json").unlink()
    (one,) = group(folder.read(path) for path in folder.find([tmp_path]))
    assert {phase: cost["bytes_up"] for phase, cost in ledger(one).items()} == {
        "lower": 15,
        "upper": 2,
    }


def test_what_clients_paid_is_the_mean_over_finished_seeds_and_older_runs_have_none(
    tmp_path: Path,
) -> None:
    small, large = (
        {"bytes_up": 1, "bytes_down": 2, "peak_bytes": 10},
        {"bytes_up": 3, "bytes_down": 4, "peak_bytes": 20},
    )
    for seed, entries in enumerate(
        [[{**small, "clients": 3, "flops": 8}], [{**small, "clients": 1, "flops": 16}], None]
    ):
        path = write_run(tmp_path / f"seed-{seed}", "fedbio", seed, 2)
        summary = json.loads((path / "summary.json").read_text())
        summary["clients"] = [*(entries or []), {**large, "clients": 2, "flops": 100}]
        if entries is None:
            del summary["clients"]
            summary["ledger"]["lower"].pop("flops")
        (path / "summary.json").write_text(json.dumps(summary))
    runs = [folder.read(path) for path in folder.find([tmp_path])]
    (one,) = group(runs[:2])
    assert clients(one) == [
        {**small, "clients": 2, "flops": 10},
        {**large, "clients": 2, "flops": 100},
    ]
    assert '<h2 id="clients">Cost by client</h2>' in page(runs[:2])
    (old,) = group(runs[2:])
    assert clients(old) == []
    assert np.isnan(ledger(old)["lower"]["flops"])
    assert "nan FLOP" not in page(runs[2:])


# Page


def test_page_holds_the_table_the_configs_and_why_a_run_ended(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=2, seeds=3)
    file = tmp_path / "fedbio" / "seed-1" / "summary.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "status": "diverged", "reason": "upper_loss is nan"}
        )
    )
    html = page([folder.read(path) for path in folder.find([tmp_path])])
    assert "2 curves from 6 runs." in html
    assert "fedbio, seed 1: diverged, upper_loss is nan" in html
    assert "2 completed, 1 diverged" in html
    assert "Communication rounds to test accuracy" in html
    assert "Virtual time" not in html  # all zero in these runs
    assert "partition = &quot;dirichlet&quot;" in html


def test_page_without_accuracy_shows_losses_alone() -> None:
    html = page([made(seed, [0, 1, 2], [3, 2, 1], "upper_loss") for seed in (0, 1)])
    assert "Final upper loss" in html
    assert "Final accuracy" not in html
    assert 'id="test_accuracy"' not in html


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hold no evaluation past round 0"):
        page([made(0, [], [])])
    path = write_run(tmp_path / "run", "fedbio", 0)
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="hold no evaluation past round 0"):
        report.write_figure([path], tmp_path / "figure.pdf")


def test_largest_page_is_small_and_quick(tmp_path: Path) -> None:
    write_comparison(tmp_path / "runs", algorithms=8, seeds=5, evaluations=2000)
    start = time.perf_counter()
    report.write_page([tmp_path / "runs"], tmp_path / "page.html")
    assert time.perf_counter() - start < 10
    assert (tmp_path / "page.html").stat().st_size < 10_000_000


# Page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page was not opened in a browser")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    runs = write_comparison(out / "runs", algorithms=8, seeds=3)
    for file in (runs / "mdbo").glob("*/config.toml"):
        file.write_text(file.read_text().replace('name = "mdbo"', f"name = {json.dumps(HOSTILE)}"))
    summary = runs / "mdbo" / "seed-0" / "summary.json"
    hostile = {
        "status": HOSTILE,
        "reason": HOSTILE,
        "ledger": {HOSTILE: json.loads(summary.read_text())},
    }
    summary.write_text(json.dumps(hostile))
    report.write_page([runs], out / "page.html")
    return out / "page.html"


@pytest.fixture
def opened(browser: Browser, html: Path) -> Iterator[Page]:
    """The page, opened; after the test it must have reported no error and asked for nothing outside."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    tab = context.new_page()
    troubles: list[str] = []
    tab.on("console", lambda message: troubles.append(message.text))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    allowed = ("file:", "data:", "blob:")
    tab.on(
        "request",
        lambda request: None if request.url.startswith(allowed) else troubles.append(request.url),
    )
    tab.goto(html.as_uri())
    tab.wait_for_selector("#hypergradient_norm .xtitle")
    yield tab
    context.close()
    assert troubles == []


def lines(tab: Page, chart: str) -> int:
    return tab.locator(f"#{chart} .scatter .lines path").count()


def test_axis_switches_by_keyboard(opened: Page) -> None:
    title = opened.locator("#test_accuracy .xtitle")
    expect(title).to_have_text("Communication rounds")
    opened.get_by_role("radio", name="Communication rounds").focus()
    opened.keyboard.press("ArrowRight")
    expect(title).to_have_text("Bytes up and down (GB)")
    expect(opened.locator("#upper_loss .xtitle")).to_have_text("Bytes up and down (GB)")
    table = opened.locator("[data-axis]:visible")
    expect(table).to_have_count(1)
    expect(table).to_contain_text("Bytes up and down to test accuracy")


def test_a_curve_hides_by_its_checkbox_and_by_the_legend(opened: Page) -> None:
    everything = lines(opened, "upper_loss")
    box = opened.get_by_role("checkbox", name="fednest")
    box.focus()
    opened.keyboard.press("Space")
    one = everything - lines(opened, "upper_loss")
    assert one > 0
    opened.locator("#test_accuracy .legendtoggle").first.click()
    expect(opened.get_by_role("checkbox").first).not_to_be_checked()
    assert (
        lines(opened, "test_accuracy")
        == lines(opened, "hypergradient_norm")
        == everything - 2 * one
    )
    box.focus()
    opened.keyboard.press("Space")
    assert lines(opened, "upper_loss") == everything - one


def test_dark_mode_colours_page_and_chart_while_open(opened: Page) -> None:
    body, chart = opened.locator("body"), opened.locator("#test_accuracy .main-svg").first
    curve_line = opened.locator("#test_accuracy .legendlines path").first
    for scheme, back, colour in (
        ("light", "rgb(255, 255, 255)", "rgb(0, 114, 178)"),
        ("dark", "rgb(20, 23, 27)", "rgb(74, 168, 224)"),
    ):
        opened.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        expect(body).to_have_css("background-color", back)
        expect(chart).to_have_css("background-color", back)
        expect(curve_line).to_have_css("stroke", colour)


def test_a_phone_scrolls_in_one_direction(opened: Page) -> None:
    opened.set_viewport_size({"width": 390, "height": 844})
    expect(opened.locator("#test_accuracy .main-svg").first).to_have_css("width", "358px")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.locator("[data-axis]:visible .scroll").evaluate(
        "box => box.scrollWidth > box.clientWidth"
    )


def test_a_chart_saves_as_an_image(opened: Page) -> None:
    opened.locator("#test_accuracy").hover()
    with opened.expect_download() as download:
        opened.locator("#test_accuracy .modebar-btn").first.click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


def test_hostile_text_is_only_text(opened: Page) -> None:
    assert opened.evaluate("window.hurt") is None
    assert opened.locator("img").count() == 0
    assert opened.get_by_role("checkbox", name=HOSTILE).count() == 1
    assert HOSTILE in opened.locator("#test_accuracy .legendtext").all_text_contents()


# Figure


@pytest.mark.parametrize(
    ("name", "magic"), [("figure.pdf", b"%PDF"), ("figure.png", b"\x89PNG\r\n\x1a\n")]
)
def test_figure_is_written(tmp_path: Path, name: str, magic: bytes) -> None:
    def settings() -> dict[str, object]:  # looking at the backend alone would choose one
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    runs, before = write_comparison(tmp_path / "runs", algorithms=8, seeds=2), settings()
    report.write_figure([runs], tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(magic)
    assert len(data) > 10_000
    assert b"/Type3" not in data
    assert settings() == before


def test_figure_of_one_run_with_losses_alone(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, algorithm={"name": r"$\frac"})
    kept = ("round", "upper_loss")
    history = [{key: line[key] for key in kept} for line in folder.read(path).history]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, history)))
    report.write_figure([path], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_figure_refuses_other_formats(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    with pytest.raises(ValueError, match=r"figure\.svg ends in '\.svg', expected \.pdf or \.png"):
        report.write_figure([path], tmp_path / "figure.svg")
