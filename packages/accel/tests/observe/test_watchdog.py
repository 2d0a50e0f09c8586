"""The watchdog of Accelerators: its settings, and what is there when it is on and off."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from accel import Accelerator
from accel.observe.watchdog import WatchdogKwargs
from accel_ops.debug import watchdog

pytestmark = pytest.mark.usefixtures("fresh_state")


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("accel-watchdog"))


BOTH = ["accel-watchdog", "accel-watchdog-store"]

# Settings


def test_arguments_come_before_the_environment_and_that_before_defaults(monkeypatch):
    assert WatchdogKwargs() == WatchdogKwargs(timeout=120, abort=False)
    monkeypatch.setenv("ACCELERATE_WATCHDOG", "30")
    monkeypatch.setenv("ACCELERATE_WATCHDOG_ABORT", "true")
    assert WatchdogKwargs() == WatchdogKwargs(timeout=30, abort=True)
    assert WatchdogKwargs(timeout=5, abort=False) == WatchdogKwargs(5, False)


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_an_error(timeout):
    with pytest.raises(
        ValueError, match=r"WatchdogKwargs\(timeout=...\) is .*; it takes a number of seconds"
    ):
        WatchdogKwargs(timeout=timeout)


@pytest.mark.parametrize(
    ("text", "message"),
    [("0", "ACCELERATE_WATCHDOG is 0.0; it takes"), ("soon", "ACCELERATE_WATCHDOG has the value 'soon'")],
)
def test_an_error_names_the_variable(monkeypatch, text, message):
    monkeypatch.setenv("ACCELERATE_WATCHDOG", text)
    with pytest.raises(ValueError, match=message):
        Accelerator(cpu=True)


def test_abort_is_a_truth_value():
    with pytest.raises(ValueError, match=r"WatchdogKwargs\(abort=...\) is 'yes'; it takes True or False"):
        WatchdogKwargs(abort="yes")


def test_abort_without_a_watchdog_is_a_warning(monkeypatch, recwarn):
    monkeypatch.setenv("ACCELERATE_WATCHDOG_ABORT", "false")
    Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_WATCHDOG_ABORT", "true")
    Accelerator(cpu=True, kwargs_handlers=[WatchdogKwargs()]).end_training()
    assert not [str(item.message) for item in recwarn if "WATCHDOG" in str(item.message)]
    with pytest.warns(UserWarning, match="ABORT=true .* is ignored, as there is no watchdog"):
        Accelerator(cpu=True)


def test_one_process_has_no_watchdog():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[WatchdogKwargs(timeout=1)])

    assert threads() == []
    accelerator.end_training()


# Several processes


def threads_of(handlers: list[Any]) -> list[list[str]]:
    first = Accelerator(kwargs_handlers=handlers)
    seen = [threads()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = Accelerator(kwargs_handlers=[WatchdogKwargs(timeout=7)] if handlers else None)
    seen += [threads(), [str(warning.message).partition(":")[0] for warning in caught]]
    for observer in first.run.observers:
        observer.stop()
    seen.append(threads())
    second.end_training()
    return [*seen, threads()]


def test_accelerators_share_one_which_ends_with_the_last(world):
    for rank, seen in enumerate(world.run(threads_of, [WatchdogKwargs(timeout=60)])):
        ignored = ["WatchdogKwargs(timeout=7, abort=False) is ignored"] if rank == 0 else []
        assert seen == [BOTH, BOTH, ignored, BOTH, []]


def test_off_nothing_is_attached(world):
    assert world.run(threads_of, []) == [[[], [], [], [], []]] * 2


def late_save(folder: str) -> tuple[list[str], list[str]]:
    """One process comes late to a save; returns what the watchdog reports, and the threads at the end."""
    reports = []
    with mock.patch.object(watchdog.Watchdog, "_write", lambda self, text: reports.append(text)):
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        if not accelerator.is_main_process:
            time.sleep(1.6)
        accelerator.save_state(folder)
        accelerator.end_training()
    return reports, threads()


def test_the_environment_starts_it_and_a_save_is_watched(world, tmp_path):
    results = world.run(late_save, str(tmp_path / "state"), env={"ACCELERATE_WATCHDOG": "0.4"})

    assert [left for _, left in results] == [[], []]
    (report,) = [report for reports, _ in results for report in reports]
    assert "arrived: 0; not arrived: 1\n" in report
    assert ", save_state (" in report
    assert f" at {__file__}:" in report
    assert report.endswith(" in late_save")
