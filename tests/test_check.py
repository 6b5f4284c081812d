"""`fb.check`: figures against closed forms, a warning for each thing wrong, settings that converge; the command."""

import json
import tomllib

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import normal, root
from fedbilevel.diagnostics.advice import ADVISED
from fedbilevel.tasks.quadratic import quadratic
from tests.support.tool import QUADRATIC, call, is_refusal, write

FOREVER = 10**12  # rounds: nothing is too flat to matter


def test_a_private_lower_level_is_refused(tmp_path):
    """Its losses at one y for all episodes would be measured, and are not what a run solves."""
    file = write(
        tmp_path / "a.toml", 'task = "few-shot"\nenvironment.batch_size = 5\nalgorithm = "rabo"'
    )
    is_refusal(
        call("check", file), "check solves one lower level for all; this problem's is private"
    )


# Closed forms


def relative(vectors, p):
    mean = sum(w * v for w, v in zip(p, vectors, strict=True))
    apart = sum(w * (v - mean).norm() ** 2 for w, v in zip(p, vectors, strict=True))
    return float((apart / sum(w * v.norm() ** 2 for w, v in zip(p, vectors, strict=True))) ** 0.5)


@pytest.mark.parametrize("weights", ["uniform", [0.1, 0.6, 0.3]], ids=str)
@pytest.mark.parametrize("heterogeneity", [1.0, 0.3])
def test_figures_of_a_quadratic(weights, heterogeneity):
    task = quadratic(clients=3, condition=20.0, heterogeneity=heterogeneity, seed=2)
    m = fb.check(task.problem, task.clients, weights=weights, rounds=FOREVER).measured
    A, B, _, e, _, D = task._means(weights)
    p = [1 / 3] * 3 if weights == "uniform" else weights
    parts = [[part.mean(0) for part in (*client.train, *client.val)] for client in task.clients]
    values, M = torch.linalg.eigvalsh(A), torch.linalg.solve(A, B)
    assert (m.mu, m.L) == (pytest.approx(float(values[0])), pytest.approx(float(values[-1])))
    assert m.condition == pytest.approx(float(values[-1] / values[0]))
    assert m.L_client == pytest.approx(
        max(float(torch.linalg.eigvalsh(a)[-1]) for a, *_ in parts), rel=1e-3
    )

    x = torch.zeros(5, dtype=torch.float64)
    y = task.y_star({"x": x}, weights)["y"]
    z = torch.linalg.solve(A, y - e)
    assert (m.y_way, m.sizes) == (pytest.approx(float(y.norm())), (5, len(y)))
    assert m.z_norm == pytest.approx(float(z.norm()))
    h = task.gradient({"x": x}, weights)["x"]
    assert m.hypergradient_norm == pytest.approx(float(h.norm()))
    phi = torch.eye(5, dtype=torch.float64) + M.T @ M + D.T @ M + M.T @ D
    assert m.curvature == pytest.approx(float(torch.linalg.eigvalsh(phi)[-1]), rel=1e-5)
    lag = M.T @ torch.linalg.solve(A, M + D)
    assert m.lag == pytest.approx(float(torch.linalg.eigvalsh(lag + lag.T)[-1]), rel=1e-5)

    local = [-t + D.T @ y + B.T @ torch.linalg.solve(A, y - e) for A, B, c, e, t, D in parts]
    mean = sum(w * v for w, v in zip(p, local, strict=True))
    assert m.local_error == pytest.approx(float((mean - h).norm() / h.norm()), rel=1e-5)
    assert m.local_cosine == pytest.approx(float(mean @ h / mean.norm() / h.norm()), rel=1e-5)
    assert m.local_error > 0.01
    assert m.lower_spread == pytest.approx(relative([-c for _, _, c, *_ in parts], p))
    assert m.upper_spread == pytest.approx(
        relative([-t + D.T @ y + B.T @ z for _, B, _, _, t, D in parts], p), rel=1e-5
    )


