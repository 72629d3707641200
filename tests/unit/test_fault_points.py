"""Fault points: what a file may say, when it counts, and that nothing happens unless it is asked for."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moeray.comm import faults
from moeray.comm.errors import GroupError
from moeray.comm.faults import Fault, FaultPoints, parse


def test_a_file_says_who_fails_where_and_how() -> None:
    text = "1 before_dispatch exit step=40\n\n0 mid_combine delay seconds=0.5 incarnation=2\n"
    assert parse(text) == (
        Fault(slot=1, point="before_dispatch", how="exit", step=40),
        Fault(slot=0, point="mid_combine", how="delay", seconds=0.5, incarnation=2),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 nowhere exit", "the point is 'nowhere', must be one of before_header"),
        ("1 at_switch faint", "it fails by 'faint', must be one of delay, raise, exit, stop"),
        ("1 at_switch exit when=now", "option 'when' is unknown, must be step, seconds or incarnation"),
        ("1 at_switch exit now", "option 'now' is unknown, must be step, seconds or incarnation"),
        ("one at_switch exit", "the slot is 'one', must be a number"),
        ("1 at_switch delay seconds=soon", "seconds is 'soon', must be a number"),
        ("1 at_switch", "line 1, '1 at_switch': must be SLOT POINT HOW"),
    ],
)
def test_what_it_may_not_say_is_named(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(line)


def test_a_fault_comes_once_at_its_step_in_its_slot_and_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "faults"
    monkeypatch.setenv(faults.VARIABLE, str(file))
    points = FaultPoints()
    points.here(1, 0)
    points.reach("at_switch")
    file.write_text("0 at_switch raise\n1 at_switch raise step=3 incarnation=0")
    points.reach("at_switch")
    points.step = 3
    points.reach("before_header")
    with pytest.raises(GroupError, match="a fault was asked for at at_switch"):
        points.reach("at_switch")
    points.reach("at_switch")
    again = FaultPoints()
    again.here(1, 1)
    again.step = 9
    again.reach("at_switch")


def test_a_file_that_became_nonsense_is_told_once_and_what_it_said_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "faults"
    monkeypatch.setenv(faults.VARIABLE, str(file))
    file.write_text("1 at_switch raise step=3")
    points = FaultPoints()
    points.here(1, 0)
    points.reach("at_switch")
    file.write_bytes(b"1 at_switch raise step=2\n\xff nonsense")
    for _ in range(3):
        points.reach("at_switch")
    assert [record.getMessage() for record in caplog.records if str(file) in record.getMessage()] == caplog.messages
    assert len(caplog.messages) == 1
    points.step = 3
    with pytest.raises(GroupError):
        points.reach("at_switch")
    file.write_text("\n1 nowhere exit")
    with pytest.raises(
        ValueError, match=rf"{faults.VARIABLE} names {file}, .*: line 2, '1 nowhere exit': the point is"
    ):
        faults.read(file)
    with pytest.raises(ValueError, match="which is no list of faults: "):
        faults.read(tmp_path)


@pytest.mark.parametrize(("how", "code"), [("exit", -signal.SIGKILL), ("raise", 1)])
def test_a_process_fails_only_if_the_variable_is_set(tmp_path: Path, how: str, code: int) -> None:
    file = tmp_path / "faults"
    file.write_text(f"0 during_load {how}")
    script = "from moeray.comm import faults; faults.points.here(0, 0); faults.reach('during_load')"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    failed = subprocess.run(command, env=environment | {faults.VARIABLE: str(file)}, check=False, capture_output=True)
    assert failed.returncode == code
