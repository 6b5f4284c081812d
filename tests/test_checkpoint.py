"""Checkpoints: what goes in comes out, one is replaced at once, and a damaged or foreign one is refused."""

import fcntl
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fedbilevel as fb
from fedbilevel.runs import checkpoint
from tests.support.tool import QUADRATIC, call, contents, done, is_refusal, metrics, summary, write

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


# The file


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(
        draw(st.sampled_from(DTYPES))
    )
    if made.is_floating_point() and made.numel() and draw(st.booleans()):
        made.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -0.0]))
    return made.T.T if made.ndim == 2 else made


numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    numbers | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
        st.dictionaries(st.text(max_size=5), tensors(), max_size=3).map(fb.Tree),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit and of the same kind."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return (
        a == b
        if not isinstance(a, float)
        else (math.isnan(a) and math.isnan(b)) or (a, str(a)) == (b, str(b))
    )


@settings(deadline=None, derandomize=True)
@given(value=values)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    checkpoint.save(path, value)
    assert same(checkpoint.load(path), value)


def test_tensors_that_share_memory_or_have_strides_come_out(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    value = {
        "whole": whole,
        "row": whole[1],
        "turned": whole.T,
        "again": [whole, whole.requires_grad_()],
    }
    checkpoint.save(tmp_path / "a", value)
    loaded = checkpoint.load(tmp_path / "a")
    assert torch.equal(loaded["turned"], whole.T)
    assert torch.equal(loaded["row"], whole[1])


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize("value", [{1, 2}, object(), Pair(1, 2), {"a": b"bytes"}])
def test_what_would_come_out_as_something_else_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint cannot hold"):
        checkpoint.save(tmp_path / "a", value)
    assert not list(tmp_path.iterdir())


def test_a_crash_before_the_new_one_is_complete_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"round": 1})

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, {"round": 2})
    assert checkpoint.load(path) == {"round": 1}
    (tmp_path / "a.safetensors.new").write_bytes(
        b"half"
    )  # what a kill in the middle of the writing leaves
    checkpoint.save(path, {"round": 3})
    assert checkpoint.load(path) == {"round": 3}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    value = {"x": fb.Tree(w=torch.arange(6.0).reshape(2, 3)), "n": 3, "s": "text"}
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, value)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 + place % 255)]) + whole[place + 1 :]
        )
        try:
            loaded, said = checkpoint.load(path), ""
        except ValueError as error:
            loaded, said = None, str(error)
        assert (str(path) in said and "\n" not in said) or same(
            loaded, value
        )  # a space may become a tab


