"""The accumulation window: the one owner of the question "is this micro-batch the last one before a step?".

A window is the group of micro-batches whose gradients one optimizer step uses:

    for batch in loader:
        with window:                       # counts one micro-batch, decides whether it closes the window
            loss = model(batch)
            (loss * window.loss_scale()).backward()
            optimizer.step()               # acts when the window closes
            optimizer.zero_grad()          # likewise

What the window decides is published in `GradientState.sync_gradients`; optimizer, scheduler, scaler and DDP
read it there, and nothing else sets it. What a window knows lives here, so that a total weight (the number of
tokens of a ragged window, say) is one more number beside `step`, opened and closed with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from accel_state.gradient import GradientState

__all__ = ["Window"]


class Window:
    """Counts micro-batches and decides at which of them gradients are complete.

    A window closes at its `num_steps`-th micro-batch, or at the loader's last batch when
    `sync_with_dataloader` is set. It may be entered as a context manager, once per micro-batch:

    - Entered inside itself (one micro-batch that uses several models), it counts one micro-batch.
    - Left early (`break`, `return`), it stays open: the next micro-batch, of whichever loader, continues it,
      so that gradients gathered so far are used once and none is lost.
    - Left by an exception, the micro-batch is not counted: the window is as it was before, and the next
      micro-batch takes the place of the failed one. (Gradients that its backward pass had already written
      stay.)

    Args:
        gradient_state: Where the settings are read, at every micro-batch, and the decision is published.
    """

    def __init__(self, gradient_state: GradientState) -> None:
        self.gradient_state = gradient_state
        self._step = 0
        self._depth = 0
        self._before = (0, True)

    @property
    def step(self) -> int:
        """Number of micro-batches in the open window; 0 when none is open, as at and after a boundary."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"The number of micro-batches in a window cannot be negative, got {step}.")
        # A count that never went back at a boundary (as some checkpoints hold it) means the same position.
        self._step = step % self.gradient_state.num_steps
        self.gradient_state._set_sync_gradients(self._step == 0)

    @property
    def reduce_gradients(self) -> bool:
        """Whether the backward pass of this micro-batch has to reduce gradients over the processes.

        At the boundary it must; `sync_each_batch` makes it so at every micro-batch, which needs less memory
        under sharded engines and more communication, and leaves the boundary where it is.
        """
        state = self.gradient_state
        return state.sync_gradients or state.sync_each_batch

    def advance(self) -> bool:
        """Count one micro-batch and decide whether it closes the window.

        Returns:
            Whether it does. The same is found in `gradient_state.sync_gradients` from now on.
        """
        state = self.gradient_state
        count = self._step + 1
        closes = count >= state.num_steps or (state.sync_with_dataloader and state.end_of_dataloader)
        self._step = 0 if closes else count
        state._set_sync_gradients(closes)
        return closes

    def loss_scale(self) -> float:
        """Return what a mean loss is multiplied by, so that a window's gradient is their mean.

        This is 1 / num_steps. A window that the loader's end closes early is scaled by the same number, as
        documented for gradient_accumulation_steps.
        """
        return 1.0 / self.gradient_state.num_steps

    def reset(self) -> None:
        """Forget the open window: the next micro-batch starts a new one, and until then steps are real."""
        self._step = 0
        self._before = (0, True)
        self.gradient_state._set_sync_gradients(True)

    def __enter__(self) -> Window:
        if self._depth == 0:
            self._before = (self._step, self.gradient_state.sync_gradients)
            self.advance()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and kind is not None:
            self._step, synced = self._before
            self.gradient_state._set_sync_gradients(synced)
