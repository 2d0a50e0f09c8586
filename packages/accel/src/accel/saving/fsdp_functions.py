"""Saving single models and optimizers under FSDP, in the files of `save_state`.

pytorch_model_fsdp.bin, optimizer.bin     full states (FULL_STATE_DICT)
pytorch_model_fsdp_0/, optimizer_0/       sharded states (SHARDED_STATE_DICT)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import StateDictType

from accel.saving.adapters import adapter_names, is_peft_model, to_model_names
from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.folder.all_ranks import run_on_all_ranks
from accel_ckpt.sharded.dcp_folder import read_folder, read_index, write_folder
from accel_ckpt.sharded.dcp_reader import METADATA
from accel_ckpt.sharded.optimizer import load_sharded_optimizer, sharded_state_to_save
from accel_ckpt.sharded.save_load import pack_extra_state, unpack_extra_state, without_extra_state
from accel_ckpt.training_state.optimizer_groups import match_groups
from accel_ckpt.training_state.undo import undo_on_error
from accel_state.verify import is_verifying, output_path, warn_without_checkpoint

if TYPE_CHECKING:
    from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
    from accel.training.run import HasRun, Run

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: HasRun,
    model: torch.nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a prepared model's weights; every process calls it.

    Args:
        fsdp_plugin: Its `state_dict_type` selects the format.
        accelerator: The accelerator that has prepared the model.
        model: The model.
        output_dir: The folder; created if needed, and its other files are kept.
        model_index: A number for the name.
        adapter_only: Whether to save only the peft adapter.
        use_dcp: Must be True for sharded states, which are written by torch.distributed.checkpoint.

    Raises:
        ValueError: If the state_dict_type is LOCAL_STATE_DICT, sharded states would be written without DCP,
            or there is no adapter.
        Exception: Any other error of this process; a CheckpointError on the other processes.
    """
    output_dir = output_path(output_dir)
    if _is_sharded(fsdp_plugin, use_dcp):
        weights = _sharded_weights(accelerator.run, model, adapter_only)
        folder = Path(output_dir) / file_names.sharded_model_folder(model_index)
        process = accelerator.run.process
        weights = pack_extra_state(weights, f"model {model_index}", process)
        write_folder({"model": weights}, folder, process)
        return
    full_state = accelerator.run.engine.state_dict(model)
    if adapter_only and full_state:  # empty except on the process that writes
        full_state = {name: full_state[named] for name, named in adapter_names(model, full_state).items()}
    _write_full(accelerator.run, full_state, output_dir, file_names.gathered_model_file(model_index))


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: HasRun,
    model: torch.nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load what `save_fsdp_model` has saved, on any number of processes; every process calls it.

    Args:
        fsdp_plugin: As for saving.
        accelerator: The accelerator that has prepared the model.
        model: The prepared model.
        input_dir: The folder.
        model_index: The number for the name.
        adapter_only: As for saving; for a model without adapters everything is loaded.
        use_dcp: As for saving.

    Returns:
        The missing and the unexpected names, as `load_state_dict` returns them.

    Raises:
        FileNotFoundError: If nothing was saved there under this type.
        RuntimeError: If a name of the model (with adapter_only, of its adapters) is missing or unexpected.
        Exception: Any other error of this process; a CheckpointError on the other processes.
    """
    is_sharded, input_dir = _is_sharded(fsdp_plugin, use_dcp), output_path(input_dir)
    name = (file_names.sharded_model_folder if is_sharded else file_names.gathered_model_file)(model_index)
    if _is_missing_under_verify("load_fsdp_model", input_dir, name):
        return torch.nn.Module().load_state_dict({})  # no missing and no unexpected names
    # An adapter's file does not have the frozen weights, so loading it cannot be strict.
    engine, is_partial = accelerator.run.engine, adapter_only and is_peft_model(model)
    if is_sharded:
        weights = _sharded_weights(accelerator.run, model, adapter_only)
        folder = _find_sharded_folder(accelerator.run, input_dir, name)
        index = read_index(folder, accelerator.run.process)
        weights = without_extra_state(weights, index.state_dict_metadata)
        read_folder({"model": weights}, folder, accelerator.run.process, index)
        weights = unpack_extra_state(weights)
        options = StateDictOptions(strict=not is_partial)
        # torch's function also loads tensors that are not sharded, and returns the incompatible keys.
        return set_model_state_dict(engine.to_save(model), weights, options=options)
    full_state = _read_full(accelerator.run, input_dir, name)
    target = engine.to_load(model)
    if target is model:  # not sharded: saved by the names of the original model
        target = engine.unwrap_model(model, keep_torch_compile=False)
    if is_partial:
        full_state = to_model_names(full_state, adapter_names(model, target.state_dict()), name)
    return target.load_state_dict(full_state, strict=not is_partial)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: HasRun,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save a prepared optimizer's state; every process calls it.

    Args:
        fsdp_plugin: Its `state_dict_type` selects the format.
        accelerator: The accelerator that has prepared the model.
        optimizer: The optimizer, of this model's parameters.
        model: The model.
        output_dir: The folder; created if needed, and its other files are kept.
        optimizer_index: A number for the name.
        use_dcp: Must be True for sharded states, which are written by torch.distributed.checkpoint.

    Raises:
        ValueError: As `save_fsdp_model`.
        Exception: Any other error of this process; a CheckpointError on the other processes.
    """
    output_dir = output_path(output_dir)
    if _is_sharded(fsdp_plugin, use_dcp):
        root = accelerator.run.engine.to_save(model)
        state = {"optimizer": sharded_state_to_save(root, getattr(optimizer, "optimizer", optimizer))}
        folder = Path(output_dir) / file_names.sharded_optimizer_folder(optimizer_index)
        write_folder(values.encode(state, f"optimizer {optimizer_index}"), folder, accelerator.run.process)
        return
    full_state = accelerator.run.engine.to_save(optimizer).state_dict()
    _write_full(accelerator.run, full_state, output_dir, file_names.optimizer_file(optimizer_index))


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: HasRun,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` has saved, on any number of processes; every process calls it.

    Args:
        fsdp_plugin: As for saving.
        accelerator: The accelerator that has prepared the model.
        optimizer: The prepared optimizer.
        model: The prepared model.
        input_dir: The folder.
        optimizer_index: The number for the name.
        adapter_only: Has no effect: an optimizer only has state of the parameters that it trains.
        use_dcp: As for saving.

    Raises:
        FileNotFoundError: If nothing was saved there under this type.
        CheckpointError: If the file has other parameters, or in other groups.
        Exception: Any other error of this process; a CheckpointError on the other processes. The optimizer is
            unchanged.
    """
    process, inner = accelerator.run.process, getattr(optimizer, "optimizer", optimizer)
    is_sharded, input_dir = _is_sharded(fsdp_plugin, use_dcp), output_path(input_dir)
    name = (file_names.sharded_optimizer_folder if is_sharded else file_names.optimizer_file)(optimizer_index)
    if _is_missing_under_verify("load_fsdp_optimizer", input_dir, name):
        return
    if is_sharded:
        folder = _find_sharded_folder(accelerator.run, input_dir, name)
        load_sharded_optimizer(accelerator.run.engine.to_save(model), inner, folder, process)
        return
    # Every process reads the file and takes its shard: nothing is sent.
    full_state = _read_full(accelerator.run, input_dir, name)
    engine = accelerator.run.engine
    target, owner = engine.to_load(optimizer), engine.to_load(model)

    def load() -> None:
        state, differences = match_groups(name, optimizer_index, full_state, target, [owner])
        if differences:
            raise CheckpointError(
                f"{'; '.join(differences)}. Load into an optimizer with the groups of the saved one."
            )
        target.load_state_dict(state)

    # Otherwise a failure could leave the optimizer partly loaded.
    with undo_on_error(inner):
        run_on_all_ranks(load, process, f"loading {name}")


def _is_sharded(plugin: FullyShardedDataParallelPlugin, use_dcp: bool) -> bool:
    if plugin.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise ValueError(
            "state_dict_type='LOCAL_STATE_DICT' is only written by save_state, with one file per "
            "process. Set 'SHARDED_STATE_DICT' or 'FULL_STATE_DICT', or call save_state."
        )
    is_sharded = plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    if is_sharded and not use_dcp:
        raise ValueError(
            "state_dict_type='SHARDED_STATE_DICT' is written by torch.distributed.checkpoint. Omit "
            "use_dcp=False, or set 'FULL_STATE_DICT'."
        )
    return is_sharded


def _is_missing_under_verify(function: str, folder: Folder, name: str) -> bool:
    if not is_verifying() or Path(folder, name).exists():
        return False
    warn_without_checkpoint(function)
    return True


def _sharded_weights(run: Run, model: torch.nn.Module, adapter_only: bool) -> dict[str, Any]:
    state = get_model_state_dict(run.engine.to_save(model))
    return {name: state[name] for name in adapter_names(model, state).values()} if adapter_only else state


def _find_sharded_folder(run: Run, root: Folder, name: str) -> Path:
    folder = Path(root) / name

    def find() -> None:
        if not (folder / METADATA).exists():
            raise FileNotFoundError(f"{folder} has no {METADATA}: no sharded state was saved there.")

    # On all ranks, as a rank that raises alone would leave the other ranks waiting in a collective.
    run_on_all_ranks(find, run.process, f"looking for {name}")
    return folder


def _write_full(run: Run, state: dict[str, Any], root: Folder, name: str) -> None:
    each_node = run.project_configuration.save_on_each_node

    def write() -> None:
        Path(root).mkdir(parents=True, exist_ok=True)  # several calls may save into one folder
        tensors.save(values.encode(state, name), Path(root) / name, save_on_each_node=each_node)

    run_on_all_ranks(write, run.process, f"writing {name}")


def _read_full(run: Run, root: Folder, name: str) -> Any:
    path = Path(root) / name

    def read() -> Any:
        return values.decode(tensors.load(path, map_location="cpu"))

    return run_on_all_ranks(read, run.process, f"reading {name}")
