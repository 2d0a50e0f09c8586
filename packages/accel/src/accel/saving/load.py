"""load_state: the checkpoint that an Accelerator resumes from, and the objects that are restored."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.engines.base import is_native
from accel.engines.common.checks import check_foreign
from accel.observe.base import observed
from accel.saving.per_rank_buffers import read_per_rank_buffers, set_per_rank_buffers
from accel.saving.save import checkpoints_root, free_number, models_for_hooks, sharded_models_and_optimizers
from accel.training.arguments import reject_misspelt
from accel.training.gradients import drop_gradients
from accel_ckpt import file_names
from accel_ckpt.background import thread
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.folder import manifest, recovery, rotation
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks, run_on_main
from accel_ckpt.folder.reader import CheckpointReader, open_checkpoint
from accel_ckpt.training_state.load import Objects, restore
from accel_optim.scaler import forget_round
from accel_state.logging.warning import warn
from accel_state.verify import is_verifying, output_path, warn_without_checkpoint

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_ckpt.sharded.save_load import ShardedObjects


def load_state(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any] | None,
    strict: bool | None = None,
    verify: bool = True,
    map_location: Any = None,
    missing_ok: bool = False,
    **options: Any,
) -> bool:
    """See `Accelerator.load_state`: restores a checkpoint.

    Without a folder, the newest automatically named checkpoint whose files match its manifest is restored;
    damaged ones are skipped on all processes, with a warning.

    Args:
        run: The run with the prepared and registered objects.
        input_dir: The folder; None for the newest automatically named one.
        load_kwargs: Options of torch.load for everything except weights.
        strict: True to raise on any difference between the folder and the objects, False to restore what
            matches and warn of the rest; by default strict for folders that accel wrote.
        verify: Whether to check the files' digests.
        map_location: The device that files are read to: "cpu", "on_device" or a device.
        missing_ok: Whether to return if no process has a checkpoint, as on the first start.
        **options: Options of the models' load_state_dict; under DeepSpeed, of its `load_checkpoint`.

    Returns:
        Whether a checkpoint was restored: always True without `missing_ok`.

    Raises:
        ValueError: If there is no folder to read from.
        FileNotFoundError: If there is no checkpoint in it.
        CheckpointError: If it is damaged, or differs from the objects.
        TypeError: If an option is misspelt.
    """
    reject_misspelt(load_state, options)
    with observed(run, "loading"):
        return _restore(run, input_dir, load_kwargs, strict, verify, map_location, missing_ok, options)


def _restore(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any] | None,
    strict: bool | None,
    verify: bool,
    map_location: Any,
    missing_ok: bool,
    options: dict[str, Any],
) -> bool:
    # The save in the background may be the one to load, and reads the state that is overwritten here.
    thread.wait()
    input_dir = output_path(input_dir)
    if (missing_ok or is_verifying()) and not _any_checkpoint_exists(run, input_dir):
        if is_verifying():
            warn_without_checkpoint("load_state")
        return False
    read = (run.process, map_location, dict(load_kwargs or {}), verify)
    if input_dir is not None:
        folder, reader = Path(input_dir), open_checkpoint(Path(input_dir), *read)
    else:
        folder, reader = _open_newest(run, read)
    engine = run.engine
    skipped = _call_hooks(run, reader, strict)
    optimizers = [item for item in run.prepared.optimizers if not is_native(engine, item)]
    # On any number of processes, and under any engine.
    is_sharded = any(file_names.role_of(name) == "sharded" for name in reader.names)
    # Models whose weights the engine reads from its own files are not for `restore`.
    native = {index for index, model in enumerate(run.prepared.models) if is_native(engine, model)}
    models = {
        index: engine.to_load(model)
        for index, model in enumerate(run.prepared.models)
        if index not in native and not is_sharded
    }
    objects = Objects(
        [model for index, model in models.items() if index not in skipped],
        [] if is_sharded else [engine.to_load(optimizer) for optimizer in optimizers],
        run.prepared.schedulers,
        run.prepared.loaders,
        run.scaler,
        run.registered,
        _sharded_objects(run, skipped) if is_sharded else None,
        # The optimizer of a model that a hook has removed needs the names of its parameters.
        list(models.values()),
        is_sharded=engine.traits.shards_gradients,
    )
    buffers = read_per_rank_buffers(run, reader)  # before anything changes
    result = restore(
        reader,
        objects,
        run.process.rank,
        run.process,
        skip={*_files_of_hooks(run, skipped), *file_names.ENGINE_ROLES},
        strict=strict,
        **{} if native else options,
    )
    set_per_rank_buffers(run, buffers)
    if (checkpoint := engine.checkpoint.native) is not None:
        checkpoint.load(reader.folder, **options)  # DeepSpeed and Megatron read their own files
    forget_round(run.scaler)  # previous overflows do not apply to the loaded scale
    _continue_window(run, reader, result)
    _set_next_number(run, folder)
    return True


def _call_hooks(run: Run, reader: CheckpointReader, strict: bool | None) -> set[int]:
    """Call the hooks; return the indexes of the models that they have removed from the list."""
    hook_models = models_for_hooks(run)
    remaining = list(hook_models)

    def call_hooks() -> None:
        # Before anything changes.
        if (checkpoint := run.engine.checkpoint.native) is not None:
            checkpoint.check(reader.names)
        else:
            check_foreign(reader.names, run.engine.name)
        # Hooks may remove models from the list, which they load themselves.
        for hook in run.load_hooks.values():
            hook(remaining, str(reader.folder))

    if run.load_hooks:
        # Everything that does not depend on hooks is checked first, as what they load cannot be undone.
        rest = Objects([], [], run.prepared.schedulers, run.prepared.loaders, run.scaler, run.registered)
        skip = {"other", "model", "extra", "optimizer", "sharded", *file_names.ENGINE_ROLES}
        restore(reader, rest, run.process.rank, run.process, skip=skip, strict=strict, only_check=True)
    # If a hook fails on one rank, the other ranks must not wait for it in the collectives below.
    run_on_all_ranks(call_hooks, run.process, "calling the hooks of load_state")
    kept_ids = {id(model) for model in remaining}
    return {index for index, model in enumerate(hook_models) if id(model) not in kept_ids}


def _continue_window(run: Run, reader: CheckpointReader, result: dict[str, Any]) -> None:
    """Restore the position in the accumulation window."""
    if not reader.facts.get("open_window"):
        drop_gradients(run)  # of the abandoned window
    if "window" in result:
        run.window.load_state_dict(result["window"])
    else:
        run.window.step = result.get("step", 0)  # Accelerate's checkpoints have no window


def _set_next_number(run: Run, folder: Path) -> None:
    """Set the number of the next checkpoint above the loaded one and all existing ones."""
    config = run.project_configuration
    if config.automatic_checkpoint_naming and config.project_dir is not None:
        number = file_names.iteration_of(folder.name)
        above = 0 if number is None else number + 1
        config.iteration = max(config.iteration, above, free_number(run, run.process))


def _sharded_objects(run: Run, skipped: Collection[int]) -> ShardedObjects:
    from accel_ckpt.sharded.save_load import ShardedObjects  # takes most of a second to import

    return ShardedObjects.of(**sharded_models_and_optimizers(run), skipped=skipped)


def _files_of_hooks(run: Run, skipped: Collection[int]) -> set[str]:
    """Return the files that hooks read: their own, and the weights of models that they removed."""
    if not run.load_hooks:
        return set()
    # For full weights, hooks are assumed to remove models from the end of the list, as `pop()` does.
    last = range(len(run.prepared.models) - len(skipped), len(run.prepared.models))
    return {
        "other",
        *(name for index in last for name in file_names.model_files(index)),
        *map(file_names.extra_state_file, last),
        *(file_names.sharded_model_folder(index) for index in skipped),
    }


def _any_checkpoint_exists(run: Run, input_dir: str | os.PathLike[str] | None) -> bool:
    """Whether any process sees a checkpoint, damaged or not."""
    process = run.process

    def look() -> bool:
        if not process.is_local_main:  # one check per machine, which may have its own disk
            return False
        if input_dir is None:
            return bool(rotation.checkpoints(_project_root(run)))
        try:
            return manifest.is_checkpoint(recovery.find(Path(input_dir)))
        except FileNotFoundError:
            return False

    return any(all_gather_object(run_on_all_ranks(look, process, "looking for a checkpoint"), process))


def _project_root(run: Run) -> Path:
    config = run.project_configuration
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        raise ValueError(
            "load_state needs input_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    return checkpoints_root(config)


def _open_newest(run: Run, read: tuple[Any, ...]) -> tuple[Path, CheckpointReader]:
    """Open the newest undamaged checkpoint, and return its folder too."""
    process = run.process
    root = _project_root(run)
    folders = run_on_main(lambda: rotation.checkpoints(root), process, "looking for the newest checkpoint")
    if not folders:
        raise FileNotFoundError(
            f"there is no complete checkpoint in {root}. If there need not be one, as on the first start, "
            "call load_state(missing_ok=True)."
        )
    damage: list[str] = []
    for folder in reversed(folders):  # newest first
        try:
            reader = open_checkpoint(folder, *read)
        except Exception as error:
            # Every process gets here with an error; if one has found damage, all try the previous checkpoint.
            corrupt = str(error) if isinstance(error, CorruptCheckpointError) else None
            found_damage = [text for text in all_gather_object(corrupt, process) if text is not None]
            if not found_damage:
                raise
            # One process's message is enough: it names the file.
            damage.append(found_damage[0])
            continue
        if damage:
            warn(f"Resuming from {folder}. {' '.join(damage)}")
        return folder, reader
    raise CheckpointError(f"no checkpoint in {root} can be read. {' '.join(damage)}")
