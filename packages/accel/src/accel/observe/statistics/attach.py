"""Timing the objects of a run where they are: attached while statistics are on, and taken off at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from accel.observe.attach import Undo, follow, put
from accel.observe.statistics.clock import MANY_NOTES, OWN_GRADIENTS_READY, Clock
from accel_ops.collectives import operations, waits

# Those that torch has; the names differ between releases.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce"),
    *("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)
_PLACES: list[tuple[Any, str]] = [
    *((dist, name) for name in _COLLECTIVES),
    # What waits for a collective that was started, also in operations that a program has imported by name.
    *((waits, name) for name in ("all_gather", "wait")),
    *((operations, name) for name in ("broadcast", "gather", "reduce")),
]
_clocks: list[Clock] = []
_queue_callback = Variable._execution_engine.queue_callback  # torch's own name
_WAIT = "wait"
_current_pass = torch._C._current_graph_task_id  # private, and what torch's own checkpoints use


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
            # A wrapper that was put there since stays, and calls the function that is put back here.
            if function is not None and "_accel_statistics" in vars(function):
                setattr(owner, name, function._accel_statistics)

    return undo


def _timed_collective(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        clocks = tuple(_clocks)
        for clock in clocks:
            clock.begin("collectives")
        try:
            return function(*args, **kwargs)
        finally:
            for clock in clocks:
                clock.end()

    timed._accel_statistics = function  # type: ignore[attr-defined]
    return timed


def time_model(clock: Clock, model: torch.nn.Module) -> Undo:
    """Time the forward passes of a prepared model; returns what takes that off."""
    if not isinstance(model, DistributedDataParallel):
        return _hook_forward(clock, model, "forward")
    if next(model.module.buffers(), None) is None:
        return _wrap_forward(clock, model, "forward")
    # Before it calls the model it broadcasts buffers, and waits for the others.
    undo_both = (
        _wrap_forward(clock, model, "collectives"),
        _hook_forward(clock, model.module, "forward"),
    )

    def undo() -> None:
        for undo_one in undo_both:
            undo_one()

    return undo


def _wrap_forward(clock: Clock, model: DistributedDataParallel, part: str) -> Undo:
    """Time the forward method of DDP, which costs a step less than hooks, and has no hooks of an engine."""
    plain = vars(model).get("forward")
    notes, note, now = clock.notes, clock.note, clock.now

    @functools.wraps(_function_of(model.forward))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        note((part, now(), get_ident()))
        try:
            return type(self).forward(self, *args, **kwargs) if plain is None else plain(*args, **kwargs)
        finally:
            note((None, now(), get_ident()))
            if notes.qsize() > MANY_NOTES:
                clock.add_up()

    # A method, which copies of the model have as one of theirs.
    return put(model, "forward", MethodType(forward, model))


def _function_of(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a method: a wrapper of that, bound again, has the method's signature."""
    return getattr(method, "__func__", method)


