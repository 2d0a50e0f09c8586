"""Comparing models and random generators between processes: what differs first, and by how much.

All that is compared is one digest per process, which one collective gathers. Only where they differ do the
processes exchange more.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from accel_ops.collectives.checks import require_group
from accel_ops.debug import check_collectives
from accel_ops.debug.digest import digest
from accel_ops.debug.store import DistributedOperationException
from accel_ops.modules import extract_model_from_parallel, unsaved_buffers
from accel_state.devices import table
from accel_state.enums import RNGType
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

_BEGIN = "Processes are out of step:"
_RNG_HINT = (
    "Seed it alike on all processes (set_seed), draw from it on all or on none, or leave the generators out "
    "with rng=False where processes are to draw different numbers (set_seed with device_specific=True)."
)
_HINT = (
    "Processes train weights of their own from here on. Something changed it on some processes alone: under "
    "an `if` of the rank, by other random numbers, or by a gradient that was not averaged."
)
_BUFFER_HINT = (
    "Each process has its own where nobody averages it, as with running statistics of batch norm: leave "
    "buffers out with buffers=False. Otherwise something changed it under an `if` of the rank, or by other "
    "random numbers or data."
)


@dataclass(frozen=True)
class _Entry:
    """A tensor or generator of one process.

    Args:
        name: The name.
        kind: "parameter", "buffer" or "random generator".
        form: Dtype, shape and the like, as text.
        part: Which part of a tensor in parts it is, the same on processes that have it alike; "" for all of
            it.
        value: A digest; None if it is not compared.
    """

    name: str
    kind: str
    form: str
    part: str = ""
    value: int | None = None


def verify_sync(
    *models: torch.nn.Module,
    buffers: bool = True,
    rng: bool = True,
    process: ProcessInfo | None = None,
    is_shard: Callable[[torch.Tensor], bool] | None = None,
) -> list[str]:
    """Make sure that models and random generators are the same on all processes, to the last bit.

    Every process must call it. Of a DTensor the processes compare what the mesh says they have alike. With
    one process there is nothing to do.

    Args:
        *models: The models, the same on every process; as they are or wrapped for training.
        buffers: Whether to compare buffers too, also those that are not saved. Running statistics of batch
            norm are each process's own between the forward passes of DDP.
        rng: Whether to compare the random generators of Python, NumPy, torch and the device.
        process: The facts of this process; the current one by default.
        is_shard: Returns whether each process has its own shard of a tensor, which is then not compared.

    Returns:
        The names of what was not compared: no other process has it alike, or it has no plain bits (sparse
        and quantized tensors, tensors without data).

    Raises:
        TypeError: If one of the models is no module.
        DistributedOperationException: On every process, if something differs; the message names the first in
            the order of the models, the processes and how far they are apart.
        RuntimeError: If the process group has been destroyed.
    """
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"verify_sync got a {type(model).__name__}; it takes models (torch.nn.Module).")
    process = process or current_process()
    if process.world_size == 1:
        return []
    if process.debug:
        check_collectives.check("verify_sync", process=process, detail=f"buffers={buffers}, rng={rng}")
    require_group("verify_sync", process)
    found = list(_tensors(models, buffers, is_shard or (lambda _: False)))
    tensors = [tensor for _, tensor in found]
    entries = _with_values([entry for entry, _ in found], tensors)
    if rng:
        entries += _generators(process)
    if _all_alike(entries, process):
        return [entry.name for entry in entries if entry.value is None]
    # Pickled by torch: a process group is there, and debug mode has compared this call already.
    everyone: list[list[_Entry]] = [[] for _ in range(process.world_size)]
    dist.all_gather_object(everyone, entries)
    place = _first_difference(everyone)
    if place is None:  # parts differ, as they should
        counts = _counts(everyone)
        return [entry.name for entry in entries if entry.value is None or counts[_key(entry)] == 1]
    rows = [entries[place] if place < len(entries) else None for entries in everyone]
    mine = tensors[place] if place < len(tensors) else None
    raise DistributedOperationException(_describe(place, everyone, _distances(rows, mine, process)))


def _tensors(
    models: Sequence[torch.nn.Module], buffers: bool, is_shard: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[_Entry, torch.Tensor | None]]:
    """The parameters and buffers of models, in order, each with the tensor that this process has of it."""
    for number, model in enumerate(models, start=1):
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        label = type(inner).__name__ + (f" (model {number})" if len(models) > 1 else "")
        for path, module in inner.named_modules():
            prefix = f"{label}.{path}." if path else f"{label}."
            for name, item in module._parameters.items():
                yield _tensor_entry(prefix + name, "parameter", item, is_shard)
            for name, item in module._buffers.items() if buffers else ():
                # A buffer that is saved on one process alone is a difference, too.
                kind = "unsaved buffer" if name in unsaved_buffers(module) else "buffer"
                yield _tensor_entry(prefix + name, kind, item, is_shard)


def _tensor_entry(
    name: str, kind: str, item: torch.Tensor | None, is_shard: Callable[[torch.Tensor], bool]
) -> tuple[_Entry, torch.Tensor | None]:
    if item is None:
        return _Entry(name, kind, "None"), None
    form = f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
    if item.requires_grad:
        form += ", requires grad"
    if is_shard(item):
        # Its shape, too, may be that of a part.
        return _Entry(name, kind, "in parts"), None
    if item.is_meta or item.layout != torch.strided or item.is_quantized:
        return _Entry(name, kind, form), None
    # Without an import of torch.distributed.tensor, which takes most of a second.
    if hasattr(item, "device_mesh") and hasattr(item, "placements"):
        return _Entry(name, kind, f"{form} as {item.placements}", part=_part_of(item)), _local(item)
    if type(item) not in (torch.Tensor, torch.nn.Parameter) and hasattr(item, "__tensor_flatten__"):
        return _Entry(name, kind, form), None  # wraps others (quantized weights): no bits of its own
    return _Entry(name, kind, form), item


def _local(item: Any) -> torch.Tensor:
    local: torch.Tensor = item.to_local()
    return local


def _part_of(item: Any) -> str:
    """Which part of a DTensor this process has: its place along each axis over which it is in parts."""
    mesh = item.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:  # this process is not in the mesh
        return "outside"
    # Partial sums count as parts too: each process has numbers of its own.
    parts = zip(coordinates, item.placements, strict=True)
    return ", ".join(f"{placement} {place}" for place, placement in parts if not placement.is_replicate())


def _with_values(entries: list[_Entry], tensors: Sequence[torch.Tensor | None]) -> list[_Entry]:
    """The entries with the digests of their tensors."""
    # A tied tensor is in several places, and its digest is taken once.
    waiting = {id(item): (item.device, digest(item)) for item in tensors if item is not None}
    values: dict[int, int] = {}
    # One copy from each device, instead of one for each tensor.
    for device in {device for device, _ in waiting.values()}:
        here = {key: value for key, (place, value) in waiting.items() if place == device}
        values |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return [
        _Entry(entry.name, entry.kind, entry.form, entry.part, None if item is None else values[id(item)])
        for entry, item in zip(entries, tensors, strict=True)
    ]


def _generators(process: ProcessInfo) -> list[_Entry]:
    states = {
        "Python's": repr(random.getstate()).encode(),
        "NumPy's": repr([numpy.asarray(item).tolist() for item in numpy.random.get_state()]).encode(),
        "torch's": _bytes(torch.get_rng_state()),
    }
    device = table.device_spec(process.device)
    if device.rng_type not in (RNGType.TORCH, None) and process.device.type != "cpu":
        states[f"the {process.device.type} device's"] = _bytes(torch.as_tensor(device.get_rng_state()).cpu())
    return [
        _Entry(name, "random generator", "", value=int.from_bytes(_hash(state)[:8], "little"))
        for name, state in states.items()
    ]


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _all_alike(entries: Sequence[_Entry], process: ProcessInfo) -> bool:
    """Whether the digests of all entries are the same everywhere; one collective."""
    whole = _hash(repr(entries).encode())
    mine = torch.tensor([*whole], dtype=torch.uint8, device=process.device)
    everyone = [torch.empty_like(mine) for _ in range(process.world_size)]
    dist.all_gather(everyone, mine)
    return bool((torch.stack(everyone) == mine).all())


def _key(entry: _Entry) -> tuple[str, str, str]:
    return entry.name, entry.kind, entry.part


def _counts(everyone: Sequence[Sequence[_Entry]]) -> dict[tuple[str, str, str], int]:
    counts: dict[tuple[str, str, str], int] = {}
    for entries in everyone:
        for entry in entries:
            counts[_key(entry)] = counts.get(_key(entry), 0) + 1
    return counts


def _first_difference(everyone: Sequence[Sequence[_Entry]]) -> int | None:
    """The first place at which processes that should have the same have not."""
    for place in range(max(map(len, everyone))):
        if any(place >= len(entries) for entries in everyone):
            return place
        rows = [entries[place] for entries in everyone]
        if any((row.name, row.kind, row.form) != (rows[0].name, rows[0].kind, rows[0].form) for row in rows):
            return place
        values: dict[str, int | None] = {}
        if any(values.setdefault(row.part, row.value) != row.value for row in rows):
            return place
    return None


def _distances(
    rows: Sequence[_Entry | None], mine: torch.Tensor | None, process: ProcessInfo
) -> list[float | None]:
    """How far the values of each process are from those of the first that has the same part; a collective.

    Returns:
        By rank the largest absolute difference, NaN where only one of two is NaN; None where there are no
        values, or they are not compared as something else differs.
    """
    present = [row for row in rows if row is not None]
    unlike = len(present) < len(rows) or len({(row.name, row.form) for row in present}) > 1
    values: dict[str, set[int | None]] = {}
    for row in present:
        values.setdefault(row.part, set()).add(row.value)
    different = [part for part, seen in values.items() if len(seen) > 1]
    if unlike or not different or present[0].kind == "random generator":
        return [None] * len(rows)
    part = different[0]
    source = next(rank for rank, row in enumerate(present) if row.part == part)
    apart: float | None = None
    if mine is not None:
        # Bytes, as not every backend moves every dtype. Parts of other places may have other sizes.
        plain = mine.detach().contiguous()
        sizes: list[Any] = [plain.numel() * plain.element_size()]
        dist.broadcast_object_list(sizes, source)
        theirs = torch.empty(sizes[0], dtype=torch.uint8, device=process.device)
        if process.rank == source:
            theirs.copy_(plain.flatten().view(torch.uint8))
        dist.broadcast(theirs, source)
        if present[process.rank].part == part:
            other = theirs.to(plain.device).view(plain.dtype).view(plain.shape)
            apart = _distance(plain, other)
    distances: list[float | None] = [None] * len(rows)
    dist.all_gather_object(distances, apart)
    return distances


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; NaN is equal to itself."""
    kind = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(kind), other.to(kind)
    alike = (first == second) | (first.isnan() & second.isnan())  # also infinities, whose difference is NaN
    return float((first - second).abs().masked_fill(alike, 0.0).max())


