"""Models and optimizers that are sharded over processes, saved and loaded without gathering them.

    pytorch_model_fsdp_0/   weights of the first model, a folder of torch.distributed.checkpoint
    optimizer_0/            state of the first optimizer

Each process writes its own part. On another number of processes each reads the parts that it needs, whoever
wrote them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accel_ckpt import layout
from accel_ckpt.agree import together
from accel_ckpt.dcp import SafePlanner, SafeReader
from accel_ckpt.errors import CheckpointError
from accel_ckpt.reading import open_checkpoint
from accel_ckpt.staging import staged
from accel_state.process import Process, current_process

__all__ = ["load_sharded_state", "save_sharded_state"]

Folder = str | os.PathLike[str]


def save_sharded_state(
    output_dir: Folder,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    owners: Sequence[int] | None = None,
    process: Process | None = None,
) -> None:
    """Save the weights and optimizer states of sharded models. Every process must call it.

    Into a folder that `staged` has opened they are written beside what else a checkpoint has; any other
    folder appears, or is replaced, as a whole. All processes must see the folder.

    Args:
        output_dir: The checkpoint folder.
        models: The models, sharded with `fully_shard` or not.
        optimizers: The optimizers; with no `owners`, one for each of the first models.
        owners: For each optimizer, which model has its parameters.
        process: This process; by default the current one.

    Raises:
        ValueError: If there are more optimizers than models.
        Exception: What else went wrong here; a CheckpointError on the other processes.
    """
    owners = _owners(models, optimizers, owners)
    process = current_process() if process is None else process
    with staged(output_dir, process=process) as staging:
        for index, model in enumerate(models):
            weights = {"model": get_model_state_dict(model)}
            _save(weights, staging.path / layout.sharded_model_folder(index), process)
        for index, optimizer in enumerate(optimizers):
            state = {"optimizer": get_optimizer_state_dict(models[owners[index]], optimizer)}
            _save(state, staging.path / layout.sharded_optimizer_folder(index), process)


def load_sharded_state(
    input_dir: Folder,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    owners: Sequence[int] | None = None,
    process: Process | None = None,
    verify: bool = True,
) -> None:
    """Load what `save_sharded_state` has saved, on any number of processes. Every process must call it.

    Args:
        input_dir: The checkpoint folder.
        models: The models, sharded like here and now.
        optimizers: The optimizers; with no `owners`, one for each of the first models.
        owners: For each optimizer, which model has its parameters.
        process: This process; by default the current one.
        verify: Whether to check the digests of the files.

    Raises:
        ValueError: If there are more optimizers than models.
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing, changed, or lead out of the folder.
        CheckpointError: If the folder has no state for one of the objects, or another one than they need.
    """
    owners = _owners(models, optimizers, owners)
    process = current_process() if process is None else process
    reading = open_checkpoint(Path(input_dir), process, None, {}, verify)
    folders = [layout.sharded_model_folder(index) for index in range(len(models))]
    folders += [layout.sharded_optimizer_folder(index) for index in range(len(optimizers))]

    def check() -> None:
        missing = [name for name in folders if f"{name}/.metadata" not in reading.names]
        if missing:
            raise CheckpointError(f"{reading.folder} has no {', no '.join(missing)}. Load what was saved.")

    together(check, process, "comparing the checkpoint with the objects given")
    for index, model in enumerate(models):
        weights = {"model": get_model_state_dict(model)}
        _load(weights, reading.folder / layout.sharded_model_folder(index), process)
        set_model_state_dict(model, weights["model"])
    for index, optimizer in enumerate(optimizers):
        state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(models[owners[index]], optimizer)}
        _load(state, reading.folder / layout.sharded_optimizer_folder(index), process)
        set_optimizer_state_dict(models[owners[index]], optimizer, state["optimizer"])


def _owners(models: Sequence[Any], optimizers: Sequence[Any], owners: Sequence[int] | None) -> Sequence[int]:
    """The model of each optimizer, checked."""
    found = range(len(optimizers)) if owners is None else owners
    if len(found) != len(optimizers) or any(not 0 <= index < len(models) for index in found):
        raise ValueError(
            f"each optimizer needs its model, at the same place or named in owners: there are "
            f"{len(optimizers)} optimizers for {len(models)} models, and owners={owners!r}."
        )
    return found


def _save(state: dict[str, Any], folder: Path, process: Process) -> None:
    def write() -> None:
        # What is flushed and renamed as a whole needs neither a flush nor a rename of each file.
        save(
            state, storage_writer=FileSystemWriter(folder, sync_files=False), no_dist=process.world_size == 1
        )

    _collective(write, process, f"writing {folder.name}")


def _load(state: dict[str, Any], folder: Path, process: Process) -> None:
    def read() -> None:
        alone = process.world_size == 1
        load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=alone)

    _collective(read, process, f"reading {folder.name}")


def _collective(function: Callable[[], None], process: Process, task: str) -> None:
    """Call a function of DCP, which speaks with the other processes, and unwrap its errors."""

    def call() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="torch.distributed is disabled", category=UserWarning
                )
                function()
        except CheckpointException as error:  # what went wrong on some processes, raised on all
            rank, (cause, _) = sorted(error.failures.items())[0]
            if isinstance(cause, CheckpointError):
                raise type(cause)(str(cause)) from error
            raise CheckpointError(f"process {rank}: {type(cause).__name__}: {cause}") from error

    together(call, process, task)
