"""Several ranks: a run on two processes gives the iterates, costs and files of a run on one."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fedbilevel as fb
from fedbilevel import federation
from fedbilevel.core import ranks
from fedbilevel.federation.delays import Faults, LogNormal
from fedbilevel.runs import checkpoint
from fedbilevel.runs.run import Run
from tests.support.tool import forkserver, invoke, read_metrics, read_summary, write

ENVIRONMENT = {"local_steps": (1, 3), "batch_size": 2}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "summed": (fb.algorithms.SimFBO(), {"participation": 5}),
    "each reply": (fb.algorithms.get("fednest")(), {"participation": 5}),
    "one client, one rank without any": (fb.algorithms.ShroFBO(), {"participation": 1}),
    "client memory": (fb.algorithms.get("fedbioacc")(), {"participation": 4}),
    "client memory, lost tasks": (
        fb.algorithms.get("fedbioacc")(),
        {"participation": 6, "faults": Faults(drop=0.3)},
    ),
    "no barrier": (fb.algorithms.AFBO(), {"participation": 2, "delay": LogNormal()}),
    "no barrier, client memory": (
        fb.algorithms.AFBO(memory="client"),
        {"participation": 2, "delay": LogNormal()},
    ),
    "corrupted replies, lost tasks and a deadline": (
        fb.algorithms.ASFBO(),
        {
            "faults": Faults(drop=0.2, corrupt=0.3, duplicate=0.2),
            "delay": LogNormal(),
            "deadline": 3.0,
        },
    ),
    "submodels": (fb.algorithms.get("rabo")(), {"capacity": [1.0, 0.5, 0.5]}),
}


# One rank


def test_without_distributed_there_is_one_rank() -> None:
    assert (ranks.size(), ranks.rank()) == (1, 0)
    assert ranks.is_local(5)
    assert ranks.local_device("cuda") == "cuda"
    assert ranks.all_gather("value") == ["value"]
    assert ranks.on_all_ranks(lambda: 3) == [3]
    assert ranks.on_first_rank(lambda: 3) == 3


def test_one_rank_raises_its_own_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        ranks.on_all_ranks(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), ranks.fail_together():
        raise ZeroDivisionError


def test_tensors_are_moved_and_other_values_stay() -> None:
    moved = ranks.move_tensors({"a": (torch.ones(2), 3), "b": fb.Tree(w=torch.ones(4))}, "meta")
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == 3
    assert isinstance(moved["b"], fb.Tree)
    assert moved["b"]["w"].shape == (4,)


# Two ranks


def task(submodels: bool = False) -> Any:
    quadratic = fb.tasks.load("quadratic", clients=7, samples=4, noise=1.0)
    problem = fb.Problem(
        padded(quadratic.problem.upper),
        padded(quadratic.problem.lower),
        *quadratic.problem.start,
        axes={"x": ("u",), "y": ("v",)} if submodels else {},
    )
    return fb.tasks.Task(problem, quadratic.clients)


def padded(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The quadratic's loss for a submodel: entries that a client does not hold are 0."""

    def loss_of_submodel(x: Any, y: Any, batch: Any) -> Any:
        whole_x = torch.nn.functional.pad(x["x"], (0, 5 - len(x["x"])))
        whole_y = torch.nn.functional.pad(y["y"], (0, 4 - len(y["y"])))
        return loss(fb.Tree(x=whole_x), fb.Tree(y=whole_y), batch, None)

    return loss_of_submodel


def run_case(case: str) -> dict[str, Any]:
    """Run eight rounds and return everything that must not depend on the number of ranks."""
    method, conditions = CASES[case]
    quadratic = task(submodels=case == "submodels")
    environment = fb.Environment(**ENVIRONMENT, **conditions)
    fed = fb.simulated_federation(quadratic.problem, quadratic.clients, environment)
    run = Run(method, fed, {"rounds": 8})
    history = [{key: value for key, value in metrics.items() if key != "wall_s"} for metrics in run]
    ledger = fed.snapshot()["ledger"] | {"wall_s": 0.0}
    assert run.status == "completed"
    return {"x": run.state.x, "y": run.state.y, "history": history, "ledger": ledger}


def solve_in(folder: Path, rounds: int, resume: bool = False) -> fb.Result:
    quadratic = task()
    method, conditions = CASES["no barrier, client memory"]
    environment = fb.Environment(**ENVIRONMENT, **conditions)
    return fb.solve(
        quadratic.problem,
        quadratic.clients,
        method,
        rounds=rounds,
        environment=environment,
        out=folder,
        resume=resume,
    )


