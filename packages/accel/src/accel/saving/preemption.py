"""Saving on preemption: after a signal to any process, all save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel.training.any_rank_flag import AnyRankFlag
from accel_state.logging.warning import warn
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.accelerator import Accelerator
    from accel.training.run import Run
    from accel_state.process.info import ProcessInfo


class PreemptionHandler(Observer):
    """Handles the signals of a preemption, and synchronizes whether any process has received one.

    Args:
        process: This process.
        signals: Names of the signals; those that the system does not have are skipped.

    Raises:
        RuntimeError: If this is not the main thread, the only one that can handle signals.
        ValueError: If the system has none of them.
    """

    def __init__(self, process: ProcessInfo, signals: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "save_on_preemption takes signals, which only the main thread can: call it there."
            )
        self.received: str | None = None
        self._any_rank = AnyRankFlag(process)
        # Windows has no SIGUSR1.
        numbers = [getattr(signal, name) for name in signals if hasattr(signal, name)]
        if not numbers:
            available = ", ".join(sorted(item.name for item in signal.Signals))
            raise ValueError(
                f"save_on_preemption(signals={list(signals)}): this system ({sys.platform}) has none of "
                f"them. Pass some of {available}."
            )
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in numbers}

    def check(self) -> bool:
        """Return whether any process had received a signal at the previous call. Every process calls it."""
        return self._any_rank.check_previous(self.received is not None)

    def stop(self) -> None:
        """Restore the previous handlers of these signals."""
        for number, handler in self._previous_handlers.items():
            if signal.getsignal(number) == self._on_signal:  # handlers set since are kept
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous_handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only recorded: a handler may interrupt any line, and saving is collective.
        self.received = signal.Signals(number).name
        # The program's handler runs too, except Python's default, which would raise KeyboardInterrupt.
        previous: Any = self._previous_handlers.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def save_on_preemption(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None,
    signals: Sequence[str],
    exit_code: int,
) -> None:
    """See `Accelerator.save_on_preemption`."""
    reason = preemption_signal(accelerator.run, output_dir, signals)
    if reason is None:
        return
    try:
        accelerator.wait_for_save()
    except Exception as error:  # this is the last chance to save
        warn(f"The save before failed: {type(error).__name__}: {error}.")
    folder = accelerator.save_state(output_dir)
    if accelerator.is_main_process:
        message = f"Preempted ({reason}): saved {folder}; exiting with {exit_code}."
        print(message, file=sys.stderr, flush=True)
    # Trackers are flushed, and the process group ends on all: no process waits for one that is gone.
    accelerator.end_training()
    raise SystemExit(exit_code)


def preemption_signal(
    run: Run, output_dir: str | os.PathLike[str] | None, signals: Sequence[str]
) -> str | None:
    """Return the preemption signal that any process received; every process calls it at the end of each step.

    Args:
        run: The run that would be saved.
        output_dir: The folder; not needed with automatic naming.
        signals: Names of the signals, whose handlers the first call installs.

    Returns:
        Its name, on all processes in the same step, at the end of an accumulation window; None if there is
        none.

    Raises:
        ValueError: If there is no folder to save to, or the system has none of the signals.
        RuntimeError: If this is not the main thread.
    """
    handler = next((item for item in run.observers if isinstance(item, PreemptionHandler)), None)
    if handler is None:
        # At the first call, not when the signal arrives and time is short.
        _check_folder(run, output_dir)
        handler = PreemptionHandler(run.process, signals)
        run.observers.append(handler)  # which end_training stops
    if run.window.step or not handler.check():  # not every engine saves the gradients of a window
        return None
    return handler.received or "a signal to another process"


def _check_folder(run: Run, output_dir: str | os.PathLike[str] | None) -> None:
    config = run.project_configuration
    if output_dir is None and not config.automatic_checkpoint_naming:
        raise ValueError(
            "save_on_preemption needs output_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
