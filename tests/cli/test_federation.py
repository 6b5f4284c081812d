"""Commands for real federations refuse wrong options before anything is started."""

from __future__ import annotations

import pytest

from fedbilevel.cli import main


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("serve digits --host 0.0.0.0", "no keys are given"),
        ("join 10.0.0.1:8000 --partition 0", "no keys are given"),
        ("join 10.0.0.1 --partition 0", "must be host:port"),
        ("join 127.0.0.1:1 --partition 0 --client-data nowhere:load", "cannot be imported"),
        ("serve digits --keys nowhere", "has no ca.crt"),
        ("serve digits --clients 4 --set conduct.deadline_s=0", "deadline_s is 0"),
        ("run digits --stock", "for --federation flower"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    command: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert reason in printed
    assert printed.count("\n") == 1
