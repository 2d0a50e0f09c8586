"""Saving and loading sharded models and optimizers without gathering them.

    pytorch_model_fsdp_0/   weights of the first model, a folder of torch.distributed.checkpoint
    optimizer_0/            state of the first optimizer

Each process writes its shards. On another number of processes each reads the shards that it needs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accel_ckpt import file_names
from accel_ckpt.background.buffers import SnapshotBuffer
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.folder.all_ranks import run_on_all_ranks
from accel_ckpt.folder.reader import open_checkpoint
from accel_ckpt.folder.staging import Staging, staged
from accel_ckpt.sharded.dcp_folder import read_folder, write_folder
from accel_ckpt.sharded.dcp_reader import METADATA, read_metadata
from accel_ckpt.sharded.optimizer import (
    different_state,
    load_sharded_optimizer,
    sharded_state_to_save,
    state_to_read,
)
from accel_ckpt.weights.model_tensors import is_extra_state
from accel_ops.trees.walk import recursively_apply
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

Folder = str | os.PathLike[str]

_PACKED = "accel_ckpt.packed"


@dataclass(frozen=True)
class ShardedObjects:
    """Models and optimizers that are saved sharded.

    Args:
        models: The models.
        optimizers: The optimizers.
        owners: For each optimizer, which model has its parameters.
        skipped: The numbers of models whose weights are saved and loaded elsewhere.
    """

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    owners: Sequence[int]
    skipped: Collection[int] = ()

    @classmethod
    def of(
        cls,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        owners: Sequence[int] | None = None,
        skipped: Collection[int] = (),
    ) -> ShardedObjects:
        """Match optimizers to models; by default the first to the first, and so on.

        Raises:
            ValueError: If one has no model.
        """
        model_numbers = range(len(optimizers)) if owners is None else owners
        if len(model_numbers) != len(optimizers) or any(
            not 0 <= index < len(models) for index in model_numbers
        ):
            raise ValueError(
                f"each optimizer needs its model, at the same position or named in owners: there are "
                f"{len(optimizers)} optimizers for {len(models)} models, and owners={owners!r}."
            )
        return cls(models, optimizers, model_numbers, skipped)

    @property
    def saved_models(self) -> list[tuple[int, torch.nn.Module]]:
        """The models whose weights are saved sharded, with their numbers."""
        return [(index, model) for index, model in enumerate(self.models) if index not in self.skipped]

    def owner(self, index: int) -> torch.nn.Module:
        """Return the model of an optimizer."""
        return self.models[self.owners[index]]

    def folders(self) -> list[tuple[str, str]]:
        """Return the object of each folder, and the folder's name."""
        return [
            *((f"model {i}", file_names.sharded_model_folder(i)) for i, _ in self.saved_models),
            *(
                (f"optimizer {i}", file_names.sharded_optimizer_folder(i))
                for i in range(len(self.optimizers))
            ),
        ]


@dataclass(frozen=True)
class ShardedComparison:
    """A comparison of folders with the objects that are loaded from them.

    Attributes:
        differences: One line for each missing folder, and for each weight and entry of an optimizer's state
            that differs or exists only on one side.
        indexes: The index of each folder, by its name.
        states: By the number of an optimizer, the new tensors that its state is read into.
        incomplete: The numbers of optimizers that have no folder, or not all of their state in it.
    """

    differences: list[str]
    indexes: dict[str, Metadata]
    states: dict[int, dict[str, Any]]
    incomplete: list[int]


def save_sharded_state(
    output_dir: Folder,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    owners: Sequence[int] | None = None,
    skipped: Collection[int] = (),
    process: ProcessInfo | None = None,
) -> None:
    """Save the weights and optimizer states of sharded models. Every process must call it.

    If `staged` has opened the folder, they are added to that checkpoint; any other folder appears, or is
    replaced, atomically. All processes must see the folder.

    Args:
        output_dir: The checkpoint folder.
        models: The models, sharded with `fully_shard` or not.
        optimizers: The optimizers; with no `owners`, one for each of the first models.
        owners: For each optimizer, which model has its parameters.
        skipped: The numbers of models whose weights are not saved.
        process: This process; by default the current one.

    Raises:
        ValueError: If there are more optimizers than models.
        Exception: Any other error of this process; a CheckpointError on the other processes.
    """
    objects = ShardedObjects.of(models, optimizers, owners, skipped)
    process = current_process() if process is None else process
    with staged(output_dir, process=process) as staging:
        for index, model in objects.saved_models:
            weights = pack_extra_state(get_model_state_dict(model), f"model {index}", process)
            write_sharded({"model": weights}, file_names.sharded_model_folder(index), staging, process)
        for index, optimizer in enumerate(objects.optimizers):
            state = {"optimizer": sharded_state_to_save(objects.owner(index), optimizer)}
            write_sharded(state, file_names.sharded_optimizer_folder(index), staging, process)


