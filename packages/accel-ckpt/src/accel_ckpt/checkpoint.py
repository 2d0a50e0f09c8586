"""The main entry point: save and load the objects of a training run, by the same names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accel_ckpt.background import thread
from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import MANIFEST, role_of
from accel_ckpt.files import digests
from accel_ckpt.folder import manifest, recovery
from accel_ckpt.folder.all_ranks import run_on_all_ranks
from accel_ckpt.folder.reader import open_checkpoint
from accel_ckpt.folder.staging import staged
from accel_ckpt.training_state.frozen_weights import frozen_names
from accel_ckpt.training_state.load import Objects, restore
from accel_ckpt.training_state.save import save_accelerator_state, save_custom_state
from accel_ops.modules import extract_model_from_parallel
from accel_state.process.state import current_process

Folder = str | os.PathLike[str]

_STEP = "training_step"  # in the facts of the manifest


def save(
    folder: Folder,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    others: Any = None,
    step: int = 0,
    blocking: bool = True,
    save_on_each_node: bool = False,
    incremental: bool = False,
) -> Path:
    """Save the objects of a training run, and the random generators. Every process calls it.

    The folder appears, or is replaced, atomically, when the files of all processes are on the disk. Sharded
    models (`fully_shard`, FullyShardedDataParallel) are saved sharded: each process writes its own shards.

    Args:
        folder: The checkpoint folder. `latest`, `checkpoints` and `prune` find those named
            `checkpoint_<number>` in one folder.
        model: A model, in DistributedDataParallel, compiled, sharded or plain, or a list of models.
        optimizer: An optimizer, or a list.
        scheduler: A learning rate scheduler, or a list.
        loader: A loader with a `state_dict`, as those of accel-data, or a list.
        scaler: The loss scaler of fp16 training, after its `update`.
        others: Any object with a `state_dict`, or a list. With a sharded model their DTensors are saved
            sharded too.
        step: The training step; `load` returns it.
        blocking: False to copy the state, and write and commit it in the background: `wait` waits for it, as
            the next save and load do.
        save_on_each_node: Whether each machine with its own disk gets the shared files too.
        incremental: Whether a file that is the same in the newest complete checkpoint, in the folder or next
            to it, is linked to it instead of written again; frozen weights then have their own file. Files of
            sharded models are always written.

    Returns:
        The folder.

    Raises:
        ValueError: If a sharded model is saved, and an optimizer has no parameters of a passed model.
        Exception: Any other error of this process, or of the previous save in the background; a
            CheckpointError on the other processes. The folder is unchanged.
    """
    process = current_process()
    models, optimizers = _listed(model), _listed(optimizer)
    # If one model is sharded, all models and optimizers are saved sharded: a load reads either kind, not
    # both.
    is_sharded = any(map(_is_sharded, models))
    owners = _find_owners(models, optimizers) if is_sharded else []
    with staged(
        folder,
        save_on_each_node=save_on_each_node,
        blocking=blocking,
        process=process,
        incremental=incremental,
    ) as staging:
        staging.facts[_STEP] = step

        def write_shared() -> None:
            save_accelerator_state(
                staging.path,
                [] if is_sharded else [_unwrap(item).state_dict() for item in models],
                [] if is_sharded else optimizers,
                _listed(scheduler),
                _listed(loader),
                process.rank,
                step=0,  # micro-batches of an open window; the user's step is in the facts
                scaler=scaler,
                frozen=[frozen_names(item) for item in models] if incremental else (),
                process=process,
            )

        # Checked before the sharded files, whose collectives a failed process would not join.
        run_on_all_ranks(write_shared, process, "writing the checkpoint")
        if is_sharded:
            from accel_ckpt.sharded.save_load import save_sharded_state  # takes most of a second to import

            roots = list(map(_root, models))
            save_sharded_state(staging.path, roots, optimizers, owners=owners, process=process)
        for index, item in enumerate(_listed(others)):
            if is_sharded:
                from accel_ckpt.training_state.registered import save_registered

                save_registered(item, index, staging, process)
            else:
                save_custom_state(item, staging.path, index)
        return staging.target


def load(
    folder: Folder,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    others: Any = None,
    strict: bool | None = None,
    verify: bool = True,
) -> int:
    """Restore what `save` has saved, on any number of processes. Every process calls it.

    Files are checked, and compared with the objects, before anything changes.

    Args:
        folder: The checkpoint folder.
        model: As for `save`, like the next five.
        optimizer: The optimizers.
        scheduler: The schedules.
        loader: The loaders.
        scaler: The loss scaler.
        others: The other objects.
        strict: True to raise on any difference between the folder and the objects, False to restore what
            matches and warn of the rest. By default strict for folders that accel wrote.
        verify: Whether to check the files' digests.

    Returns:
        The step that it was saved with; 0 if it does not say.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing or changed.
        CheckpointError: If the folder and the objects differ, or another process has failed.
    """
    process = current_process()
    # A save in the background may still write the folder that is read.
    thread.wait()
    reader = open_checkpoint(Path(folder), process, None, {}, verify)
    models, optimizers = _listed(model), _listed(optimizer)
    sharded = None
    if any(role_of(name) == "sharded" for name in reader.names):
        from accel_ckpt.sharded.save_load import ShardedObjects  # takes most of a second to import

        sharded = ShardedObjects.of(list(map(_root, models)), optimizers, _find_owners(models, optimizers))
    elif any(map(_is_sharded, models)):
        raise CheckpointError(
            f"{reader.folder} has full weights, and the model is sharded. Load it before the model is "
            "sharded, or save it from a sharded model."
        )
    objects = Objects(
        [] if sharded else models,
        [] if sharded else optimizers,
        _listed(scheduler),
        _listed(loader),
        scaler,
        _listed(others),
        sharded,
        is_sharded=any(map(_is_sharded, models)),
    )
    restore(reader, objects, process.rank, process, strict=strict)
    return int(reader.facts.get(_STEP, 0))


def verify(folder: Folder) -> None:
    """Check that a checkpoint is complete, and that every file has the bytes that were written.

    Nothing is loaded. Call it on one process, or in a program outside the training.

    Args:
        folder: The checkpoint folder.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing or changed; it names them.
        CheckpointError: If it has no manifest, as another implementation wrote it.
    """
    checkpoint = recovery.find(Path(folder))
    described = manifest.read(checkpoint)
    if described is None:
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: its files cannot be checked.")
    digests.verify(checkpoint, described.files, described.chunk_bytes, algorithm=described.algorithm)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    # Names of the unwrapped model, so that it loads under any wrapper.
    inner: torch.nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


def _root(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model whose shards are saved: FSDP's wrapper stays."""
    compiled: torch.nn.Module = getattr(model, "_orig_mod", model)
    return compiled if isinstance(compiled, FullyShardedDataParallel) else _unwrap(compiled)


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(item, FullyShardedDataParallel) for item in model.modules()) or any(
        isinstance(item, DTensor) for item in model.parameters()
    )


def _find_owners(models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> list[int]:
    """Return for each optimizer the index of the model that has its parameters."""
    # By identity: comparing tensors by value would gather sharded ones.
    parameter_ids = [{id(item) for item in model.parameters()} for model in models]
    owners = []
    for index, optimizer in enumerate(optimizers):
        optimizer_ids = {id(item) for group in optimizer.param_groups for item in group["params"]}
        owner = next((index for index, ids in enumerate(parameter_ids) if ids & optimizer_ids), None)
        if owner is None:
            raise ValueError(
                f"optimizer {index} ({type(optimizer).__name__}) has no parameters of a passed model, so "
                "its sharded state cannot be saved or loaded. Pass its model too."
            )
        owners.append(owner)
    return owners
