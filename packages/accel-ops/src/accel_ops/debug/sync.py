"""Comparing models and random generators between processes: the first difference, and how large it is.

One collective gathers one digest per process. Only if they differ do the processes exchange more.
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
    "Seed it in the same way on all processes (set_seed), draw from it on all or on none, or leave the "
    "generators out with rng=False if processes should draw different numbers (set_seed with "
    "device_specific=True)."
)
_HINT = (
    "From here on each process trains different weights. Something changed it on some processes only: under "
    "an `if` of the rank, by other random numbers, or by a gradient that was not averaged."
)
_BUFFER_HINT = (
    "Each process has its own unless it is averaged, as with running statistics of batch norm: leave "
    "buffers out with buffers=False. Otherwise something changed it under an `if` of the rank, or by other "
    "random numbers or data."
)


@dataclass(frozen=True)
class _Entry:
    """A tensor or generator of one process.

    Args:
        name: The name.
        kind: "parameter", "buffer" or "random generator".
        form: Dtype, shape and similar, as text.
        shard: Which shard of a sharded tensor it is, equal on processes that replicate it; "" for the full
            tensor.
        value: A digest; None if it is not compared.
    """

    name: str
    kind: str
    form: str
    shard: str = ""
    value: int | None = None


def verify_sync(
    *models: torch.nn.Module,
    buffers: bool = True,
    rng: bool = True,
    process: ProcessInfo | None = None,
    is_shard: Callable[[torch.Tensor], bool] | None = None,
) -> list[str]:
    """Check that models and random generators are identical on all processes, to the last bit.

    Every process must call it. Of a DTensor the processes compare what the mesh replicates. With one process
    it is a no-op.

    Args:
        *models: The models, the same on every process; plain or wrapped for training.
        buffers: Whether to compare buffers too, also those that are not saved. Running statistics of batch
            norm differ between processes between the forward passes of DDP.
        rng: Whether to compare the random generators of Python, NumPy, torch and the device.
        process: This process; the current one by default.
        is_shard: Returns whether each process has its own shard of a tensor, which is then not compared.

    Returns:
        The names of what was not compared: it is replicated on no other process, or has no plain bits
        (sparse and quantized tensors, tensors without data).

    Raises:
        TypeError: If one of the models is not a module.
        DistributedOperationException: On every process, if something differs; the message names the first
            difference in the order of the models, the processes and the distance.
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
    pairs = list(_tensors(models, buffers, is_shard or (lambda _: False)))
    tensors = [tensor for _, tensor in pairs]
    entries = _with_values([entry for entry, _ in pairs], tensors)
    if rng:
        entries += _generators(process)
    if _all_equal(entries, process):
        return [entry.name for entry in entries if entry.value is None]
    # torch's function: debug mode has compared this call already.
    everyone: list[list[_Entry]] = [[] for _ in range(process.world_size)]
    dist.all_gather_object(everyone, entries)
    index = _first_difference(everyone)
    if index is None:  # shards differ, as they should
        counts = _counts(everyone)
        return [entry.name for entry in entries if entry.value is None or counts[_key(entry)] == 1]
    rows = [entries[index] if index < len(entries) else None for entries in everyone]
    local = tensors[index] if index < len(tensors) else None
    raise DistributedOperationException(_describe(index, everyone, _distances(rows, local, process)))


