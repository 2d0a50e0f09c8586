"""Information about the current batch, available while a loader is iterated."""

from __future__ import annotations

from accel_state.gradient import GradientState


class DataLoaderStateMixin:
    """Mixin with information about the current batch while the loader is iterated.

    Attributes:
        end_of_dataloader: Whether the current batch is the last one.
        remainder: Real samples over all processes in an incomplete last step, 0 if it is full; -1 if unknown.
        real_samples: Number of real samples of each process in the current step; the rest is padding at the
            end of its batch. None if nothing is padded and every process has a batch.
        batch_rows: Number of samples of each process in the current step, padding included; 0 if it has no
            batch. None if real_samples is None.
        gradient_state: The state that is notified when iteration begins and ends.
    """

    end_of_dataloader: bool
    remainder: int
    real_samples: tuple[int, ...] | None
    batch_rows: tuple[int, ...] | None
    gradient_state: GradientState

    def __init__(self) -> None:
        self.gradient_state = GradientState()
        self.reset()

    def reset(self) -> None:
        """Clear the information about the last batch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_samples = None
        self.batch_rows = None

    def begin(self) -> None:
        """Begin an iteration: this loader becomes the active one of its gradient state."""
        self.reset()
        # Known before the first batch if there is a length: loops also read it at their beginning.
        self.remainder = self._remainder_if_known()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End the iteration: the previously active loader becomes the active one again."""
        self.gradient_state._remove_dataloader(self)

    def _remainder_if_known(self) -> int:
        return -1
