"""Facts of the current batch, which a loader has while it is iterated."""

from __future__ import annotations

from accel_state.gradient import GradientState


class DataLoaderStateMixin:
    """Mixin with the facts of the current batch, while the loader is iterated.

    Attributes:
        end_of_dataloader: Whether the batch at hand is the last one.
        remainder: Real samples in the last step of all processes if that is not full, else 0; -1 where not
            known.
        real_samples: How many samples of each process in the step at hand are real, the rest being padding
            at the end of that process's batch; None if nothing is padded and every process has a batch.
        batch_rows: How many samples, padding included, each process has in this step, 0 if it has no batch;
            None where real_samples is.
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
        """Forget what was known about the last batch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_samples = None
        self.batch_rows = None

    def begin(self) -> None:
        """Begin an iteration: this loader becomes the active one of its gradient state."""
        self.reset()
        # Known before the first batch where there is a length: loops ask for it at their beginning too.
        self.remainder = self._known_remainder()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End the iteration: the loader that was active before is so again."""
        self.gradient_state._remove_dataloader(self)

    def _known_remainder(self) -> int:
        return -1
