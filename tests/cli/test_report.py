"""`fedbilevel report` and `fedbilevel export`: pages, figures and trained modules of runs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedbilevel as fb
from fedbilevel import data
from tests.support.tool import assert_refused, invoke, invoke_ok, read_summary


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run on digits."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    invoke_ok("run", "digits", "--rounds", 3, "--out", folder)
    return folder


@pytest.mark.xdist_group("exported")
def test_an_exported_module_has_the_accuracy_of_the_run(digits: Path, tmp_path: Path) -> None:
    run = fb.load_run(digits)
    assert (run.status, run.config["algorithm"]["name"]) == ("completed", "simfbo")
    assert [evaluation["round"] for evaluation in run.history] == [0, 1, 2, 3]
    outcome = invoke("export", digits, "--out", tmp_path / "model.safetensors")
    assert outcome == (0, f"written: {tmp_path / 'model.safetensors'}\n", "")
    net = fb.nets.mlp(64, 64, 10)
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images, labels = data.load("digits").test
    with torch.no_grad():
        accuracy = int((net(images).argmax(-1) == labels).sum()) / len(labels)
    assert accuracy == read_summary(digits)["final_test_accuracy"]


@pytest.mark.xdist_group("exported")
def test_what_cannot_be_exported_is_named(digits: Path, tmp_path: Path) -> None:
    unwritable = tmp_path / "no" / "model.safetensors"
    assert_refused(invoke("export", digits, "--out", unwritable), "model.safetensors")
    assert_refused(invoke("export", tmp_path, "--out", tmp_path / "a.safetensors"), "config.toml")
    assert_refused(invoke("export", digits, "--out", tmp_path / "a.pt"), "must end in .safetensors")


@pytest.mark.xdist_group("exported")
@pytest.mark.parametrize(
    ("page", "figure", "mention"),
    [
        ("page.html", "figure.svg", "figure.svg ends in '.svg', expected .pdf or .png"),
        ("page.html", "no/figure.pdf", "--figure is 'no/figure.pdf'"),
        ("no/page.html", "figure.pdf", "--out is 'no/page.html'"),
        (".", "figure.pdf", "--out is '.'"),
    ],
)
def test_nothing_is_written_if_the_page_or_the_figure_cannot_be(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    figure: str,
    mention: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(invoke("report", digits, "--out", page, "--figure", figure), mention)
    assert not list(tmp_path.iterdir())


@pytest.mark.xdist_group("exported")
def test_a_page_and_a_figure_are_written(digits: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    figure = tmp_path / "figure.pdf"
    outcome = invoke("report", digits, "--out", page, "--figure", figure)
    assert outcome == (0, f"page: {page}\nfigure: {figure}\n", "")
    assert page.read_text().startswith("<!doctype html>")
    assert figure.read_bytes().startswith(b"%PDF")


def test_the_model_of_a_client_is_exported(tmp_path: Path) -> None:
    options = {"clients": 3, "hidden": 4, "samples": 60}
    task = fb.tasks.load("hyper-representation", **options, owner="client")
    out = tmp_path / "run"
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=2, out=out)
    outcome = invoke("export", out, "--client", 2, "--out", tmp_path / "model.safetensors")
    assert outcome.code == 0, outcome
    exported = load_file(tmp_path / "model.safetensors")
    x, y = result.personal(2)
    assert exported.keys() == {**x, **y}.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in {**x, **y}.items())
    missing = invoke("export", out, "--client", 3, "--out", tmp_path / "model.safetensors")
    assert_refused(missing, "client is 3; it must be 0 to 2")