def test_clients_that_are_alike():
    task = quadratic(clients=3, heterogeneity=0.0)
    report = fb.check(task.problem, task.clients, fb.Environment(local_steps=7))
    m = report.measured
    assert max(m.lower_spread, m.upper_spread, m.local_error) < 1e-6
    assert m.local_cosine == pytest.approx(1)
    assert "clients are alike" in report.reason
    settings = report.settings()
    assert settings["lr_y"] == settings["server_lr_y"] == pytest.approx(1 / m.L, rel=0.05), (
        "local steps count in full"
    )


def test_a_run_sees_nothing_flatter_than_its_length_allows():
    """mu and L are the problem's own; what depends on slow directions is damped by L / rounds."""
    task = quadratic(clients=2, condition=1000.0, heterogeneity=0.0)
    short, long = (fb.check(task.problem, task.clients, rounds=rounds) for rounds in (10, FOREVER))
    assert short.measured.mu == pytest.approx(long.measured.mu) == pytest.approx(1e-3)
    assert short.measured.ridge == pytest.approx(0.1)
    assert short.measured.lag < 1e-3 * long.measured.lag
    assert short.settings()["lr_x"] > 100 * long.settings()["lr_x"]


def figures(measured):
    """All but what is left of the lower level's gradient, which is rounding, in one list."""
    return [*measured._replace(left=0, sizes=0), *measured.sizes]


def test_single_precision_and_clients_of_several_sizes():
    """The same figures: from a stack, from a loop, from numbers of half the length."""
    task = quadratic(clients=5, samples=4, noise=0.5)
    clients = [
        fb.ClientData(train=tuple(t[: 1 + i % 2] for t in client.train), val=client.val)
        for i, client in enumerate(task.clients)
    ]
    expected = figures(fb.check(task.problem, clients, weights="samples").measured)
    loop = fb.check(task.problem, clients, weights="samples", mode="loop")
    assert figures(loop.measured) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    half = [
        fb.ClientData(*(tuple(t.float() for t in side) for side in (client.train, client.val)))
        for client in clients
    ]
    problem = fb.Problem(
        task.problem.upper,
        task.problem.lower,
        *(v.map(torch.Tensor.float) for v in task.problem.start),
    )
    report = fb.check(problem, half, weights="samples")
    assert report.warnings == []
    assert figures(report.measured) == pytest.approx(expected, rel=1e-2, abs=1e-3)


class Lazy:
    """A million clients, made when they are asked for."""

    def __init__(self):
        self.asked = set()

    def __len__(self):
        return 10**6

    def __getitem__(self, i):
        self.asked.add(i)
        return client(i % 5, samples=1000)


def client(i, samples=6):
    return fb.ClientData(
        *((normal(root(i, side), (samples, 3), torch.float64),) for side in ("train", "val"))
    )


def test_a_large_federation_is_read_in_part():
    clients = Lazy()
    report = fb.check(problem(), clients)
    assert len(clients.asked) <= 21
    assert report.where.startswith("measured on 20 of 1000000 clients")
    assert report.warnings == []


# Warnings


def upper(x, y, batch):
    return ((batch[0] @ y["y"] - 1) ** 2).mean() + (x["x"] ** 2).sum()


def lower(x, y, batch):
    return ((batch[0] @ y["y"]) ** 2).mean() + ((y["y"] - x["x"]) ** 2).sum()


def problem(upper=upper, lower=lower):
    return fb.Problem(
        upper, lower, *({name: torch.ones(3, dtype=torch.float64) / 3} for name in "xy")
    )


def checked(**losses):
    return fb.check(problem(**losses), [client(i) for i in range(3)])