def _tensors(
    models: Sequence[torch.nn.Module], buffers: bool, is_shard: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[_Entry, torch.Tensor | None]]:
    """The parameters and buffers of models, in order, each with this process's tensor."""
    for number, model in enumerate(models, start=1):
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        label = type(inner).__name__ + (f" (model {number})" if len(models) > 1 else "")
        for path, module in inner.named_modules():
            prefix = f"{label}.{path}." if path else f"{label}."
            for name, item in module._parameters.items():
                yield _tensor_entry(prefix + name, "parameter", item, is_shard)
            for name, item in module._buffers.items() if buffers else ():
                # A buffer that is saved on one process only is a difference, too.
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
        # Its shape, too, may be that of a shard.
        return _Entry(name, kind, "sharded"), None
    if item.is_meta or item.layout != torch.strided or item.is_quantized:
        return _Entry(name, kind, form), None
    # Without an import of torch.distributed.tensor, which takes most of a second.
    if hasattr(item, "device_mesh") and hasattr(item, "placements"):
        return _Entry(name, kind, f"{form} as {item.placements}", shard=_shard_of(item)), _local(item)
    if type(item) not in (torch.Tensor, torch.nn.Parameter) and hasattr(item, "__tensor_flatten__"):
        return _Entry(name, kind, form), None  # wraps others (quantized weights): no plain bits
    return _Entry(name, kind, form), item


def _local(item: Any) -> torch.Tensor:
    local: torch.Tensor = item.to_local()
    return local


def _shard_of(item: Any) -> str:
    """Which shard of a DTensor this process has: its rank along each axis that is not replicated."""
    mesh = item.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:  # this process is not in the mesh
        return "outside"
    # Partial sums count as shards too: each process has different numbers.
    shards = zip(coordinates, item.placements, strict=True)
    return ", ".join(f"{placement} {index}" for index, placement in shards if not placement.is_replicate())