def load_sharded_state(
    input_dir: Folder,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    owners: Sequence[int] | None = None,
    process: ProcessInfo | None = None,
    verify: bool = True,
) -> None:
    """Load what `save_sharded_state` has saved, on any number of processes. Every process must call it.

    Args:
        input_dir: The checkpoint folder.
        models: The models, sharded as in this run.
        optimizers: The optimizers; with no `owners`, one for each of the first models.
        owners: For each optimizer, which model has its parameters.
        process: This process; by default the current one.
        verify: Whether to check the digests of the files.

    Raises:
        ValueError: If there are more optimizers than models.
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing, changed, or lead out of the folder.
        CheckpointError: If the folder has no state for one of the objects, or a different one.
    """
    objects = ShardedObjects.of(models, optimizers, owners)
    process = current_process() if process is None else process
    # Before the objects change: a damaged checkpoint leaves them unchanged.
    reader = open_checkpoint(Path(input_dir), process, None, {}, verify)
    compared = compare_sharded(reader.folder, reader.names, objects, process)
    if compared.differences:
        raise CheckpointError(
            f"{reader.folder} does not match the objects: {'; '.join(compared.differences)}."
        )
    load_sharded(reader.folder, objects, process, compared)


def compare_sharded(
    folder: Path, names: Collection[str], objects: ShardedObjects, process: ProcessInfo
) -> ShardedComparison:
    """Compare folders with their models and optimizers. Every process must call it.

    Args:
        folder: The checkpoint folder, checked.
        names: Its files.
        objects: The objects to load.
        process: This process.
    """
    task = "comparing the checkpoint with the objects"

    def read() -> dict[str, Metadata]:
        existing = [name for _, name in objects.folders() if _has(names, name)]
        return {name: read_metadata(folder / name) for name in existing}

    indexes = run_on_all_ranks(read, process, task)
    saved = {name: index.state_dict_metadata for name, index in indexes.items()}
    states, incomplete = {}, []
    findings = [f"there is no {name} for {what}" for what, name in objects.folders() if name not in saved]
    for index, model in objects.saved_models:
        name = file_names.sharded_model_folder(index)
        if name in saved:
            weights = without_extra_state(get_model_state_dict(model), saved[name])
            state = flatten_state_dict({"model": weights})[0]
            findings += [f"{line} {index}" for line in _different_weights(name, saved[name], state)]
    for index, optimizer in enumerate(objects.optimizers):
        name = file_names.sharded_optimizer_folder(index)
        if name in saved:
            owner = objects.owner(index)
            states[index] = state_to_read(owner, optimizer, folder / name, indexes[name], process)
            missing, surplus = different_state(states[index], saved[name])
            incomplete += [index] if missing else []
            findings += [f"{name} has no {key} for optimizer {index}" for key in missing]
            findings += [f"{name} has {key}, which is not in optimizer {index}" for key in surplus]
        else:
            incomplete.append(index)
    return ShardedComparison(findings, indexes, states, incomplete)


def load_sharded(
    folder: Path,
    objects: ShardedObjects,
    process: ProcessInfo,
    compared: ShardedComparison,
    strict: bool = True,
) -> None:
    """Load optimizers and models from their folders. Every process must call it.

    Args:
        folder: The checkpoint folder, checked.
        objects: The objects to load into.
        process: This process.
        compared: The result of `compare_sharded`; its states are consumed.
        strict: False to skip weights that the folder does not have in their shape, objects without a folder,
            and optimizers with incomplete state.

    Raises:
        CheckpointError: If the state of an optimizer differs from what it needs.
    """
    for index, optimizer in enumerate(objects.optimizers):
        if strict or index not in compared.incomplete:
            name = file_names.sharded_optimizer_folder(index)
            load_sharded_optimizer(
                objects.owner(index),
                optimizer,
                folder / name,
                process,
                index=compared.indexes[name],
                state=compared.states.pop(index),
            )
    for index, model in objects.saved_models:
        name = file_names.sharded_model_folder(index)
        if strict or name in compared.indexes:
            index_read = compared.indexes[name]
            saved = index_read.state_dict_metadata
            weights = without_extra_state(get_model_state_dict(model), saved)
            if not strict:
                weights = {key: value for key, value in weights.items() if _all_fit(saved, key, value)}
            read_folder({"model": weights}, folder / name, process, index_read)
            weights = unpack_extra_state(weights)
            set_model_state_dict(model, weights, options=StateDictOptions(strict=strict))


