"""Saving when the machine is about to be taken away: a signal to any process, and all save."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel.training.agreement import Agreement

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_state.process.info import ProcessInfo


class Preemption:
    """Notes the signals that announce the end, and asks whether any process has got one.

    Args:
        process: This process.
        signals: Names of the signals; those that the system does not have are passed over.

    Raises:
        RuntimeError: If this is not the main thread, which alone can take signals.
        ValueError: If the system has none of them.
    """

    def __init__(self, process: ProcessInfo, signals: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "save_on_preemption takes signals, which only the main thread can: call it there."
            )
        self.received: str | None = None
        self._agreement = Agreement(process)
        # Windows has no SIGUSR1.
        numbers = [getattr(signal, name) for name in signals if hasattr(signal, name)]
        if not numbers:
            known = ", ".join(sorted(each.name for each in signal.Signals))
            raise ValueError(
                f"save_on_preemption(signals={list(signals)}): this system ({sys.platform}) has none of "
                f"them. Give some of {known}."
            )
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def agreed(self) -> bool:
        """Whether a process had got a signal at the call before; the same on all, which all call it."""
        return self._agreement.ask_ahead(self.received is not None)

    def stop(self) -> None:
        """Put back what was done on these signals before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # others set since are left alone
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only noted: a handler may interrupt any line, and saving is a collective.
        self.received = signal.Signals(number).name
        # The program's handler runs too, but for Python's own, which would raise KeyboardInterrupt.
        before: Any = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def preemption_signal(run: Run, output_dir: str | None, signals: Sequence[str]) -> str | None:
    """Return the signal to end that any process got; every process calls it at the end of each step.

    Args:
        run: The run that would be saved.
        output_dir: The folder; not needed with automatic naming.
        signals: Names of the signals, which the first call takes.

    Returns:
        Its name, on all processes in the same step, outside of accumulation windows; None if there is none.

    Raises:
        ValueError: If there is no folder to save to, or the system has none of the signals.
        RuntimeError: If this is not the main thread.
    """
    if run.preemption is None:
        # At the first call, and not when the signal comes and time is short.
        _check_folder(run, output_dir)
        run.preemption = Preemption(run.process, signals)
    if run.window.step or not run.preemption.agreed():  # not every engine saves the gradients of a window
        return None
    return run.preemption.received or "a signal to another process"


def _check_folder(run: Run, output_dir: str | None) -> None:
    config = run.project_configuration
    if output_dir is None and not config.automatic_checkpoint_naming:
        raise ValueError(
            "save_on_preemption needs output_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
