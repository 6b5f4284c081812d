"""UniFBO beyond the conformance suite: its steps, and where it ends, against closed forms."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms import UniFBO
from fedbilevel.algorithms.unifbo import wide
from fedbilevel.core import ranks
from fedbilevel.core.tree import flatten
from fedbilevel.execution.ranked import RankedExecutor
from fedbilevel.federation import Reply
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Stragglers
from fedbilevel.runs.run import Run

STEPS = {"lr_x": 0.3, "lr_y": 0.5, "lr_z": 0.5}


def matrices(lower_scale=1.0, upper_scale=1.0, **options):
    """min f = |x - t|^2_Q / 2 + <y, x> over a matrix x, with y* = x + c; x is 2 by 3, y 3 by 2."""
    draw = torch.Generator().manual_seed(0)
    t, c = (
        torch.randn(2, 3, generator=draw, dtype=torch.float64),
        torch.ones(3, 2, dtype=torch.float64),
    )
    half = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    Q = half @ half.T / 6 + 2 * torch.eye(6, dtype=torch.float64)

    def upper(x, y, batch):
        away = (x["x"] - t).reshape(-1)
        return upper_scale * (away @ Q @ away / 2 + (y["y"].T * x["x"]).sum())

    def lower(x, y, batch):
        return lower_scale * ((y["y"] - x["x"].T - c) ** 2).sum() / 2

    zeros = torch.zeros(2, 3, dtype=torch.float64)
    problem = fb.Problem(upper, lower, x={"x": zeros}, y={"y": zeros.T.contiguous()}, **options)
    clients = [fb.ClientData(train=(torch.zeros(1),), val=(torch.zeros(1),))]
    x = t.reshape(-1)
    hessian, slope = (
        Q + 2 * torch.eye(6, dtype=torch.float64),
        Q @ x - c.T.reshape(-1),
    )  # of x -> f(x, y*(x))
    return problem, clients, hessian, slope


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (4, 3), (4, 2, 3, 3), (20, 2, 3)], ids=str)
def test_the_first_step_is_the_polar_factor_of_the_gradient(shape):
    """U V^T of h = U s V^T, and every entry of it sqrt(columns) times as long; for a vector h / ||h||."""
    target = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    problem = fb.Problem(
        lambda x, y, batch: (x["x"] * target).sum() + 0 * y["y"].sum(),
        lambda x, y, batch: (y["y"] ** 2).sum(),
        x={"x": torch.zeros(shape, dtype=torch.float64)},
        y={"y": torch.zeros(1, dtype=torch.float64)},
    )
    clients = [fb.ClientData(train=(torch.zeros(1),), val=(torch.zeros(1),))]
    moved = -fb.solve(problem, clients, UniFBO(lr_x=0.5, momentum_weight=0.4), rounds=1).x["x"]
    U, _, Vh = torch.linalg.svd(wide(target), full_matrices=False)
    expected = 0.4 * 0.5 * Vh.shape[1] ** 0.5 * (U @ Vh)
    torch.testing.assert_close(wide(moved), expected, rtol=0, atol=1e-4)  # FLOOR
    assert moved.square().mean().sqrt() == pytest.approx(0.4 * 0.5, rel=1e-4)


def test_unequal_local_steps_on_unequal_clients_lead_to_the_true_solution():
    task = fb.tasks.load("quadratic", clients=4, condition=3.0, seed=5)
    steps = [1, 1, 1, 3]
    assert (task.x_star()["x"] - task.x_star(weights=steps)["x"]).norm() > 0.1, (
        "unequal steps would not show"
    )
    environment = fb.Environment(local_steps=steps)
    found = fb.solve(
        task.problem, task.clients, UniFBO(**STEPS), rounds=48, environment=environment, every=48
    )
    torch.testing.assert_close(found.x["x"], task.x_star()["x"], rtol=0, atol=1e-2)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_matrices_go_to_the_solution(damping):
    """Damped, to that of the linear system (1 + damping) z = x^T."""
    problem, clients, hessian, slope = matrices()
    hessian = hessian - damping / (1 + damping) * torch.eye(6, dtype=torch.float64)
    found = fb.solve(problem, clients, UniFBO(**STEPS, damping=damping), rounds=80, every=80).x["x"]
    torch.testing.assert_close(
        found.reshape(-1), torch.linalg.solve(hessian, slope), rtol=0, atol=1e-6
    )


def test_projected_matrices_go_to_the_constrained_solution():
    """The slope is 0 inside the bounds and points outwards on them: a whitened step would leave that point.

    Slowly: on the bounds it does not vanish, so the squares add up for ever.
    """
    problem, clients, hessian, slope = matrices(project_x=lambda x: {"x": x["x"].clamp(-0.2, 0.2)})
    x = fb.solve(problem, clients, UniFBO(**STEPS), rounds=60, every=60).x["x"].reshape(-1)
    outwards, at_bound = slope - hessian @ x, x.abs() == 0.2
    assert 0 < at_bound.sum() < 6
    assert (outwards * x.sign())[at_bound].min() > 1e-3
    assert outwards[~at_bound].abs().max() < 1e-2


def test_the_scales_of_the_losses_do_not_matter():
    """Only that of the upper to the lower one does, and to z alone."""
    runs = [
        fb.solve(*matrices(scale, scale)[:2], UniFBO(), rounds=20, every=20) for scale in (1.0, 1e4)
    ]
    for level in ("x", "y"):
        a, b = (getattr(run, level)[level] for run in runs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_a_tensor_without_gradient_stays():
    problem = fb.Problem(
        lambda x, y, batch: (x["x"] * y["y"]).sum() + 0 * x["idle"].sum(),
        lambda x, y, batch: ((y["y"] - 1) ** 2).sum(),
        x={"x": torch.ones(2), "idle": torch.ones(2, 300)},
        y={"y": torch.zeros(2)},
    )
    result = fb.solve(
        problem, [fb.ClientData((torch.zeros(1),), (torch.zeros(1),))], "unifbo", rounds=3
    )
    assert result.status == "completed"
    assert torch.equal(result.x["idle"], torch.ones(2, 300))
    assert not torch.equal(result.x["x"], torch.ones(2))


def test_h_weighs_clients_by_the_number_of_all_over_that_of_those_asked():
    problem = fb.Problem(
        lambda x, y, batch: batch[0].mean() * x["x"].sum() + 0 * y["y"].sum(),
        lambda x, y, batch: (y["y"] ** 2).sum() + 0 * x["x"].sum(),
        x={"x": torch.zeros(3, dtype=torch.float64)},
        y={"y": torch.zeros(1, dtype=torch.float64)},
    )
    clients = [
        fb.ClientData(train=(one,), val=(one,))
        for one in torch.tensor([[1.0], [7.0]], dtype=torch.float64)
    ]
    fed = fb.simulated_federation(
        problem, clients, fb.Environment(participation=1), weights=[0.75, 0.25]
    )
    run = Run(UniFBO(), fed, {"rounds": 9})
    run.advance()
    assert float(run.state.s[0]["x"]) in (3 * 1.5**2, 3 * 3.5**2)  # (2 p_i h_i)^2, of either


# Without a barrier


def quadratic_run(algorithm, rounds=48, clients=4, **environment):
    task = fb.tasks.load("quadratic", clients=clients, condition=3.0, seed=5)
    run = {"environment": fb.Environment(**environment), "rounds": rounds, "every": rounds}
    return fb.solve(task.problem, task.clients, algorithm, **run), task


def test_where_everyone_is_as_fast_it_is_the_method_with_a_barrier():
    runs = [
        quadratic_run(UniFBO(**STEPS, barrier=barrier), rounds=12, delay=Constant(), local_steps=2)[
            0
        ]
        for barrier in (True, False)
    ]
    for level in ("x", "y"):
        a, b = (flatten(getattr(run, level)) for run in runs)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_an_iteration_without_a_barrier_is_the_one_by_hand():
    """One client said 1 six iterations ago, another says 3 now: h is 2 and the mean age 3, so steps are halved.

    The first step of a number is -w lr sign(h), here -.4 lr / 2.
    """
    x, y = ({name: torch.zeros(1, dtype=torch.float64)} for name in "xy")
    problem = fb.Problem(
        lambda x, y, batch: x["x"] @ y["y"], lambda x, y, batch: (y["y"] ** 2).sum(), x, y
    )
    whole = {"hx": fb.Tree(x), "hy": fb.Tree(y), "hz": fb.Tree(y)}
    posted = []

    class Said(list):
        idle = (1,)

    fed = SimpleNamespace(
        problem=problem,
        iteration=8,
        post=lambda phase, clients, **point: posted.extend(clients),
        collect=lambda: Said(
            [
                Reply(
                    0,
                    1,
                    1,
                    1.0,
                    0,
                    {name: value.map(lambda t: t + 3) for name, value in whole.items()},
                )
            ]
        ),
        record=lambda **values: None,
    )
    method = UniFBO(lr_x=0.1, lr_y=0.2, lr_z=0.3, momentum_weight=0.4, barrier=False)
    before = {name: value.map(lambda t: t + 1) for name, value in whole.items()}
    state = method.init(problem)._replace(latest=(before, 1.0, {0: (2, before)}), idle=(1,))
    after = method.iterate(state, fed)
    for value, lr in zip((after.x, after.y, after.z), (0.1, 0.2, 0.3), strict=True):
        assert float(flatten(value)) == pytest.approx(-0.4 * lr / 2, rel=1e-5)
    assert posted == [1]


def test_slow_clients_count_as_much_as_fast_ones():
    """Means of what arrives would solve the problem of the fast ones."""
    conditions = {
        "delay": LogNormal(),
        "stragglers": Stragglers(clients=2, slowdown=8.0),
        "participation": 1,
    }
    steps = dict.fromkeys(STEPS, 0.3)
    found, task = quadratic_run(UniFBO(**steps, barrier=False), rounds=700, **conditions)
    torch.testing.assert_close(found.x["x"], task.x_star()["x"], rtol=0, atol=1e-2)


def test_lost_tasks_and_replies_that_are_refused_are_survived():
    conditions = {"delay": Constant(), "faults": Faults(drop=0.3, corrupt=0.3), "participation": 1}
    found, task = quadratic_run(UniFBO(**STEPS, barrier=False), rounds=400, **conditions)
    torch.testing.assert_close(found.x["x"], task.x_star()["x"], rtol=0, atol=2e-2)


def test_whoever_has_ended_is_asked_again_also_before_anyone_was_heard():
    task = fb.tasks.load("quadratic", clients=3, seed=5)
    environment = fb.Environment(delay=Constant(), faults=Faults(drop=0.8), participation=1)
    fed = fb.simulated_federation(task.problem, task.clients, environment)
    run = Run(UniFBO(barrier=False), fed, {"rounds": 99})
    heard = []
    for _ in range(12):
        run.advance()
        heard.append(run.state.latest[1])
        assert sorted([*run.state.idle, *run.fed.in_flight]) == [0, 1, 2]
    assert heard[0] == 0 < heard[-1]


def test_without_a_barrier_it_resumes_with_tasks_in_flight(tmp_path: Path):
    conditions = {"delay": LogNormal(), "participation": 2}
    task = fb.tasks.load("quadratic", clients=5, seed=5)

    def solved(rounds, **more):
        environment = fb.Environment(**conditions)
        return fb.solve(
            task.problem,
            task.clients,
            UniFBO(barrier=False),
            rounds=rounds,
            environment=environment,
            **more,
        )

    solved(7, out=tmp_path / "run")
    resumed, straight = solved(15, out=tmp_path / "run", resume=True), solved(15)
    assert torch.equal(resumed.x["x"], straight.x["x"])


# Submodels


@pytest.mark.parametrize("added_up", [False, True])
def test_h_is_the_mean_over_those_who_hold_a_coordinate(added_up, monkeypatch):
    """The first step of x, whose rows are units: those that nobody holds stay.

    Also where replies are added up where they were computed, as with several ranks (here there is one).
    """
    problem = fb.Problem(
        lambda x, y, batch: (batch[0].mean() * x["w"]).sum() + 0 * y["b"].sum(),
        lambda x, y, batch: (y["b"] ** 2).sum() + 0 * x["w"].sum(),
        x={"w": torch.zeros(4, 3, dtype=torch.float64)},
        y={"b": torch.zeros(2, dtype=torch.float64)},
        axes={"w": ("units", None)},
    )
    data = [torch.full((1,), value, dtype=torch.float64) for value in (1.0, 3.0)]
    clients = [fb.ClientData(train=(one,), val=(one,)) for one in data]
    fed = fb.simulated_federation(problem, clients, fb.Environment(capacity=[0.75, 0.5]))
    if added_up:
        monkeypatch.setattr(ranks, "total", lambda values: values)
        fed.transport.executor = RankedExecutor(fed.transport.executor, "cpu")
    run = fb.solve(problem, clients, UniFBO(policy="static"), rounds=1, federation=fed)
    h = torch.tensor([2.0, 2.0, 1.0, 0.0], dtype=torch.float64).unsqueeze(1).expand(4, 3)
    U, _, Vh = torch.linalg.svd(wide(h), full_matrices=False)
    step = 0.5 * 0.02 * 2 * torch.outer(U[:, 0], Vh[0])  # sqrt(columns) = 2; h has rank one
    torch.testing.assert_close(
        -run.x["w"], (step.T if step.shape != (4, 3) else step), rtol=0, atol=1e-5
    )
    assert torch.equal(run.x["w"][3], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("policy", "moved"), [("static", [0, 1]), ("rolling", [0, 1, 2]), ("importance", [1, 3])]
)
def test_clients_hold_the_units_of_the_policy(policy, moved):
    """Two of four units in two iterations: the first ones, those from the iteration's number on, the largest ones."""
    start = torch.tensor([[1.0], [5.0], [2.0], [4.0]], dtype=torch.float64)
    problem = fb.Problem(
        lambda x, y, batch: x["w"].sum() + 0 * y["b"].sum(),
        lambda x, y, batch: (y["b"] ** 2).sum() + 0 * x["w"].sum(),
        x={"w": start},
        y={"b": torch.zeros(2, dtype=torch.float64)},
        axes={"w": ("units", None)},
    )
    clients = [fb.ClientData(train=(torch.zeros(1),), val=(torch.zeros(1),))]
    environment = fb.Environment(capacity=0.5)
    away = (
        fb.solve(problem, clients, UniFBO(policy=policy), rounds=2, environment=environment).x["w"]
        - start
    )
    assert away.squeeze().nonzero().squeeze().tolist() == moved


