"""What clients remember: a dict to its users, however little of it is cached."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.core.tree import nbytes
from fedbilevel.execution import memories
from fedbilevel.execution.client_memory import Memory
from fedbilevel.execution.memories import Memories
from fedbilevel.federation.delays import LogNormal
from fedbilevel.runs.recorder import Recorder
from fedbilevel.runs.run import Run

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def memory(value: int) -> Memory:
    """A memory whose dtype and shapes depend on the value; that of 0 is empty."""
    if value == 0:
        return {}
    tensor = torch.arange(value).to(DTYPES[value % 5])
    return {
        "a": fb.Tree(w=tensor, b=tensor[:0].reshape(0, 3)),
        "way": (fb.Tree(y=tensor[0]), tensor.reshape(1, -1)),
    }


def check_equal(actual: Mapping[int, Memory], expected: Mapping[int, int]) -> None:
    assert set(actual) == set(expected)
    for client, value in expected.items():
        torch.testing.assert_close(actual[client], memory(value), rtol=0, atol=0)


def new_memories(cache_bytes: int, folder: Path | None) -> Memories:
    created = Memories("cpu", cache_bytes)
    created.folder = folder
    return created


clients = st.integers(0, 5)
actions = st.one_of(
    st.tuples(st.just("set"), clients, st.integers(0, 9)),
    st.tuples(
        st.sampled_from(["mark", "rollback", "snapshot", "kill", "fall back", "delete"]),
        clients,
        st.just(0),
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(actions, max_size=40),
    cache_bytes=st.sampled_from([0, 200, 10**6]),
    in_folder=st.booleans(),
)
def test_memories_behave_like_a_dict_with_marks_and_checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[tuple[str, int, int]],
    cache_bytes: int,
    in_folder: bool,
) -> None:
    """`kill` loses what was done since the last checkpoint, `fall back` since the one before."""
    folder = tmp_path_factory.mktemp("run") if in_folder else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "SLACK", 300)
        actual = new_memories(cache_bytes, folder)
        model: dict[int, int] = {}
        saved = [(actual.snapshot(), dict(model))]
        mark = actual.mark()
        model_at_mark = dict(model)
        for action, client, value in actions:
            if action == "set":
                actual[client] = memory(value)
                model[client] = value
                if value == 0:
                    del model[client]
            elif action == "delete" and client in model:
                del actual[client]
                del model[client]
            elif action == "mark":
                mark = actual.mark()
                model_at_mark = dict(model)
            elif action == "rollback":
                actual.rollback(mark)
                model = dict(model_at_mark)
            elif action == "snapshot":
                saved.append((actual.snapshot(), dict(model)))
            elif action in ("kill", "fall back"):
                if action == "fall back" and len(saved) > 1:
                    del saved[-1]
                    saved[:-1] = []  # the checkpoint before that one is no longer kept
                actual = new_memories(cache_bytes, folder)
                actual.restore([saved[-1][0]])
                model = dict(saved[-1][1])
                mark = actual.mark()
                model_at_mark = dict(model)
            cached_bytes = sum(nbytes(cached) for cached in actual._cache.values())
            assert cached_bytes == actual.cached_bytes <= cache_bytes
            check_equal(actual, model)
    if folder:
        for _ in range(3):
            actual.snapshot()
        assert len(list(folder.iterdir())) <= 1, "outdated files are removed"


def test_only_the_latest_mark_can_be_rolled_back_to() -> None:
    changed = new_memories(10**6, None)
    old = changed.mark()
    changed.mark()
    with pytest.raises(RuntimeError, match=f"mark is {old}; .* the latest one only"):
        changed.rollback(old)


def test_files_are_rewritten_before_they_are_mostly_outdated(tmp_path: Path) -> None:
    changed = new_memories(0, tmp_path)
    for turn in range(200):
        for client in range(3):
            changed[client] = {"w": torch.full((125_000,), float(turn))}
        if turn % 10 == 0:
            changed.snapshot()
    for _ in range(3):
        changed.snapshot()
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    written = 200 * 3 * 500_000
    assert size < 2 * memories.SLACK < written
    assert float(changed[2]["w"][-1]) == 199.0


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Damage to outdated records is refused too: a wrong client in a header could revive them."""
    saved = new_memories(0, tmp_path)
    saved[2] = memory(6)
    saved[3] = memory(7)
    saved[2] = memory(8)
    saved[3] = {}
    saved[3] = memory(4)
    saved[2] = {}
    snapshot = saved.snapshot()
    assert isinstance(snapshot, tuple)
    name, length = snapshot
    content = (tmp_path / name).read_bytes()
    damaged_contents = [content[:-1]]
    for position in range(length):
        flipped = bytearray(content)
        flipped[position] ^= 1
        damaged_contents.append(bytes(flipped))
    for damaged in damaged_contents:
        (tmp_path / name).write_bytes(damaged)
        restored = new_memories(0, tmp_path)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            restored.restore([snapshot])


@pytest.mark.parametrize("cache_bytes", [0, 10**6])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, cache_bytes: int) -> None:
    """Whether it is written for want of cache, or for a checkpoint."""
    remembered = new_memories(cache_bytes, tmp_path)

    def fill() -> None:
        for client in range(200):
            remembered[client] = memory(9)
        remembered.snapshot()

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(OSError, match=r"memories-0-0 cannot be written: File too large"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_killed_run_resumes_with_the_same_bits_and_small_checkpoints(tmp_path: Path) -> None:
    """Hardly any memory is cached, and the run stops without a last checkpoint."""
    task = fb.tasks.load("quadratic", clients=6, samples=4, noise=1.0)
    method = fb.algorithms.AFBO(memory="client")
    config: dict[str, Any] = {"algorithm": {"name": "afbo"}, "seed": 0}
    environment = fb.Environment(
        participation=2, local_steps=(1, 3), batch_size=2, delay=LogNormal()
    )

    def recorder(folder: str, cache_bytes: int) -> Recorder:
        federation = fb.simulated_federation(task.problem, task.clients, environment)
        federation.transport.executor.memories.cache_bytes = cache_bytes  # type: ignore[attr-defined]
        run = Run(method, federation, {"rounds": 20})
        return Recorder(run, tmp_path / folder, config, resume=True, checkpoint_every=3)

    uninterrupted = recorder("uninterrupted", cache_bytes=10**6)
    list(uninterrupted)
    for stop in (5, 10, 11, 20):
        interrupted = recorder("interrupted", cache_bytes=300)
        for metrics in interrupted:
            if metrics["round"] == stop:
                break  # as if killed: the last checkpoint is that of a multiple of 3
    expected = uninterrupted.run
    actual = interrupted.run
    assert torch.equal(expected.state.x["x"], actual.state.x["x"])
    assert expected.fed.ledger.phases == actual.fed.ledger.phases
    expected_memories = expected.fed.transport.executor.memories  # type: ignore[attr-defined]
    actual_memories = actual.fed.transport.executor.memories  # type: ignore[attr-defined]
    assert sorted(expected_memories) == sorted(actual_memories) == list(range(6))
    for client, remembered in expected_memories.items():
        torch.testing.assert_close(actual_memories[client], remembered, rtol=0, atol=0)
    assert actual_memories.cached_bytes <= 300
    snapshot = actual.fed.snapshot()["transport"]["executors"][0]["memories"]
    assert isinstance(snapshot, tuple), "a checkpoint names the file and its length"
