"""XLA devices (TPUs): replicas whose gradients torch_xla averages once per window.

Operations on XLA devices are recorded and run when a step is marked: here by `optimizer.step()`, and by
loaders after each batch. None of this has been run on torch_xla, which is not available for the torch that
accel is tested with: the calls are those of torch_xla 2.9, and the tests use a fake of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from accel.engines.base import Engine
from accel.engines.common.full_state import FullStateOptimizer
from accel.engines.common.loader import EngineLoader
from accel.engines.context import EngineContext, EngineTraits
from accel_ops.trees.send import send_to_device
from accel_optim.optimizer import AcceleratedOptimizer


def _xla_model() -> Any:
    # Imported on use, as torch_xla is optional.
    return import_module("torch_xla.core.xla_model")


def _end_step() -> None:
    """Run the recorded operations, as `xla_model.mark_step` did before torch_xla 2.5."""
    import_module("torch_xla").sync()


class XLAEngine(Engine):
    """Every process has the full model on one XLA device."""

    name = "xla"
    traits = EngineTraits(
        saves_collectively=True,
        ignored_handlers={
            "ddp": "gradients are reduced without DistributedDataParallel, whose options can be left out"
        },
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        if context.settings is not None:
            raise ValueError(
                "fsdp_plugin, megatron_lm_plugin and deepspeed_plugin, and the variables that select them, "
                "are not supported on XLA devices, where every process has the full model. Leave them out."
            )
        # Ordered, unlike a WeakSet.
        self._optimizers: weakref.WeakKeyDictionary[XLAOptimizer, None] = weakref.WeakKeyDictionary()

    def setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Broadcast the weights of the first process to the model."""
        if self.context.process.world_size > 1:
            # A collective of torch_xla: every process wraps its models in the same order.
            _xla_model().broadcast_master_param(model)
        return model

    def setup_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Wrap an optimizer: gradients are averaged before its step, and the step is marked afterwards."""
        prepared = XLAOptimizer(
            optimizer,
            device_placement=place,
            scaler=self.context.scaler,
            gradient_state=self.context.gradient_state,
            gradient_sync=self,
        )
        self._optimizers[prepared] = None
        return prepared

    def wrap_loader(self, loader: Any) -> Any:
        """The prepared loader, which marks a step after each batch, for loops that only evaluate."""
        return loader if isinstance(loader, XLALoader) else XLALoader(loader)

    # In a step

    def reduce_accumulated(self) -> None:
        """Average the gradients of all prepared optimizers, once at the end of a window."""
        state = self.context.gradient_state
        # Clipping may have reduced them already: once per window.
        if self.context.process.world_size == 1 or not state.sync_gradients or state.is_xla_gradients_synced:
            return
        # In order: all processes must reduce the same gradients at the same time.
        for optimizer in self._optimizers:
            _xla_model().reduce_gradients(optimizer.optimizer)
        state.is_xla_gradients_synced = True

    # Saving

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state on the CPU, as files must not depend on XLA devices."""
        state: dict[str, Any] = send_to_device(dict(super().state_dict(model, unwrap)), "cpu")
        return state

    def to_save(self, item: Any) -> Any:
        """The model, or the optimizer with its state on the CPU."""
        if isinstance(item, torch.nn.Module):
            return super().to_save(item)
        return FullStateOptimizer(item, send_to_device(item.state_dict(), "cpu"))


class XLAOptimizer(AcceleratedOptimizer):
    """An optimizer whose gradients are averaged before they are unscaled, and whose step is marked."""

    def unscale_gradients(self) -> None:
        """Average the gradients, and divide them by the loss scale."""
        if self.gradient_sync is not None:
            self.gradient_sync.reduce_accumulated()
        super().unscale_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step and mark the step, at the window's boundary only."""
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
