"""Which processes save: all, or the main one alone, as under `if accelerator.is_main_process:`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accel.engines.base.states import States
from accel_ops.collectives.callers import who_calls
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_state.process.facts import Process

PATIENCE_S = 30.0
"""How long the main process waits for the others, in seconds, before it saves alone."""


def savers(run: Run, what: str) -> Process | None:
    """Find out whether all processes save together. Those that call `save_state` or `save_model` call this.

    Of replicas the main process can save alone. Engines that have no whole model on one process need all.

    Args:
        run: Whose state is saved.
        what: The method, for messages.

    Returns:
        This process, whose collectives all join; the main process as the only one of a run, if the others
        do not come; None on another one that comes when the main process has saved without it.

    Raises:
        RuntimeError: If the main process does not come for as long as a collective would wait.
    """
    process = run.process
    if type(run.engine.states) is not States:
        return process
    who = who_calls(process, PATIENCE_S)
    if who == "all":
        return process
    if who == "main before":
        warn(
            f"process {process.rank} calls {what} after the main process, which had waited for "
            f"{PATIENCE_S:g} s and has saved without it: the random generators of process {process.rank} are "
            "not saved.",
            about="process",
        )
        return None
    if who == "main alone":
        warn(
            f"the main process calls {what}, and the others have not within {PATIENCE_S:g} s: it saves "
            "alone, without their random generators, so that training with dropout and the like does not go "
            "on exactly. Call it on every process, outside of `if accelerator.is_main_process:`."
        )
    return replace(process, world_size=1, local_world_size=1)
