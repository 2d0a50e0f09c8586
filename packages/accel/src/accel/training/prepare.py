"""`prepare`: which kind each object is, in which order kinds are prepared, and what is prepared already."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel.engines.base.context import PrepareRequest
from accel.engines.common.loader import EngineLoader
from accel.engines.common.placeholders import PlaceholderOptimizer, PlaceholderScheduler
from accel.training.uneven import warn_of_missing, warn_of_uneven
from accel_ops.modules import compile_children_in_place
from accel_optim.lomo import find_lomo
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.training.run import Run

_made_from: WeakKeyDictionary[DataLoader[Any], tuple[ref[DataLoader[Any]], tuple[Any, ...]]] = (
    WeakKeyDictionary()
)
"""For prepared loaders: what each was made from, and with which settings."""

# Schedulers read optimizers, and optimizers read the parameters that models end up with.
_KINDS: dict[str, Any] = {
    "model": torch.nn.Module,
    "scheduler": (LRScheduler, AcceleratedScheduler, PlaceholderScheduler),
    "optimizer": (torch.optim.Optimizer, PlaceholderOptimizer),
    "loader": (DataLoader, EngineLoader),
}
_BESIDE = ("scheduler", "loader", "extra")


def prepare(
    run: Run, objects: Sequence[Any], placement: Sequence[bool | None] | None, caller: Any = None
) -> list[Any]:
    """Prepare objects of any kinds; returns them in the order given.

    Args:
        run: Whose engine, loaders and windows the objects join.
        objects: Models, optimizers, schedulers, loaders; None and other objects come back as they are.
        placement: Per object, whether it is put on the device; None: the Accelerator's default.
        caller: The Accelerator, for code of the user's that an engine hands it to.

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
    _warn_of_unknown(run, [item for item, kind in zip(objects, kinds, strict=True) if kind is None])
    result = list(objects)
    # Models and optimizers go to the engine in one call, as FSDP and DeepSpeed need both at once.
    trained = [index for index, kind in enumerate(kinds) if kind in ("model", "optimizer")]
    done = prepare_models_and_optimizers(
        run,
        [objects[index] for index in trained],
        [placement[index] for index in trained],
        beside=[item for item, kind in zip(objects, kinds, strict=True) if kind in _BESIDE],
        caller=caller,
    )
    for index, item in zip(trained, done, strict=True):
        result[index] = item
    # Schedulers and loaders afterwards: they follow optimizers and the engine's mesh.
    for index, kind in enumerate(kinds):
        if kind == "scheduler":
            result[index] = prepare_scheduler(run, objects[index])
        elif kind == "loader":
            result[index] = prepare_loader(run, objects[index], placement[index])
            # Sequence parallelism shares the batches of loaders that come with the model, as documented.
            if "model" in kinds:
                result[index] = run.engine.loaders.wrap_loader(result[index])
        elif kind == "extra":
            result[index] = run.engine.loaders.prepare_extra(objects[index], caller)
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
    beside: Sequence[Any] = (),
    caller: Any = None,
) -> list[Any]:
    """Hand the models and optimizers that are not prepared yet to the engine, together.

    Args:
        run: Whose engine they join.
        objects: The models and optimizers.
        placement: Per object, whether it is put on the device; None: the Accelerator's default.
        evaluation_mode: Whether models are only evaluated.
        beside: Schedules, loaders and the engine's own objects of the same call, which are prepared
            afterwards.
        caller: See `prepare`.
    """
    _check_settings(run)
    for item in objects:
        _check_wrapper(item)
    # A model that was evaluated before is done already, but for what training needs.
    if not evaluation_mode:
        _wrap_what_trains_now(run, objects)
    fresh: dict[int, Any] = {}  # by id: an object that is given twice is prepared once
    for item, put in zip(objects, placement, strict=True):
        if _already(run, item) is None and id(item) not in fresh:
            fresh[id(item)] = (item, run.device_placement if put is None else put)
    models = [pair for pair in fresh.values() if isinstance(pair[0], torch.nn.Module)]
    for model, _ in models:
        compile_children_in_place(model)  # plans, policies and checkpoints go by names and classes
    optimizers = [pair for pair in fresh.values() if not isinstance(pair[0], torch.nn.Module)]
    request = PrepareRequest(
        models=tuple(model for model, _ in models),
        optimizers=tuple(_inner(optimizer) for optimizer, _ in optimizers),
        place_models=tuple(put for _, put in models),
        place_optimizers=tuple(put for _, put in optimizers),
        evaluation_mode=evaluation_mode,
        accelerator=caller,
        **_beside_models(run, beside),
    )
    run.engine.check_collectively(request)  # raises before anything is changed
    done = run.engine.prepare(request)
    run.models.extend(map(_marked, done.models))
    run.optimizers.extend(map(_marked, done.optimizers))
    for observer in run.observers:
        for model in done.models:
            observer.model_prepared(model)
        for optimizer in done.optimizers:
            observer.optimizer_prepared(optimizer)
    run.gradients = run.engine.gradients
    run.lomo = find_lomo(run.optimizers)  # all: one of an earlier call may be it
    if fresh:
        run.misuse.restart(run)
    _attach_schedulers(run)
    asked, answered = [item for item, _ in (*models, *optimizers)], (*done.models, *done.optimizers)
    # The engine answers in the order in which it was asked.
    new = {id(item): prepared for item, prepared in zip(asked, answered, strict=True)}
    return [new[id(item)] if id(item) in new else _already(run, item) for item in objects]


