"""save_state: the objects of an Accelerator in a checkpoint, and the checkpoint's folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.engines.base import is_native
from accel.engines.common.checks import warn_of_options
from accel.engines.common.gradients import tensors_with_grad
from accel.observe.base import observed
from accel.observe.sync import verify_before_save
from accel.saving.per_rank_buffers import save_per_rank_buffers
from accel.saving.saving_process import saving_process
from accel.training.arguments import reject_misspelt
from accel.training.prepare import has_any_parameter
from accel_ckpt import file_names
from accel_ckpt.background import thread
from accel_ckpt.files import tensors
from accel_ckpt.folder import rotation
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks
from accel_ckpt.folder.staging import Staging, staged
from accel_ckpt.training_state.frozen_weights import frozen_names
from accel_ckpt.training_state.gradients import get_gradients
from accel_ckpt.training_state.save import save_accelerator_state, save_custom_state
from accel_ckpt.weights.files import save_weights
from accel_optim.scaler import end_round
from accel_state.logging.warning import warn
from accel_state.verify import output_path

if TYPE_CHECKING:
    import torch

    from accel.training.run import Run
    from accel_ckpt.config import ProjectConfiguration
    from accel_state.process.info import ProcessInfo


def save_object(run: Run, value: Any, file: str | os.PathLike[str], safe_serialization: bool) -> None:
    """See `Accelerator.save`."""
    each_node = run.project_configuration.save_on_each_node
    tensors.save(value, file, save_on_each_node=each_node, safe_serialization=safe_serialization)


def save_model(
    run: Run,
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
    main_process_only: bool | None,
) -> None:
    """See `Accelerator.save_model`."""
    saver = saving_process(run, "save_model", main_process_only)
    if saver is None:
        return
    process = saver  # for the function below, in which mypy knows no narrower type
    state, folder = run.engine.state_dict(model, True), str(output_path(folder))
    each_node = run.project_configuration.save_on_each_node

    def write() -> None:
        if process.is_local_main if each_node else process.is_main:
            save_weights(state, folder, max_shard_size, safe_serialization)

    run_on_all_ranks(write, process, "saving the model")


def register(run: Run, objects: Sequence[Any]) -> None:
    """Register objects to save and load with the state.

    Raises:
        ValueError: If one has no state_dict or no load_state_dict; then none is registered.
    """
    unfit = [
        f"{type(item).__name__} ({position})"
        for position, item in enumerate(objects)
        if not (
            callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
        )
    ]
    if unfit:
        raise ValueError(
            "register_for_checkpointing takes objects with state_dict() and load_state_dict(); these lack "
            f"one: {', '.join(unfit)}."
        )
    # Only after all checks, so that an error registers none.
    run.registered.extend(objects)


def save_state(
    run: Run,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    main_process_only: bool | None,
    blocking: bool = True,
    **options: Any,
) -> str:
    """See `Accelerator.save_state`: writes a checkpoint atomically.

    In the middle of an accumulation window the accumulated gradients are saved too, so that the window can be
    resumed.

    Args:
        run: The run with the prepared and registered objects.
        output_dir: The folder; not needed with automatic naming.
        safe_serialization: Whether weights are safetensors.
        main_process_only: Whether the main process calls it alone; None to decide by the surrounding code.
        blocking: False to copy the state, and write and commit it in the background.
        **options: Engine-specific options for saving (DeepSpeed's `save_checkpoint`); others take none.

    Returns:
        The folder.

    Raises:
        ValueError: If there is no folder to write to.
        TypeError: If an option is misspelt.
        Exception: The error of this process, or of the previous save in the background.
    """
    reject_misspelt(save_state, options)
    with observed(run, "saving"):
        output_dir = output_path(output_dir)
        process = saving_process(run, "save_state", main_process_only)
        if process is None:
            return saved_folder(run, output_dir)
        return _write_checkpoint(run, output_dir, safe_serialization, blocking, process, options)


def _write_checkpoint(
    run: Run,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    blocking: bool,
    process: ProcessInfo,
    options: dict[str, Any],
) -> str:
    # One save at a time: the previous one may still read the buffers that this one would overwrite.
    thread.wait()
    # Checks come before the folder is created: a failing call leaves nothing behind.
    _check_window(run)
    if (check := run.engine.checkpoint.check) is not None:
        check(run.prepared.optimizers)
    run.misuse.before_save(run)
    verify_before_save(run, process)
    end_round(run.scaler)  # or the saved scale would not include the overflows of the last steps
    config = run.project_configuration
    folder = _new_folder(run, output_dir, process)
    each_node = config.save_on_each_node
    incremental = config.incremental_saves
    with staged(
        folder, save_on_each_node=each_node, process=process, blocking=blocking, incremental=incremental
    ) as staging:
        saves_sharded = run.engine.checkpoint.format == "sharded"
        weights, optimizers = (_sharded_states_for_hooks(run), []) if saves_sharded else _full_states(run)
        # By the states' ids, as hooks may remove some from the list.
        frozen = _frozen(run, weights) if incremental and not saves_sharded else {}
        state_ids = [id(state) for state in weights]

        def write_shared() -> None:
            # Hooks may remove weights from the list and write them themselves.
            for hook in run.save_hooks.values():
                hook(models_for_hooks(run), weights, str(staging.path))
            save_accelerator_state(
                staging.path,
                [] if saves_sharded else weights,
                optimizers,
                run.prepared.schedulers,
                run.prepared.loaders,
                process.rank,
                run.window.step,
                run.scaler,
                each_node,
                safe_serialization,
                gradients=get_gradients(run.prepared.models) if run.window.step else None,
                window=run.window.state_dict(),
                frozen=[] if saves_sharded else [frozen.get(id(state), ()) for state in weights],
                gathered=run.engine.checkpoint.format == "gathered",
                process=process,
            )

        # Checked before the sharded files, whose collectives a failed process would not join.
        run_on_all_ranks(write_shared, process, "writing the checkpoint")
        if saves_sharded:
            from accel_ckpt.sharded.save_load import save_sharded_state  # takes most of a second to import

            kept_ids = {id(state) for state in weights}
            skipped = [index for index, state in enumerate(state_ids) if state not in kept_ids]
            save_sharded_state(
                staging.path, **sharded_models_and_optimizers(run), skipped=skipped, process=process
            )
        if run.engine.traits.shards_gradients:
            save_per_rank_buffers(run, staging)
        if (native := run.engine.checkpoint.native) is not None:
            native.save(staging.path, **options)
        else:
            warn_of_options(run.engine.name, options)
        for index, item in enumerate(run.registered):
            _save_registered(run, item, index, staging)
        if config.automatic_checkpoint_naming:
            # Old checkpoints are deleted only once this one is complete.
            limit = config.total_limit
            staging.after_commit(lambda: rotation.prune(folder.parent, limit, staging.target))
    if config.automatic_checkpoint_naming:
        config.iteration += 1  # after the commit: a failed save leaves its number free
    return str(staging.target)


def _save_registered(run: Run, item: Any, index: int, staging: Staging) -> None:
    """Write a registered object's state; sharded tensors are written by all processes."""
    if not run.engine.traits.shards_gradients:
        each_node = run.project_configuration.save_on_each_node
        save_custom_state(item, staging.path, index, each_node)
        return
    from accel_ckpt.training_state.registered import save_registered

    save_registered(item, index, staging, run.process)


def _frozen(run: Run, weights: Sequence[dict[str, Any]]) -> dict[int, Collection[str]]:
    """Return the names of the frozen weights of each full state, by the id of the state."""
    models = [model for model in run.prepared.models if not is_native(run.engine, model)] if weights else []
    return {id(state): frozen_names(model) for state, model in zip(weights, models, strict=True)}


def _full_states(run: Run) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the states that one process writes for all."""
    engine = run.engine
    # Collective under some engines: every process calls it, even those that write nothing.
    weights = [run.engine.state_dict(model) for model in run.prepared.models if not is_native(engine, model)]
    optimizers = [item for item in run.prepared.optimizers if not is_native(engine, item)]
    return weights, [engine.to_save(item) for item in optimizers]


def _sharded_states_for_hooks(run: Run) -> list[dict[str, Any]]:
    """Return this process's shards of the models' states, which hooks may remove; empty without hooks."""
    if not run.save_hooks:
        return []
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return [get_model_state_dict(run.engine.to_save(model)) for model in run.prepared.models]


def sharded_models_and_optimizers(run: Run) -> dict[str, Any]:
    """Return the models and optimizers that are saved sharded, and the model of each optimizer.

    Raises:
        ValueError: If an optimizer has no parameter of a prepared model.
    """
    engine = run.engine
    models = [engine.to_save(model) for model in run.prepared.models]
    # Under FSDP a model may have other tensors than its optimizer; tensors_with_grad returns the latter's.
    parameter_ids = [
        {id(item) for item in tensors_with_grad(engine.parameters, model.parameters())} for model in models
    ]
    optimizers, owners = [], []
    for item in run.prepared.optimizers:
        owner = next(
            (index for index, wanted in enumerate(parameter_ids) if has_any_parameter(item, wanted)), None
        )
        if owner is None:
            raise ValueError(
                f"{type(item).__name__} has no parameters of a prepared model, so its state cannot be "
                "saved sharded. Prepare its model too, or set state_dict_type='FULL_STATE_DICT'."
            )
        # torch's state_dict functions take the optimizer itself, not the wrapper.
        optimizers.append(getattr(item, "optimizer", item))
        owners.append(owner)
    return {"models": models, "optimizers": optimizers, "owners": owners}


def _check_window(run: Run) -> None:
    if run.window.step and not run.engine.traits.can_save_mid_window:
        raise ValueError(
            f"save_state in the middle of an accumulation window ({run.window.step} of "
            f"{run.gradient_state.num_steps} micro-batches): the {run.engine.name} engine "
            "has not reduced its gradients yet. Save where accelerator.sync_gradients is True, after the "
            "optimizer's step."
        )


def models_for_hooks(run: Run) -> list[torch.nn.Module]:
    """Return the prepared models that hooks get: replicas without their wrapper."""
    if run.engine.traits.saves_collectively:
        return list(run.prepared.models)
    return [run.engine.unwrap_model(model) for model in run.prepared.models]


def saved_folder(run: Run, output_dir: str | os.PathLike[str] | None) -> str:
    """Return the folder that the main process alone has saved into."""
    config = run.project_configuration
    if not config.automatic_checkpoint_naming:
        return os.path.realpath(str(output_dir))
    return str(rotation.checkpoints(checkpoints_root(config))[-1])


def _new_folder(run: Run, output_dir: str | os.PathLike[str] | None, process: ProcessInfo) -> Path:
    config = run.project_configuration
    if not config.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "save_state needs output_dir, unless checkpoints are named automatically: "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        return Path(output_dir)
    if config.project_dir is None:
        raise ValueError("automatic_checkpoint_naming needs a project_dir to name checkpoints in.")
    number = free_number(run, process)
    if number > config.iteration:
        _warn_about_other_run(config, number)
    config.iteration = max(config.iteration, number)
    folder = file_names.checkpoint_dir(output_path(config.project_dir), config.iteration)
    if output_dir is not None and not run.has_warned_of_folder:
        run.has_warned_of_folder = True
        warn(
            f"save_state ignores output_dir={str(output_dir)!r}, as checkpoints are named automatically: "
            f"this one is {folder}. Turn automatic_checkpoint_naming off to name folders yourself."
        )
    return folder


def checkpoints_root(config: ProjectConfiguration) -> Path:
    """Return the folder of a project's automatically named checkpoints."""
    return Path(str(output_path(config.project_dir))) / file_names.CHECKPOINTS_DIR


def free_number(run: Run, process: ProcessInfo) -> int:
    """Return the lowest number above all automatically named checkpoints; every saving process calls it.

    Machines with their own disks may have different checkpoints.
    """
    root = checkpoints_root(run.project_configuration)
    free = run_on_all_ranks(lambda: rotation.next_number(root), process, "naming the checkpoint")
    # All processes must write into one folder: the largest number is free on every disk.
    number: int = max(all_gather_object(free, process))
    return number


def _warn_about_other_run(config: ProjectConfiguration, number: int) -> None:
    limit = config.total_limit
    pruned = (
        ""
        if limit is None
        else f" total_limit={limit} counts those of both runs; the oldest are deleted first."
    )
    warn(
        f"{config.project_dir} has checkpoints that this run has neither saved nor loaded, up to "
        f"checkpoint_{number - 1}: this one is checkpoint_{number}.{pruned} Call load_state() first to "
        "resume from the newest, or set another project_dir for a new run."
    )
