"""Saving when the machine is about to be taken away: a signal to any process, and all save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel.saving.signals import Preemption

if TYPE_CHECKING:
    from accel.training.run import Run

__all__ = ["announced_end"]


def announced_end(run: Run, output_dir: str | None, signals: Sequence[str]) -> str | None:
    """Return the signal to end that any process got; every process calls it at the end of each step.

    Args:
        run: What would be saved.
        output_dir: The folder; not needed with automatic naming.
        signals: Names of the signals, which the first call takes.

    Returns:
        Its name, on all processes in the same step, outside of accumulation windows; None if there is none.

    Raises:
        ValueError: If there is no folder to save to.
        RuntimeError: If this is not the main thread.
    """
    if run.preemption is None:
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
