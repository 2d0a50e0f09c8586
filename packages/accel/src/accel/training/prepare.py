"""`prepare`: which kind each object is, in which order kinds are prepared, and what is prepared already."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel.engines.common.checks import mapped_devices
from accel.engines.common.loader import EngineLoader, unwrap_loader
from accel.engines.common.placeholders import PlaceholderOptimizer, PlaceholderScheduler
from accel.engines.context import PrepareRequest
from accel.training.prepared_objects import unwrap_optimizer
from accel.training.uneven import warn_of_missing, warn_of_uneven
from accel_ops.modules import compile_children_in_place
from accel_optim.lomo import find_lomo
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.training.run import Run

# Schedulers read optimizers, and optimizers read the parameters that models end up with.
_KINDS: dict[str, Any] = {
    "model": torch.nn.Module,
    "scheduler": (LRScheduler, AcceleratedScheduler, PlaceholderScheduler),
    "optimizer": (torch.optim.Optimizer, PlaceholderOptimizer),
    "loader": (DataLoader, EngineLoader),
}
_Model = TypeVar("_Model", bound=torch.nn.Module)
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_Loader = TypeVar("_Loader", bound=DataLoader[Any])


def prepare(
    run: Run, objects: Sequence[Any], placement: Sequence[bool | None] | None, accelerator: Any = None
) -> list[Any]:
    """Prepare objects of any kinds; returns them in the same order.

    Args:
        run: The run whose engine, loaders and window the objects join.
        objects: Models, optimizers, schedulers, loaders; None and other objects come back as they are.
        placement: Per object, whether it is put on the device; None: the Accelerator's default.
        accelerator: The Accelerator, which an engine passes to code of the user's.

    Raises:
        ValueError: If `placement` has another length than `objects`, or the engine rejects an object.
        TypeError: If an optimizer is of a subclass of AcceleratedOptimizer that the program made.
        AttributeError: After `AcceleratorState._reset_state()`, as long as no other state was made.
    """
    if placement is None:
        placement = [None] * len(objects)
    if len(placement) != len(objects):
        raise ValueError(
            f"prepare got {len(objects)} objects and a device_placement of {len(placement)}: give one entry "
            f"for each."
        )
    # Kinds before anything is changed: an object of no kind comes back as it is.
    kinds = [_kind_of(run, item) for item in objects]
    _warn_about_unknown(run, [item for item, kind in zip(objects, kinds, strict=True) if kind is None])
    result = list(objects)
    # Models and optimizers go to the engine in one call, as FSDP and DeepSpeed need both at once.
    trained = [index for index, kind in enumerate(kinds) if kind in ("model", "optimizer")]
    done = prepare_models_and_optimizers(
        run,
        [objects[index] for index in trained],
        [placement[index] for index in trained],
        other_objects=[
            item
            for item, kind in zip(objects, kinds, strict=True)
            if kind in ("scheduler", "loader", "extra")
        ],
        accelerator=accelerator,
    )
    for index, item in zip(trained, done, strict=True):
        result[index] = item
    # Schedulers and loaders afterwards: they follow optimizers and the engine's mesh.
    for index, kind in enumerate(kinds):
        if kind == "scheduler":
            result[index] = prepare_scheduler(run, objects[index])
        elif kind == "loader":
            result[index] = prepare_loader(run, objects[index], placement[index])
            # Sequence parallelism splits the batches of loaders that come with the model, as documented.
            if "model" in kinds:
                result[index] = _wrap_loader(run, result[index])
        elif kind == "extra":
            result[index] = run.engine.setup_loader(objects[index], accelerator)
    return result


def check_kind(item: Any, kind: str) -> None:
    """Reject an object that is not what `prepare_model`, `prepare_optimizer` or `prepare_scheduler` takes.

    Raises:
        TypeError: If it is of another kind.
    """
    takes, is_like_one = {
        "model": ("a torch.nn.Module", False),
        "optimizer": ("an optimizer of torch's kind", _is_like_an_optimizer(item)),
        "scheduler": ("what has a step method", callable(getattr(item, "step", None))),
    }[kind]
    if not isinstance(item, _KINDS[kind]) and not is_like_one:
        raise TypeError(f"prepare_{kind} takes {takes}, not {type(item).__name__} ({item!r:.80}).")


def prepare_models_and_optimizers(
    run: Run,
    objects: Sequence[Any],
    placement: Sequence[bool | None],
    evaluation_mode: bool = False,
    other_objects: Sequence[Any] = (),
    accelerator: Any = None,
) -> list[Any]:
    """Pass the models and optimizers that are not prepared yet to the engine, in one call.

    Args:
        run: Whose engine they join.
        objects: The models and optimizers.
        placement: Per object, whether it is put on the device; None: the Accelerator's default.
        evaluation_mode: Whether models are only evaluated.
        other_objects: Schedulers, loaders and the engine's extra objects of the same call, which are prepared
            afterwards.
        accelerator: See `prepare`.
    """
    _check_settings(run)
    for item in objects:
        _check_wrapper(item)
    # A model that was evaluated before is done already, but for what training needs.
    if not evaluation_mode:
        _wrap_newly_trained(run, objects)
    new: dict[int, Any] = {}  # by id: an object that is passed twice is prepared once
    for item, is_placed in zip(objects, placement, strict=True):
        if run.prepared.find(item) is None and id(item) not in new:
            new[id(item)] = (item, run.device_placement if is_placed is None else is_placed)
    models = [pair for pair in new.values() if isinstance(pair[0], torch.nn.Module)]
    for model, _ in models:
        compile_children_in_place(model)  # plans, policies and checkpoints go by names and classes
    optimizers = [pair for pair in new.values() if not isinstance(pair[0], torch.nn.Module)]
    request = PrepareRequest(
        models=tuple(model for model, _ in models),
        optimizers=tuple(unwrap_optimizer(optimizer) for optimizer, _ in optimizers),
        place_models=tuple(is_placed for _, is_placed in models),
        place_optimizers=tuple(is_placed for _, is_placed in optimizers),
        evaluation_mode=evaluation_mode,
        accelerator=accelerator,
        **_describe_other_objects(run, other_objects),
    )
    run.engine.check(request)  # raises before anything is changed
    result = run.engine.prepare(request)
    for (original, _), model in zip(models, result.models, strict=True):
        run.prepared.record("models", original, _mark_prepared(model))
    for (original, _), optimizer in zip(optimizers, result.optimizers, strict=True):
        run.prepared.record("optimizers", original, _mark_prepared(optimizer))
    for observer in run.observers:
        for model in result.models:
            observer.model_prepared(model)
        for optimizer in result.optimizers:
            observer.optimizer_prepared(optimizer)
    run.lomo = find_lomo(run.prepared.optimizers)  # all: one of an earlier call may be it
    if new:
        run.misuse.restart(run)
    _attach_schedulers(run)
    return [run.prepared.find(item) for item in objects]


def prepare_model(
    run: Run, model: _Model, placement: bool | None, evaluation_mode: bool, accelerator: Any
) -> _Model:
    """See `Accelerator.prepare_model`."""
    check_kind(model, "model")
    (prepared,) = prepare_models_and_optimizers(
        run, [model], [placement], evaluation_mode, accelerator=accelerator
    )
    return prepared  # type: ignore[no-any-return]


def prepare_optimizer(
    run: Run, optimizer: _Optimizer, placement: bool | None, accelerator: Any
) -> _Optimizer:
    """See `Accelerator.prepare_optimizer`."""
    check_kind(optimizer, "optimizer")
    (prepared,) = prepare_models_and_optimizers(run, [optimizer], [placement], accelerator=accelerator)
    return prepared  # type: ignore[no-any-return]


def is_spread(model: torch.nn.Module) -> bool:
    """See `Accelerator.verify_device_map`."""
    return len(mapped_devices(model)) > 1


def split_sequences(run: Run, loader: _Loader, model: torch.nn.Module) -> _Loader:
    """See `Accelerator.deepspeed_ulysses_dl_adapter`."""
    if not any(prepared is model for prepared in run.prepared.models):
        raise ValueError("deepspeed_ulysses_dl_adapter needs the prepared model: prepare() comes first.")
    config = run.state.parallelism_config
    if config is None or not config.sp_enabled:
        raise ValueError("There is no sequence parallelism: pass ParallelismConfig(sp_size=...).")
    return _wrap_loader(run, loader)  # type: ignore[no-any-return]


def _describe_other_objects(run: Run, other_objects: Sequence[Any]) -> dict[str, Any]:
    """The schedules, loaders and batch sizes of a call, which some engines need."""
    config, state = run.dataloader_config, run.gradient_state
    size = run.engine.data_parallel.size
    loaders = [item for item in other_objects if isinstance(item, DataLoader)]
    sizes = [_batch_size(item, size if config.split_batches else 1) for item in loaders]
    previous = [_batch_size(item) for item in run.prepared.loaders]
    # As AcceleratedScheduler steps schedulers.
    scheduler_steps = 1 if config.split_batches or not state.step_scheduler_per_process else size
    return {
        "schedulers": tuple(item for item in other_objects if isinstance(item, _KINDS["scheduler"])),
        "extra": tuple(item for item in other_objects if isinstance(item, run.engine.traits.loader_types)),
        "batch_sizes": tuple(size for size in sizes if size is not None),
        "previous_batch_size": min((size for size in previous if size is not None), default=None),
        "scheduler_steps_per_step": scheduler_steps,
    }


def _batch_size(loader: Any, split_over: int = 1) -> int | None:
    """Samples per process and micro-batch; None if the loader does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size // split_over if isinstance(size, int) else None


