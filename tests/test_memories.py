"""What clients remember: a dict to whoever uses it, however little of it is held in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.execution import memories
from fedbilevel.execution.memories import Memories
from fedbilevel.federation.delays import LogNormal
from fedbilevel.runs.recorder import Recorder
from fedbilevel.runs.run import Run

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def memory(value: int) -> dict[str, Any]:
    """Another form for every kind of number, an empty one for 0."""
    if value == 0:
        return {}
    tensor = torch.arange(value).to(DTYPES[value % 5])
    return {
        "a": fb.Tree(w=tensor, b=tensor[:0].reshape(0, 3)),
        "way": (fb.Tree(y=tensor[0]), tensor.reshape(1, -1)),
    }


def same(found: Any, expected: dict[int, int]) -> None:
    assert set(found) == set(expected)
    for client, value in expected.items():
        torch.testing.assert_close(found[client], memory(value), rtol=0, atol=0)


steps = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(
        st.sampled_from(["mark", "back", "save", "kill", "delete"]), st.integers(0, 5), st.just(0)
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(steps, max_size=40),
    most=st.sampled_from([0, 200, 10**6]),
    in_folder=st.booleans(),
)
def test_it_is_a_dict(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    most: int,
    in_folder: bool,
) -> None:
    """With marks and checkpoints to go back to; `kill` loses what was done since the last checkpoint."""
    folder = tmp_path_factory.mktemp("run") if in_folder else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "SLACK", 300)
        ours, model = Memories("cpu", most), {}
        ours.folder = folder
        saved, checkpoint, mark, marked = ours.save(), dict(model), ours.mark(), dict(model)
        for what, client, value in steps:
            if what == "set":
                ours[client] = memory(value)
                model = {
                    **{i: v for i, v in model.items() if i != client},
                    **({client: value} if value else {}),
                }
            elif what == "delete" and client in model:
                del ours[client], model[client]
            elif what == "mark":
                mark, marked = ours.mark(), dict(model)
            elif what == "back":
                ours.back(mark)
                model = dict(marked)
            elif what == "save":
                saved, checkpoint = ours.save(), dict(model)
            elif what == "kill":
                ours, model = Memories("cpu", most), dict(checkpoint)
                ours.folder = folder
                ours.restore([saved])
                mark, marked = ours.mark(), dict(model)
            assert sum(memories.nbytes(kept) for kept in ours._near.values()) == ours._size <= most
            same(ours, model)
    if folder:
        ours.save()
        ours.save()
        assert len(list(folder.iterdir())) <= 1, "outdated files are removed"


def test_files_are_written_anew_before_they_are_mostly_outdated(tmp_path: Path) -> None:
    ours = Memories("cpu", 0)
    ours.folder = tmp_path
    for turn in range(200):
        for client in range(3):
            ours[client] = {"w": torch.full((125_000,), float(turn))}
        if turn % 10 == 0:
            ours.save()
    ours.save()
    ours.save()
    assert (
        sum(file.stat().st_size for file in tmp_path.iterdir())
        < 2 * memories.SLACK
        < 200 * 1_500_000
    )
    assert float(ours[2]["w"][-1]) == 199.0


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    ours = Memories("cpu", 0)
    ours.folder = tmp_path
    ours[3] = memory(7)
    name, length = ours.save()  # type: ignore[misc]
    whole = (tmp_path / name).read_bytes()
    for place in range(length + 1):
        flipped = bytearray(whole)
        if place < length:
            flipped[place] ^= 1
        (tmp_path / name).write_bytes(flipped[: length - (place == length)])
        again = Memories("cpu", 0)
        again.folder = tmp_path
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            assert [again.restore([(name, length)]), *again.values()]


def test_a_run_goes_on_with_the_same_bits_and_small_checkpoints(tmp_path: Path) -> None:
    """Clients that remember, next to nothing of it in memory, stopped without a last checkpoint."""
    task = fb.tasks.load("quadratic", clients=6, samples=4, noise=1.0)
    method, config = fb.algorithms.AFBO(memory="client"), {"algorithm": {"name": "afbo"}, "seed": 0}
    conditions = fb.Environment(
        participation=2, local_steps=(1, 3), batch_size=2, delay=LogNormal()
    )

    def recorder(folder: str, rounds: int, memory: int = 300) -> Recorder:
        fed = fb.simulated_federation(task.problem, task.clients, conditions)
        fed.transport.executor.memories.most = memory
        run = Run(method, fed, {"rounds": rounds})
        return Recorder(run, tmp_path / folder, config, resume=True, checkpoint_every=3)

    whole = recorder("whole", 20, memory=10**6)
    list(whole)
    for stop in (5, 10, 11, 20):
        part = recorder("parts", 20)
        for metrics in part:
            if metrics["round"] == stop:
                break  # as if killed: the last multiple of 3 is what there is
    a, b = whole.run, part.run
    assert torch.equal(a.state.x["x"], b.state.x["x"])
    assert a.fed.ledger.phases == b.fed.ledger.phases
    ours, theirs = (run.fed.transport.executor.memories for run in (a, b))
    assert sorted(ours) == sorted(theirs) == list(range(6))
    for client in ours:
        torch.testing.assert_close(ours[client], theirs[client], rtol=0, atol=0)
    assert theirs._size <= 300
    saved = b.fed.snapshot()["transport"]["executors"][0]["memories"]
    assert isinstance(saved, tuple), "a checkpoint names the file"
