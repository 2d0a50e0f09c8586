"""What a script prepares in the place of a schedule that Megatron-LM makes."""

from __future__ import annotations

from typing import Any

from accel.engines.common.stand_ins import SchedulerStandIn

__all__ = ["MegatronLMDummyScheduler"]


class MegatronLMDummyScheduler(SchedulerStandIn):
    """Stands for the schedule that Megatron-LM makes.

    Args:
        optimizer: The optimizer that is scheduled.
        total_num_steps: Length of the schedule, in the steps that one process would need.
        warmup_num_steps: Steps over which the learning rate grows, counted alike.
        **kwargs: Kept as attributes, for code that reads them.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.__dict__.update(kwargs)
