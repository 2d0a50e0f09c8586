"""Changes that `accel verify` makes in the runs that it compares: functions, batches, schedules, dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_optim.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from accel.engines import Engine
    from accel.observe.attach import Undo
    from accel.training.run import Run


def replace_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> Undo:
    """Have `wrapper(original, *args, **kwargs)` run in place of a function; returns what takes it off.

    Args:
        owner: A module, class or object.
        name: The function's name there.
        wrapper: What is called in its place.
    """
    original = getattr(owner, name)
    is_own = name in vars(owner)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    if is_own:
        return functools.partial(setattr, owner, name, original)
    return functools.partial(delattr, owner, name)


def replace_methods(engine: Engine, kind: str, **methods: Callable[..., Any]) -> Undo:
    """Have `method(part, original, *args)` run in place of methods of a part of an engine.

    Args:
        engine: The engine.
        kind: The attribute that holds the part's class.
        **methods: What runs in place of which method.

    Returns:
        What takes it off.
    """
    base = getattr(engine, kind)
    # Parts are made anew whenever they are asked for, so that wrapping one would be lost.
    changed = {name: _in_place_of(getattr(base, name), method) for name, method in methods.items()}
    setattr(engine, kind, type(base.__name__, (base,), changed))
    return functools.partial(delattr, engine, kind)


def _in_place_of(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(part: Any, *args: Any, **kwargs: Any) -> Any:
        return method(part, original, *args, **kwargs)

    return call


def enlarge_batches(factor: int, loader: Any) -> Any:
    """Make the batches of a loader larger, in place; idempotent.

    Args:
        factor: How many times as large.
        loader: The loader; what is no DataLoader stays as it is.

    Returns:
        The same loader.
    """
    if not isinstance(loader, DataLoader) or getattr(loader, "_verify_enlarged", False):
        return loader
    sampler = loader.batch_sampler
    if isinstance(getattr(sampler, "batch_size", None), int):
        sampler.batch_size *= factor  # type: ignore[union-attr]
    # DataLoader rejects an assignment after it was made, and reads it when it is prepared.
    if loader.batch_size is not None:
        vars(loader)["batch_size"] = loader.batch_size * factor
    vars(loader)["_verify_enlarged"] = True
    return loader


def wrap_scheduler(run: Run, factor: int, original: Callable[..., Any], scheduler: Any) -> Any:
    """Move schedules as many processes would: their length counts the batches of one process.

    Args:
        run: The run, of one process.
        factor: The number of processes.
        original: What the engine does with schedules.
        scheduler: The schedule.
    """
    own = original(scheduler)
    if own is not None or isinstance(scheduler, AcceleratedScheduler):
        return own
    return AcceleratedScheduler(
        scheduler,
        run.optimizers,
        step_with_optimizer=run.step_scheduler_with_optimizer,
        split_batches=run.dataloader_config.split_batches,
        gradient_state=run.gradient_state,
        num_processes=factor,
    )


def switch_off(keyword: str) -> Callable[..., Any]:
    """A wrapper that calls a function of torch without its dropout.

    Args:
        keyword: The function's argument for the share that is dropped.
    """

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if keyword == "p":
            # Its second argument by place.
            args, kwargs = args[:1] + (0.0,) * (len(args) > 1) + args[2:], {**kwargs}
            return original(*args, **({**kwargs, "p": 0.0} if len(args) < 2 else kwargs))
        return original(*args, **({**kwargs, keyword: 0.0} if keyword in kwargs else kwargs))

    return call