class Refuse(torch.autograd.Function):
    """The identity, without a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v):
        return v.clone()

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("there is none")


def square(backward_):
    """v^2 as a custom function with a backward of its own."""

    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(v):
            return v**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return backward_(g, *ctx.saved_tensors)

    return Square


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v**2

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


Right = square(lambda g, v: 2 * g * v)
Wrong = square(lambda g, v: 3 * g * v)
WrongTwice = square(lambda g, v: 2 * g * v.detach())
Refusing = square(lambda g, v: Refuse.apply(2 * g * v))
Once = square(lambda g, v: 2 * g * v)
Once.backward = staticmethod(once_differentiable(lambda ctx, g: 2 * g * ctx.saved_tensors[0]))


def custom(function):
    return lambda x, y, batch: (
        function.apply(y["y"] - x["x"]).sum() + ((batch[0] @ y["y"]) ** 2).mean()
    )


FATAL = {
    "the lower loss's derivative in y is wrong": [
        {"lower": lambda x, y, b: (y["y"].detach() * y["y"]).sum() - y["y"] @ x["x"]},
        {"lower": custom(Wrong)},
    ],
    "the lower loss's mixed derivative is wrong": [
        {"lower": lambda x, y, b: lower({"x": x["x"].detach()}, y, b)}
    ],
    "the upper loss's derivative in x is wrong": [
        {"upper": lambda x, y, b: upper({"x": x["x"].detach()}, y, b)}
    ],
    "the upper loss's derivative in y is wrong": [
        {"upper": lambda x, y, b: upper(x, {"y": y["y"].detach()}, b)}
    ],
    "the lower loss's second derivative in y is wrong": [
        {"lower": custom(WrongTwice)},
        {"lower": custom(Once)},  # torch.func takes what may be differentiated once for a constant
    ],
    "the lower loss has no second derivative: there is none": [{"lower": custom(Refusing)}],
    "the lower loss has no derivative: ": [{"lower": custom(OldStyle)}],
    "the Hessian of the lower loss in y is exactly zero": [
        {"lower": lambda x, y, b: (y["y"] - b[0]).abs().mean() + (x["x"] ** 2).sum()}
    ],
    "the lower loss does not depend on y": [{"lower": lambda x, y, b: (x["x"] ** 2).sum()}],
}


@pytest.mark.parametrize(
    ("sentence", "losses"), [(sentence, case) for sentence in FATAL for case in FATAL[sentence]]
)
def test_losses_that_cannot_be_used(sentence, losses):
    report = checked(**losses)
    assert [warning for warning in report.warnings if warning.startswith(sentence)], report.warnings
    assert all("\n" not in warning for warning in report.warnings)
    assert report.measured is None
    assert sentence in str(report)
    with pytest.raises(ValueError, match=r"^there are no settings for this problem: the "):
        report.algorithm()


@pytest.mark.parametrize("function", [Right, torch.square], ids=["custom", "torch"])
def test_losses_that_can(function):
    loss = custom(function) if function is Right else lower
    report = checked(lower=loss)
    assert report.warnings == []
    assert "recommended: SimFBO(" in str(report)


def test_levels_that_do_not_meet():
    (warning,) = checked(
        lower=lambda x, y, b: lower({"x": torch.ones(3)}, y, b) + (x["x"] ** 2).sum()
    ).warnings
    assert (
        warning
        == "the minimiser of the lower loss does not depend on x: the problem is not bilevel"
    )
    (warning,) = checked(upper=lambda x, y, b: (x["x"] ** 4).sum()).warnings
    assert warning == "the upper loss does not depend on y: the problem is not bilevel"


@pytest.mark.parametrize("scale", [0.0, -0.7], ids=["flat", "concave"])
def test_a_lower_level_that_is_not_strongly_convex(scale):
    """One sentence, with a ridge that mends it."""

    def loss(x, y, batch, ridge=0.0):
        curvature = torch.tensor([2.0, 1.0, scale], dtype=torch.float64)
        return 0.5 * ((curvature + ridge) * y["y"] ** 2).sum() - y["y"] @ x["x"]

    report = checked(lower=lambda x, y, batch: loss(x, y, batch))
    (warning,) = report.warnings
    assert warning.startswith(
        "the lower level is not strongly convex in y (its smallest curvature is "
    )
    assert report.measured.mu == pytest.approx(scale, abs=1e-6)
    assert report.settings()["damping"] > -scale
    ridge = float(warning.split("at least ")[1])
    mended = checked(lower=lambda x, y, batch: loss(x, y, batch, ridge))
    assert mended.warnings == []
    assert 100 < mended.measured.condition < 1001


@pytest.mark.parametrize("statistics", ["batch", "frozen", "instance"])
def test_batch_normalisation_is_seen(statistics):
    def normalised(batch):
        if statistics == "instance":
            return F.instance_norm(batch[:, None, :])[:, 0]
        if statistics == "batch":
            return F.batch_norm(batch, None, None, training=True)
        return F.batch_norm(batch, torch.zeros(3).double(), torch.ones(3).double())

    report = checked(upper=lambda x, y, b: upper(x, y, (normalised(b[0]),)))
    expected = (
        ["the upper loss normalises a batch by its own statistics"] if statistics == "batch" else []
    )
    assert [warning.split(" (")[0] for warning in report.warnings] == expected


def test_kinks_and_single_precision_raise_no_alarm():
    """A network of ReLU units; its local Hessians differ, its heads share nothing."""
    task = fb.tasks.load(
        "hyper-representation", data="digits", partition="shards", clients=10, hidden=16
    )
    report = fb.check(task.problem, task.clients, rounds=100)
    assert report.warnings == []
    assert report.measured.mu == pytest.approx(
        1e-3, rel=0.01
    )  # the ridge: cross-entropy is flat along shifts
    assert 1e-3 < report.settings()["lr_x"] < 1
    assert "biased: methods that average them solve another problem" in str(report)
    oracle, bias = Oracle(task.problem), "backbone.1.bias"  # 16 of 1,040 numbers
    broken = fb.Problem(
        lambda x, y, batch: oracle.upper(x, y, fb.Batch(val=batch)),
        lambda x, y, batch: oracle.lower(
            fb.Tree({**x, bias: x[bias].detach()}), y, fb.Batch(train=batch)
        ),
        *task.problem.start,
    )
    (warning,) = fb.check(broken, task.clients).warnings
    assert warning.startswith("the lower loss's mixed derivative is wrong")


def test_wrong_input_is_refused():
    task = quadratic(clients=2)
    with pytest.raises(ValueError, match=r"^rounds is 0; it must be at least 1$"):
        fb.check(task.problem, task.clients, rounds=0)
    with pytest.raises(ValueError, match="global generator"):
        checked(lower=lambda x, y, batch: lower(x, y, batch) + torch.rand(()))
    report = fb.check(task.problem, task.clients)
    for name in ("localbsgm", "fedavg"):
        with pytest.raises(
            ValueError, match=f"^name is '{name}'; it must be one of 'simfbo', 'shrofbo'"
        ):
            report.settings(name)


# Settings


def fall(task, method, rounds, environment=None):
    """What is left of the true hypergradient's norm."""
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
        *((condition, "simfbo", 49) for condition in (2.0, 20.0, 200.0)),
        *((200.0, name, 49) for name in ("shrofbo", "asfbo", "la-asfbo", "unifbo", "fedbio")),
        (2.0, "fednest", 400),
    ],
)
def test_settings_converge_untouched(condition, name, rounds):
    task = quadratic(condition=condition)
    report = fb.check(task.problem, task.clients)
    assert report.recommended == "simfbo"
    assert fall(task, report.algorithm(name), rounds) < 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("condition", [2.0, 20.0, 200.0])