def _with_values(entries: list[_Entry], tensors: Sequence[torch.Tensor | None]) -> list[_Entry]:
    """The entries with the digests of their tensors."""
    # The digest of a tied tensor is computed once.
    waiting = {id(item): (item.device, digest(item)) for item in tensors if item is not None}
    values: dict[int, int] = {}
    # One copy from each device, instead of one per tensor.
    for device in {device for device, _ in waiting.values()}:
        here = {key: value for key, (on, value) in waiting.items() if on == device}
        values |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return [
        _Entry(entry.name, entry.kind, entry.form, entry.shard, None if item is None else values[id(item)])
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


def _all_equal(entries: Sequence[_Entry], process: ProcessInfo) -> bool:
    """Whether the digests of all entries are equal on all processes; one collective."""
    combined = _hash(repr(entries).encode())
    local = torch.tensor([*combined], dtype=torch.uint8, device=process.device)
    everyone = [torch.empty_like(local) for _ in range(process.world_size)]
    dist.all_gather(everyone, local)
    return bool((torch.stack(everyone) == local).all())


def _key(entry: _Entry) -> tuple[str, str, str]:
    return entry.name, entry.kind, entry.shard


def _counts(everyone: Sequence[Sequence[_Entry]]) -> dict[tuple[str, str, str], int]:
    counts: dict[tuple[str, str, str], int] = {}
    for entries in everyone:
        for entry in entries:
            counts[_key(entry)] = counts.get(_key(entry), 0) + 1
    return counts


def _first_difference(everyone: Sequence[Sequence[_Entry]]) -> int | None:
    """The index of the first entry that should be equal and is not."""
    for index in range(max(map(len, everyone))):
        if any(index >= len(entries) for entries in everyone):
            return index
        rows = [entries[index] for entries in everyone]
        if any((row.name, row.kind, row.form) != (rows[0].name, rows[0].kind, rows[0].form) for row in rows):
            return index
        values: dict[str, int | None] = {}
        if any(values.setdefault(row.shard, row.value) != row.value for row in rows):
            return index
    return None


def _distances(
    rows: Sequence[_Entry | None], local: torch.Tensor | None, process: ProcessInfo
) -> list[float | None]:
    """The distance of each process's values from those of the first with the same shard; a collective.

    Returns:
        By rank the largest absolute difference, NaN where only one of two is NaN; None where there are no
        values, or something else differs.
    """
    existing = [row for row in rows if row is not None]
    mismatched = len(existing) < len(rows) or len({(row.name, row.form) for row in existing}) > 1
    values: dict[str, set[int | None]] = {}
    for row in existing:
        values.setdefault(row.shard, set()).add(row.value)
    different = [shard for shard, seen in values.items() if len(seen) > 1]
    if mismatched or not different or existing[0].kind == "random generator":
        return [None] * len(rows)
    shard = different[0]
    source = next(rank for rank, row in enumerate(existing) if row.shard == shard)
    distance: float | None = None
    if local is not None:
        # Bytes, as not every backend supports every dtype. Other shards may have other sizes.
        plain = local.detach().contiguous()
        sizes: list[Any] = [plain.numel() * plain.element_size()]
        dist.broadcast_object_list(sizes, source)
        remote = torch.empty(sizes[0], dtype=torch.uint8, device=process.device)
        if process.rank == source:
            remote.copy_(plain.flatten().view(torch.uint8))
        dist.broadcast(remote, source)
        if existing[process.rank].shard == shard:
            other = remote.to(plain.device).view(plain.dtype).view(plain.shape)
            distance = _distance(plain, other)
    distances: list[float | None] = [None] * len(rows)
    dist.all_gather_object(distances, distance)
    return distances


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference; NaN is equal to itself."""
    kind = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(kind), other.to(kind)
    equal = (first == second) | (first.isnan() & second.isnan())  # also infinities, whose difference is NaN
    return float((first - second).abs().masked_fill(equal, 0.0).max())


def _describe(index: int, everyone: Sequence[Sequence[_Entry]], distances: Sequence[float | None]) -> str:
    rows = [entries[index] if index < len(entries) else None for entries in everyone]
    existing = [row for row in rows if row is not None]
    first = existing[0]
    if len(existing) < len(rows) or len({(row.name, row.kind) for row in existing}) > 1:
        return _describe_names(index, rows, everyone)
    forms = {row.form for row in existing}
    # Of a sharded tensor, the processes with the shard that differs.
    shard = next(
        (row.shard for row, distance in zip(existing, distances, strict=True) if distance is not None), None
    )
    groups: dict[str, list[int]] = {}
    for rank, (row, distance) in enumerate(zip(existing, distances, strict=True)):
        if shard is not None and row.shard != shard:
            continue
        text = row.form if len(forms) > 1 else f"digest {(row.value or 0) % 2**64:016x}"
        if distance:  # also NaN
            reference = [item.shard for item in existing].index(row.shard)
            text += f", up to {distance:.6g} away from process {reference}"
        groups.setdefault(text, []).append(rank)
    lines = [f"  {_processes(ranks)}: {text}" for text, ranks in groups.items()]
    if first.kind == "random generator":
        return "\n".join(
            [f"{_BEGIN} {first.name} random generator is the first to differ.", *lines, _RNG_HINT]
        )
    form = f" ({first.form})" if len(forms) == 1 else ""
    hint = _HINT if first.kind == "parameter" else _BUFFER_HINT
    return "\n".join([f"{_BEGIN} the {first.kind} {first.name}{form} is the first to differ.", *lines, hint])


def _describe_names(index: int, rows: Sequence[_Entry | None], everyone: Sequence[Sequence[_Entry]]) -> str:
    """Describe which processes have an entry that others lack, or have at another position."""
    names = [{entry.name for entry in entries} for entries in everyone]
    # First what is missing on some process; otherwise the order differs.
    for row in rows:
        without = (
            [] if row is None else [rank for rank, existing in enumerate(names) if row.name not in existing]
        )
        if row is not None and without:
            having = [rank for rank in range(len(rows)) if rank not in without]
            return (
                f"{_BEGIN} the {row.kind} {row.name} ({row.form}) exists on {_processes(having)} and is "
                f"missing on {_processes(without)}. Make the same model on every process."
            )
    groups: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault("nothing" if row is None else f"the {row.kind} {row.name}", []).append(rank)
    pairs = "; ".join(f"{_processes(ranks)}: {text}" for text, ranks in groups.items())
    return (
        f"{_BEGIN} their models have the same tensors in another order, first at position {index + 1} "
        f"({pairs}). Make the same model on every process."
    )


def _processes(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
