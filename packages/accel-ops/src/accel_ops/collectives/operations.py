"""Collectives over trees of tensors: gather, reduce, broadcast.

A tree is sent in a few collectives, not one per tensor: small tensors share one buffer, large ones are sent
separately, without a copy and concurrently. Every process must call the same operation with a tree of the
same structure, shapes and dtypes; in debug mode that is compared first (see `check_collectives`). Gradients
do not flow through any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accel_ops.collectives import waits
from accel_ops.collectives.checks import require_devices, require_group, require_plain, require_rank
from accel_ops.collectives.pack import Plan, plan
from accel_ops.collectives.pack_sections import as_bytes
from accel_ops.collectives.stack import stack_if_uniform
from accel_ops.debug import check_collectives
from accel_ops.trees.walk import find_path, flatten, plain_tensors, rebuild
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from accel_state.literals import Reduction

_T = TypeVar("_T")

# Exact types that need no further check; DTensor and other subclasses take the slow path.
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_REDUCTIONS = ("mean", "sum", "max", "none")


def gather(tensor: _T, *, process: ProcessInfo | None = None) -> _T:
    """Concatenate the tensors of all processes along their first dimension, in rank order, on every process.

    Args:
        tensor: A tree of tensors, of the same structure, shapes and dtypes on every process (see
            `pad_across_processes`).
        process: This process; the current one by default.

    Returns:
        The tree with tensors of shape `(world_size * n, *)` for `(n, *)`, and `(world_size,)` for
        0-dimensional ones. They have no gradient. With one process they share memory with the inputs.

    Raises:
        TypeError: If a leaf is not a tensor, or is a DTensor, sparse, nested or quantized tensor.
        ValueError: If a tensor is on a device that the process group cannot move.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    put_back: Callable[[Sequence[torch.Tensor]], _T]
    plain = plain_tensors(tensor)
    if plain is not None:
        leaves, put_back = plain, partial(rebuild, tensor)
    else:
        leaves, put_back = flatten(tensor, required_by="gather")
    if process.world_size == 1 or (plain is None and not set(map(type, leaves)) <= _PLAIN_TYPES):
        require_plain("gather", tensor, leaves)
    if process.world_size == 1:
        return put_back([leaf.detach() if leaf.dim() else leaf.detach().reshape(1) for leaf in leaves])  # type: ignore[no-any-return]
    if process.debug:
        check_collectives.check("gather", tensor, process=process)
    group = require_group("gather", process)
    try:
        if plain is not None:
            return _gather(tensor, leaves, put_back, process, group)  # type: ignore[no-any-return]
        # Other containers may read the values when they are built, so only afterwards.
        return put_back(_gather(tensor, leaves, list, process, group))  # type: ignore[no-any-return]
    except RuntimeError:
        # These give better errors, but are too expensive to run before.
        require_plain("gather", tensor, leaves)
        if dist.group.WORLD is group:  # else another thread has destroyed it
            require_devices("gather", tensor, {leaf.device for leaf in leaves}, process)
        raise


def _gather(
    data: Any,
    leaves: Sequence[torch.Tensor],
    put_back: Callable[[Sequence[torch.Tensor]], _T],
    process: ProcessInfo,
    group: dist.ProcessGroup,
) -> _T:
    # The common case, such as the metrics of a step: one stack, and one collective.
    stack = stack_if_uniform(leaves, process.world_size)
    if stack is None:
        with torch.no_grad():
            return put_back(_gather_packs(data, leaves, process, group))
    buffers = stack.buffers
    if buffers.sent.device.type != "cpu":  # there a group that cannot move it raises an error by itself
        require_devices("gather", data, [buffers.sent.device], process)

    def make_results() -> tuple[torch.Tensor, _T]:
        memory, results = stack.make_results()
        return memory, put_back(results)

    memory, gathered = waits.all_gather(buffers.received, buffers.sent, group, make_results)
    stack.finish(memory)
    return gathered


def _gather_packs(
    data: Any, leaves: Sequence[torch.Tensor], process: ProcessInfo, group: dist.ProcessGroup
) -> Sequence[torch.Tensor]:
    world = process.world_size
    packing = _plan("gather", data, leaves, process, copies=world)
    gathered: list[Any] = [None] * len(leaves)
    works = []
    for i in packing.large:
        shape = leaves[i].shape
        gathered[i] = leaves[i].new_empty((world * shape[0], *shape[1:]))
        works.append(waits.start_all_gather(as_bytes(gathered[i]), as_bytes(leaves[i]), group))
    # Meanwhile the large ones are in flight.
    for pack in packing.packs:
        buffers = pack.buffers()
        if pack.nbytes:
            pack.pack(leaves, buffers)
            waits.all_gather(buffers.received, buffers.sent, group, lambda: None)
        pack.unpack(buffers, gathered)
        pack.keep(buffers)
    for work in works:
        waits.wait(work)
    return gathered


