from __future__ import annotations

import os
import subprocess
import sys

import pytest

from accel_state.logging import tracebacks
from accel_state.process.state import PartialState

RICH = "ACCELERATE_ENABLE_RICH"
OFF = "ACCELERATE_DISABLE_RICH"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for name in (RICH, OFF):
        monkeypatch.delenv(name, raising=False)


def test_the_first_state_lets_rich_write_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fresh_state: None
) -> None:
    pytest.importorskip("rich", reason="the alone environment has no rich")
    monkeypatch.setenv(RICH, "1")
    PartialState(cpu=True)
    try:
        raise KeyError("not here")
    except KeyError:
        sys.excepthook(*sys.exc_info())

    written = capsys.readouterr().err
    assert "Traceback (most recent call last)" in written
    assert "╭" in written
    assert "KeyError: 'not here'" in written


def test_a_whole_program(tmp_path: os.PathLike[str]) -> None:
    pytest.importorskip("rich", reason="the alone environment has no rich")
    program = (
        "from accel_state.logging.tracebacks import set_tracebacks\nset_tracebacks()\nraise KeyError('it')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, RICH: "true"}, capture_output=True, timeout=180
    )

    assert run.returncode == 1
    assert "╭" in run.stderr.decode()


@pytest.mark.parametrize("variables", [{}, {RICH: "0"}, {OFF: "1"}])
def test_tracebacks_are_pythons_own_by_default(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    tracebacks.set_tracebacks()

    assert sys.excepthook is sys.__excepthook__


def test_the_old_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RICH, "1")
    monkeypatch.setenv(OFF, "1")
    with pytest.warns(UserWarning, match="ENABLE_RICH is ignored, as ACCELERATE_DISABLE_RICH is set"):
        tracebacks.set_tracebacks()

    assert sys.excepthook is sys.__excepthook__


def test_without_rich_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RICH, "1")
    monkeypatch.setattr(tracebacks, "is_rich_available", lambda: False)
    with pytest.warns(UserWarning, match="rich is not installed: `pip install rich`"):
        tracebacks.set_tracebacks()

    assert sys.excepthook is sys.__excepthook__
