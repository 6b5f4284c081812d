"""The page: its contents, and its behaviour in a real browser."""

import base64
import csv
import dataclasses
import json
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from plotly.offline import get_plotlyjs

import fedbilevel as fb
from fedbilevel import report
from fedbilevel.report._curves import mean_curve
from fedbilevel.report._page import _name_of, page
from fedbilevel.runs import folder
from fedbilevel.runs.clients import distribution
from fedbilevel.runs.folder import RunFolder
from tests.support.synthetic_runs import run_with, write_comparison, write_run

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>&amp;"
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


# Contents.


def test_it_holds_the_ranking_the_configs_and_why_a_run_ended(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=2, seeds=3)
    file = tmp_path / "fedbio" / "seed-1" / "summary.json"
    summary = json.loads(file.read_text())
    summary["status"] = "diverged"
    summary["reason"] = "upper_loss is nan"
    file.write_text(json.dumps(summary))
    html = page([folder.read(path) for path in folder.find([tmp_path])])
    assert "2 curves from 6 runs." in html
    assert "fedbio, seed 1: diverged, upper_loss is nan" in html
    assert "2 completed, 1 diverged" in html
    assert "Communication rounds to test accuracy" in html
    assert "Virtual time" not in html  # it is zero in these runs
    assert 'partition = "dirichlet"' in unescape(html)


def test_runs_without_accuracy_have_no_columns_about_it() -> None:
    html = page([run_with(seed, [0, 1, 2], [3, 2, 1], "upper_loss") for seed in (0, 1)])
    assert "Final upper loss" in html
    assert "Final accuracy" not in html
    assert 'id="test_accuracy"' not in html


def test_it_says_when_where_and_how_it_was_written(tmp_path: Path) -> None:
    html = page([run_with(0, [0, 1], [0.1, 0.2])], "fedbilevel compare a.toml --seeds '<3>'")
    line = next(line for line in html.splitlines() if line.startswith("<footer>"))
    assert f"by fedbilevel {fb.__version__} (Python 3." in line
    assert "UTC" in line
    assert " cores: fedbilevel compare a.toml --seeds &#39;&lt;3&gt;&#39;" in line


def test_costs_that_older_runs_do_not_have_are_left_out(tmp_path: Path) -> None:
    run = folder.read(write_run(tmp_path / "run", "fedbio", 0, 2))
    assert run.summary is not None
    html = page([run])
    assert '<h2 id="clients">Cost by client</h2>' in html
    assert '<th class="text" scope="col">Clients</th>' in html
    del run.summary["clients"]
    del run.summary["ledger"]["lower"]["flops"]
    html = page([run])
    assert '<th class="text" scope="col">Clients</th>' not in html
    assert "nan FLOP" not in html


def unpacked(html: str) -> dict[str, Any]:
    """Return what page.js finds in a page."""
    found = re.search(r'id="data">([^<]*)<', html)
    assert found
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def with_clients(seed: int, values: list[float], name: str = "fedbio") -> RunFolder:
    """A run of two evaluations, with an accuracy of each client at the end."""
    run = run_with(seed, [0, 5], [0.1, 0.5], name=name)
    of_clients = distribution("test_accuracy", values)
    for metrics in run.history:
        metrics |= {f"test_accuracy_{key}": value for key, value in of_clients.items()}
    entry = {**of_clients, "clients": list(range(3, 3 + len(values))), "values": values}
    summary = {"status": "completed", "ledger": {}, "client_metrics": {"test_accuracy": entry}}
    return dataclasses.replace(run, summary=summary)


