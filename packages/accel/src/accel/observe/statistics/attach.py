"""Timing the objects of a run where they are: attached while statistics are on, and taken off at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from accel.observe.attach import Undo, follow, put
from accel.observe.statistics.clock import Clock
from accel_ops.collectives import operations

__all__ = ["time_backward", "time_collectives", "time_loader", "time_model", "time_step"]

# Those that torch has; the names differ between releases.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce"),
    *("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)
_PLACES: list[tuple[Any, str]] = [
    *((dist, name) for name in _COLLECTIVES),
    # Large tensors are awaited here, after torch's functions have returned.
    *((operations, name) for name in ("broadcast", "gather", "reduce")),
]
_clocks: list[Clock] = []


def time_collectives(clock: Clock) -> Undo:
    """Time the collectives of this process, which belong to no Accelerator; returns what takes that off.

    Those of torch's own code (DDP, FSDP in part) do not come by here.
    """
    if not _clocks:
        for owner, name in _PLACES:
            function = getattr(owner, name, None)
            if function is not None and not hasattr(function, "_accel_statistics"):
                setattr(owner, name, _timed_collective(function))
    _clocks.append(clock)

    def undo() -> None:
        _clocks.remove(clock)
        if _clocks:
            return
        for owner, name in _PLACES:
            function = getattr(owner, name, None)
            # What was put around it since stays, and calls what is left in its place here.
            if function is not None and "_accel_statistics" in vars(function):
                setattr(owner, name, function._accel_statistics)

    return undo


def _timed_collective(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        before = [(clock, clock.switch("collectives")) for clock in _clocks]
        try:
            return function(*args, **kwargs)
        finally:
            for clock, part in before:
                clock.back(part)

    timed._accel_statistics = function  # type: ignore[attr-defined]
    return timed


def time_model(clock: Clock, model: torch.nn.Module) -> Undo:
    """Time the forward passes of a prepared model; returns what takes that off."""
    if isinstance(model, DistributedDataParallel) and next(model.module.buffers(), None) is not None:
        # Before it calls the model it waits for the others, to send buffers around.
        handles = _forward_hooks(clock, model, "collectives") + _forward_hooks(clock, model.module, "forward")
    else:
        handles = _forward_hooks(clock, model, "forward")

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _forward_hooks(clock: Clock, model: torch.nn.Module, part: str) -> list[Any]:
    before: list[str | None] = []

    def begin(*_: Any) -> None:
        before.append(clock.switch(part))

    def end(*_: Any) -> None:
        clock.back(before.pop())

    return [
        model.register_forward_pre_hook(_Hook(begin), prepend=True),
        model.register_forward_hook(_Hook(end), always_call=True),  # also when the model raises
    ]


class _Hook(functools.partial[None]):
    """A hook that copies of the model share, and that is not pickled with it."""

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def time_backward(clock: Clock, engine: Any, awaits: Callable[[], bool], started: Callable[[], None]) -> Undo:
    """Time an engine's backward passes; returns what takes that off.

    Args:
        clock: The clock.
        engine: The engine.
        awaits: Whether backward ends with a wait for the gradients of the other processes. Time from when
            this process's own gradients are there goes to "collectives".
        started: Called when a backward pass begins.
    """
    plain = engine.backward

    def own_part_done() -> None:
        if clock.current == "backward":
            clock.switch("collectives")

    def queue(_: torch.Tensor) -> None:
        # Called first in the backward pass, and so before DDP queues its wait for the exchange of gradients:
        # such callbacks run in order when the last gradient of this process is there. (torch's own name.)
        Variable._execution_engine.queue_callback(own_part_done)

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        started()
        before = clock.switch("backward")
        is_tensor = isinstance(loss, torch.Tensor) and loss.requires_grad
        hook = loss.register_hook(queue) if is_tensor and awaits() else None
        try:
            plain(loss, *args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
            clock.back(before)

    return put(engine, "backward", backward)


def time_step(clock: Clock, optimizer: Any, stepped: Callable[[], None]) -> Undo:
    """Time the steps of a prepared optimizer; returns what takes that off.

    Args:
        clock: The clock.
        optimizer: The optimizer.
        stepped: Called after each step, but not inside of an accumulation window.
    """
    plain = optimizer.step
    state = getattr(optimizer, "gradient_state", None)

    @functools.wraps(plain)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        before = clock.switch("optimizer")
        try:
            result = plain(*args, **kwargs)
        finally:
            clock.back(before)
        if state is None or state.sync_gradients:
            stepped()
        return result

    # A method: torch's schedules take its function.
    return put(optimizer, "step", MethodType(step, optimizer))


def time_loader(
    clock: Clock,
    loader: Any,
    part: str,
    begins: Callable[[Any], None],
    got: Callable[[Any, Any], None],
    ended: Callable[[Any], None],
) -> Undo:
    """Time the reading of a prepared loader; returns what takes that off.

    Args:
        clock: The clock.
        loader: The loader.
        part: The part that reading is.
        begins: Called with the loader when an iteration begins.
        got: Called with the loader and each batch.
        ended: Called with the loader when its iteration ends.
    """

    def timed(self: Any, batches: Iterator[Any]) -> Iterator[Any]:
        begins(self)
        try:
            while True:
                before = clock.switch(part)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    clock.back(before)
                got(self, batch)
                yield batch
        finally:
            ended(self)

    return follow(loader, timed)
