"""Offloaded buffers that a forward updates, such as running statistics: their stored values are outdated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from accel.big_models.hooks.tensors import Slot
from accel.big_models.parameters import META, bring_to


def versioned_copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with a version counter for changes by a forward, which inference tensors lack."""
    with torch.inference_mode(False):
        return value.clone()


class UpdatedBuffers:
    """Finds the buffers of a module that a forward has updated; they are no longer offloaded."""

    def __init__(self) -> None:
        # Buffers by name, as they were before the calls that are running.
        self._before: dict[str, torch.Tensor] = {}
        self._slots: list[Slot] = []

    def watch(self, slot: Slot, value: torch.Tensor) -> None:
        """Compare a buffer, once the calls have ended, with its state before them.

        Args:
            slot: The buffer's slot.
            value: The tensor that was put in its place, from `versioned_copy`.
        """
        self._before[slot.name] = value

    def take_from(self, slots: list[Slot], stored: Callable[[Slot], torch.Tensor], *, training: bool) -> None:
        """Remove those that a forward has updated from a list, and leave them where they are.

        Args:
            slots: The list, which is changed in place.
            stored: Returns the stored value of a slot.
            training: Whether the module is in training.
        """
        if self._before:
            updated = {slot.name for slot in slots if self._is_updated(slot, stored, training)}
            self._slots += [slot for slot in slots if slot.name in updated]
            slots[:] = [slot for slot in slots if slot.name not in updated]
            self._before.clear()

    def _is_updated(self, slot: Slot, stored: Callable[[Slot], torch.Tensor], training: bool) -> bool:
        before = self._before.get(slot.name)
        if before is None:
            return False
        current = slot.table[slot.leaf]
        if current is not before or before._version > 0:
            return True
        # Writes through .data, as some modules do in training, are not counted.
        return training and not torch.equal(current, bring_to(current.device, stored(slot), current))

    def restore(self, devices: Mapping[str, torch.device]) -> None:
        """Move the removed ones to their devices; those from the meta device stay where they are.

        Args:
            devices: Where each was before it was offloaded, by name.
        """
        for slot in self._slots:
            current, device = slot.table[slot.leaf], devices[slot.name]
            if current is not None and device != META:
                slot.table[slot.leaf] = current.to(device)