def reduce(
    tensor: _T, reduction: Reduction = "mean", scale: float = 1.0, *, process: ProcessInfo | None = None
) -> _T:
    """Combine the tensors of all processes element by element, on every process.

    Args:
        tensor: A tree of tensors, of the same structure, shapes and dtypes on every process. It is not
            changed.
        reduction: "sum"; "mean", which divides the sum by the number of processes (integers become floating
            point); "max", the largest of each element (of booleans whether any is true); or "none", which
            does nothing at all.
        scale: The result is multiplied by this (integers become floating point, unless it is 1 or an int).
        process: This process; the current one by default.

    Returns:
        The tree of reduced tensors, in new memory and without gradient. The order in which floating
        point numbers of three and more processes are added is the backend's.

    Raises:
        ValueError: If `reduction` is unknown, or a tensor is on a device that the process group cannot move.
        TypeError: If a leaf is not a dense tensor, is boolean under "sum" or "mean" (which have no agreed
            meaning), is complex under "max", or has a dtype that the backend cannot reduce.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduce: reduction={reduction!r} is unknown; allowed: {', '.join(_REDUCTIONS)}.")
    process = process or current_process()
    rebuild: Callable[[Sequence[torch.Tensor]], _T]
    leaves, rebuild = flatten(tensor, required_by="reduce")
    require_plain("reduce", tensor, leaves)
    if reduction == "none":
        return tensor
    _require_numbers(tensor, leaves, ordered=reduction == "max")
    divisor = process.world_size if reduction == "mean" else 0
    if process.world_size == 1:
        return rebuild([_finish(_contiguous_copy(leaf), divisor, scale) for leaf in leaves])
    if process.debug:
        check_collectives.check(
            "reduce", tensor, process=process, detail=f"reduction={reduction!r}, scale={scale}"
        )
    with torch.no_grad():
        packing = _plan("reduce", tensor, leaves, process)
        op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        return rebuild(_reduce(leaves, packing, op, divisor, scale))


def _reduce(
    leaves: Sequence[torch.Tensor], plan: Plan, op: dist.ReduceOp.RedOpType, divisor: int, scale: float
) -> list[torch.Tensor]:
    reduced: list[Any] = [None] * len(leaves)
    works = []
    for i in plan.large:
        reduced[i] = _contiguous_copy(leaves[i])
        works.append(_all_reduce(reduced[i], op, async_op=True))
    for section in (section for pack in plan.packs for section in pack.sections):
        total = section.flatten_tensors(leaves)
        # All-reduce works in place, and the inputs must not change.
        total = (
            _contiguous_copy(total) if len(section.positions) == 1 else total
        )  # of one tensor it may be a view
        _all_reduce(total, op)
        for i, piece in zip(
            section.positions, section.split_copies(_finish(total, divisor, scale)), strict=True
        ):
            reduced[i] = piece
    for i, work in zip(plan.large, works, strict=True):
        waits.wait(work)
        reduced[i] = _finish(reduced[i], divisor, scale)
    return reduced


def _contiguous_copy(leaf: torch.Tensor) -> torch.Tensor:
    # Contiguous: backends reduce dense memory in its order, whatever the strides.
    copied = leaf.detach().clone(memory_format=torch.contiguous_format)
    return copied.resolve_conj().resolve_neg()


def _finish(total: torch.Tensor, divisor: int, scale: float) -> torch.Tensor:
    inexact = total.is_floating_point() or total.is_complex()
    # In place where the dtype allows: nothing else uses the tensor.
    if divisor:
        total = total.div_(divisor) if inexact else total / divisor
    # Checked again, as a mean of integers is floating point by now.
    if scale != 1:
        total = total.mul_(scale) if total.is_floating_point() or total.is_complex() else total * scale
    return total


def _all_reduce(total: torch.Tensor, op: dist.ReduceOp.RedOpType, async_op: bool = False) -> Any:
    if total.dtype is torch.bool:  # the same memory: backends know no booleans
        total = total.view(torch.uint8)
    try:
        return dist.all_reduce(total, op, async_op=async_op)
    except RuntimeError as error:
        # Backends say it in different words, but all of them name the type.
        if "type" not in str(error):
            raise
        raise TypeError(
            f"reduce: the backend {dist.get_backend()} cannot reduce tensors of {total.dtype} ({error}). "
            "Convert them first, for example to torch.float32 or torch.int64."
        ) from error


def _require_numbers(data: Any, leaves: Sequence[torch.Tensor], ordered: bool) -> None:
    if not ordered and any(leaf.dtype is torch.bool for leaf in leaves):
        where = _first_path(data, lambda leaf: leaf.dtype is torch.bool)
        raise TypeError(
            f"reduce takes numbers, but {where} is boolean. Pass its .int() to count, use reduction='max' "
            "to know whether any is true, or gather it."
        )
    if ordered and any(map(torch.is_complex, leaves)):
        where = _first_path(data, torch.is_complex)
        raise TypeError(
            f"reduce: reduction='max' needs numbers that have an order, but {where} is complex. Pass its "
            ".abs(), or gather it."
        )


def _first_path(data: Any, condition: Callable[[torch.Tensor], bool]) -> str:
    match = find_path(data, lambda node: isinstance(node, torch.Tensor) and condition(node))
    return match[0] if match else "a tensor"


def broadcast(tensor: _T, from_process: int = 0, *, process: ProcessInfo | None = None) -> _T:
    """Give every process the values that one process has.

    Args:
        tensor: A tree of tensors, of the same structure, shapes and dtypes on every process. On the other
            processes they are overwritten in place.
        from_process: Rank of the process whose values count.
        process: This process; the current one by default.

    Returns:
        `tensor` itself.

    Raises:
        TypeError: If a leaf is not a dense tensor.
        ValueError: If there is no process `from_process`, a tensor is on a device that the process group
            cannot move, or elements of a tensor here share memory and get different values.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    leaves, _ = flatten(tensor, required_by="broadcast")
    require_plain("broadcast", tensor, leaves)
    require_rank("broadcast", from_process, process)
    if process.world_size == 1:
        return tensor
    if process.debug:
        detail = f"from_process={from_process}"
        check_collectives.check("broadcast", tensor, process=process, detail=detail, one_place=False)
    with torch.no_grad():
        packing = _plan("broadcast", tensor, leaves, process)
        _broadcast(leaves, packing, from_process, sends=process.rank == from_process)
    return tensor