def prepare_scheduler(run: Run, scheduler: Any) -> AcceleratedScheduler:
    """See `Accelerator.prepare_scheduler`; idempotent."""
    check_kind(scheduler, "scheduler")
    _check_settings(run)
    if isinstance(scheduler, AcceleratedScheduler) and not shares_window(run, scheduler):
        scheduler = scheduler.scheduler
    if (prepared := run.prepared.find(scheduler)) is not None:
        return prepared  # type: ignore[no-any-return]
    original = scheduler
    scheduler = run.engine.setup_scheduler(scheduler) or scheduler  # DeepSpeed and Megatron make their own
    if not isinstance(scheduler, AcceleratedScheduler):
        scheduler = AcceleratedScheduler(
            scheduler,
            run.prepared.optimizers,
            step_with_optimizer=run.step_scheduler_with_optimizer,
            split_batches=run.dataloader_config.split_batches,
            gradient_state=run.gradient_state,
            num_processes=run.engine.data_parallel.size * run.batch_factor,
        )
    run.prepared.record("schedulers", original, _mark_prepared(scheduler))
    run.misuse.start(run)
    _attach_schedulers(run)
    return scheduler  # type: ignore[no-any-return]


def _attach_schedulers(run: Run) -> None:
    """Let each scheduler follow the optimizer it was made for, whichever was prepared first."""
    wrappers = {id(unwrap_optimizer(item)): item for item in run.prepared.optimizers}
    for scheduler in run.prepared.schedulers:
        wrapper = wrappers.get(id(unwrap_optimizer(getattr(scheduler.scheduler, "optimizer", None))))
        if wrapper is not None:
            # Its own alone: with all optimizers a skipped step of another one would hold it back.
            scheduler.optimizers = [wrapper]


