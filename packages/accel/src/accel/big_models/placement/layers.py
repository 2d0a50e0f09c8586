"""The layers of a model, which are placed as one unit: their sizes and shared tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from accel.big_models.placement.plan import Layer, ModelLayers
from accel_ops.module_sizes import Dtype, size_function

_NOTHING: Mapping[int, float] = {}


def make_layout(
    model: torch.nn.Module,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> ModelLayers:
    """Split a model into layers, in one pass over its tensors.

    Args:
        model: The model; it may be on the meta device.
        no_split_module_classes: Names of classes whose modules are layers.
        dtype: Dtype that weights will be converted to, as in `tensor_sizes`.
        special_dtypes: Dtypes that single tensors will be converted to, by full name.

    Returns:
        The layers.
    """
    kept = no_split_module_classes or ()
    found = _Found({kept} if isinstance(kept, str) else frozenset(kept), size_function(dtype, special_dtypes))
    found.visit("", model, 0)
    shared: dict[int, dict[int, float]] = {}
    for number, users in found.users.items():
        for index in users:
            shared.setdefault(index, {})[number] = found.tensors[number][1]
    layers = [
        Layer(names, size, buffers, shared.get(index, _NOTHING))
        for index, (names, size, buffers) in enumerate(
            zip(found.names, found.sizes, found.buffers, strict=True)
        )
    ]
    return ModelLayers(layers, _tied(found.users.values()), list(chain.from_iterable(found.levels)))


@dataclass
class _Found:
    """Layers as they are found, each with its names and bytes, and their tensors.

    Attributes:
        tensors: First layer and bytes of each tensor, by its number.
        users: The layers of each shared tensor, by its number.
        levels: First layer and the one after the last of each module, for each level of the tree.
    """

    kept: Collection[str]
    size_of: Callable[[str, torch.Tensor], float]
    names: list[tuple[str, ...]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    buffers: list[float] = field(default_factory=list)
    tensors: dict[int, tuple[int, float]] = field(default_factory=dict)
    users: dict[int, list[int]] = field(default_factory=dict)
    levels: list[list[tuple[int, int]]] = field(default_factory=list)

    def visit(self, name: str, module: torch.nn.Module, level: int) -> None:
        first = len(self.names)
        while len(self.levels) < level + 2:  # also for tensors directly in a module
            self.levels.append([])
        if not any(child is not None for child in module._modules.values()):
            self.add((name,), [(name, module)])
        # By name, as the classes that models list (`_no_split_modules`) are names.
        elif type(module).__name__ in self.kept:
            self.add((name,), module.named_modules(prefix=name))
        else:
            leaves = [*_existing(module._parameters), *_existing(module._buffers)]
            if leaves:
                self.add(tuple(_join(name, key) for key in leaves), [(name, module)])
                self.levels[level + 1].append((first, first + 1))
            for child_name, child in module.named_children():
                self.visit(_join(name, child_name), child, level + 1)
        self.levels[level].append((first, len(self.names)))

    def add(self, names: tuple[str, ...], modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        index = len(self.names)
        parameters: float = 0
        buffers: float = 0
        for path, module in modules:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parameters += self.bytes_in(index, path, key, parameter)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    buffers += self.bytes_in(index, path, key, buffer)
        self.names.append(names)
        self.sizes.append(parameters + buffers)
        self.buffers.append(buffers)

    def bytes_in(self, index: int, path: str, key: str, tensor: torch.Tensor) -> float:
        """Record that a layer has a tensor; return the bytes that this adds to the layer."""
        # By identity: tensors compare by value, and meta tensors have none.
        number = id(tensor)
        recorded = self.tensors.get(number)
        if recorded is None:
            size = self.size_of(_join(path, key), tensor)
            self.tensors[number] = index, size
            return size
        first, size = recorded
        if first == index:
            return 0
        users = self.users.setdefault(number, [first])
        if users[-1] == index:
            return 0
        users.append(index)
        return size


def _existing(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tied(users: Collection[Sequence[int]]) -> dict[int, list[int]]:
    """Group layers that share tensors, also through others (connected components, by union and find)."""
    parents = {index: index for group in users for index in group}

    def root(index: int) -> int:
        while parents[index] != index:
            # Path halving, which keeps later searches short.
            parents[index] = index = parents[parents[index]]
        return index

    for first, *others in users:
        for other in others:
            low, high = sorted((root(first), root(other)))
            parents[high] = low
    groups: dict[int, list[int]] = {}
    for index in sorted(parents):
        groups.setdefault(root(index), []).append(index)
    return {index: groups[root(index)] for index in sorted(parents)}
