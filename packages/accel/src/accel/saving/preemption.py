"""Saving when the machine is about to be taken away: a signal to any process, and all save and exit."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel.training.agreement import Agreement
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.accelerator import Accelerator
    from accel_state.process.facts import Process

__all__ = ["EXIT_CODE", "SIGNALS", "Preemption", "save_on_preemption"]

EXIT_CODE = 75
"""How a process ends that has saved because it was preempted (EX_TEMPFAIL: start it again)."""

SIGNALS = ("SIGTERM", "SIGUSR1")


class Preemption:
    """Notes the signals that announce the end, and asks whether any process has got one.

    Args:
        process: This process.
        signals: Names of the signals; those that the system does not have are passed over.

    Raises:
        RuntimeError: If this is not the main thread, which alone can take signals.
    """

    def __init__(self, process: Process, signals: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "save_on_preemption takes signals, which only the main thread can: call it there."
            )
        self.received: str | None = None
        self._agreement = Agreement(process)
        numbers = [getattr(signal, name) for name in signals if hasattr(signal, name)]
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def agreed(self) -> bool:
        """Whether a process had got a signal at the call before; the same on all, which all call it."""
        return self._agreement.ask_ahead(self.received is not None)

    def stop(self) -> None:
        """Put back what was done on these signals before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        before: Any = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def save_on_preemption(
    accelerator: Accelerator, output_dir: str | None, signals: Sequence[str], exit_code: int
) -> None:
    """Save, commit and exit, if a process was told to end; every process calls it at the end of each step.

    Raises:
        SystemExit: With `exit_code`, on all processes in the same step, when the checkpoint is committed.
        ValueError: If there is no folder to save to.
    """
    if accelerator._preemption is None:
        _check_folder(accelerator, output_dir)
        accelerator._preemption = Preemption(accelerator.process, signals)
    if accelerator.step or not accelerator._preemption.agreed():
        return
    received = accelerator._preemption.received
    try:
        accelerator.wait_for_save()
    except Exception as error:  # this is the last chance to save
        warn(f"The save before failed: {type(error).__name__}: {error}.")
    folder = accelerator.save_state(output_dir)
    if accelerator.is_main_process:
        why = received or "a signal to another process"
        print(f"Preempted ({why}): saved {folder}; exiting with {exit_code}.", file=sys.stderr, flush=True)
    accelerator.end_training()
    raise SystemExit(exit_code)


def _check_folder(accelerator: Accelerator, output_dir: str | None) -> None:
    config = accelerator.project_configuration
    if output_dir is None and not config.automatic_checkpoint_naming:
        raise ValueError(
            "save_on_preemption needs output_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