def prepare_loader(
    run: Run, loader: Any, place: bool | None = None, slice_fn_for_dispatch: Any = None
) -> Any:
    """Shard a loader over the engine's data-parallel processes; idempotent."""
    from accel_data.prepare import prepare_data_loader

    _check_settings(run)
    if isinstance(loader, EngineLoader):
        inner = prepare_loader(run, loader.loader, place, slice_fn_for_dispatch)
        if isinstance(inner, EngineLoader):  # prepared already
            return inner
        wrapped = loader if inner is loader.loader else loader.with_loader(inner)
        run.prepared.replace("loaders", inner, wrapped)
        return wrapped
    config = run.dataloader_config
    place = run.device_placement if place is None else place
    settings = (place, slice_fn_for_dispatch, list(run.rng_types), *vars(config).values())
    if (prepared := run.prepared.find(loader, settings)) is not None:
        return prepared
    rank, size = run.engine.data_parallel.rank_and_size
    shares_samples = size != run.process.world_size  # tensor or context parallelism
    prepared = prepare_data_loader(
        run.engine.setup_loader(_enlarge_batches(run.batch_factor, loader), None),
        run.process.device,
        num_processes=size,
        process_index=rank,
        split_batches=config.split_batches,
        put_on_device=place,
        rng_types=list(run.rng_types),
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
        gradient_state=run.gradient_state,
        custom_classes=config.custom_classes,
        order=config.order,
        presharded=config.presharded,
        # Processes that work on one batch together get the same.
        torch_device_mesh=run.engine.data_parallel.mesh if shares_samples else None,
        data_ranks=run.engine.data_parallel.ranks,
    )
    if not shares_window(run, prepared):
        # Another Accelerator's loader: a copy reports its progress to this one's gradient state.
        prepared = copy.copy(prepared)
        prepared.gradient_state = run.gradient_state
    # Partials of functions, not methods: the loader must not keep the Accelerator.
    if run.process.world_size > 1:
        joining = run.engine.data_parallel.uneven_inputs
        prepared.set_warnings(partial(warn_of_uneven, joining), partial(warn_of_missing, joining))
    existing = next((item for item in run.prepared.loaders if unwrap_loader(item) is prepared), None)
    run.prepared.record(
        "loaders", loader, _mark_prepared(prepared if existing is None else existing), settings
    )
    if existing is not None:
        return existing
    run.misuse.start(run)
    for observer in run.observers:
        observer.loader_prepared(prepared)
    return prepared