# A run's


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment and its run."""
    folder = tmp_path_factory.mktemp("finished")
    done("run", write(folder / "a.toml"), "--out", folder / "run")
    return folder


class Hurt:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def foreign(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def of_another_version(path: Path) -> None:
    save_file({}, path, {"fedbilevel": "1", "plain": "{}", "digest": ""})


def malicious(path: Path) -> None:
    path.write_bytes(pickle.dumps(Hurt(path.parents[2] / "mark")))


def malicious_torch(path: Path) -> None:
    torch.save(Hurt(path.parents[2] / "mark"), path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(length: int) -> Any:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def flipped(place: int) -> Any:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return flip


DAMAGE = {
    "cut to nothing": cut(0),
    "cut in its length": cut(4),
    "cut in its header": cut(100),
    "cut by a byte": cut(-1),
    "flipped in its length": flipped(1),
    "flipped in its header": flipped(100),
    "flipped in its tensors": flipped(-1),
    "foreign": foreign,
    "of another version": of_another_version,
    "a pickle": malicious,
    "a torch file": malicious_torch,
    "a folder": folder_instead,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused_and_nothing_overwritten(
    finished: Path, tmp_path: Path, damage: str
) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    DAMAGE[damage](run / "checkpoint" / "latest.safetensors")
    before = contents(tmp_path)
    outcome = call("run", finished / "a.toml", "--rounds", 8, "--out", run, "--resume")
    is_refusal(outcome, str(run / "checkpoint" / "latest.safetensors"))
    with pytest.raises(ValueError, match=r"latest\.safetensors"):
        fb.load_run(run)
    is_refusal(call("export", run, "--out", tmp_path / "model.safetensors"))
    assert contents(tmp_path) == before  # no mark either


def test_lost_metrics_are_noticed(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    before = contents(run)
    is_refusal(call("run", finished / "a.toml", "--out", run, "--resume"), "metrics.jsonl", "lost")
    (run / "metrics.jsonl").unlink()
    is_refusal(call("run", finished / "a.toml", "--out", run, "--resume"), "metrics.jsonl")
    del before["metrics.jsonl"]
    assert contents(run) == before


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (["--algorithm", "asfbo"], ["algorithm", "'simfbo'", "'asfbo'"]),
        (["--set", "algorithm.lr_x=0.2"], ["algorithm.lr_x = 0.05, not 0.2"]),
        (["--seed", 1], ["seed = 0, not 1"]),
        (
            ["--set", "environment.local_steps=[1, 3]"],
            ["environment.local_steps = [1, 2], not [1, 3]"],
        ),
        (["--set", "task.noise=0.4"], ["task.noise = 0.3, not 0.4"]),
        (["--set", "runtime.threads=2"], ["runtime.threads = 1, not 2"]),
    ],
)
def test_a_run_does_not_go_on_as_another(
    finished: Path, tmp_path: Path, options: list[object], mentions: list[str]
) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    before = contents(run)
    is_refusal(
        call("run", finished / "a.toml", "--out", run, "--resume", *options), str(run), *mentions
    )
    is_refusal(call("run", finished / "a.toml", "--out", run, *options), str(run), "--resume")
    assert contents(run) == before


def test_a_raised_budget_gives_the_longer_run(finished: Path, tmp_path: Path) -> None:
    run, whole = shutil.copytree(finished / "run", tmp_path / "run"), tmp_path / "whole"
    done("run", finished / "a.toml", "--out", run, "--resume", "--rounds", 7)
    done("run", finished / "a.toml", "--out", whole, "--rounds", 7)
    assert metrics(run) == metrics(whole)
    assert same(fb.load_run(run).x, fb.load_run(whole).x)
    assert {**summary(run), "wall_s": 0} == {**summary(whole), "wall_s": 0}
    assert (run / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()
    done(
        "run", finished / "a.toml", "--out", run, "--resume", "--rounds", 7
    )  # there is nothing left to do
    assert metrics(run) == metrics(whole)
    assert {**summary(run), "wall_s": 0} == {**summary(whole), "wall_s": 0}


def test_lines_after_the_checkpoint_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--set", "every=4", "--set", "checkpoint_every=1"]
    file, run, save = write(tmp_path / "a.toml"), tmp_path / "run", checkpoint.save
    done("run", file, "--out", run, *options, "--rounds", 4)
    with (run / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"round": 99}\n{"round"')  # a run that was killed got that far
    counted = []

    def watched(path: Path, value: Any) -> None:
        counted.append((value["metrics_bytes"], (run / "metrics.jsonl").stat().st_size))
        save(path, value)

    monkeypatch.setattr(checkpoint, "save", watched)
    done("run", file, "--out", run, *options, "--rounds", 8, "--resume")
    assert len(counted) == 5
    assert all(said == there for said, there in counted)
    assert [line["round"] for line in metrics(run)] == [0, 4, 8]


def test_a_folder_has_one_writer(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    before = contents(run)
    with (run / "checkpoint" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = call("run", finished / "a.toml", "--rounds", 9, "--out", run, "--resume")
        is_refusal(outcome, str(run), "another process")
        assert contents(run) == before
    done("run", finished / "a.toml", "--rounds", 9, "--out", run, "--resume")


def test_a_diverged_run_keeps_its_last_good_state_and_stays_diverged(tmp_path: Path) -> None:
    file, run = (
        write(tmp_path / "a.toml", "algorithm.server_lr_x = 1e150" + QUADRATIC),
        tmp_path / "run",
    )
    assert call("run", file, "--rounds", 9, "--out", run, "--quiet") == (3, "", "")
    told = summary(run)
    assert (told["status"], told["rounds"]) == ("diverged", metrics(run)[-1]["round"])
    assert told["reason"].startswith(f"round {told['rounds']}: ")
    assert "finite" in told["reason"] or "times its start" in told["reason"]
    loaded = fb.load_run(run)
    assert loaded.status == "diverged"
    assert all(bool(torch.isfinite(t).all()) for t in (*loaded.x.values(), *loaded.y.values()))
    before = metrics(run)
    assert call("run", file, "--rounds", 20, "--out", run, "--resume", "--quiet").code == 3
    assert (metrics(run), summary(run)["reason"]) == (before, told["reason"])
