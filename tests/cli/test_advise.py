"""`fedbilevel advise`: sentences of 80 columns with settings to paste, or JSON."""

import json
import tomllib

from tests.support.tool import QUADRATIC, assert_refused, invoke, write


def test_it_prints_sentences_and_settings_that_an_experiment_can_use(tmp_path):
    file = write(tmp_path / "a.toml")
    code, out, err = invoke("advise", file)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "condition: clients take unequal numbers of local steps" in out
    assert "not compared in our results: " in out
    (name, settings) = tomllib.loads(out[out.index("[algorithms.") :])["algorithms"].popitem()
    assert f"first choice: {name}\n" in out
    snippet = out[out.index("[algorithms.") :]
    pasted = write(tmp_path / "b.toml", f'algorithm = "{name}"\n{QUADRATIC}\n{snippet}')
    assert invoke("run", pasted, "--out", tmp_path / "run", "--quiet").code == 0
    algorithm = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["algorithm"]
    assert {key: algorithm[key] for key in settings} == settings


def test_settings_of_the_experiment_come_first(tmp_path):
    own = "[algorithms.afbo]\nlr_x = 0.0123\n"
    file = write(tmp_path / "a.toml", f"{QUADRATIC}\n{own}")
    code, out, _ = invoke("advise", file, "--goal", "seconds", "--json")
    printed = json.loads(out)
    assert code == 0
    assert next(iter(printed["order"])) == "afbo"
    assert printed["settings"] == {"lr_x": 0.0123}
    assert printed["goal"] == "seconds"
    assert {"apart", "unequal steps"} == printed["conditions"].keys()


def test_an_unknown_goal_is_refused(tmp_path):
    file = write(tmp_path / "a.toml")
    assert_refused(invoke("advise", file, "--goal", "money"), "goal is 'money'", "'bytes'")
