"""How an engine reduces, scales and clips gradients: the second part of the engine interface."""

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
    """Gradients that are this process's own, in `.grad`; made anew whenever it is asked for.

    Args:
        engine: Whose gradients they are.
    """

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    in_parts: ClassVar[bool] = False
    """Whether processes hold parts of gradients, so that they have to agree on what is left out in fp16."""

    reduces_in_backward: ClassVar[bool] = False
    """Whether backward reduces gradients unless it runs under `no_sync`; else nobody enters that."""

    reduction: Literal["mean", "sum"] = "mean"
    """How the gradients of the processes of `data_shard` are reduced."""

    @property
    def shards(self) -> int:
        """Processes whose gradients are reduced together: they have data, or parts of it, of their own."""
        return self.engine.loaders.data_shard[1]

    @property
    def unsupported_optimizers(self) -> tuple[str, ...]:
        """Classes of torch.optim whose steps need tensors that no process has whole here."""
        return ()

    @classmethod
    def make_scaler(cls, device_type: str, **options: Any) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16 training, or None if the engine scales losses by itself.

        Args:
            device_type: Type of the device that losses are on.
            **options: Those of torch.amp.GradScaler.
        """
        # Each process would otherwise decide by its own parts which steps are skipped.
        if cls.in_parts:
            return get_fsdp2_grad_scaler(device_type=device_type, **options)
        return get_grad_scaler(device_type=device_type, **options)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which backward leaves the gradients of `model` on their process."""
        return contextlib.nullcontext()

    def total_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """Add up a weight over the processes whose gradients are reduced together.

        Args:
            weight: A number, or a tensor without dimensions on the accelerator.
            dtype: The precision of tensors.

        Returns:
            The same on all processes: a number where the host knows it without waiting, else a tensor.
        """
        process = self.engine.context.process
        # No collective, and no rounding to `dtype`.
        if process.world_size == 1:
            return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), weight, dtype=dtype, device=process.device)  # no copy, no wait
        total: torch.Tensor = operations.reduce(weight.to(process.device, dtype), "sum", process=process)
        # Processes whose gradients are not reduced together work on the same samples, and give one weight.
        total = total / (process.world_size // self.shards)
        return total if total.device.type != "cpu" else float(total)

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients gathered in this window, before its last backward pass reduces them."""
        multiply(gradients_of(parameters), factor)

    def with_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that have the gradients of parameters: these themselves, as a rule."""
        return list(parameters)

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor | None:
        """The total norm of the gradients as they are now."""
        return utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm; returns the norm before clipping."""
        # Not by gradients_of: one call of Python less in every step.
        found = [tensor.grad for tensor in parameters if tensor.grad is not None]
        kinds = {(type(gradient), gradient.device, gradient.dtype) for gradient in found}
        if len(kinds) == 1:
            ((kind, device, _),) = kinds
            if kind is torch.Tensor and device.type in ("cpu", "cuda"):
                return _clip_alike(found, float(max_norm), float(norm_type))
        return utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]."""
        clipped = [tensor for tensor in parameters if tensor.grad is not None]
        if clipped:  # torch 2.13 fails on none
            utils.clip_grad_value_(clipped, clip_value)


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that there are."""
    return [tensor.grad for tensor in parameters if tensor.grad is not None]


@torch.no_grad()
def _clip_alike(gradients: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip gradients of one device and one dtype.

    The operations are those of `torch.nn.utils.clip_grad_norm_`, with the same bits, without its sorting by
    device and dtype: that is most of what it takes where gradients are small.
    """
    norms = torch._foreach_norm(gradients, norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def multiply(gradients: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place, all of a device at once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient  # also of one that is not coalesced
        by_device.setdefault(values.device, []).append(values)
    for device, tensors in by_device.items():
        # A factor that another device has computed is not waited for.
        here = factor.to(device, non_blocking=True) if isinstance(factor, torch.Tensor) else factor
        # A private of torch, which its optimizers and clipping use too: one kernel for many tensors.
        torch._foreach_mul_(tensors, here)
