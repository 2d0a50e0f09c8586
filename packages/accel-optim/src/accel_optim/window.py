"""The accumulation window: the only place that decides which micro-batch is the last one before a step.

A window is the group of micro-batches whose gradients one optimizer step uses:

    for batch in loader:
        with window:                       # counts one micro-batch, decides whether it closes the window
            loss = model(batch)
            (loss * window.loss_scale()).backward()
            optimizer.step()               # acts when the window closes
            optimizer.zero_grad()          # likewise

What the window decides is published in `GradientState.sync_gradients`; optimizer, scheduler, scaler and DDP
read it there, and nothing else sets it. The window also keeps the total weight of its losses (see
`accel_optim.weight`), which is reset with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_optim.weight import Weight, WindowWeight, positive, ratio
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from accel_optim.weight import Gradients


class Window:
    """Counts micro-batches and decides at which of them gradients are complete.

    A window closes at its `num_steps`-th micro-batch, or at the last batch of the loader that it follows when
    `sync_with_dataloader` is set. It may be entered as a context manager, once per micro-batch:

    - Entered inside itself (one micro-batch that uses several models), it counts one micro-batch.
    - Left early (`break`, `return`), it stays open: the next micro-batch, of whichever loader, continues it,
      so that gradients gathered so far are used once and none is lost.
    - Left by an exception, the micro-batch is not counted: the window is as it was before, and the next
      micro-batch takes the place of the failed one. (Gradients that its backward pass had already written
      stay.)

    The losses of a window are either means, of which each is divided by `num_steps` (`loss_scale`), or sums
    with a weight, which are divided by the total weight of the window (`weigh`); not both.

    Args:
        gradient_state: Where the settings are read, at every micro-batch, and the decision is published; by
            default a new one, which optimizers and schedulers created afterwards follow.
        num_steps: Micro-batches of a window, instead of a gradient_state.

    Raises:
        ValueError: If neither or both are passed, or the number is below 1.
    """

    def __init__(self, gradient_state: GradientState | None = None, *, num_steps: int | None = None) -> None:
        if (gradient_state is None) == (num_steps is None):
            raise ValueError(
                "Window takes num_steps, the micro-batches of a window, or a GradientState that has it: pass "
                "one of them."
            )
        if gradient_state is None:
            if not isinstance(num_steps, int) or num_steps < 1:
                raise ValueError(f"Window got num_steps={num_steps!r}; it takes an integer of at least 1.")
            gradient_state = GradientState.new(GradientAccumulationPlugin(num_steps=num_steps))
        self.gradient_state = gradient_state
        self._step = 0
        # The nesting depth of the context.
        self._depth = 0
        # What __exit__ restores after an exception: step, sync_gradients, has_means.
        self._before = (0, True, False)
        self._inside = False  # a micro-batch
        self._has_means = False
        self._weight: WindowWeight | None = None
        self._estimate: Weight | None = None

    @property
    def step(self) -> int:
        """Number of micro-batches in the open window; 0 when none is open, as at and after a boundary."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"The number of micro-batches in a window cannot be negative, got {step}.")
        # A count that never went back at a boundary (as in some checkpoints) means the same position.
        self._step = step % self.gradient_state.num_steps
        self._forget_losses()
        self.gradient_state._set_sync_gradients(self._step == 0)

    @property
    def in_micro_batch(self) -> bool:
        """Whether this is inside the context, in a micro-batch."""
        return self._inside

    @property
    def has_means(self) -> bool:
        """Whether the losses of this window are means, which are divided by `num_steps`."""
        return self._has_means

    @property
    def reduce_gradients(self) -> bool:
        """Whether the backward pass of this micro-batch has to reduce gradients over the processes.

        At the boundary it must; `sync_each_batch` makes it so at every micro-batch, which needs less memory
        under sharded engines and more communication, and leaves the boundary where it is.
        """
        state = self.gradient_state
        return state.sync_gradients or state.sync_each_batch

    def advance(self, loader: Any = None) -> bool:
        """Count one micro-batch and decide whether it closes the window.

        Args:
            loader: The loader whose last batch closes the window; by default the one that gave the batch, see
                `accel_state.open_loaders.OpenLoaders.follow`.

        Returns:
            Whether it does; also published in `gradient_state.sync_gradients`.
        """
        state = self.gradient_state
        self._next_micro_batch()
        self._inside = True
        count = self._step + 1
        # Without the properties, which cost as much as everything else here. Not equality: num_steps may have
        # been lowered in the middle of a window.
        settings = state.plugin_kwargs
        steps = settings.get("num_steps") or 1
        closes = count >= steps
        if steps > 1 or loader is not None:
            loaders, with_loader = state._loaders, settings.get("sync_with_dataloader", True)
            ends = loaders.follow(with_loader) if loader is None else loaders.follow_loader(loader)
            closes = closes or (ends and with_loader)
        # 0 again at the boundary, so that `step` only counts the micro-batches of an open window.
        self._step = 0 if closes else count
        state._set_sync_gradients(closes)
        return closes

    def loss_scale(self) -> float:
        """Return what a mean loss is multiplied by, so that a window's gradient is their mean: 1 / num_steps.

        Raises:
            ValueError: If the window has losses with a weight.
        """
        return 1.0 / self.loss_divisor()

    def loss_divisor(self) -> int:
        """Return what a mean loss is divided by, so that a window's gradient is their mean: num_steps.

        A window that the loader's end closes early is divided by the same number, as documented for
        gradient_accumulation_steps.

        Raises:
            ValueError: If the window has losses with a weight.
        """
        if self._weight is not None and self._is_open:
            raise ValueError(_MIXED)
        self._has_means = True
        return self.gradient_state.plugin_kwargs.get("num_steps") or 1  # no property, see `advance`

    def weigh(self, weight: Any, gradients: Gradients) -> Weight:
        """Count the weight of this micro-batch, and return what its sum of losses is multiplied by.

        With it the window's gradient is that of the sum of all its losses over the sum of all its weights, on
        all processes: what one batch with all the items has. A window whose weights are all 0 has the
        gradient 0. Outside any micro-batch, each call is its own window.

        At the window's end (and once in the first window) the processes sum their weights, so all of them
        must call it there. Gradients left from previous windows are scaled together with this one's.

        Args:
            weight: How many items the loss is the sum over; a number, or a tensor of one element. Several
                losses of one micro-batch give the same weight, and each is divided by the window's total.
            gradients: The gradients that the window gathers. Those gathered so far are corrected at its end.

        Returns:
            The factor: a number, or a tensor without dimensions on the accelerator.

        Raises:
            TypeError: If the weight is not a number.
            ValueError: If it is negative, not finite, or not the one that the micro-batch has, or if the
                window has losses without a weight.
        """
        if self._has_means and self._is_open:
            raise ValueError(_MIXED)
        if not self._inside:
            self._next_micro_batch()
        window_weight = self._weight = self._weight or WindowWeight()
        window_weight.count(weight)
        if self.gradient_state.sync_gradients:
            return ratio(gradients.divisor, self._sum_weights(window_weight, gradients))
        if window_weight.norm is None:
            window_weight.norm = self._expected(window_weight, gradients)
        return gradients.divisor / window_weight.norm

    def reset(self) -> None:
        """Drop the open window: the next micro-batch starts a new one, and until then steps are real."""
        self._step = 0
        self._before = (0, True, False)
        self._forget_losses()
        self.gradient_state._set_sync_gradients(True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resumes the open window, without its gradients; plain numbers."""
        weight = self._weight if self._step > 0 else None
        # float() synchronizes with an accelerator, which is fine in a checkpoint.
        gathered = None if weight is None else float(weight.gathered) + float(weight.current or 0.0)
        return {
            "step": self._step,
            "has_means": self._step > 0 and self._has_means,
            "gathered": gathered,
            "norm": None if weight is None or weight.norm is None else float(weight.norm),
            "estimate": None if self._estimate is None else float(self._estimate),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume a window whose gradients have been restored, at the next micro-batch.

        Args:
            state: What `state_dict` returned on this process.
        """
        self.step = state["step"]
        self._has_means = state["has_means"]
        self._estimate = state["estimate"]
        if state["gathered"] is not None:
            self._weight = WindowWeight()
            # The state's `gathered` includes the weight of the current micro-batch.
            self._weight.gathered, self._weight.norm = state["gathered"], state["norm"]

    def __enter__(self, loader: Any = None) -> Window:
        if self._depth == 0:
            self._before = (self._step, self.gradient_state.sync_gradients, self._has_means)
            self.advance(loader)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._inside = False
        # The failed micro-batch is undone, the window is not.
        if kind is not None:
            self._step, synced, self._has_means = self._before
            self.gradient_state._set_sync_gradients(synced)
            if self._weight is not None:
                self._weight.forget_micro_batch()

    @property
    def _is_open(self) -> bool:
        return self._inside or self._step > 0

    def _forget_losses(self) -> None:
        self._has_means = False
        self._weight = None

    def _next_micro_batch(self) -> None:
        if self._step == 0:
            self._has_means, self._weight = False, None
        elif self._weight is not None:
            self._weight.next_micro_batch()

    def _expected(self, window_weight: WindowWeight, gradients: Gradients) -> Weight:
        """The expected total: the last one, or extrapolated from the first micro-batch."""
        if self._estimate is None:
            assert window_weight.current is not None, "it was counted"
            total = gradients.total_weight(window_weight.current) * self.gradient_state.num_steps
            self._estimate = positive(total, 1.0)
        return self._estimate

    def _sum_weights(self, window_weight: WindowWeight, gradients: Gradients) -> Weight:
        """Sum the window's weight over the processes, once, and correct the accumulated gradients."""
        if window_weight.total is None:
            assert window_weight.current is not None, "it was counted"
            total = gradients.total_weight(window_weight.gathered + window_weight.current)
            if window_weight.norm is not None:
                # The previous losses were divided by an estimate of the total.
                gradients.scale(ratio(window_weight.norm, total))
            window_weight.total = total
            window_weight.norm = self._estimate = positive(
                total, 1.0 if self._estimate is None else self._estimate
            )
        return window_weight.total


_MIXED = (
    "backward was called both with and without a weight in one accumulation window. Without one, each loss "
    "is a mean and counts 1 / gradient_accumulation_steps; with one, losses are sums and count by their "
    "weights. Give a weight with every loss (weight=1 for one that is a mean), or with none."
)