def test_single_loops_are_stable_where_x_can_outrun_y(seed, condition):
    """Clients that are alike keep the condition number asked for; it takes too many rounds to run, so the round's map
    is written out: its spectral radius is below 1, and with ten times the step of x it may not be."""
    task = quadratic(clients=2, condition=condition, heterogeneity=0.0, seed=seed)
    steps = fb.check(task.problem, task.clients).settings()
    A, B, _, _, _, D = task._means("uniform")
    m, n = B.shape
    rows = [
        [torch.eye(n), D.T, B.T],
        [-B, A, torch.zeros(m, m)],
        [-D, -torch.eye(m), A],
    ]  # d_x, d_y, d_z in x, y, z
    J, lr = (
        torch.cat([torch.cat(row, 1) for row in rows]),
        torch.ones(n + 2 * m, dtype=torch.float64),
    )

    def radius(times):
        lr[:n], lr[n : n + m], lr[n + m :] = (steps[f"server_lr_{v}"] for v in "xyz")
        lr[:n] *= times
        return float(torch.linalg.eigvals(torch.eye(n + 2 * m) - lr[:, None] * J).abs().max())

    assert radius(1) < 1
    assert radius(10) > 1 or condition == 2.0


@pytest.mark.parametrize("local_steps", [5, [1, 2, 2, 3, 5, 5, 8, 8]], ids=str)
def test_settings_allow_for_local_steps(local_steps):
    """Where clients differ, local steps must not carry them apart; with unequal numbers it takes shrofbo."""
    task, environment = quadratic(), fb.Environment(local_steps=local_steps)
    report = fb.check(task.problem, task.clients, environment)
    assert report.recommended == ("simfbo" if local_steps == 5 else "shrofbo")
    assert fall(task, report.algorithm(), 49, environment) < 1e-3


