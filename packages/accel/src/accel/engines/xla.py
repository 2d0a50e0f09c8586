"""XLA devices (TPUs): replicas whose gradients torch_xla averages once per window.

Operations on XLA devices are recorded and run when a step is marked: here by `optimizer.step()`, and by
loaders after each batch. None of this has been run on torch_xla, which is not available for the torch that
accel is tested with: the calls are those of torch_xla 2.9, and the tests use a fake of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from accel.engines.base import Engine, Gradients, Loaders, States
from accel.engines.base.context import EngineContext
from accel.engines.common.full_state import FullStateOptimizer
from accel.engines.common.loader import EngineLoader
from accel_ops.trees.send import send_to_device
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scaler import get_grad_scaler
from accel_state.enums import DistributedType


def _xla_model() -> Any:
    # Imported on use, as torch_xla is optional.
    return import_module("torch_xla.core.xla_model")


def _end_step() -> None:
    """Run the recorded operations, as `xla_model.mark_step` did before torch_xla 2.5."""
    import_module("torch_xla").sync()


class XLALoaders(Loaders):
    """Loaders that mark steps."""

    def wrap_loader(self, loader: Any) -> Any:
        """The prepared loader, which marks a step after each batch, for loops that only evaluate."""
        return loader if isinstance(loader, XLALoader) else XLALoader(loader)


class XLAGradients(Gradients):
    """Gradients that are averaged before they are clipped."""

    engine: XLAEngine

    @classmethod
    def make_scaler(cls, device_type: str, **options: Any) -> torch.amp.GradScaler:
        """The scaler of torch_xla."""
        scaler: torch.amp.GradScaler = get_grad_scaler(DistributedType.XLA, **options)
        return scaler

    def clip_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Average the gradients, unless already done, and clip them by their norm."""
        self.engine.reduce_gradients()
        return super().clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Average the gradients, unless already done, and clip each."""
        self.engine.reduce_gradients()
        super().clip_value(parameters, clip_value)


class XLAStates(States):
    """States, copied to the CPU first."""

    engine: XLAEngine

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state on the CPU, as files must not depend on XLA devices."""
        state: dict[str, Any] = send_to_device(dict(super().state_dict(model, unwrap)), "cpu")
        return state

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer with its state on the CPU."""
        return FullStateOptimizer(optimizer, send_to_device(optimizer.state_dict(), "cpu"))


class XLAEngine(Engine):
    """Every process has the full model on one XLA device."""

    loaders_type = XLALoaders
    gradients_type = XLAGradients
    states_type = XLAStates

    name = "xla"

    ignored_handlers: ClassVar = {
        "ddp": "gradients are reduced without DistributedDataParallel, whose options can be left out"
    }

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        if context.settings is not None:
            raise ValueError(
                "fsdp_plugin, megatron_lm_plugin and deepspeed_plugin, and the variables that select them, "
                "are not supported on XLA devices, where every process has the full model. Leave them out."
            )
        # Ordered, unlike a WeakSet.
        self._optimizers: weakref.WeakKeyDictionary[XLAOptimizer, None] = weakref.WeakKeyDictionary()

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Broadcast the weights of the first process to the model."""
        if self.context.process.world_size > 1:
            # A collective of torch_xla: every process wraps its models in the same order.
            _xla_model().broadcast_master_param(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Wrap an optimizer: gradients are averaged before its step, and the step is marked afterwards."""
        prepared = XLAOptimizer(
            optimizer,
            self.reduce_gradients,
            device_placement=place,
            scaler=self.context.scaler,
            gradient_state=self.context.gradient_state,
        )
        self._optimizers[prepared] = None
        return prepared

    # Gradients

    def reduce_gradients(self) -> None:
        """Average the gradients of all prepared optimizers, once at the end of a window."""
        state = self.context.gradient_state
        # Clipping may have reduced them already: once per window.
        if self.context.process.world_size == 1 or not state.sync_gradients or state.is_xla_gradients_synced:
            return
        # In order: all processes must reduce the same gradients at the same time.
        for optimizer in self._optimizers:
            _xla_model().reduce_gradients(optimizer.optimizer)
        state.is_xla_gradients_synced = True


class XLAOptimizer(AcceleratedOptimizer):
    """An optimizer whose gradients are averaged before they are unscaled, and whose step is marked.

    Args:
        optimizer: The optimizer.
        reduce_gradients: Averages the gradients of a window that has ended.
        **options: Options of AcceleratedOptimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, reduce_gradients: Callable[[], None], **options: Any
    ) -> None:
        super().__init__(optimizer, **options)
        self._reduce_gradients = reduce_gradients

    def unscale_gradients(self) -> None:
        """Average the gradients, and divide them by the loss scale."""
        self._reduce_gradients()
        super().unscale_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, step and mark the step, at the window's boundary only."""
        self._reduce_gradients()
        result = super().step(closure)
        if self.gradient_state.sync_gradients:
            self.gradient_state.is_xla_gradients_synced = False
            _end_step()
        return result


class XLALoader(EngineLoader):
    """A prepared loader that marks a step after each batch; everything else is the prepared loader's.

    torch_xla's MpDeviceLoader does the same, and reads ahead in a thread. The prepared loader must not be
    read ahead of the loop: it marks the end of the epoch, and of the accumulation window.

    Args:
        loader: The prepared loader, which moves batches to the device.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        for batch in self.loader:
            yield batch
            _end_step()
