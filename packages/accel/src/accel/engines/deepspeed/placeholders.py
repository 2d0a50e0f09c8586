"""Placeholders for an optimizer and a scheduler that DeepSpeed creates from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accel.engines.common.placeholders import PlaceholderOptimizer, PlaceholderScheduler


class DummyOptim(PlaceholderOptimizer):
    """Stands for the optimizer of DeepSpeed's configuration; `prepare` returns the real one.

    Args:
        params: Parameters, or parameter groups, to optimize.
        lr: Value for an "auto" learning rate.
        weight_decay: Value for an "auto" weight decay.
        **kwargs: Values for other "auto" settings under `optimizer.params`, by name.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params = [
            # As lists: parameters may be generators, which can be read only once.
            {**item, "params": list(item["params"])} if isinstance(item, dict) else item
            for item in params
        ]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as in an optimizer."""
        defaults = {"lr": self.lr, "weight_decay": self.weight_decay, **self.kwargs}
        if self.params and isinstance(self.params[0], dict):
            return [{**defaults, **group} for group in self.params]
        return [{**defaults, "params": self.params}]


class DummyScheduler(PlaceholderScheduler):
    """Stands for the scheduler of DeepSpeed's configuration; `prepare` returns the real one.

    Args:
        optimizer: The optimizer (a DummyOptim, or a real one) whose learning rate is scheduled.
        total_num_steps: Value for an "auto" length, in the steps of one process.
        warmup_num_steps: Value for an "auto" warm-up, in the steps of one process.
        lr_scheduler_callable: Creates the scheduler from the optimizer if the configuration has none.
        **kwargs: Values for other "auto" settings under `scheduler.params`, by name.
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
