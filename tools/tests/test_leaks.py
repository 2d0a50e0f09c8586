"""The leak check: what each kind of leak is called, and that the next test starts clean."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from accel_world import leaks

pytest_plugins = "pytester"

LEAKS = """
import os, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist

stop = threading.Event()

def test_environment_1():
    os.environ["LEFT"] = "1"
    del os.environ["TAKEN"]

def test_environment_2():
    assert "LEFT" not in os.environ
    assert os.environ["TAKEN"] == "here"

def test_folder_1(tmp_path):
    os.chdir(tmp_path)

def test_folder_2(request):
    assert os.getcwd() == str(request.config.rootpath)

def test_thread():
    threading.Thread(target=stop.wait, args=(30,), name="lingerer").start()

def test_daemon_thread_is_allowed():
    threading.Thread(target=stop.wait, args=(30,), daemon=True).start()

def test_child_1():
    test_child_1.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])

def test_child_2():
    assert test_child_1.process.wait(5) is not None

def test_group_1(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)

def test_group_2():
    assert not dist.is_initialized()

def test_signal_1():
    signal.signal(signal.SIGTERM, print)

def test_signal_2():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

def test_torch_1():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_deterministic_debug_mode("error")

def test_torch_2():
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()

def test_zz_end():
    stop.set()
"""


@pytest.fixture
def inner(pytester, monkeypatch):
    """Run a test file under the plugin in its own process."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("TAKEN", "here")

    def run(source: str) -> pytest.RunResult:
        pytester.makeconftest("from accel_world import leaks; leaks.PATIENCE_S = 0.5")
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", "accel_pytest", "-p", "no:cacheprovider", "-rA")

    return run


def test_each_kind_of_leak_is_named_and_put_back(inner):
    result = inner(LEAKS)
    result.assert_outcomes(passed=15, errors=7)
    result.stdout.fnmatch_lines_random(
        [
            "environment: LEFT set to '1'; TAKEN removed",
            "working folder: changed to *",
            "*threads: thread 'lingerer' still runs",
            "*child processes: process * still ran: * import time; time.sleep(30)",
            "*signal handlers: SIGTERM is handled by <built-in function print>",
            "*process group: torch.distributed was left initialised",
            "*default dtype changed from torch.float32 to torch.float64;*",
        ]
    )


def test_a_test_without_torch_stays_without_it(inner):
    inner("""
        import sys

        def test_first(): pass

        def test_second(): assert "torch" not in sys.modules and "psutil" not in sys.modules
    """).assert_outcomes(passed=2)


def test_a_singleton_left_behind(monkeypatch):
    class PartialState:
        _shared_state: dict = {}  # noqa: RUF012 - what is looked at

        @classmethod
        def _reset_state(cls) -> None:
            cls._shared_state.clear()

    module = types.ModuleType("accel_state.process.state")
    module.PartialState = PartialState
    monkeypatch.setitem(sys.modules, "accel_state.process.state", module)
    before = leaks.capture()
    PartialState._shared_state["rank"] = 0
    assert leaks.restore(before) == {
        "accel state": ["PartialState was left initialised (call its _reset_state())"]
    }
    assert PartialState._shared_state == {}


def test_what_pytest_sets_itself_is_no_leak():
    before = leaks.capture()
    os.environ["PYTEST_CURRENT_TEST"] += "x"
    assert leaks.restore(before) == {}
