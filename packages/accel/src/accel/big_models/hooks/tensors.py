"""The tensors of a module, and the places of those that are offloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.big_models.parameters import META, move
from accel_ckpt.weights.placement import memory_device
from accel_ops.modules import unsaved_buffers
from accel_state.process.state import current_process

Device = int | str | torch.device

Copies = dict[torch.device, torch.Tensor]
# By `tied_key` of a tied weight: its copies by device, each made once.
TiedParameters = dict[int, Copies]


def as_device(device: Device) -> torch.device:
    """Parse a device; a number is the index of an accelerator.

    Raises:
        ValueError: If it is a number, and this process uses no accelerator.
    """
    if isinstance(device, int) and current_process().device.type == "cpu":
        raise ValueError(f'this process uses no accelerator, so it has no device {device}. Use "cpu".')
    return device if isinstance(device, torch.device) else torch.device(memory_device(device))


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; one without an index ("cuda") matches any of its type.

    Args:
        tensor: The tensor; its device has an index if there may be several.
        device: The device.
    """
    here = tensor.device
    return here.type == device.type and device.index in (None, here.index)


def tied_key(tensor: torch.Tensor) -> int:
    """Identify a weight in a map of tied ones: by its address, or on the meta device by the object's id."""
    try:
        return tensor.data_ptr() or id(tensor)
    except RuntimeError:  # of a subclass without its own memory
        return id(tensor)


@dataclass(frozen=True)
class Kept:
    """A tensor of a module that stays on the execution device, while weights are offloaded.

    Args:
        table: The module's parameters, or its buffers.
        leaf: The key there.
        device: Where it was before.
        tied: Copies by device if other modules share it; else None.
    """

    table: dict[str, Any]
    leaf: str
    device: torch.device
    tied: Copies | None

    def restore(self, tied_params_map: TiedParameters | None) -> None:
        """Move the tensor back to its device, once for all modules that share it."""
        current: torch.Tensor | None = self.table.get(self.leaf)
        if current is None or META in (current.device, self.device):
            return
        back: Copies = {}
        # Among all copies: their keys may have no index ("cuda"), unlike a tensor's device.
        shared = self.tied is not None and any(current is copy for copy in self.tied.values())
        if tied_params_map is not None and shared:
            # Kept alive by the map, so that its key is not reused.
            back = tied_params_map.setdefault(tied_key(current), {})
        if self.device not in back:
            back[self.device] = move(current, current, self.device)
        self.table[self.leaf] = back[self.device]


@dataclass(frozen=True)
class Slot:
    """One offloaded weight of a module.

    Args:
        table: The module's parameters, or its buffers.
        leaf: The key there.
        name: The key in the map of weights.
        placeholder: The tensor in its place while it is offloaded.
        tied: Copies by device if other modules share it; else None.
    """

    table: dict[str, Any]
    leaf: str
    name: str
    placeholder: torch.Tensor
    tied: Copies | None

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer, which a forward may update."""
        return not isinstance(self.placeholder, nn.Parameter)


def list_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[dict[str, Any], str, str, str]]:
    """List the tensors of modules, without those that are None.

    Args:
        modules: (name, module) of each.

    Yields:
        The table that has the tensor, the key there, its name and its kind: "parameter", "buffer" or "own
        buffer" for one that is not in the state dict.
    """
    for path, module in modules:
        prefix = f"{path}." if path else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield module._parameters, leaf, prefix + leaf, "parameter"
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                kind = "own buffer" if leaf in unsaved_buffers(module) else "buffer"
                yield module._buffers, leaf, prefix + leaf, kind