def _broadcast(leaves: Sequence[torch.Tensor], plan: Plan, source: int, sends: bool) -> None:
    works = []
    for i in plan.large:
        buffer = as_bytes(leaves[i])  # the tensor's own memory where that is contiguous
        works.append((leaves[i], buffer, dist.broadcast(buffer, source, async_op=True)))
    for pack in plan.packs:
        buffers = pack.buffers()
        if sends:
            pack.pack(leaves, buffers)
        if pack.nbytes:
            dist.broadcast(buffers.sent, source)
        if not sends:
            received: list[Any] = [None] * len(leaves)
            pack.unpack(buffers, received)
            for leaf, values in zip(leaves, received, strict=True):
                if values is not None:
                    _write(leaf, values)
        pack.keep(buffers)
    for leaf, buffer, work in works:
        waits.wait(work)
        # A tensor that is not contiguous was received into a copy.
        if not sends and buffer.data_ptr() != leaf.data_ptr():
            _write(leaf, buffer.view(leaf.dtype).view(leaf.shape))


def _write(leaf: torch.Tensor, values: torch.Tensor) -> None:
    target, source = leaf, values
    for dim, stride in enumerate(leaf.stride()):
        if stride == 0 and leaf.shape[dim]:  # expanded: all entries are one, which is written once
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    if not leaf.is_contiguous() and not torch.equal(as_bytes(leaf), as_bytes(values)):
        raise ValueError(
            f"broadcast: elements of a tensor here (shape {tuple(leaf.shape)}, strides {leaf.stride()}) "
            "share memory, and the received values for them differ. Pass its .clone()."
        )


def copy_tensor_to_devices(
    tensor: torch.Tensor | None = None, *, process: ProcessInfo | None = None
) -> torch.Tensor:
    """Give every process a tensor of one process, whose shape the others do not know.

    Args:
        tensor: The tensor on one process, None on all others.
        process: This process; the current one by default.

    Returns:
        The tensor, on the device of each process, without gradient.

    Raises:
        ValueError: On every process, unless exactly one of them gave a tensor.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    operation = "copy_tensor_to_devices"
    if process.debug:
        check_collectives.check(operation, process=process, one_place=False)
    # Shape and dtype alone: the values move once it is known who has them.
    offer = (tensor.shape, tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    offers: list[Any] = [offer]
    if process.world_size > 1:
        require_group(operation, process)
        offers = [None] * process.world_size
        dist.all_gather_object(offers, offer)
    # The name of None's type: a process that gave nothing.
    sources = [rank for rank, offered in enumerate(offers) if offered != "NoneType"]
    if len(sources) != 1 or isinstance(offers[sources[0]], str):
        contributors = ", ".join(f"process {rank} gave {_offered(offers[rank])}" for rank in sources)
        raise ValueError(
            f"{operation} takes a tensor on exactly one process and None on the others, but "
            f"{contributors or 'no process gave one'}."
        )
    shape, dtype = offers[sources[0]]
    copied = torch.empty(shape, dtype=dtype, device=process.device)
    if tensor is not None:
        copied.copy_(tensor.detach())
    if process.world_size > 1:
        dist.broadcast(as_bytes(copied), sources[0])
    return copied


def _offered(offer: Any) -> str:
    return f"a {offer}" if isinstance(offer, str) else f"a tensor of shape {tuple(offer[0])}"


def _plan(
    operation: str, data: Any, leaves: Sequence[torch.Tensor], process: ProcessInfo, copies: int = 1
) -> Plan:
    require_group(operation, process)
    packing = plan(leaves, copies)
    require_devices(operation, data, packing.devices, process)
    return packing