def _has(names: Collection[str], folder: str) -> bool:
    return f"{folder}/{METADATA}" in names


def _fits(saved: Mapping[str, Any], key: str, value: Any) -> bool:
    # Non-tensors have no size in the index.
    shape = getattr(saved.get(key), "size", None)
    return key in saved and (shape is None or shape == value.size())


def _all_fit(saved: Mapping[str, Any], key: str, value: Any) -> bool:
    entries = flatten_state_dict({"model": {key: value}})[0]
    return all(_fits(saved, *entry) for entry in entries.items())


def _different_weights(name: str, saved: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    short = {key: key.removeprefix("model.") for key in saved.keys() | state.keys()}
    findings = [f"{name} has no {short[key]} for model" for key in state.keys() - saved.keys()]
    findings += [f"{name} has {short[key]}, which is not in model" for key in saved.keys() - state.keys()]
    for key in state.keys() & saved.keys():
        if not _fits(saved, key, state[key]):
            shapes = [*saved[key].size], [*state[key].size()]
            findings.append(f"{short[key]} has the shape {shapes[0]} in {name} and {shapes[1]} in model")
    return sorted(findings)


def pack_extra_state(weights: dict[str, Any], what: str, process: ProcessInfo) -> dict[str, Any]:
    """Return a model's state with its extra state as bytes. Every process must call it.

    DCP would flatten dicts, and look for the entries that the model has when it is loaded.

    Args:
        weights: The state.
        what: Which model, for messages.
        process: This process.

    Raises:
        ValueError: If there is a value that no load would accept; a CheckpointError on the other processes.
    """

    def pack() -> dict[str, Any]:
        extra = {name: value for name, value in weights.items() if is_extra_state(name, value)}
        packed = {}
        for name, value in values.encode(extra, what).items():
            tensors.write_to(value, file := io.BytesIO())
            packed[name] = (_PACKED, file.getvalue())
        return {**weights, **packed}

    return run_on_all_ranks(pack, process, f"saving {what}")


def without_extra_state(weights: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    """Return a model's state for reading the one of a folder into it.

    Args:
        weights: The state.
        saved: The names in the folder's index. If it has the entries of a dict separately, as accel 0.2 wrote
            it, they are read into a copy of the model's dict.
    """
    extra = {
        name: None if f"model.{name}" in saved else deepcopy(value)
        for name, value in weights.items()
        if is_extra_state(name, value)
    }
    return {**weights, **extra}


def unpack_extra_state(weights: dict[str, Any]) -> dict[str, Any]:
    """Undo `pack_extra_state`."""
    return {
        name: values.decode(tensors.load(io.BytesIO(value[1]), map_location="cpu"))
        if isinstance(value, tuple) and value[:1] == (_PACKED,)
        else value
        for name, value in weights.items()
    }


def write_sharded(state: dict[str, Any], name: str, staging: Staging, process: ProcessInfo) -> None:
    """Write a sharded state into a folder of a checkpoint. Every process must call it.

    Args:
        state: The state.
        name: The folder's name.
        staging: The checkpoint's folder.
        process: This process.
    """
    folder = staging.path / name
    state = run_on_all_ranks(lambda: values.encode(state, name), process, f"writing {name}")
    if staging.buffer is not None:
        state = recursively_apply(_copy, state, staging.buffer, {})
        staging.buffer.wait_for_cpu()

    def write(group: Any) -> None:
        # Rank 0 writes its index, which `seal` adds to the manifest.
        write_folder(state, folder, process, group, writer=staging.writer)

    staging.write_collectively(write)


def _copy(value: torch.Tensor, buffer: SnapshotBuffer, meshes: dict[DeviceMesh, DeviceMesh]) -> torch.Tensor:
    """Copy a tensor; of a sharded one this process's shard.

    Args:
        value: The tensor.
        buffer: The memory of copies.
        meshes: For each mesh the one of its copies; new ones are added, as a mesh lists all of its processes.
    """
    if not isinstance(value, DTensor):
        return buffer.copy(value)
    mesh = value.device_mesh
    if mesh not in meshes:
        # The copy is on the CPU and is never used in computations: its mesh needs no process group.
        meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    return DTensor.from_local(
        buffer.copy(value.to_local()),
        meshes[mesh],
        value.placements,
        run_check=False,
        shape=value.size(),
        stride=value.stride(),
    )