def _beside_models(run: Run, beside: Sequence[Any]) -> dict[str, Any]:
    """The schedules, loaders and batch sizes of a call, which some engines need."""
    config, state = run.dataloader_config, run.gradient_state
    size = run.engine.loaders.dp_rank_and_size[1]
    given = [item for item in beside if isinstance(item, DataLoader)]
    sizes = [_batch_size(item, size if config.split_batches else 1) for item in given]
    earlier = [_batch_size(item) for item in run.loaders]
    # As AcceleratedScheduler moves schedules.
    moves = 1 if config.split_batches or not state.step_scheduler_per_process else size
    return {
        "schedulers": tuple(item for item in beside if isinstance(item, _KINDS["scheduler"])),
        "extra": tuple(item for item in beside if isinstance(item, run.engine.loaders.extra_types)),
        "batch_sizes": tuple(known for known in sizes if known is not None),
        "previous_batch_size": min((known for known in earlier if known is not None), default=None),
        "scheduler_steps_per_step": moves,
    }


def _batch_size(loader: Any, split_over: int = 1) -> int | None:
    """Samples per process and micro-batch; None if the loader does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size // split_over if isinstance(size, int) else None


def prepare_scheduler(run: Run, scheduler: Any) -> AcceleratedScheduler:
    """Wrap a scheduler so that it steps when its optimizer really did; idempotent."""
    _check_settings(run)
    if isinstance(scheduler, AcceleratedScheduler) and not _follows(run, scheduler):
        scheduler = scheduler.scheduler
    for known in run.schedulers:
        # Prepared already, in either form.
        if known is scheduler or known.scheduler is scheduler:
            return known
    scheduler = run.engine.prepare_scheduler(scheduler) or scheduler  # DeepSpeed and Megatron make their own
    if not isinstance(scheduler, AcceleratedScheduler):
        scheduler = AcceleratedScheduler(
            scheduler,
            run.optimizers,
            step_with_optimizer=run.step_scheduler_with_optimizer,
            split_batches=run.dataloader_config.split_batches,
            gradient_state=run.gradient_state,
            num_processes=run.engine.loaders.dp_rank_and_size[1] * run.batch_factor,
        )
    prepared: AcceleratedScheduler = scheduler
    run.schedulers.append(_marked(prepared))
    run.misuse.start(run)
    _attach_schedulers(run)
    return prepared


def _attach_schedulers(run: Run) -> None:
    """Let each scheduler follow the optimizer it was made for, whichever was prepared first."""
    wrappers = {id(_inner(item)): item for item in run.optimizers}
    for scheduler in run.schedulers:
        wrapper = wrappers.get(id(_inner(getattr(scheduler.scheduler, "optimizer", None))))
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
        return loader if inner is loader.loader else loader.with_loader(inner)
    config = run.dataloader_config
    place = run.device_placement if place is None else place
    # Prepared again with other settings, it is another loader.
    asked = (place, slice_fn_for_dispatch, list(run.rng_types), *vars(config).values())
    for known in run.loaders:
        source = _made_from.get(known)
        if source is not None and source[0]() is loader and source[1] == asked:
            return known
    rank, size = run.engine.loaders.dp_rank_and_size
    shares_samples = size != run.process.world_size  # tensor or context parallelism
    prepared = prepare_data_loader(
        run.engine.loaders.loader_to_prepare(_enlarge_batches(run.batch_factor, loader)),
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
        torch_device_mesh=run.engine.loaders.mesh if shares_samples else None,
        data_ranks=run.engine.loaders.data_ranks,
    )
    if not _follows(run, prepared):
        # Another Accelerator's loader: a copy reports its progress to this one's gradient state.
        prepared = copy.copy(prepared)
        prepared.gradient_state = run.gradient_state
    # Partials of functions, not methods: the loader must not keep the Accelerator.
    if run.process.world_size > 1:
        joining = run.engine.loaders.join_state
        prepared.set_warnings(partial(warn_of_uneven, joining), partial(warn_of_missing, joining))
    if not any(known is prepared for known in run.loaders):
        run.loaders.append(_marked(prepared))
        run.misuse.start(run)
        for observer in run.observers:
            observer.loader_prepared(prepared)
    if prepared is not loader:
        _made_from[prepared] = ref(loader), asked
    return prepared


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
    if isinstance(item, run.engine.loaders.extra_types):
        return "extra"
    if _is_like_an_optimizer(item):
        return "optimizer"
    return None


def _is_like_an_optimizer(item: Any) -> bool:
    """Whether it is used as an optimizer without being torch's, as schedule-free's wrapper is."""
    methods = ("step", "zero_grad", "state_dict", "load_state_dict")
    return hasattr(item, "param_groups") and all(callable(getattr(item, name, None)) for name in methods)


def _warn_of_unknown(run: Run, items: Sequence[Any]) -> None:
    """Warn once of each type: programs prepare what they have."""
    # Programs pass None for objects that they do not have.
    new = {type(item) for item in items if item is not None} - run.warned_types
    if not new:
        return
    run.warned_types |= new
    names = ", ".join(sorted(kind.__name__ for kind in new))
    warn(
        f"prepare gives back unchanged what it does not prepare: {names}. It prepares torch Module, "
        "Optimizer, LRScheduler and DataLoader objects.",
        UserWarning,
    )


def prepared_optimizer(run: Run, optimizer: Any) -> Any:
    """The prepared form of an optimizer.

    Raises:
        ValueError: If it is not prepared.
    """
    found = _already(run, optimizer)
    if found is None:
        raise ValueError(f"The {type(optimizer).__name__} is not prepared: pass it to prepare() first.")
    return found


def holds_any(optimizer: torch.optim.Optimizer, wanted: Collection[int]) -> bool:
    """Whether the optimizer has a parameter whose `id` is among `wanted`."""
    return any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])


def _wrap_what_trains_now(run: Run, objects: Sequence[Any]) -> None:
    """Wrap models that were prepared for evaluation, or while they were frozen, and are to train now."""
    for index, model in enumerate(run.models):
        if any(isinstance(item, torch.nn.Module) and _is_form_of(run, item, model) for item in objects):
            run.models[index] = _marked(run.engine.wrap_model(model))


def _check_settings(run: Run) -> None:
    """Raise AttributeError after `AcceleratorState._reset_state()`, before anything is prepared by it."""
    run.state.distributed_type  # noqa: B018


def _marked(prepared: Any) -> Any:
    """Mark a prepared object as clients expect it, who ask before they prepare it themselves."""
    prepared._is_accelerate_prepared = True
    return prepared


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


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


def _follows(run: Run, item: Any) -> bool:
    """Whether a wrapper or loader belongs to this Accelerator's accumulation window, and no other's."""
    # Handles on one state share its settings, and no two states do.
    return item.gradient_state.plugin_kwargs is run.gradient_state.plugin_kwargs


def _is_form_of(run: Run, item: torch.nn.Module, model: torch.nn.Module) -> bool:
    if model is item:
        return True
    # The user may hold the model from before wrapping, or what torch.compile made of it.
    plain = run.engine.unwrap_model(model, keep_torch_compile=False)
    return plain is item or plain is getattr(item, "_orig_mod", None)


def _already(run: Run, item: Any) -> Any | None:
    """The prepared form of `item` when there is one: itself, or what wraps it."""
    if isinstance(item, torch.nn.Module):
        return next((model for model in run.models if _is_form_of(run, item, model)), None)
    for optimizer in run.optimizers:
        if optimizer is item or _inner(optimizer) is _inner(item):
            return optimizer
    return None
