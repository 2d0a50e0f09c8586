"""Stand-ins for an optimizer and a schedule that DeepSpeed makes by itself, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accel.engines.common.placeholders import PlaceholderOptimizer, PlaceholderScheduler


class DummyOptim(PlaceholderOptimizer):
    """Stands for the optimizer of DeepSpeed's configuration; `prepare` returns the real one.

    Args:
        params: Parameters, or parameter groups, to optimize.
        lr: What an "auto" learning rate becomes.
        weight_decay: What an "auto" weight decay becomes.
        **kwargs: What other "auto" settings under `optimizer.params` become, by name.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = [
            # As lists: parameters may come as generators, which can be read once.
            {**item, "params": list(item["params"])} if isinstance(item, dict) else item
            for item in params
        ]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as groups, as an optimizer has them."""
        defaults = {"lr": self.lr, "weight_decay": self.weight_decay, **self.kwargs}
        if self.params and isinstance(self.params[0], dict):
            return [{**defaults, **group} for group in self.params]
        return [{**defaults, "params": self.params}]


class DummyScheduler(PlaceholderScheduler):
    """Stands for the schedule of DeepSpeed's configuration; `prepare` returns the real one.

    Args:
        optimizer: The optimizer (a DummyOptim, or a real one) whose learning rate is scheduled.
        total_num_steps: What an "auto" length becomes, in the steps of one process.
        warmup_num_steps: What an "auto" warm-up becomes, in the steps of one process.
        lr_scheduler_callable: Makes the schedule from the optimizer, where the configuration has none.
        **kwargs: What other "auto" settings under `scheduler.params` become, by name.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