def _describe(place: int, everyone: Sequence[Sequence[_Entry]], distances: Sequence[float | None]) -> str:
    rows = [entries[place] if place < len(entries) else None for entries in everyone]
    present = [row for row in rows if row is not None]
    first = present[0]
    if len(present) < len(rows) or len({(row.name, row.kind) for row in present}) > 1:
        return _describe_names(place, rows, everyone)
    forms = {row.form for row in present}
    # Of a tensor in parts, those that have the part that is not alike.
    part = next((row.part for row, apart in zip(present, distances, strict=True) if apart is not None), None)
    groups: dict[str, list[int]] = {}
    for rank, (row, apart) in enumerate(zip(present, distances, strict=True)):
        if part is not None and row.part != part:
            continue
        text = row.form if len(forms) > 1 else f"digest {(row.value or 0) % 2**64:016x}"
        if apart:  # also NaN
            text += f", up to {apart:.6g} away from process {[item.part for item in present].index(row.part)}"
        groups.setdefault(text, []).append(rank)
    lines = [f"  {_processes(ranks)}: {text}" for text, ranks in groups.items()]
    if first.kind == "random generator":
        return "\n".join(
            [f"{_BEGIN} {first.name} random generator is the first to differ.", *lines, _RNG_HINT]
        )
    form = f" ({first.form})" if len(forms) == 1 else ""
    hint = _HINT if first.kind == "parameter" else _BUFFER_HINT
    return "\n".join([f"{_BEGIN} the {first.kind} {first.name}{form} is the first to differ.", *lines, hint])


def _describe_names(place: int, rows: Sequence[_Entry | None], everyone: Sequence[Sequence[_Entry]]) -> str:
    """Say which processes have something that others do not have, or have elsewhere."""
    names = [{entry.name for entry in entries} for entries in everyone]
    # First what is missing somewhere; without any, the order differs.
    for row in rows:
        without = [] if row is None else [rank for rank, known in enumerate(names) if row.name not in known]
        if row is not None and without:
            having = [rank for rank in range(len(rows)) if rank not in without]
            return (
                f"{_BEGIN} the {row.kind} {row.name} ({row.form}) is there on {_processes(having)} and "
                f"missing on {_processes(without)}. Make the same model on every process."
            )
    groups: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault("nothing" if row is None else f"the {row.kind} {row.name}", []).append(rank)
    found = "; ".join(f"{_processes(ranks)}: {text}" for text, ranks in groups.items())
    return (
        f"{_BEGIN} their models have the same in another order, first at place {place + 1} ({found}). Make "
        "the same model on every process."
    )


def _processes(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
