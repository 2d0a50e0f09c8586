"""An engine in its own package: replicas whose gradients are averaged once per window, after backward."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from accel.engines import Engine, EngineTraits
from accel_ops.collectives import operations


@dataclass
class LateAverageSettings:
    """Passed in `kwargs_handlers`, it selects the engine.

    Args:
        average_in: The dtype in which gradients travel; None: their own.
    """

    engine: ClassVar[str] = "late_average"  # the entry point's name

    average_in: torch.dtype | None = None


class LateAverage(Engine):
    """Every process has the full model, and nothing is sent while backward runs."""

    name = "late_average"
    traits = EngineTraits(settings_type=LateAverageSettings)

    def __init__(self, context):
        super().__init__(context)
        self.trained = {}  # by id, as tensors compare by value

    def setup_model(self, model):
        """Start from the first process's weights."""
        self.broadcast([*model.parameters(), *model.buffers()])
        self.trained.update((id(parameter), parameter) for parameter in model.parameters())
        return model

    def setup_optimizer(self, optimizer, place):
        """Include parameters that belong to no model, such as a learned temperature."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.broadcast(parameters)
        self.trained.update((id(parameter), parameter) for parameter in parameters)
        return super().setup_optimizer(optimizer, place)

    def broadcast(self, tensors):
        """Broadcast the first process's values."""
        if self.context.process.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def release(self):
        """Drop the references to parameters, for `free_memory`."""
        self.trained.clear()

    def backward(self, loss, **kwargs):
        """Average at the end of a window; averaging again changes nothing."""
        super().backward(loss, **kwargs)
        if self.context.gradient_state.sync_gradients:
            for parameter in self.trained.values():
                if parameter.requires_grad:  # processes may have used different ones
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.average(gradient)

    def average(self, gradient):
        """The mean over all processes."""
        dtype = self.context.settings.average_in or gradient.dtype
        mean = operations.reduce(gradient.to(dtype), "mean", process=self.context.process)
        return mean.to(gradient.dtype)
