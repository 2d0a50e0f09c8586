"""An engine in its own package: replicas whose gradients are averaged once per window, after backward."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from accel.engines import Engine
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
    settings_type = LateAverageSettings

    def __init__(self, context):
        super().__init__(context)
        self.parameters = {}  # by id, as tensors compare by value

    def wrap_model(self, model):
        """Start from the first process's weights."""
        self.broadcast([*model.parameters(), *model.buffers()])
        self.parameters.update((id(parameter), parameter) for parameter in model.parameters())
        return model

    def prepare_optimizer(self, optimizer, place):
        """Include parameters that belong to no model, such as a learned temperature."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.broadcast(parameters)
        self.parameters.update((id(parameter), parameter) for parameter in parameters)
        return super().prepare_optimizer(optimizer, place)

    def broadcast(self, tensors):
        """Broadcast the first process's values."""
        if self.context.process.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def release(self):
        """Drop the references to parameters, for `free_memory`."""
        self.parameters.clear()

    def backward(self, loss, **kwargs):
        """Average at the end of a window; averaging again changes nothing."""
        super().backward(loss, **kwargs)
        if self.context.gradient_state.sync_gradients:
            trained = [item for item in self.parameters.values() if item.requires_grad]
            for parameter in trained:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.average(gradient)  # processes may have used different parameters

    def average(self, gradient):
        """The mean over all processes."""
        dtype = self.context.settings.average_in or gradient.dtype
        mean = operations.reduce(gradient.to(dtype), "mean", process=self.context.process)
        return mean.to(gradient.dtype)