def test_whole_models_are_asked_for_as_before():
    task = fb.tasks.load("hyper-representation", clients=4, hidden=8, samples=200)
    found = []
    for policy in ("static", "rolling"):
        environment = fb.Environment(batch_size=8)
        found.append(
            fb.solve(
                task.problem, task.clients, UniFBO(policy=policy), rounds=3, environment=environment
            )
        )
    assert torch.equal(flatten(found[0].x), flatten(found[1].x))


@pytest.mark.parametrize("axes", [{}, {"w": ("units", None)}], ids=["no axes", "axes"])
@pytest.mark.parametrize("capacity", [0.5, [1.0, 0.5]], ids=str)
def test_submodels_without_a_barrier_are_refused(axes, capacity):
    problem = fb.Problem(
        lambda x, y, batch: x["w"].sum() + 0 * y["b"].sum(),
        lambda x, y, batch: (y["b"] ** 2).sum() + 0 * x["w"].sum(),
        x={"w": torch.ones(4, 1)},
        y={"b": torch.zeros(2)},
        axes=axes,
    )
    clients = [fb.ClientData(train=(torch.zeros(1),), val=(torch.zeros(1),))] * 2
    environment = fb.Environment(capacity=capacity)
    told = re.escape(
        f"barrier is False and capacity is {capacity}; without a barrier models are whole"
    )
    with pytest.raises(ValueError, match=f"^{told}: barrier must be True, or capacity 1$"):
        fb.solve(problem, clients, UniFBO(barrier=False), rounds=1, environment=environment)
    assert fb.solve(problem, clients, UniFBO(barrier=False), rounds=1).status == "completed"
    if axes:
        assert (
            fb.solve(problem, clients, UniFBO(), rounds=1, environment=environment).status
            == "completed"
        )


def test_policies_without_a_meaning_here_are_refused():
    for policy in ("all", "segments"):
        with pytest.raises(
            ValueError,
            match=f"policy is '{policy}'; it must be one of 'static', 'rolling', 'importance'",
        ):
            UniFBO(policy=policy)
