"""Reports recommend methods and settings with which a run converges."""

import pytest
import torch

import fedbilevel as fb
from fedbilevel.diagnostics.advice import ADVISED
from fedbilevel.tasks.quadratic import quadratic


def remaining_hypergradient(task, method, rounds, environment=None):
    """The norm of the true hypergradient after a run, relative to that before it."""
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=rounds,
        environment=environment,
        evaluate=task.evaluate,
        every=rounds,
    )
    return result.history[-1]["hypergradient_norm"] / result.history[0]["hypergradient_norm"]


@pytest.mark.parametrize(
    ("condition", "name", "rounds"),
    [
        (2.0, "simfbo", 49),
        (20.0, "simfbo", 49),
        (200.0, "simfbo", 49),
        (200.0, "shrofbo", 49),
        (200.0, "asfbo", 49),
        (200.0, "la-asfbo", 49),
        (200.0, "unifbo", 49),
        (200.0, "fedbio", 49),
        (2.0, "fednest", 400),
    ],
)
def test_a_run_with_the_settings_converges(condition, name, rounds):
    task = quadratic(condition=condition)
    report = fb.check(task.problem, task.clients)
    assert report.recommended == "simfbo"
    assert remaining_hypergradient(task, report.algorithm(name), rounds) < 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("condition", [2.0, 20.0, 200.0])
def test_single_loops_are_stable_where_x_can_outrun_y(seed, condition):
    """The spectral radius of a round is below 1; with ten times the step of x it may not be.

    All clients have the same Hessian, so that its condition number is `condition`. A run would
    take too many rounds, so the linear map of one round is written out.
    """
    task = quadratic(clients=2, condition=condition, heterogeneity=0.0, seed=seed)
    settings = fb.check(task.problem, task.clients).settings()
    A, B, _, _, _, D = task._means("uniform")
    m, n = B.shape
    # The derivatives of d_x, d_y and d_z (rows) in x, y and z (columns).
    blocks = [
        [torch.eye(n), D.T, B.T],
        [-B, A, torch.zeros(m, m)],
        [-D, -torch.eye(m), A],
    ]
    J = torch.cat([torch.cat(row, 1) for row in blocks])

    def spectral_radius(factor):
        lr_x = torch.full((n,), factor * settings["server_lr_x"], dtype=torch.float64)
        lr_y = torch.full((m,), settings["server_lr_y"], dtype=torch.float64)
        lr_z = torch.full((m,), settings["server_lr_z"], dtype=torch.float64)
        lr = torch.cat([lr_x, lr_y, lr_z])
        return float(torch.linalg.eigvals(torch.eye(n + 2 * m) - lr[:, None] * J).abs().max())

    assert spectral_radius(1) < 1
    assert spectral_radius(10) > 1 or condition == 2.0


@pytest.mark.parametrize("local_steps", [5, [1, 2, 2, 3, 5, 5, 8, 8]], ids=str)
def test_settings_allow_for_local_steps(local_steps):
    """Local steps must not let clients drift apart; unequal numbers of them need shrofbo."""
    task = quadratic()
    environment = fb.Environment(local_steps=local_steps)
    report = fb.check(task.problem, task.clients, environment)
    assert report.recommended == ("simfbo" if local_steps == 5 else "shrofbo")
    assert remaining_hypergradient(task, report.algorithm(), 49, environment) < 1e-3


def test_local_steps_of_clients_that_are_alike_have_full_length():
    task = quadratic(clients=3, heterogeneity=0.0)
    report = fb.check(task.problem, task.clients, fb.Environment(local_steps=7))
    assert "clients are alike" in report.reason
    settings = report.settings()
    expected = pytest.approx(1 / report.measured.L, rel=0.05)
    assert settings["lr_y"] == settings["server_lr_y"] == expected


def test_there_are_settings_for_methods_that_solve_the_problem():
    task = quadratic()
    report = fb.check(task.problem, task.clients)
    for name in ADVISED:
        assert report.algorithm(name).name == name
        assert report.algorithm(name).solves == "global"
    # The random truncation of these two leaves noise, so that they only come closer.
    for name in ("aggitd", "fedmbo"):
        assert remaining_hypergradient(task, report.algorithm(name), 150) < 0.9


@pytest.mark.parametrize("name", ["localbsgm", "fedavg"])
def test_there_are_no_settings_for_methods_that_solve_another_problem(name):
    task = quadratic(clients=2)
    report = fb.check(task.problem, task.clients)
    sentence = f"^name is '{name}'; it must be one of 'simfbo', 'shrofbo'"
    with pytest.raises(ValueError, match=sentence):
        report.settings(name)