def _hook_forward(clock: Clock, model: torch.nn.Module, part: str) -> Undo:
    passes = _Passes(clock, part)
    handles = (
        model.register_forward_pre_hook(passes.begin, prepend=True),
        model.register_forward_hook(passes.end, always_call=True),  # also when the model raises
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _Passes:
    """Times the forward passes of a model, and of its copies; pickled ones are timed by no clock of a run."""

    def __init__(self, clock: Clock, part: str) -> None:
        self._clock, self._part = clock, part
        self._notes, self._note, self._now = clock.notes, clock.note, clock.now

    def begin(self, model: torch.nn.Module, inputs: Any) -> None:
        self._note((self._part, self._now(), get_ident()))

    def end(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._note((None, self._now(), get_ident()))
        if self._notes.qsize() > MANY_NOTES:
            self._clock.add_up()

    def __deepcopy__(self, memo: Any) -> _Passes:
        return self

    def __reduce__(self) -> Any:
        return _Passes, (self._clock, self._part)


def time_backward(
    clock: Clock,
    engine: Any,
    awaited: Callable[[], Sequence[torch.nn.Module]] | None,
    started: Callable[[], None],
) -> Undo:
    """Time an engine's backward passes; returns what takes that off.

    Args:
        clock: The clock.
        engine: The engine.
        awaited: Returns the models whose backward ends with a wait for the gradients of the other processes.
            Time from when this process's own gradients are there goes to "collectives". None on one process.
        started: Called when a backward pass begins.
    """
    plain = engine.backward
    wait = None if awaited is None else _Wait(clock, awaited)
    notes, note, now = clock.notes, clock.note, clock.now

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        started()
        note(("backward", now(), get_ident()))
        hook = None
        if wait is not None:
            wait.unqueued[_WAIT] = wait.begin
            hook = wait.hook_loss(loss) if wait.hooks_losses else None
        try:
            plain(loss, *args, **kwargs)
        finally:
            note((None, now(), get_ident()))
            if hook is not None:
                hook.remove()
        if wait is not None and (hook is not None or wait.unqueued):
            wait.choose()
        if notes.qsize() > MANY_NOTES:
            clock.add_up()

    undo = put(engine, "backward", backward)

    def undo_both() -> None:
        undo()
        if wait is not None:
            wait.release()

    return undo_both


class _Wait:
    """Notices in a backward pass that this process's own gradients are there, so that the wait begins.

    Callbacks that are queued in a pass run in order once its last gradient is there. DDP queues its wait with
    that gradient; one that is queued before runs before. What queues it is a hook of the loss at first, and
    then of one parameter, which takes a third of the time as it stays. If a pass does not reach that
    parameter, or reaches it in a pass of its own (reentrant checkpoints), losses have hooks again.

    DDP's own timers (`_set_ddp_runtime_logging_sample_rate`) are no substitute: they cost a step no less
    than the hook, and count a wait again for each forward pass that no backward pass follows.

    Attributes:
        hooks_losses: Whether the next pass begins with a hook of its loss.
        begin: The callback, which notes that this process's gradients are there.
        unqueued: Holds the callback until it is queued in the pass at hand.
    """

    def __init__(self, clock: Clock, awaited: Callable[[], Sequence[torch.nn.Module]]) -> None:
        self.hooks_losses = True
        self.unqueued: dict[str, Callable[[], None]] = {}
        self._awaited = awaited
        self.begin = clock.noting(OWN_GRADIENTS_READY)
        # Each item that is taken queues the callback, without a Python function, like `Clock.noting`.
        callbacks = iter(partial(self.unqueued.pop, _WAIT, self.begin), None)
        self._queue = map(_queue_callback, callbacks)
        self._task = -1  # torch's number of the pass at hand
        self._handle: Any = None  # of the parameter's hook
        self._tried: Callable[[], torch.Tensor | None] = lambda: None  # the parameter
        self._may_hook_parameter = True

    def hook_loss(self, loss: Any) -> Any:
        """Return the handle of a hook of a loss; None where backward does not wait."""
        is_tensor = isinstance(loss, torch.Tensor) and loss.requires_grad
        return loss.register_hook(self._at_loss) if is_tensor and self._awaited() else None

    def choose(self) -> None:
        """Choose what the next pass has a hook of; called where the last one had one of its loss, or none."""
        if self._handle is not None:
            if self.hooks_losses or self.unqueued:
                self._may_hook_parameter = False
                self.release()
            elif (parameter := self._tried()) is not None:
                # Called with the parameter, which `next` takes for its default, and never needs.
                self._hook(parameter, partial(next, self._queue))
        elif self._may_hook_parameter and not self.unqueued:
            parameters = (item for model in self._awaited() for item in model.parameters())
            # One that was frozen since may still have a gradient, and takes no hook.
            trained = (item for item in parameters if item.requires_grad)
            reached = next((item for item in trained if item.grad is not None), None)
            if reached is not None:
                self._tried = ref(reached)
                self._hook(reached, self._try_parameter)

    def _hook(self, parameter: Any, hook: Callable[[torch.Tensor], None]) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = parameter.register_post_accumulate_grad_hook(hook)

    def release(self) -> None:
        """Take the hook of the parameter off."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self.hooks_losses = None, True

    def _at_loss(self, _: torch.Tensor) -> None:
        self._task = _current_pass()
        next(self._queue)

    def _try_parameter(self, _: torch.Tensor) -> None:
        if _current_pass() == self._task:
            self.hooks_losses = False


def time_step(clock: Clock, optimizer: Any, stepped: Callable[[], None]) -> Undo:
    """Time the steps of a prepared optimizer; returns what takes that off.

    Args:
        clock: The clock.
        optimizer: The optimizer.
        stepped: Called after each step, but not inside of an accumulation window.
    """
    plain = optimizer.step
    state = getattr(optimizer, "gradient_state", None)
    notes, note, now = clock.notes, clock.note, clock.now

    @functools.wraps(_function_of(plain))
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        note(("optimizer", now(), get_ident()))
        try:
            result = plain(*args, **kwargs)
        finally:
            note((None, now(), get_ident()))
        if state is None or state.sync_gradients:
            stepped()
        if notes.qsize() > MANY_NOTES:
            clock.add_up()
        return result

    # A method: torch's schedules take its function.
    return put(optimizer, "step", MethodType(step, optimizer))


def time_loader(
    clock: Clock,
    loader: Any,
    part: str,
    begins: Callable[[Any], tuple[Callable[[Any], None], Callable[[], None]]],
) -> Undo:
    """Time the reading of a prepared loader; returns what takes that off.

    Args:
        clock: The clock.
        loader: The loader.
        part: The part that reading is.
        begins: Called with the loader when an iteration begins; returns what is called with each batch, and
            what is called when the iteration ends.
    """
    notes, note, now = clock.notes, clock.note, clock.now

    def timed(self: Any, batches: Iterator[Any]) -> Iterator[Any]:
        got, ended = begins(self)
        try:
            while True:
                note((part, now(), get_ident()))
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    note((None, now(), get_ident()))
                    if notes.qsize() > MANY_NOTES:
                        clock.add_up()
                got(batch)
                yield batch
        finally:
            ended()

    return follow(loader, timed)
