"""The layers of a model: what is placed as a whole, its size, and which layers share tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from accel.big_models.placement.plan import Layer, Layout
from accel_ops.module_sizes import Dtype, tensor_sizes

__all__ = ["make_layout"]


def make_layout(
    model: torch.nn.Module,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> Layout:
    """Split a model into layers, in one pass over its tensors.

    Args:
        model: The model; it may be on the meta device.
        no_split_module_classes: Names of classes whose modules are layers.
        dtype: What weights will be converted to, as in `tensor_sizes`.
        special_dtypes: What single tensors will be converted to, by their full names.

    Returns:
        The layers.
    """
    kept = no_split_module_classes or ()
    found = _Found({kept} if isinstance(kept, str) else frozenset(kept))
    found.visit("", model, 0)
    sizes = {id(tensor): size for _, tensor, size in tensor_sizes(model, dtype, special_dtypes)}
    counts: dict[int, list[int]] = {}
    for index, tensors in enumerate(found.tensors):
        for number in tensors:
            counts.setdefault(number, []).append(index)
    layers = [
        Layer(
            names,
            sum(sizes[number] for number in tensors),
            sum(sizes[number] for number, is_buffer in tensors.items() if is_buffer),
            {number: sizes[number] for number in tensors if len(counts[number]) > 1},
        )
        for names, tensors in zip(found.names, found.tensors, strict=True)
    ]
    spans = [span for _, span in sorted(found.spans, key=lambda item: item[0])]
    return Layout(layers, _tied(len(layers), counts.values()), spans)


@dataclass
class _Found:
    """Layers as they are found: names, and tensors by number, with whether each is a buffer."""

    kept: Collection[str]
    names: list[tuple[str, ...]] = field(default_factory=list)
    tensors: list[dict[int, bool]] = field(default_factory=list)
    spans: list[tuple[int, tuple[int, int]]] = field(default_factory=list)

    def visit(self, name: str, module: torch.nn.Module, level: int) -> None:
        first = len(self.names)
        children = list(module.named_children())
        if not children or type(module).__name__ in self.kept:
            self.add((name,), module.modules())
        else:
            own = [*_present(module._parameters), *_present(module._buffers)]
            if own:
                self.add(tuple(_join(name, key) for key in own), [module])
                self.spans.append((level + 1, (first, first + 1)))
            for child_name, child in children:
                self.visit(_join(name, child_name), child, level + 1)
        self.spans.append((level, (first, len(self.names))))

    def add(self, names: tuple[str, ...], modules: Iterable[torch.nn.Module]) -> None:
        tensors: dict[int, bool] = {}
        for module in modules:
            tensors.update((id(tensor), False) for tensor in _present(module._parameters).values())
            tensors.update((id(tensor), True) for tensor in _present(module._buffers).values())
        self.names.append(names)
        self.tensors.append(tensors)


def _present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tied(count: int, users: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """Group layers that share tensors, also through others (connected components, by union and find)."""
    parents = list(range(count))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for first, *others in users:
        for other in others:
            low, high = sorted((root(first), root(other)))
            parents[high] = low
    groups: dict[int, list[int]] = {}
    for index in range(count):
        groups.setdefault(root(index), []).append(index)
    return [groups[root(index)] for index in range(count)]
