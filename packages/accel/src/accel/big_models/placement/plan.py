"""Choose a device for each layer of a model, in order, with room where offloaded layers run.

A layer is the unit that is placed: a module without children, one of a class that the user does not split, or
the parameters and buffers directly in a module with children. Devices are filled in their order with layers
in theirs, so that data passes each device once; a layer goes to the next device only when it does not fit.

Layers that share a weight (ties) are placed as one, with the weight counted once, at the place of the first
of them, if any device of the current kind has room for all; otherwise one by one, and each device counts its
own copy of the weight.

A layer on the CPU or the disk runs on the first accelerator that has layers, so room for the largest one is
kept there, and on the CPU for the largest on the disk. How much is needed depends on which layers are
offloaded, and vice versa: both grow from nothing until they agree, which takes few rounds and offloads the
fewest layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Layer(NamedTuple):
    """A part of a model that is placed on one device as one unit.

    Args:
        names: Its entries in a device map: the module, or the tensors directly in a module.
        size: Bytes of all its tensors.
        buffers: Bytes of its buffers.
        shared: Bytes of each tensor that other layers also have, by a number of the tensor.
    """

    names: tuple[str, ...]
    size: float
    buffers: float
    shared: Mapping[int, float]

    @property
    def alone(self) -> float:
        """Bytes of the tensors that no other layer has."""
        return self.size - sum(self.shared.values()) if self.shared else self.size


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model.

    Args:
        layers: In the order of the model.
        tied: For each layer that shares tensors, the layers connected by ties in order, itself included.
        spans: First layer and the one after the last of each module, parents first, level by level.
    """

    layers: Sequence[Layer]
    tied: Mapping[int, Sequence[int]]
    spans: Sequence[tuple[int, int]]

    @cached_property
    def before(self) -> Sequence[float]:
        """Cumulative bytes of the layers, without shared tensors."""
        return [0.0, *accumulate(layer.alone for layer in self.layers)]

    @cached_property
    def empty(self) -> Sequence[int]:
        """Layers without tensors, or with none that has elements."""
        return [index for index, layer in enumerate(self.layers) if layer.size == 0]


@dataclass(frozen=True)
class Target:
    """A device to fill.

    Args:
        key: Its key in a device map: a number, "cpu", "disk" ...
        capacity: Bytes.
        kind: Its kind: "cpu", "disk" or "accelerator".
    """

    key: int | str
    capacity: float
    kind: str


@dataclass(frozen=True)
class PlacementPlan:
    """Where layers go.

    Args:
        targets: The index of the device of each layer.
        reserved: Bytes that are kept free on the accelerator that runs offloaded layers.
        reserved_on_cpu: Bytes that are kept free on the CPU for layers on the disk.
    """

    targets: Sequence[int]
    reserved: float
    reserved_on_cpu: float


def make_plan(layout: ModelLayers, targets: Sequence[Target], fallback: bool = False) -> PlacementPlan:
    """Choose a device for each layer.

    Args:
        layout: The layers of the model.
        targets: The devices, in the order in which they are filled: accelerators, then the CPU, the disk.
        fallback: If the next layer is too large for a device, place the first module that fits on it, level
            by level.

    Returns:
        The plan.

    Raises:
        ValueError: If the devices are too small in total.
    """
    reserved = reserved_on_cpu = 0.0
    while True:
        found = _Placer(layout, targets, reserved, reserved_on_cpu, fallback).run()
        largest = _largest_by_kind(layout, targets, found)
        offloaded = max(largest.get("cpu", 0), largest.get("disk", 0))
        needed = offloaded if "accelerator" in largest else 0
        needed_on_cpu = largest.get("disk", 0)
        if needed <= reserved and needed_on_cpu <= reserved_on_cpu:
            return PlacementPlan(found, reserved, reserved_on_cpu)
        # Never less than before, so that the loop ends.
        reserved, reserved_on_cpu = max(reserved, needed), max(reserved_on_cpu, needed_on_cpu)


def _largest_by_kind(
    layout: ModelLayers, targets: Sequence[Target], found: Sequence[int]
) -> dict[str, float]:
    """Return the bytes of the largest layer on each kind of device in use."""
    largest = dict.fromkeys((targets[index].kind for index in set(found)), 0.0)
    if largest.keys() == {"accelerator"}:  # nothing is offloaded, so the size is not needed
        return largest
    kinds = [target.kind for target in targets]
    for layer, index in zip(layout.layers, found, strict=True):
        if layer.size > largest[kinds[index]]:
            largest[kinds[index]] = layer.size
    return largest