def _wrap_loader(run: Run, loader: Any) -> Any:
    """Wrap a loader whose batches the engine changes on their way to a prepared model."""
    wrapped = run.engine.wrap_loader(loader)
    run.prepared.replace("loaders", loader, wrapped)
    return wrapped


def _enlarge_batches(factor: int, loader: Any) -> Any:
    """Make the batches of a DataLoader larger, in place; idempotent. Returns the loader."""
    if factor == 1 or not isinstance(loader, DataLoader) or getattr(loader, "_verify_enlarged", False):
        return loader
    sampler = loader.batch_sampler
    if isinstance(getattr(sampler, "batch_size", None), int):
        sampler.batch_size *= factor  # type: ignore[union-attr]
    # DataLoader rejects an assignment after it was made, and its batch size is read here alone.
    if loader.batch_size is not None:
        vars(loader)["batch_size"] = loader.batch_size * factor
    vars(loader)["_verify_enlarged"] = True
    return loader


def _kind_of(run: Run, item: Any) -> str | None:
    for kind, types in _KINDS.items():
        if isinstance(item, types):
            return kind
    if isinstance(item, run.engine.traits.loader_types):
        return "extra"
    if _is_like_an_optimizer(item):
        return "optimizer"
    return None


def _is_like_an_optimizer(item: Any) -> bool:
    """Whether it is used as an optimizer without being torch's, as schedule-free's wrapper is."""
    methods = ("step", "zero_grad", "state_dict", "load_state_dict")
    return hasattr(item, "param_groups") and all(callable(getattr(item, name, None)) for name in methods)


def _warn_about_unknown(run: Run, items: Sequence[Any]) -> None:
    """Warn once of each type: programs prepare what they have."""
    # Programs pass None for objects that they do not have.
    new = {type(item) for item in items if item is not None} - run.warned_types
    if not new:
        return
    run.warned_types |= new
    names = ", ".join(sorted(kind.__name__ for kind in new))
    warn(
        f"prepare() returned objects unchanged: {names}. It prepares only torch Module, Optimizer, "
        "LRScheduler and DataLoader objects.",
        UserWarning,
    )


def find_prepared_optimizer(run: Run, optimizer: Any) -> Any:
    """The prepared form of an optimizer.

    Raises:
        ValueError: If it is not prepared.
    """
    prepared = run.prepared.find(optimizer)
    if prepared is None:
        raise ValueError(f"The {type(optimizer).__name__} is not prepared: pass it to prepare() first.")
    return prepared


def has_any_parameter(optimizer: torch.optim.Optimizer, wanted: Collection[int]) -> bool:
    """Whether the optimizer has a parameter whose `id` is among `wanted`."""
    return any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])


def _wrap_newly_trained(run: Run, objects: Sequence[Any]) -> None:
    """Wrap models that were prepared for evaluation, or while they were frozen, and are to train now."""
    prepared = [run.prepared.find(item) for item in objects if isinstance(item, torch.nn.Module)]
    for model in list(run.prepared.models):
        if any(item is model for item in prepared):
            run.prepared.replace("models", model, _mark_prepared(run.engine.setup_model(model)))


def _check_settings(run: Run) -> None:
    """Raise AttributeError after `AcceleratorState._reset_state()`, before anything is prepared by it."""
    run.state.distributed_type  # noqa: B018


def _mark_prepared(prepared: Any) -> Any:
    """Mark a prepared object as clients expect it, who look before they prepare it themselves."""
    prepared._is_accelerate_prepared = True
    return prepared


def _check_wrapper(item: Any) -> None:
    """Reject an optimizer's wrapper whose methods would be lost, as the engine makes another one."""
    kind = type(item)
    is_ours = kind.__module__.partition(".")[0] in ("accel", "accel_optim")
    if isinstance(item, AcceleratedOptimizer) and not is_ours:
        raise TypeError(
            f"prepare got a {kind.__name__}, a subclass of AcceleratedOptimizer. It would make another "
            f"wrapper, without the methods of {kind.__name__}. Pass its `.optimizer`, and override methods "
            "in a subclass of the torch optimizer."
        )


def shares_window(run: Run, item: Any) -> bool:
    """Whether a wrapper or loader belongs to this Accelerator's accumulation window, and to no other one."""
    # Handles on one state share its settings, and no two states do.
    return item.gradient_state.plugin_kwargs is run.gradient_state.plugin_kwargs
