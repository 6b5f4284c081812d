"""Two processes, one run: the same iterates, costs and files as with one, and an error on one ends both."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fedbilevel as fb
from fedbilevel.core import ranks
from fedbilevel.federation.delays import Faults, LogNormal
from fedbilevel.runs import checkpoint
from fedbilevel.runs.run import Run
from tests.support.tool import call, metrics, summary, warm, write

ENVIRONMENT = {"local_steps": (1, 3), "batch_size": 2}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "summed": (fb.algorithms.SimFBO(), {"participation": 5}),
    "each reply": (fb.algorithms.get("fednest")(), {"participation": 5}),
    "one client, one rank without any": (fb.algorithms.ShroFBO(), {"participation": 1}),
    "remembers": (fb.algorithms.get("fedbioacc")(), {"participation": 4}),
    "remembers, and some are lost": (
        fb.algorithms.get("fedbioacc")(),
        {"participation": 6, "faults": Faults(drop=0.3)},
    ),
    "no barrier": (fb.algorithms.AFBO(), {"participation": 2, "delay": LogNormal()}),
    "no barrier, remembers": (
        fb.algorithms.AFBO(memory="client"),
        {"participation": 2, "delay": LogNormal()},
    ),
    "lies, losses and a deadline": (
        fb.algorithms.ASFBO(),
        {
            "faults": Faults(drop=0.2, corrupt=0.3, duplicate=0.2),
            "delay": LogNormal(),
            "deadline": 3.0,
        },
    ),
    "submodels": (fb.algorithms.get("rabo")(), {"capacity": [1.0, 0.5, 0.5]}),
}


def task(submodels: bool = False) -> Any:
    found = fb.tasks.load("quadratic", clients=7, samples=4, noise=1.0)
    axes = {"x": ("u",), "y": ("v",)} if submodels else {}
    return fb.tasks.Task(
        fb.Problem(
            halves(found.problem.upper),
            halves(found.problem.lower),
            *found.problem.start,
            axes=axes,
        ),
        found.clients,
    )


def halves(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The quadratic's loss for a submodel: what a client does not hold is 0."""

    def padded(x: Any, y: Any, batch: Any) -> Any:
        whole = [torch.nn.functional.pad(v, (0, n - len(v))) for v, n in ((x["x"], 5), (y["y"], 4))]
        return loss(fb.Tree(x=whole[0]), fb.Tree(y=whole[1]), batch, None)

    return padded


def outcome(case: str) -> dict[str, Any]:
    method, conditions = CASES[case]
    here = task(submodels=case == "submodels")
    environment = fb.Environment(**ENVIRONMENT, **conditions)
    fed = fb.simulated_federation(here.problem, here.clients, environment)
    run = Run(method, fed, {"rounds": 8})
    history = [{key: value for key, value in metrics.items() if key != "wall_s"} for metrics in run]
    ledger = fed.snapshot()["ledger"] | {"wall_s": 0.0}
    assert run.status == "completed"
    return {"x": run.state.x, "y": run.state.y, "history": history, "ledger": ledger}


class Spoilt(list[fb.ClientData]):
    """Of these clients, one (of rank 1) has no data."""

    def __getitem__(self, client: Any) -> Any:
        if client == 3:
            raise RuntimeError("this client cannot")
        return super().__getitem__(client)


def rank(number: int, folder: Path, port: int) -> None:
    """What each of two processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    try:
        for case in CASES:
            checkpoint.save(folder / f"{case}-{number}", outcome(case))
        here = task()
        fed = fb.simulated_federation(here.problem, Spoilt(here.clients))
        run = Run(fb.algorithms.SimFBO(), fed, {"rounds": 3})
        with pytest.raises(
            fb.federation.ClientError, match=r"client 3, .*: RuntimeError: this client cannot"
        ):
            run.advance()
        assert ranks.agree(lambda: number) == [0, 1]
        assert ranks.first(lambda: number) == 0
        for name in ("same", "fewer"):
            recorded(folder / name, 5)
        recorded(folder / "same", 14, resume=True)
        recorded(folder / "whole", 14)
    finally:
        dist.destroy_process_group()
    told = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        **{name: str(value) for name, value in told.items()},
    }
    outcomes = [call("run", folder / "a.toml", "--out", folder / "tool") for _ in range(2)]
    outcomes.append(call("compare", folder / "a.toml", "--out", folder / "compared"))
    (folder / f"tool-{number}").write_text(json.dumps(outcomes))


def recorded(folder: Path, rounds: int, resume: bool = False) -> fb.Result:
    here = task()
    method, conditions = CASES["no barrier, remembers"]
    options = {
        "environment": fb.Environment(**ENVIRONMENT, **conditions),
        "out": folder,
        "resume": resume,
    }
    return fb.solve(here.problem, here.clients, method, rounds=rounds, **options)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write(folder / "a.toml")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [warm.Process(target=rank, args=(number, folder, port)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(both: Path, case: str) -> None:
    first, second = (checkpoint.load(both / f"{case}-{number}") for number in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, outcome(case), rtol=1e-10, atol=1e-10)


@pytest.mark.xdist_group("ranks")
def test_a_run_of_two_ranks_goes_on_with_the_same_bits_and_with_one_to_rounding(both: Path) -> None:
    whole = metrics(both / "whole")
    assert metrics(both / "same") == whole
    assert {**summary(both / "same"), "wall_s": 0} == {**summary(both / "whole"), "wall_s": 0}
    alone = recorded(both / "fewer", 14, resume=True)
    torch.testing.assert_close(metrics(both / "fewer"), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alone.x, fb.load_run(both / "whole").x, rtol=1e-10, atol=1e-10)


@pytest.mark.xdist_group("ranks")
def test_the_tool_has_one_folder_and_one_voice(both: Path) -> None:
    """As under torchrun, which tells each process its rank in the environment."""
    first, second = (json.loads((both / f"tool-{number}").read_text()) for number in range(2))
    folder = f"{both}/tool"
    assert first[0][:2] == [0, f"simfbo: completed after 4 rounds\nfolder: {folder}\n"]
    assert first[1][::2] == [
        2,
        f"error: {folder} holds a run already; go on with --resume or give another folder with --out\n",
    ]
    why = "torchrun has started 2 processes; `fedbilevel compare` is one, only `run` is shared out"
    assert first[2] == [2, "", f"error: {why}\n"]
    assert second == [[0, "", ""], [2, "", ""], [2, "", ""]]
    assert not (both / "compared").exists()
