"""Saving when the machine is about to be taken away: a signal to any process, and all save."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel.saving.save import save_state, wait_for_save
from accel.saving.signals import Preemption
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.training.run import Run

__all__ = ["EXIT_CODE", "SIGNALS", "save_if_preempted"]

EXIT_CODE = 75
"""How a process ends that has saved because it was preempted (EX_TEMPFAIL: start it again)."""

SIGNALS = ("SIGTERM", "SIGUSR1")


def save_if_preempted(run: Run, output_dir: str | None, signals: Sequence[str], exit_code: int) -> bool:
    """Save and commit, if a process was told to end; every process calls it at the end of each step.

    Args:
        run: What is saved.
        output_dir: The folder; not needed with automatic naming.
        signals: Names of the signals, which the first call takes.
        exit_code: How the caller ends the process, for the message.

    Returns:
        Whether it saved, on all processes in the same step.

    Raises:
        ValueError: If there is no folder to save to.
        RuntimeError: If this is not the main thread.
    """
    if run.preemption is None:
        _check_folder(run, output_dir)
        run.preemption = Preemption(run.process, signals)
    if run.window.step or not run.preemption.agreed():
        return False
    received = run.preemption.received
    try:
        wait_for_save()
    except Exception as error:  # this is the last chance to save
        warn(f"The save before failed: {type(error).__name__}: {error}.")
    folder = save_state(run, output_dir)
    if run.process.is_main:
        why = received or "a signal to another process"
        print(f"Preempted ({why}): saved {folder}; exiting with {exit_code}.", file=sys.stderr, flush=True)
    return True


def _check_folder(run: Run, output_dir: str | None) -> None:
    config = run.project_configuration
    if output_dir is None and not config.automatic_checkpoint_naming:
        raise ValueError(
            "save_on_preemption needs output_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
