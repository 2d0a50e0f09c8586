"""How an engine reduces, scales and clips gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch.nn import utils

from accel_ops.collectives import operations
from accel_optim.scaler import get_fsdp2_grad_scaler, get_grad_scaler

if TYPE_CHECKING:
    from accel.engines.base.context import EngineContext
    from accel.engines.base.loaders import Loaders


class _Engine(Protocol):
    context: EngineContext

    @property
    def loaders(self) -> Loaders: ...


class Gradients:
    """Gradients of one process, in `.grad`; created on each access.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    are_sharded: ClassVar[bool] = False
    """Whether gradients are sharded, so that in fp16 processes have to agree on which steps to skip."""

    reduces_in_backward: ClassVar[bool] = False
    """Whether backward reduces gradients unless it runs under `no_sync`; if not, `no_sync` is not entered."""

    reduction: Literal["mean", "sum"] = "mean"
    """How gradients are reduced over the data-parallel processes."""

    @property
    def data_parallel_size(self) -> int:
        """Processes whose gradients differ and are reduced: each has its own data or sequence shard."""
        return self.engine.loaders.dp_rank_and_size[1]

    @property
    def unsupported_optimizers(self) -> tuple[str, ...]:
        """Classes of torch.optim whose steps need full tensors, which no process has here."""
        return ()

    @classmethod
    def make_scaler(cls, device_type: str, **options: Any) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16 training, or None if the engine scales losses itself.

        Args:
            device_type: Type of the device that losses are on.
            **options: Those of torch.amp.GradScaler.
        """
        # Otherwise each process would decide from its own shards which steps to skip.
        if cls.are_sharded:
            return get_fsdp2_grad_scaler(device_type=device_type, **options)
        return get_grad_scaler(device_type=device_type, **options)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backward does not reduce the gradients of `model`."""
        return contextlib.nullcontext()

    def total_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """Sum a weight over the data-parallel processes.

        Args:
            weight: A number, or a scalar tensor on the accelerator.
            dtype: The precision of tensors.

        Returns:
            The same on all processes: a number if that needs no device synchronization, else a tensor.
        """
        process = self.engine.context.process
        # No collective, and no rounding to `dtype`.
        if process.world_size == 1:
            return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), weight, dtype=dtype, device=process.device)  # no copy, no wait
        total: torch.Tensor = operations.reduce(weight.to(process.device, dtype), "sum", process=process)
        # Model-parallel processes work on the same samples, with the same weight.
        total = total / (process.world_size // self.data_parallel_size)
        return total if total.device.type != "cpu" else float(total)

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients accumulated in this window, before its last backward pass reduces them."""
        multiply(gradients_of(parameters), factor)

    def tensors_with_grad(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors whose `.grad` has the gradients of parameters: by default the parameters themselves."""
        return list(parameters)

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor | None:
        """The total norm of the current gradients."""
        return utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm; returns the norm before clipping."""
        # Inlined gradients_of: one Python call less in every step.
        grads = [tensor.grad for tensor in parameters if tensor.grad is not None]
        kinds = {(type(grad), grad.device, grad.dtype) for grad in grads}
        if len(kinds) == 1:
            ((kind, device, _),) = kinds
            if kind is torch.Tensor and device.type in ("cpu", "cuda"):
                return _clip_uniform(grads, float(max_norm), float(norm_type))
        return utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        clipped = [tensor for tensor in parameters if tensor.grad is not None]
        if clipped:  # torch 2.13 fails on none
            utils.clip_grad_value_(clipped, clip_value)


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parameters that have one."""
    return [tensor.grad for tensor in parameters if tensor.grad is not None]


@torch.no_grad()
def _clip_uniform(gradients: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip gradients of one device and one dtype.

    Bitwise the same as `torch.nn.utils.clip_grad_norm_`, without its grouping by device and dtype, which
    takes most of the time for small gradients.
    """
    norms = torch._foreach_norm(gradients, norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def multiply(gradients: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place, in one call per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient  # works uncoalesced too
        by_device.setdefault(values.device, []).append(values)
    for device, tensors in by_device.items():
        # Does not wait for a factor on another device.
        local_factor = factor.to(device, non_blocking=True) if isinstance(factor, torch.Tensor) else factor
        # Private in torch, but used by its optimizers and clipping too: one kernel for many tensors.
        torch._foreach_mul_(tensors, local_factor)
