"""Releasing what was prepared, and the end of training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel.training.gradients import drop_gradients
from accel_ops.memory import release_memory

if TYPE_CHECKING:
    from accel.training.run import Run


def free_memory(run: Run, objects: Sequence[Any]) -> list[Any]:
    """See `Accelerator.free_memory`."""
    from accel_data.order.seeding import reset_seeding

    reset_seeding(run.gradient_state)
    # Before the objects are dropped, through which the gradients are found.
    drop_gradients(run)
    run.prepared.clear()
    run.engine.release()  # what engines hold themselves (DeepSpeed's and Megatron's models)
    run.lomo = None
    run.window.reset()
    return release_memory(*objects)


def end_training(run: Run) -> None:
    """See `Accelerator.end_training`."""
    with contextlib.ExitStack() as ending:  # from the last to the first, whatever one of them raises
        ending.callback(run.state.destroy_process_group)
        for observer in run.observers:
            ending.callback(observer.stop)
        run.observers = []
        run.gradient_state.events = None
        # A run that never saves does not import the code of saving at its end.
        if "accel_ckpt.background.thread" in sys.modules:
            ending.callback(sys.modules["accel_ckpt.background.thread"].wait)