def test_it_tells_how_a_metric_is_distributed_over_clients() -> None:
    runs = [with_clients(0, [0.25, 0.75, 0.5]), with_clients(1, [0.5, 0.5])]
    html = page([*runs, run_with(0, [0, 5], [0.1, 0.3], name="simfbo")])
    section = html[html.index('id="single"') : html.index('id="cost"')]
    cells = [unescape(cell) for cell in re.findall(r'data-value="[^"]*">([^<]*)<', section)]
    assert cells[:5] == [
        "0.5000 ± 0.0000",
        "0.5000 ± 0.0000",
        "0.4000 ± 0.1414",
        "0.3750 ± 0.1768",
        "0.1021 ± 0.1443",
    ]
    assert len(cells) == 5
    data = unpacked(html)
    assert data["personal"][0]["values"] == {"0": [0.25, 0.5, 0.5, 0.5, 0.75]}
    cells = re.findall(r'data-value="[^"]*">([^<]*)<', data["clients"]["0"])
    assert cells == ["3", "0.2500", "4", "0.7500", "5", "0.5000"]  # of the first seed
    assert "simfbo" not in section
    assert 'id="single"' not in page([run_with(0, [0, 5], [0.1, 0.3])])


def test_runs_without_an_evaluation_to_draw_are_refused() -> None:
    with pytest.raises(ValueError, match="hold no evaluation past round 0"):
        page([run_with(0, [], [])])


def test_of_many_clients_the_worst_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbilevel.report._page.CLIENT_ROWS", 2)
    html = page([with_clients(0, [0.25, 0.75, 0.5])])
    assert "the 2 worst of 3 clients" in html
    cells = re.findall(r'data-value="[^"]*">([^<]*)<', unpacked(html)["clients"]["0"])
    assert cells == ["3", "0.2500", "5", "0.5000"]


def test_a_page_about_many_long_runs_is_small_and_written_quickly(tmp_path: Path) -> None:
    runs = []
    for index, name in enumerate(f"trial-{number}" for number in range(200)):
        noise = np.random.default_rng(index).uniform(0, 1, 1000)
        run = with_clients(0, [float(value) for value in noise[:40]], name)
        run.history[:] = [
            {**run.history[0], "round": k, "wall_s": k + value, "upper_loss": 1 + value}
            for k, value in enumerate(noise)
        ]
        runs.append(run)
    started = time.process_time()
    html = page(runs)
    assert time.process_time() - started < 10
    assert len(html.encode()) - len(get_plotlyjs().encode()) < 1_000_000


