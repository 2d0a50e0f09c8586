"""Cut a model into stages of about equal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from accel_ckpt.weights.files import convert_file_size_to_int


@dataclass(frozen=True)
class _Unit:
    """A part of a model that is on one stage; `module` is None for a weight directly in its parent."""

    name: str
    module: nn.Module | None
    size: int  # bytes


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int, int | str] | None = None,
) -> dict[str, int]:
    """Assign modules to the stages of a pipeline, for stages of about equal size.

    Modules are taken in the order in which the model registers them. One is cut if it is larger than a stage
    should be, or if there are too few. Shared weights count for the first module.

    Args:
        model: The model.
        num_processes: Number of stages.
        no_split_module_classes: Names of classes whose modules are not cut.
        max_memory: The most that a stage may have, in bytes or as "1GB", by number of the stage; by default
            there is no limit.

    Returns:
        Number of the stage by name of a module, or of a weight next to modules that are cut.

    Raises:
        ValueError: If the model has too few modules, or a stage is larger than `max_memory` allows.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes={num_processes}: a pipeline has at least 1 stage.")
    units = _units(model, num_processes, set(no_split_module_classes or ()))
    if sum(unit.module is not None for unit in units) < num_processes:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into {num_processes} stages: it has {len(units)} modules "
            "that are not split. Use fewer processes, or cut more (no_split_module_classes)."
        )
    begins = [*_cut(units, num_processes), len(units)]
    for stage, limit in (max_memory or {}).items():
        size = sum(unit.size for unit in units[begins[stage] : begins[stage + 1]])
        if size > convert_file_size_to_int(limit):
            raise ValueError(
                f"Stage {stage} of {type(model).__name__} has {size:,} bytes, but max_memory allows "
                f"{limit}. Use more processes."
            )
    return {
        unit.name: stage
        for stage in range(num_processes)
        for unit in units[begins[stage] : begins[stage + 1]]
    }


def first_modules(device_map: dict[str, int]) -> list[str]:
    """Return the module that each stage but the first begins with.

    Args:
        device_map: What `generate_device_map` returned.
    """
    first: dict[int, str] = {}
    for name, stage in device_map.items():
        first.setdefault(stage, name)
    return [name for stage, name in sorted(first.items()) if stage > 0]


def _units(model: nn.Module, stages: int, not_split: set[str]) -> list[_Unit]:
    """Split a model until there are enough units and none is larger than a stage should be."""
    counted: set[int] = set()
    sizes: dict[str, int] = {}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        # A tied weight counts once, where it comes first.
        if id(parameter) not in counted:
            counted.add(id(parameter))
            sizes[name] = parameter.nbytes
    units = [_unit("", model, sizes)]
    even_size = units[0].size / stages
    while True:
        # A list of modules is never called itself, so no stage can begin there.
        lists = [unit for unit in units if isinstance(unit.module, (nn.ModuleList, nn.ModuleDict))]
        few = len(units) < stages
        large = [
            unit
            for unit in units
            if unit.module is not None
            and any(unit.module.children())
            and type(unit.module).__name__ not in not_split
            and (few or unit.size > even_size)
        ]
        if not lists and not large:
            return units
        chosen = lists[0] if lists else max(large, key=lambda unit: unit.size)
        place = units.index(chosen)
        units[place : place + 1] = _inside(chosen, sizes)


def _inside(unit: _Unit, sizes: dict[str, int]) -> list[_Unit]:
    assert unit.module is not None
    prefix = f"{unit.name}." if unit.name else ""
    names = [*unit.module._parameters, *unit.module._buffers]
    # 0 for a tied weight, which has been counted where it comes first.
    weights = [_Unit(prefix + name, None, sizes.get(prefix + name, 0)) for name in names]
    return [*weights, *(_unit(prefix + name, child, sizes) for name, child in unit.module.named_children())]


def _unit(name: str, module: nn.Module, sizes: dict[str, int]) -> _Unit:
    prefix = f"{name}." if name else ""
    return _Unit(name, module, sum(size for path, size in sizes.items() if path.startswith(prefix)))


def _cut(units: Sequence[_Unit], stages: int) -> list[int]:
    """Return where stages begin, for the least sum of their squared sizes."""
    before = [0]
    for unit in units:
        before.append(before[-1] + unit.size)
    # best[end] = (cost, begins): the units up to `end`, in one stage per round so far.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(1, len(units) + 1):
            # A stage begins with a module: a weight directly in its parent is never called.
            ways = [
                (cost + (before[end] - before[begin]) ** 2, [*begins, begin])
                for begin, (cost, begins) in best.items()
                if begin < end and (begin == 0 or units[begin].module is not None)
            ]
            if ways:
                longer[end] = min(ways)
        best = longer
    return best[len(units)][1]