@dataclass
class _Placer:
    """One pass over the layers, and the content of the current device."""

    layout: ModelLayers
    targets: Sequence[Target]
    reserved: float
    reserved_on_cpu: float
    fallback: bool
    placed: list[int | None] = field(default_factory=list)
    current: int = -1
    room: float = 0
    empty: bool = True
    used_accelerator: bool = False
    placed_tensors: set[int] = field(default_factory=set)
    # By first layer: the kind of device on which ties are placed one by one, as none has room for all.
    separate: dict[int, str] = field(default_factory=dict)

    def run(self) -> list[int]:
        """Return the device of each layer."""
        count = len(self.layout.layers)
        self.placed = [None] * count
        self.next_device(self.layout.layers[0])
        start = 0
        for tied in [*self.layout.tied, count]:
            if self.fallback:
                for index in range(start, tied):
                    self.place(index)
            else:
                self.place_untied(start, tied)
            if tied < count:
                self.place(tied)
            start = tied + 1
        return self.with_empty_layers()

    def place(self, index: int) -> None:
        """Put a layer on the first device that it fits on."""
        layer = self.layout.layers[index]
        while self.placed[index] is None and layer.size > 0:
            if self.take(index) or (self.fallback and self.empty and self.take_any()):
                continue
            self.next_device(layer)

    def place_untied(self, start: int, end: int) -> None:
        """Place layers that share nothing, as many at a time as a device has room for."""
        before, empty = self.layout.before, self.layout.empty
        while start < end:
            if before[start + 1] == before[start]:
                start += 1
                continue
            fitting = bisect_right(before, before[start] + self.room, start, end + 1) - 1
            if fitting > start:
                self.placed[start:fitting] = [self.current] * (fitting - start)
                for index in empty[bisect_left(empty, start) : bisect_left(empty, fitting)]:
                    self.placed[index] = None
                self.room -= before[fitting] - before[start]
                self.empty = False
                start = fitting
            if start < end:
                self.next_device(self.layout.layers[start])

    def next_device(self, layer: Layer) -> None:
        """Go on to the next device, for a layer."""
        self.used_accelerator = self.used_accelerator or not self.empty
        self.current += 1
        if self.current == len(self.targets):
            rooms = ", ".join(f"{target.key}: {target.capacity:.0f}" for target in self.targets)
            raise ValueError(
                f"{layer.names[0]} ({layer.size:.0f} bytes) has no room left on any device of max_memory "
                f'({rooms}). Allow more memory, or leave "disk" out of max_memory, which is then not limited.'
            )
        self.room, self.empty, self.placed_tensors = self.room_on(self.targets[self.current]), True, set()

    def room_on(self, target: Target) -> float:
        """Return the bytes that a device has for layers when it is the next to be filled."""
        # Offloaded layers run on the first accelerator that has its own layers.
        if target.kind == "accelerator" and not self.used_accelerator and self.empty:
            return target.capacity - self.reserved
        return target.capacity - (self.reserved_on_cpu if target.kind == "cpu" else 0)

    def take(self, index: int) -> bool:
        """Put a layer on the current device, with those tied to it if possible; return whether it fits."""
        kind = self.targets[self.current].kind
        tied = self.layout.tied.get(index)
        if tied is not None and self.separate.get(tied[0]) != kind:
            group = [other for other in tied if self.placed[other] is None]
            if self.put(group):
                return True
            size_of_all = self.cost(group, set())
            later_targets = (target for target in self.targets[self.current + 1 :] if target.kind == kind)
            # They wait for a later device of the kind, which has room for all of them.
            if any(size_of_all <= self.room_on(target) for target in later_targets):
                return False
            self.separate[tied[0]] = kind
        return self.put([index])

    def take_any(self) -> bool:
        """Put the first module that fits on the current device, level by level; return if there is one."""
        for first, last in self.layout.spans:
            if not 0 < self.layout.before[last] - self.layout.before[first] <= self.room:
                continue
            members = set(range(first, last))
            groups = {id(group): group for index in members if (group := self.layout.tied.get(index))}
            members.update(*groups.values())
            if all(self.placed[index] is None for index in members) and self.put(sorted(members)):
                return True
        return False

    def put(self, group: Sequence[int]) -> bool:
        """Put layers on the current device if they fit; return whether they do."""
        only = self.layout.layers[group[0]]
        # Most layers share nothing, and need no sets.
        cost = only.size if len(group) == 1 and not only.shared else self.cost(group, self.placed_tensors)
        if cost > self.room:
            return False
        for index in group:
            self.placed[index] = self.current
            self.placed_tensors.update(self.layout.layers[index].shared)
        self.room -= cost
        self.empty = False
        return True

    def cost(self, group: Sequence[int], placed_tensors: set[int]) -> float:
        """Return the bytes that layers add to the placed tensors; a shared tensor counts once."""
        layers = [self.layout.layers[index] for index in group]
        shared = {number: size for layer in layers for number, size in layer.shared.items()}
        unshared = sum(size for number, size in shared.items() if number not in placed_tensors)
        return unshared + sum(layer.alone for layer in layers)

    def with_empty_layers(self) -> list[int]:
        """Return the devices; layers without tensors get that of the previous layer, or of the first."""
        if None not in self.placed:
            return self.placed  # type: ignore[return-value]
        found = next((device for device in self.placed if device is not None), 0)
        devices = []
        for device in self.placed:
            found = found if device is None else device
            devices.append(found)
        return devices
