"""Which gradients are finite, and in which order backward reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from accel.training.run import Run


@dataclass(frozen=True)
class Measured:
    """The gradients of one optimizer.

    Attributes:
        count: How many parameters have one, or a shard of one.
        broken: The parameters whose gradients are not finite.
    """

    count: int = 0
    broken: tuple[torch.Tensor, ...] = ()


def measure(param_groups: Sequence[dict[str, Any]]) -> Measured:
    """Check the gradients of an optimizer's parameters; of sharded ones this process's shard.

    Waits for the device once.
    """
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter in (item for group in param_groups for item in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        # A DTensor's shard; asking for its type would import torch.distributed.tensor.
        values = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        values = values._values() if values.is_sparse else values  # also of one that is not coalesced
        if values.numel():
            kinds.setdefault((values.device, values.dtype), []).append((parameter, values))
    broken: list[torch.Tensor] = []
    for (_, dtype), pairs in kinds.items():
        halves = dtype in (torch.float16, torch.bfloat16)
        # A private of torch, which its clipping uses too: one kernel for many tensors. The 2-norm takes a
        # seventeenth of the time of the largest value (CPU, torch 2.13); fp32 holds the squares of halves.
        norms = torch._foreach_norm(
            [values for _, values in pairs], 2, dtype=torch.float32 if halves else None
        )
        for (parameter, values), is_finite in zip(
            pairs, torch.isfinite(torch.stack(norms)).tolist(), strict=True
        ):
            # Squares of finite values overflow too.
            if not is_finite and not bool(torch.isfinite(values).all()):
                broken.append(parameter)
    return Measured(sum(map(len, kinds.values())), tuple(broken))


class BackwardOrder:
    """The order in which backward reaches parameters, recorded in the first accumulation window.

    Hooks cost a call of Python per parameter, so they are removed after that window. A model whose gradients
    call no hook (sharded ones) counts from its last parameter to its first.
    """

    def __init__(self) -> None:
        self._places: Any = WeakIdKeyDictionary()
        self._handles: list[Any] = []

    def record(self, model: torch.nn.Module) -> None:
        """Record the order of a model in the next passes."""
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(self._reached)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _reached(self, parameter: torch.Tensor) -> None:
        self._places.setdefault(parameter, len(self._places))

    def end(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def place(self, parameter: torch.Tensor, index: int) -> int:
        """The place of a parameter, which is smaller the earlier backward reaches it.

        Args:
            parameter: The parameter.
            index: Its place in the model's order.
        """
        # After all that were recorded: 2**40 is more than any model has.
        return int(self._places.get(parameter, 2**40 - index))


def parameter_names(run: Run) -> dict[int, tuple[str, int]]:
    """The name of each stepped parameter, and its place in the order of the models, by its `id`."""
    found: dict[int, tuple[str, int]] = {}
    for number, model in enumerate(run.prepared.models):
        plain = run.engine.unwrap_model(model, keep_torch_compile=False)
        prefix = f"models[{number}]." if len(run.prepared.models) > 1 else ""
        for name, parameter in plain.named_parameters():
            trained = run.engine.parameters.trained(parameter)
            found.setdefault(id(trained), (prefix + name, len(found)))
    for number, optimizer in enumerate(run.prepared.optimizers):
        for group, options in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(options["params"]):
                name = f"optimizers[{number}].param_groups[{group}]['params'][{place}]"
                found.setdefault(id(parameter), (name, len(found)))
    return found