class WithoutClient3(list[fb.ClientData]):
    """Clients of which one, which belongs to rank 1, cannot be read."""

    def __getitem__(self, client: Any) -> Any:
        if client == 3:
            raise RuntimeError("this client cannot be read")
        return super().__getitem__(client)


class UnpicklableError(Exception):
    """An error that pickle cannot load, because its constructor takes two arguments."""

    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name} is {value}")


def check_exchanges(number: int) -> None:
    """Check the functions of `ranks` on one of two ranks."""
    assert (ranks.size(), ranks.rank()) == (2, number)
    assert [client for client in range(5) if ranks.is_local(client)] == [[0, 2, 4], [1, 3]][number]
    assert ranks.all_gather("ab"[number]) == ["a", "b"]
    assert ranks.on_all_ranks(lambda: number) == [0, 1]
    assert ranks.on_first_rank(lambda: number) == 0
    values = {"a": torch.tensor([1.0, number]), "b": (torch.tensor(number + 1), torch.ones(2, 2))}
    total = ranks.all_reduce_sum(values)
    assert total["a"].tolist() == [2.0, 1.0]
    assert total["b"][0].item() == 3
    assert total["b"][1].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def check_errors(number: int) -> None:
    """Check that both ranks raise the error of one."""

    def fail_on_second() -> None:
        if number == 1:
            raise UnpicklableError("width", 3)

    expected = [RuntimeError, UnpicklableError][number]
    with pytest.raises(expected, match="width is 3"):
        ranks.on_all_ranks(fail_on_second)
    with pytest.raises(KeyError, match="first"), ranks.fail_together():
        raise KeyError(["first", "second"][number])
    quadratic = task()
    fed = fb.simulated_federation(quadratic.problem, WithoutClient3(quadratic.clients))
    run = Run(fb.algorithms.SimFBO(), fed, {"rounds": 3})
    message = r"client 3, .*: RuntimeError: this client cannot be read"
    with pytest.raises(federation.ClientError, match=message):
        run.advance()


def run_rank(number: int, folder: Path, port: int) -> None:
    """The program of one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    try:
        check_exchanges(number)
        for case in CASES:
            checkpoint.save(folder / f"{case}-{number}", run_case(case))
        check_errors(number)
        for name in ("same", "fewer"):
            solve_in(folder / name, 5)
        solve_in(folder / "same", 14, resume=True)
        solve_in(folder / "whole", 14)
    finally:
        dist.destroy_process_group()
    # torchrun tells each process its rank in the environment.
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    outcomes = [invoke("run", folder / "a.toml", "--out", folder / "tool") for _ in range(2)]
    outcomes.append(invoke("compare", folder / "a.toml", "--out", folder / "compared"))
    (folder / f"tool-{number}").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have left their results."""
    folder = tmp_path_factory.mktemp("ranks")
    write(folder / "a.toml")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        forkserver.Process(target=run_rank, args=(number, folder, port)) for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_computes(folder: Path, case: str) -> None:
    first = checkpoint.load(folder / f"{case}-0")
    second = checkpoint.load(folder / f"{case}-1")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, run_case(case), rtol=1e-10, atol=1e-10)


@pytest.mark.xdist_group("ranks")
def test_a_run_of_two_ranks_resumes_bit_for_bit_and_up_to_rounding_on_one(folder: Path) -> None:
    whole = read_metrics(folder / "whole")
    assert read_metrics(folder / "same") == whole
    resumed_summary = {**read_summary(folder / "same"), "wall_s": 0}
    assert resumed_summary == {**read_summary(folder / "whole"), "wall_s": 0}
    alone = solve_in(folder / "fewer", 14, resume=True)
    torch.testing.assert_close(read_metrics(folder / "fewer"), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(alone.x, fb.load_run(folder / "whole").x, rtol=1e-10, atol=1e-10)


@pytest.mark.xdist_group("ranks")
def test_under_torchrun_the_first_rank_alone_writes_and_prints(folder: Path) -> None:
    first = json.loads((folder / "tool-0").read_text())
    second = json.loads((folder / "tool-1").read_text())
    out = f"{folder}/tool"
    assert first[0][0] == 0
    assert re.fullmatch(
        rf"simfbo: completed after 4 rounds, upper loss [\d.]+\nfolder: {out}\n", first[0][1]
    )
    reason = "already holds a run; resume it with --resume or give another folder with --out"
    assert first[1][::2] == [2, f"error: {out} {reason}\n"]
    reason = (
        "torchrun has started 2 processes, but only `fedbilevel run` can use several, "
        "not `fedbilevel compare`"
    )
    assert first[2] == [2, "", f"error: {reason}\n"]
    assert second == [[0, "", ""], [2, "", ""], [2, "", ""]]
    assert not (folder / "compared").exists()
