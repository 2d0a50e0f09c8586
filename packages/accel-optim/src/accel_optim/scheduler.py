"""A learning-rate scheduler that advances only when its optimizers have really stepped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, SequentialLR

from accel_state.gradient import GradientState
from accel_state.logging.warning import warn
from accel_state.process.state import current_process


class AcceleratedScheduler:
    """Wraps a scheduler: it may be stepped in every micro-batch, and advances when its optimizers stepped.

    Inside an accumulation window, and when an fp16 step was skipped, `step` leaves the learning rate alone.

    **Each real step advances the schedule `num_processes` times**, unless `split_batches` is set. N processes
    that each read full batches read the data in 1/N of the steps, and a schedule whose length was chosen for
    one process ends at the same point in the data. For one scheduler step per optimizer step instead, on any
    number of processes, set `GradientAccumulationPlugin(step_scheduler_per_process=False)` and specify the
    schedule's length in optimizer steps; with `split_batches` this is already so.

    Steps beyond the `total_steps` of a schedule are left out, where torch raises: the number of processes
    need not divide a schedule's length. When none is left, there is a warning, once per schedule. A
    ChainedScheduler ends with its first scheduler that ends. In a SequentialLR a scheduler that ends before
    its milestone waits for it.

    Accumulation does not change this: a window is one step, and the schedule's length counts steps, not
    micro-batches.

    `ReduceLROnPlateau`, whose patience counts measurements and not steps, advances once per call; a
    measurement outside the training loader's iteration always counts.

    Args:
        scheduler: The scheduler to wrap.
        optimizers: The optimizer, or optimizers, that it follows.
        step_with_optimizer: Whether to follow the optimizers. When False, `step` is the wrapped scheduler's.
        split_batches: Whether the loaders split one batch over the processes, so that the number of steps
            does not depend on the number of processes.
        gradient_state: The accumulation window's state to follow; by default the newest. Its
            `step_scheduler_per_process` turns the `num_processes` steps into one. Its `adjust_scheduler` says
            whether calls inside a window are counted in the scheduler's `_step_count`, torch's number of
            calls, as they would be in the same loop without accumulation; the learning rate does not depend
            on it.
        num_processes: Number of processes that read different data; by default all.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        gradient_state: GradientState | None = None,
        num_processes: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        # A sequence or one: the interface takes both.
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        processes = current_process().world_size if num_processes is None else num_processes
        # Its patience counts measurements, of which all processes make one.
        measured = isinstance(scheduler, ReduceLROnPlateau)
        self._moves = 1 if split_batches or measured else processes
        self._measured = measured
        self._ends = _has_end(scheduler)
        self._has_warned = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers stepped.

        Args:
            *args: Passed to the wrapped scheduler's step (a metric, for ReduceLROnPlateau).
            **kwargs: Likewise.
        """
        # Local names: __getattr__ makes every attribute look-up on a wrapper slow.
        scheduler, state = self.scheduler, self.gradient_state
        # A measurement of an evaluation belongs to no optimizer step.
        if not self.step_with_optimizer or (self._measured and not state._is_in_training_loop):
            scheduler.step(*args, **kwargs)
            return
        if not state.sync_gradients:
            if state.adjust_scheduler and hasattr(scheduler, "_step_count"):
                # What the wrapped scheduler's step would count, though the rate stays.
                scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if getattr(optimizer, "step_was_skipped", False):
                return
        moves = self._moves if self._moves > 1 and state.step_scheduler_per_process else 1
        # An epoch or a measurement is the user's.
        is_free = not self._ends or args or kwargs
        for move in range(moves):
            if is_free or not _has_ended(scheduler):
                scheduler.step(*args, **kwargs)
            elif _waits(scheduler):
                scheduler.last_epoch += 1
            else:
                if move == 0:
                    self._warn_at_end(moves)
                return

    def get_last_lr(self) -> Any:
        """Return the list of learning rates of the parameter groups, as last set."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """Return what the wrapped scheduler's `get_lr` computes."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rates.

        Args:
            *args: Passed to the wrapped scheduler's print_lr, where it has one (torch's have none).
            **kwargs: Likewise.
        """
        # torch's schedulers no longer have it, and the documented interface does.
        if hasattr(self.scheduler, "print_lr"):
            self.scheduler.print_lr(*args, **kwargs)
            return
        for group, rate in enumerate(self.get_last_lr()):
            print(f"Learning rate of group {group}: {float(rate):.4e}.")

    def state_dict(self) -> Any:
        """Return the state of the wrapped scheduler, a dictionary."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler.

        Args:
            state_dict: What `state_dict` returned.
        """
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # Missing during copying or unpickling, which would recurse forever.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"

    def _warn_at_end(self, moves: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn(
            f"{type(self.scheduler).__name__} is at the end of its total_steps, and this optimizer step "
            f"would advance it {moves} more time(s): steps beyond the end are left out, and the learning "
            f"rate stays unchanged. Each optimizer step advances a schedule {moves} time(s): make "
            f"total_steps at least {moves} * the number of optimizer steps."
        )


def _has_end(scheduler: Any) -> bool:
    """Whether a schedule, or one of its schedulers, has total_steps."""
    schedulers = getattr(scheduler, "_schedulers", ())  # of SequentialLR and ChainedScheduler
    return getattr(scheduler, "total_steps", None) is not None or any(map(_has_end, schedulers))


def _has_ended(scheduler: Any) -> bool:
    """Whether the next step would advance a schedule, or one of its schedulers, beyond its total_steps."""
    length = getattr(scheduler, "total_steps", None)
    if length is not None:
        return bool(scheduler.last_epoch >= length)
    schedulers = getattr(scheduler, "_schedulers", ())
    if isinstance(scheduler, SequentialLR):
        following = scheduler.last_epoch + 1
        if following in scheduler._milestones:  # where the next scheduler starts
            return False
        schedulers = schedulers[bisect_right(scheduler._milestones, following) :][:1]
    return any(map(_has_ended, schedulers))


def _waits(scheduler: Any) -> bool:
    """Whether a schedule continues with another scheduler at a later milestone."""
    return isinstance(scheduler, SequentialLR) and scheduler.last_epoch + 1 < scheduler._milestones[-1]
