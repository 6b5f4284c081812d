"""Stages: what messages and replies go through, on every executor; also the documented stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.rng import uniform
from fedbilevel.core.tree import Tree, norm
from fedbilevel.experiments import config as configs
from fedbilevel.federation.stages import Clip, Half, Stage
from fedbilevel.runs.run import Run
from tests.support.architecture import names as architecture
from tests.support.architecture import snippets


def quadratic() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=4, dim_x=3, dim_y=5)


def run(
    stages: list[Stage],
    iterations: int = 5,
    mode: Any = "stack",
    method: str = "simfbo",
    **conditions: Any,
) -> Run:
    """Iterate a method on the quadratic task, with stages and other conditions."""
    task = quadratic()
    environment = fb.Environment(stages=stages, **conditions)
    fed = fb.simulated_federation(task.problem, task.clients, environment, mode=mode, seed=3)
    run = Run(fb.algorithms.get(method)(), fed, {})
    for _ in range(iterations):
        run.advance()
    return run


def solve(
    algorithm: str, environment: fb.Environment, rounds: int, out: Path, resume: bool = False
) -> fb.Result:
    task = quadratic()
    return fb.solve(
        task.problem,
        task.clients,
        algorithm,
        rounds=rounds,
        environment=environment,
        out=out,
        resume=resume,
    )


def assert_same_state(run: Run, expected: Run) -> None:
    torch.testing.assert_close(run.state.x["x"], expected.state.x["x"], rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state.y["y"], expected.state.y["y"], rtol=0, atol=1e-12)


class Dithered(Stage):
    """Adds keyed noise, and counts its uses in a memory."""

    remembers = True

    def encode(self, value: Tree, key: Tensor, memory: Any) -> tuple[Any, Any]:
        count = torch.ones((), dtype=torch.float64)
        if memory:
            count = memory["count"] + 1
        noisy = value.map(lambda t: t + uniform(key, t.shape, t.dtype) * count)
        return noisy, {"count": count}


# Clip and half


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
def test_clip_shortens_what_is_longer_and_leaves_the_rest(
    bound: float, entries: list[float]
) -> None:
    value = Tree(
        {"a": torch.tensor(entries, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    )
    clipped = Clip(norm=bound).decode(value, value)
    assert norm(clipped) <= bound * (1 + 1e-12)
    scale = min(1.0, bound / float(norm(value)))
    torch.testing.assert_close(clipped["a"], scale * value["a"])


def test_each_reply_is_clipped_before_the_mean() -> None:
    """Compares one step of SimFBO on y with the same step by hand."""
    problem = quadratic().problem
    clients = quadratic().clients
    first = run([Clip(norm=0.1, values=("qy",))], 1)
    server_lr = fb.algorithms.SimFBO().server_lr_y
    start = problem.start[1]["y"]
    moved = torch.zeros_like(start)
    for client in clients:
        gradient = torch.func.grad(
            lambda y, c=client: problem.lower(problem.start[0], {"y": y}, c.train, ())
        )(start)
        assert gradient.norm() > 0.1, "nothing would be clipped"
        moved += gradient * min(1.0, 0.1 / float(gradient.norm())) / len(clients)
    torch.testing.assert_close(first.state.y["y"], start - server_lr * moved, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_bytes_are_counted_after_encoding(mode: str) -> None:
    plain = run([], mode=mode).fed.ledger.totals()
    down = run([Half()], mode=mode).fed.ledger.totals()
    up = run([Half(direction="up", values=("qx",))], mode=mode).fed.ledger.totals()
    assert (down["bytes_down"], down["bytes_up"]) == (plain["bytes_down"] // 4, plain["bytes_up"])
    assert up["bytes_up"] == plain["bytes_up"] - 5 * 4 * 3 * (8 - 2)


def test_half_precision_rounds_what_clients_are_sent() -> None:
    rounded = run([Half()], 5)
    exact = run([], 5)
    assert 0 < (rounded.state.x["x"] - exact.state.x["x"]).norm() < 1e-2


# Stages in a run


@pytest.mark.parametrize(
    "stages",
    [[Clip(norm=0.3)], [Half(), Half(direction="up")], [Dithered()], [Dithered(), Clip(norm=0.5)]],
    ids=lambda stages: "+".join(type(stage).__name__ for stage in stages),
)
@pytest.mark.parametrize(
    "conditions", [{}, {"participation": 2, "local_steps": (1, 3)}], ids=["everyone", "cohorts"]
)
def test_executors_agree(stages: list[Stage], conditions: dict[str, Any]) -> None:
    stacked = run(stages, **conditions)
    reference = run(stages, mode="loop", **conditions)
    assert_same_state(stacked, reference)
    assert stacked.fed.ledger.totals() == reference.fed.ledger.totals()
    with pytest.raises(AssertionError):
        assert_same_state(stacked, run([], **conditions))


def test_posted_and_lost_tasks_go_through_stages() -> None:
    conditions: dict[str, Any] = {
        "participation": 2,
        "delay": fb.delays.LogNormal(),
        "faults": fb.delays.Faults(drop=0.2),
    }
    stacked = run([Dithered()], 12, "stack", "afbo", **conditions)
    reference = run([Dithered()], 12, "loop", "afbo", **conditions)
    assert_same_state(stacked, reference)
    assert stacked.fed.ledger.lost_tasks > 0


def test_what_a_stage_remembers_is_resumed(tmp_path: Path) -> None:
    environment = fb.Environment(participation=2, stages=[Dithered()])
    method = "fedbioacc"  # its phases remember too
    solve(method, environment, 5, tmp_path / "stopped")
    resumed = solve(method, environment, 13, tmp_path / "stopped", resume=True)
    uninterrupted = solve(method, environment, 13, tmp_path / "uninterrupted")
    assert torch.equal(resumed.x["x"], uninterrupted.x["x"])


def test_submodels_go_through_stages() -> None:
    net = fb.tasks.load("loss-tuning", data="digits", clients=4, samples=80, model="mlp", seed=1)
    results = []
    for mode in ("stack", "loop"):
        environment = fb.Environment(
            batch_size=8, capacity=[1.0, 0.5], stages=[Half(), Clip(norm=0.05)]
        )
        fed = fb.simulated_federation(net.problem, net.clients, environment, mode=mode)  # type: ignore[arg-type]
        results.append(fb.solve(net.problem, net.clients, "static", rounds=3, federation=fed))
    for name in results[0].y:
        torch.testing.assert_close(results[0].y[name], results[1].y[name])


def test_a_stage_remembers_each_value_by_itself_across_phases() -> None:
    """FedBiOAcc replies with (dx, dy, dz), then with (dmx, dmy, dmz): all memories are kept."""
    for mode in ("stack", "loop"):
        ended = run([Dithered()], 3, mode, "fedbioacc")
        memory = ended.fed.transport.executor.memories[0]["stages "]  # type: ignore[attr-defined]
        counts = {name.split()[1]: float(kept["count"]) for name, kept in memory.items()}
        assert counts == {
            "mx": 1,
            "my": 1,
            "mz": 1,
            **dict.fromkeys(("dx", "dy", "dz", "dmx", "dmy", "dmz"), 3),
        }


def test_stages_are_decoded_from_the_last_to_the_first() -> None:
    """A clip that is first in the list is given what the others have decoded."""
    both = run([Clip(norm=0.1), Half(direction="up")], 1)
    clipped = run([Clip(norm=0.1)], 1)
    rounded = run([Half(direction="up")], 1)
    torch.testing.assert_close(both.state.y["y"], clipped.state.y["y"], rtol=0, atol=1e-3)
    assert (both.state.y["y"] - rounded.state.y["y"]).norm() > 1e-2


def test_a_clip_before_a_compressor_is_given_decoded_values() -> None:
    """In the other order it would be given bits and scales, and every reply would be refused."""
    both = run([Clip(norm=0.1), sign()], 2)
    assert both.fed.ledger.refused_replies == 0
    assert not torch.equal(both.state.y["y"], run([sign()], 2).state.y["y"])


def test_a_stage_leaves_scalars_alone() -> None:
    assert not Clip(norm=1.0, values=("count",)).applies_to("count", "scalar")
    assert Clip(norm=1.0, values=("ticket",)).applies_to("ticket", {"base": ()})
    assert not Clip(norm=1.0).applies_to("ticket", {"base": ()})


def test_draws_on_the_way_down_differ_between_rounds() -> None:
    seen: list[float] = []

    class Noise(Stage):
        direction: Any = "down"

        def encode(self, value: Tree, key: Tensor, memory: Any) -> tuple[Any, Any]:
            seen.append(float(uniform(key, ())))
            return value, memory

    run([Noise()], 3)
    assert len(set(seen)) == len(seen) == 9


# Stages in an experiment, and wrong ones


def test_in_an_experiment_a_stage_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    stages = '[{stage = "clip", norm = 2}, {stage = "half"}]'
    path.write_text(f'task = "quadratic"\n[environment]\nstages = {stages}\n')
    config = configs.resolve(*configs.read(str(path)))
    assert config.environment.stages == (Clip(norm=2.0), Half())
    again = configs.resolve("resolved", config.table)
    assert again.environment == config.environment


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ('[{stage = "clip"}]', "environment.stages[0].norm is missing"),
        ('[{stage = "clip", norm = 0}]', "environment.stages[0].norm is 0; it must be above 0"),
        ('[{stage = "half", direction = "left"}]', "it must be one of 'up', 'down'"),
        ('[{stage = "zip"}]', "a table must have stage = 'clip' or 'half'"),
        ('"clip"', "it must be a list of tables"),
    ],
)
def test_a_wrong_stage_is_refused_in_one_sentence(
    stages: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'task = "quadratic"\n[environment]\nstages = {stages}\n')
    with pytest.raises(configs.ConfigError) as error:
        configs.resolve(*configs.read(str(path)))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"stages is .*; it must be a list of stages"):
        fb.Environment(stages=["clip"])  # type: ignore[arg-type]


def test_a_stage_that_remembers_is_refused_on_submodels() -> None:
    with pytest.raises(ValueError, match=r"remembers, and capacity is 0\.5"):
        fb.Environment(capacity=0.5, stages=[Dithered()])


# The stage and the transport of docs/howto/own-stage.md


def sign() -> Any:
    return architecture()["Sign"]()


def count_lines(snippet: str, start: str, end: str) -> int:
    part = snippet[snippet.index(start) : snippet.index(end)]
    return len([line for line in part.splitlines() if line.strip()])


def test_the_documented_pieces_are_short() -> None:
    stage, transport = snippets()
    assert count_lines(stage, "class Sign", "task = ") < 30
    assert count_lines(transport, "import time", "federation = ") < 60


def test_sign_compression_sends_a_bit_per_number() -> None:
    plain = run([]).fed.ledger.totals()
    compressed = run([sign()]).fed.ledger.totals()
    assert plain["bytes_up"] == 5 * 4 * (3 + 5 + 5) * 8
    # Three tensors of at most eight numbers: a byte of bits and a scale each.
    assert compressed["bytes_up"] == 5 * 4 * 3 * (1 + 8)


def test_sign_compression_agrees_on_executors_and_remembers_its_errors() -> None:
    assert_same_state(run([sign()], 20), run([sign()], 20, mode="loop"))
    value = Tree({"y": torch.tensor([3.0, 1.0, -2.0], dtype=torch.float64)})
    payload, error = sign().encode(value, torch.tensor(0), ())
    decoded = sign().decode(payload, value)
    torch.testing.assert_close(decoded["y"], torch.tensor([2.0, 2.0, -2.0], dtype=torch.float64))
    torch.testing.assert_close((decoded + error)["y"], value["y"])


def test_simfbo_still_converges_under_sign_compression() -> None:
    history = architecture()["compressed"].history
    assert history[-1]["hypergradient_norm"] < 0.2 * history[0]["hypergradient_norm"]


def test_replies_that_wait_are_saved_as_they_travel(tmp_path: Path) -> None:
    environment = fb.Environment(participation=2, stages=[sign()])
    solve("afbo", environment, 3, tmp_path / "stopped")
    resumed = solve("afbo", environment, 9, tmp_path / "stopped", resume=True)
    uninterrupted = solve("afbo", environment, 9, tmp_path / "uninterrupted")
    assert torch.equal(resumed.x["x"], uninterrupted.x["x"])