def test_there_are_settings_for_methods_that_solve_the_problem():
    task = quadratic()
    report = fb.check(task.problem, task.clients)
    for name in ADVISED:
        assert report.algorithm(name).name == name
        assert report.algorithm(name).solves == "global"
    for name in (
        "aggitd",
        "fedmbo",
    ):  # noise of the random truncation is left, so they only come closer
        assert fall(task, report.algorithm(name), 150) < 0.9


# The command


def test_the_command_shows_a_table_and_a_piece_of_an_experiment(tmp_path):
    file = write(tmp_path / "a.toml")
    code, out, err = call("check", file)
    assert (code, err) == (0, "")
    for text in (
        "condition number L / mu",
        "strongly convex",
        "very different",
        "measured on 4 of 4 clients",
    ):
        assert text in out
    snippet = out[out.index("[algorithms.") :]
    (name, settings) = tomllib.loads(snippet)["algorithms"].popitem()
    assert name == "shrofbo"
    pasted = write(tmp_path / "b.toml", f'algorithm = "shrofbo"\n{QUADRATIC}\n{snippet}')
    assert call("run", pasted, "--out", tmp_path / "run", "--quiet").code == 0
    algorithm = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["algorithm"]
    assert {key: algorithm[key] for key in settings} == settings


def test_the_command_as_json(tmp_path):
    code, out, err = call(
        "check", write(tmp_path / "a.toml"), "--json", "--seed", 3, "--set", "task.clients=3"
    )
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    told = json.loads(out, parse_constant=pytest.fail)
    task = quadratic(clients=3, samples=3, noise=0.3, seed=3)
    environment = fb.Environment(participation=3, local_steps=(1, 2), batch_size=2)
    report = fb.check(task.problem, task.clients, environment, rounds=4, seed=3)
    assert told["measured"]["mu"] == pytest.approx(report.measured.mu)
    assert told["recommended"] == report.recommended == "shrofbo"
    assert told["settings"].keys() == set(ADVISED)
    assert told["settings"]["fednest"] == report.settings("fednest")
    assert told["verdicts"]["mu, smallest curvature of the lower level"] == "strongly convex"


def test_the_command_warns_of_a_task_of_ones_own(tmp_path, monkeypatch):
    write(
        tmp_path / "concave.py",
        """
import torch
from fedbilevel import ClientData, Problem, tasks
def task():
    data = (torch.ones(2, 1),)
    problem = Problem(lambda x, y, b: ((y["y"] - 1) ** 2).sum(), lambda x, y, b: y["y"] @ x["x"] - (y["y"] ** 2).sum(),
                      {"x": torch.ones(2)}, {"y": torch.ones(2)})
    return tasks.Task(problem, [ClientData(data, data)] * 4)
""",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path / "a.toml")
    code, out, err = call("check", file, "--task", "concave:task")
    assert (code, err) == (0, "")
    assert (
        "warning: the lower level is not strongly convex in y (its smallest curvature is -2): add a ridge"
        in out
    )
    told = json.loads(call("check", file, "--task", "concave:task", "--json").out)
    assert told["measured"]["condition"] is None
    is_refusal(call("check", file, "--task", "concave:tusk"), "tusk")
    is_refusal(call("check", "nowhere"), "nowhere")
    is_refusal(call("check", file, "--set", "task.condition=0.5"), "condition is 0.5")