def test_settings_that_most_runs_do_not_have_are_marked(tmp_path: Path) -> None:
    for number, lr_x in enumerate([0.1, 0.1, 0.5]):
        algorithm = {"name": "fedbio", "lr_x": lr_x, "lr_y": 0.1}
        write_run(
            tmp_path / "runs" / f"{number} #", "fedbio", 0, 2, algorithm=algorithm, weights=number
        )
    report.write_page([tmp_path / "runs"], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    section = html[html.index('id="configuration"') :]
    assert re.findall(r'<td(?: class="(\w*)")?>([\d.]+)</td>', section) == [
        ("", "0.1"), ("", "0"), ("", "0.1"), ("", "1"), ("differs", "0.5"), ("", "2")
    ]  # fmt: skip
    assert 'href="runs/2%20%23"' in section
    assert "lr_y = 0.1" in section
    assert "lr_x = " not in section


# In a browser.


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
    """A page about runs, one of which has hostile names."""
    out = tmp_path_factory.mktemp("page")
    runs = write_comparison(out / "runs", algorithms=8, seeds=3)
    for file in (runs / "mdbo").glob("*/config.toml"):
        file.write_text(file.read_text().replace('name = "mdbo"', f"name = {json.dumps(HOSTILE)}"))
    summary = runs / "mdbo" / "seed-0" / "summary.json"
    hostile = {
        "status": HOSTILE,
        "reason": HOSTILE,
        "ledger": {HOSTILE: json.loads(summary.read_text())},
        "final_test_accuracy": None,
    }
    summary.write_text(json.dumps(hostile))
    report.write_page([runs], out / "page.html")
    return out / "page.html"


@pytest.fixture
def opened(browser: Browser, html: Path) -> Iterator[Page]:
    """The page in a tab; the test fails if it reports an error or requests anything outside."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    tab = context.new_page()
    problems: list[str] = []

    def check_request(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            problems.append(request.url)

    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", check_request)
    tab.goto(html.as_uri())
    tab.wait_for_selector("#hypergradient_norm .xtitle")
    yield tab
    context.close()
    assert problems == []


def count_lines(tab: Page, chart: str) -> int:
    return tab.locator(f"#{chart} .scatter .lines path").count()


def test_the_axis_can_be_changed_with_the_keyboard(opened: Page) -> None:
    title = opened.locator("#test_accuracy .xtitle")
    expect(title).to_have_text("Communication rounds")
    opened.get_by_role("radio", name="Communication rounds").focus()
    opened.keyboard.press("ArrowRight")
    expect(title).to_have_text("Bytes up and down (GB)")
    expect(opened.locator("#upper_loss .xtitle")).to_have_text("Bytes up and down (GB)")
    table = opened.locator("[data-axis]:visible")
    expect(table).to_have_count(1)
    expect(table).to_contain_text("Bytes up and down to test accuracy")


def test_a_curve_can_be_hidden_by_its_checkbox_and_in_the_legend(opened: Page) -> None:
    all_lines = count_lines(opened, "upper_loss")
    box = opened.get_by_role("checkbox", name="fednest")
    box.focus()
    opened.keyboard.press("Space")
    lines_per_curve = all_lines - count_lines(opened, "upper_loss")
    assert lines_per_curve > 0
    opened.locator("#test_accuracy .legendtoggle").first.click()
    expect(opened.get_by_role("checkbox").first).not_to_be_checked()
    assert count_lines(opened, "test_accuracy") == all_lines - 2 * lines_per_curve
    assert count_lines(opened, "hypergradient_norm") == all_lines - 2 * lines_per_curve
    box.focus()
    opened.keyboard.press("Space")
    assert count_lines(opened, "upper_loss") == all_lines - lines_per_curve


def test_page_and_charts_follow_the_colour_scheme_while_open(opened: Page) -> None:
    body = opened.locator("body")
    chart = opened.locator("#test_accuracy .main-svg").first
    legend_line = opened.locator("#test_accuracy .legendlines path").first
    for scheme, back, colour in (
        ("light", "rgb(255, 255, 255)", "rgb(0, 114, 178)"),
        ("dark", "rgb(20, 23, 27)", "rgb(74, 168, 224)"),
    ):
        opened.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        expect(body).to_have_css("background-color", back)
        expect(chart).to_have_css("background-color", back)
        expect(legend_line).to_have_css("stroke", colour)


def test_on_a_phone_only_tables_scroll_sideways(opened: Page) -> None:
    opened.set_viewport_size({"width": 390, "height": 844})
    expect(opened.locator("#test_accuracy .main-svg").first).to_have_css("width", "358px")
    opened.wait_for_selector("body[aria-busy=false]")  # the charts below are drawn later
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.locator("[data-axis]:visible .scroll").evaluate(
        "box => box.scrollWidth > box.clientWidth"
    )


def test_a_chart_can_be_saved_as_an_image(opened: Page) -> None:
    opened.locator("#test_accuracy").hover()
    with opened.expect_download() as download:
        opened.locator("#test_accuracy .modebar-btn").first.click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


def vertical_range(tab: Page, chart: str) -> list[float]:
    return tab.evaluate(f"document.getElementById('{chart}').layout.yaxis.range")  # type: ignore[no-any-return]


def test_any_metric_can_be_shown_on_a_scale_of_its_own(opened: Page) -> None:
    assert opened.locator("#lower_loss:visible").count() == 0
    opened.get_by_role("checkbox", name="Lower loss").check()
    expect(opened.locator("#lower_loss .ytitle")).to_have_text("Lower loss")
    opened.get_by_role("checkbox", name="Test accuracy").uncheck()
    assert opened.locator("#test_accuracy:visible").count() == 0
    assert opened.locator("#upper_loss .legendtext").count() == 8  # the first chart has the legend
    axis = "document.getElementById('lower_loss').layout.yaxis.type"
    before = opened.evaluate(axis)
    opened.get_by_text("logarithmic", exact=True).click()
    assert opened.evaluate(axis) == "log"
    opened.get_by_text("linear", exact=True).click()
    assert opened.evaluate(axis) in (None, "linear")
    assert before != opened.evaluate(axis) or before in (None, "linear")


def test_the_vertical_range_is_that_of_the_curves_that_are_shown(opened: Page) -> None:
    low, high = vertical_range(opened, "test_accuracy")
    assert 0 < low < 0.1
    assert 0.98 < high < 1.05
    for label in ("fedbio", "fedbioacc", "fednest", "fedmbo", "simfbo", "shrofbo", "fedmsa"):
        opened.get_by_role("checkbox", name=label, exact=True).uncheck()
    assert vertical_range(opened, "test_accuracy")[1] < high


def test_smoothing_and_single_seeds_change_the_curves(opened: Page) -> None:
    values = "Array.from(document.getElementById('hypergradient_norm').data[2].y)"
    lines = count_lines(opened, "upper_loss")
    rough = opened.evaluate(values)
    slider = opened.locator("[name=smoothing]")
    slider.focus()
    for _ in range(5):
        opened.keyboard.press("ArrowRight")
    smooth = opened.evaluate(values)
    assert smooth[0] == rough[0]
    middle = sum(rough[15:26]) / 11
    assert smooth[20] == pytest.approx(middle)
    opened.get_by_role("checkbox", name="Single seeds").check()
    assert count_lines(opened, "upper_loss") == lines // 3 * 4  # 3 seeds and the mean, no band
    traces = opened.evaluate("document.getElementById('upper_loss').data.length")
    assert traces == 8 * 4


def test_a_heading_sorts_its_table_both_ways(opened: Page) -> None:
    table = opened.locator("[data-axis]:visible table")
    names = table.locator("tbody th.name")
    ranked = names.all_text_contents()
    heading = table.get_by_role("button", name="Final upper loss")
    heading.click()
    column = "document.querySelector('[data-axis]:not([hidden]) tbody').rows"
    losses = f"Array.from({column}, (row) => Number(row.cells[4].dataset.value))"
    assert opened.evaluate(losses) == sorted(opened.evaluate(losses))
    heading.click()
    assert opened.evaluate(losses) == sorted(opened.evaluate(losses), reverse=True)
    table.get_by_role("button", name="#").click()
    assert names.all_text_contents() == ranked


def test_clients_are_drawn_and_sorted(browser: Browser, tmp_path: Path) -> None:
    values = [0.25, 0.75, 0.5]
    file = tmp_path / "page.html"
    file.write_text(page([with_clients(0, values), with_clients(0, values, "simfbo")]))
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(file.as_uri())
    tab.wait_for_selector("#clients-test_accuracy .xtitle")
    assert count_lines(tab, "rounds-test_accuracy") == 2 * 3  # median, worst tenth, worst
    assert count_lines(tab, "clients-test_accuracy") == 2
    tab.get_by_role("checkbox", name="simfbo").uncheck()
    assert count_lines(tab, "rounds-test_accuracy") == 3
    details = tab.locator("details.sortable").first
    details.locator("summary").click()
    details.get_by_role("button", name="Test accuracy").click()
    assert details.locator("tbody td:first-child").all_text_contents() == ["3", "5", "4"]
    tab.close()


def test_curves_are_saved_as_csv_and_a_chart_as_svg(opened: Page) -> None:
    opened.get_by_role("checkbox", name="fednest").uncheck()
    with opened.expect_download() as download:
        opened.get_by_role("button", name="Save as CSV").click()
    head, *rows = list(csv.reader(download.value.path().read_text().splitlines()))
    assert head == ["curve", "metric", "Communication rounds", "mean", "low", "high"]
    assert {row[0] for row in rows} >= {"fedbio", HOSTILE}
    assert "fednest" not in {row[0] for row in rows}
    assert {row[1] for row in rows} == {"test_accuracy", "upper_loss", "hypergradient_norm"}
    for *_, mean, low, high in rows:
        assert float(low) <= float(mean) * (1 + 1e-6)
        assert float(mean) <= float(high) * (1 + 1e-6)
    opened.locator("#test_accuracy").hover()
    with opened.expect_download() as download:
        opened.locator("#test_accuracy [data-title='Save as SVG']").click()
    assert download.value.path().read_bytes().startswith(b"<svg")


def test_hostile_names_are_shown_as_text(opened: Page) -> None:
    assert opened.evaluate("window.hurt") is None
    assert opened.locator("img").count() == 0
    assert opened.get_by_role("checkbox", name=HOSTILE).count() == 1
    assert HOSTILE in opened.locator("#test_accuracy .legendtext").all_text_contents()


def test_of_many_curves_the_best_are_drawn_in_colour_and_the_others_in_grey(
    browser: Browser, tmp_path: Path
) -> None:
    runs = []
    for number in range(40):
        top = 0.5 + 0.01 * ((7 * number) % 40)  # trial-17 is the best: 7 * 17 = 39 modulo 40
        runs.append(run_with(0, [0, 5, 10], [0.1, top - 0.1, top], name=f"trial-{number}"))
    file = tmp_path / "page.html"
    file.write_text(page(runs))
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(file.as_uri())
    tab.wait_for_selector("#test_accuracy .xtitle")
    names = "document.getElementById('test_accuracy').data.map((trace) => trace.name)"
    traces = tab.evaluate(names)
    assert len(traces) == 1 + 10
    assert traces[1] == "trial-17"
    grey = "document.getElementById('test_accuracy').data[0]"
    assert tab.evaluate(f"new Set({grey}.text).size") == 30 + 1  # with the gaps
    assert tab.evaluate(f"{grey}.y.length") == 30 * (3 + 1)
    tab.get_by_label("Others in grey").uncheck()
    assert len(tab.evaluate(names)) == 10
    tab.get_by_role("button", name="All", exact=True).click()
    assert len(tab.evaluate(names)) == 16  # one per style
    points = "document.getElementById('test_accuracy').data.map((trace) => trace.y.length)"
    assert sum(tab.evaluate(points)) == 40 * (3 + 1)
    tab.locator("#filter").fill("trial-3")
    assert tab.locator("[name=curve]:visible").count() == 11  # 3 and 30 to 39
    tab.get_by_role("button", name="Best 10").click()
    assert set(tab.evaluate(names)) < {"trial-3", *(f"trial-{k}" for k in range(30, 40))}
    tab.close()


def test_the_page_averages_over_seeds_as_the_figure_does(browser: Browser, tmp_path: Path) -> None:
    runs = [
        run_with(0, [0, 10, 10, 20, 30], [0.1, 0.2, 0.4, None, 0.9]),
        run_with(1, [5, 12, 25], [0.25, 0.5, 0.75]),
    ]
    expected = mean_curve(runs, "round", "test_accuracy")
    assert expected is not None
    file = tmp_path / "page.html"
    file.write_text(page(runs))
    tab = browser.new_page()
    tab.goto(file.as_uri())
    tab.wait_for_selector("#test_accuracy .xtitle")
    low, high, mean = tab.evaluate(
        "document.getElementById('test_accuracy').data.map(({ x, y }) => [x, y])"
    )
    for (x, y), values in ((low, expected.low), (high, expected.high), (mean, expected.mean)):
        np.testing.assert_allclose(x, expected.x)
        np.testing.assert_allclose(y, values)
    tab.close()


def test_clients_are_shown_as_a_histogram(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page([with_clients(0, [0.0, 0.04, 0.5, 1.0])]))
    tab = browser.new_page()
    tab.goto(file.as_uri())
    tab.get_by_text("histogram", exact=True).click()
    chart = "document.getElementById('clients-test_accuracy')"
    expect(tab.locator("#clients-test_accuracy .xtitle")).to_have_text("Test accuracy")
    shares = tab.evaluate(f"{chart}.data[0].y")
    assert [shares[0], shares[10], shares[19]] == [50, 25, 25]
    assert sum(shares) == 100
    tab.close()


def test_a_page_about_a_table_is_headed_by_its_file() -> None:
    config = {"task": {"name": "table", "path": "/somewhere/patients.csv"}}
    assert _name_of("data", config) == "patients.csv"
    assert _name_of("task", config) == "table"
    assert _name_of("data", {"task": {"name": "quadratic"}}) is None
    assert _name_of("data", {"task": "a", "data": {"name": "digits"}}) == "digits"
