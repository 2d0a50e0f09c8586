"""Models and optimizers under FSDP, each saved by itself: what `save_state` writes of them.

pytorch_model_fsdp.bin, optimizer.bin     whole states (FULL_STATE_DICT)
pytorch_model_fsdp_0/, optimizer_0/       parts of all processes (SHARDED_STATE_DICT)
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
from accel_state.verify import output_path

if TYPE_CHECKING:
    from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin
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
        fsdp_plugin: Its `state_dict_type` says what is written.
        accelerator: Whose engine has the model.
        model: The model.
        output_dir: The folder; it is made, and what else is in it stays.
        model_index: A number for the name.
        adapter_only: Save what peft has added to the model alone.
        use_dcp: Parts are written by torch.distributed.checkpoint, and can be by nothing else.

    Raises:
        ValueError: If the state_dict_type is LOCAL_STATE_DICT, parts are to be written without DCP, or there
            is no adapter.
        Exception: What else went wrong here; a CheckpointError on the other processes.
    """
    output_dir = output_path(output_dir)
    if _in_parts(fsdp_plugin, use_dcp):
        weights = _weights_in_parts(accelerator.run, model, adapter_only)
        place = Path(output_dir) / file_names.sharded_model_folder(model_index)
        process = accelerator.run.process
        weights = pack_extra_state(weights, f"model {model_index}", process)
        write_folder({"model": weights}, place, process)
        return
    whole = accelerator.run.engine.states.state_dict(model)
    if adapter_only and whole:  # empty but on the process that writes
        whole = {name: whole[named] for name, named in adapter_names(model, whole).items()}
    _write_whole(accelerator.run, whole, output_dir, file_names.gathered_model_file(model_index))


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
        fsdp_plugin: As it was for saving.
        accelerator: Whose engine has the model.
        model: The prepared model.
        input_dir: The folder.
        model_index: The number for the name.
        adapter_only: As it was for saving; of a model without adapters all is loaded.
        use_dcp: As it was for saving.

    Returns:
        The names that are missing and those that are too many, as `load_state_dict` returns them.

    Raises:
        FileNotFoundError: If nothing was saved there under this type.
        RuntimeError: If a name is missing or too many: of the model, or with adapter_only of its adapters.
        Exception: What else went wrong here; a CheckpointError on the other processes.
    """
    # An adapter's file has not the frozen weights, so that loading it cannot be strict.
    engine, is_part = accelerator.run.engine, adapter_only and is_peft_model(model)
    if _in_parts(fsdp_plugin, use_dcp):
        weights = _weights_in_parts(accelerator.run, model, adapter_only)
        place = _parts_at(accelerator.run, input_dir, file_names.sharded_model_folder(model_index))
        index = read_index(place, accelerator.run.process)
        weights = without_extra_state(weights, index.state_dict_metadata)
        read_folder({"model": weights}, place, accelerator.run.process, index)
        weights = unpack_extra_state(weights)
        options = StateDictOptions(strict=not is_part)
        # torch's function also loads tensors that are not sharded, and returns what did not fit.
        return set_model_state_dict(engine.states.state_root(model), weights, options=options)
    file = file_names.gathered_model_file(model_index)
    whole = _read_whole(accelerator.run, input_dir, file)
    target = engine.states.model_to_load(model)
    if is_part:
        whole = to_model_names(whole, adapter_names(model, target.state_dict()), file)
    return target.load_state_dict(whole, strict=not is_part)


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
        fsdp_plugin: Its `state_dict_type` says what is written.
        accelerator: Whose engine has the model.
        optimizer: The optimizer, of this model's parameters.
        model: The model.
        output_dir: The folder; it is made, and what else is in it stays.
        optimizer_index: A number for the name.
        use_dcp: Parts are written by torch.distributed.checkpoint, and can be by nothing else.

    Raises:
        ValueError: As `save_fsdp_model`.
        Exception: What else went wrong here; a CheckpointError on the other processes.
    """
    output_dir = output_path(output_dir)
    if _in_parts(fsdp_plugin, use_dcp):
        root = accelerator.run.engine.states.state_root(model)
        state = {"optimizer": sharded_state_to_save(root, getattr(optimizer, "optimizer", optimizer))}
        place = Path(output_dir) / file_names.sharded_optimizer_folder(optimizer_index)
        write_folder(values.encode(state, f"optimizer {optimizer_index}"), place, accelerator.run.process)
        return
    whole = accelerator.run.engine.states.optimizer_to_save(optimizer).state_dict()
    _write_whole(accelerator.run, whole, output_dir, file_names.optimizer_file(optimizer_index))


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
        fsdp_plugin: As it was for saving.
        accelerator: Whose engine has the model.
        optimizer: The prepared optimizer.
        model: The prepared model.
        input_dir: The folder.
        optimizer_index: The number for the name.
        adapter_only: Makes no difference: an optimizer has a state for the parameters that it trains alone.
        use_dcp: As it was for saving.

    Raises:
        FileNotFoundError: If nothing was saved there under this type.
        CheckpointError: If the file has other parameters, or in other groups.
        Exception: What else went wrong here; a CheckpointError on the other processes. The optimizer is as it
            was then.
    """
    process, inner = accelerator.run.process, getattr(optimizer, "optimizer", optimizer)
    if _in_parts(fsdp_plugin, use_dcp):
        place = _parts_at(accelerator.run, input_dir, file_names.sharded_optimizer_folder(optimizer_index))
        load_sharded_optimizer(accelerator.run.engine.states.state_root(model), inner, place, process)
        return
    name = file_names.optimizer_file(optimizer_index)
    # Every process reads the file: each takes its own part, and nothing is sent.
    whole = _read_whole(accelerator.run, input_dir, name)
    states = accelerator.run.engine.states
    target, owner = states.optimizer_to_load(optimizer), states.model_to_load(model)

    def load() -> None:
        state, differences = match_groups(name, optimizer_index, whole, target, [owner])
        if differences:
            raise CheckpointError(
                f"{'; '.join(differences)}. Load into an optimizer with the groups of the one that was saved."
            )
        target.load_state_dict(state)

    # A failure in the middle would leave the optimizer half loaded.
    with undo_on_error(inner):
        run_on_all_ranks(load, process, f"loading {name}")


def _in_parts(plugin: FullyShardedDataParallelPlugin, use_dcp: bool) -> bool:
    if plugin.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise ValueError(
            "state_dict_type='LOCAL_STATE_DICT' is written by save_state alone, all of a process in one "
            "file. Set 'SHARDED_STATE_DICT' or 'FULL_STATE_DICT', or call save_state."
        )
    in_parts = plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    if in_parts and not use_dcp:
        raise ValueError(
            "state_dict_type='SHARDED_STATE_DICT' is written by torch.distributed.checkpoint. Leave "
            "use_dcp=False out, or set 'FULL_STATE_DICT'."
        )
    return in_parts


def _weights_in_parts(run: Run, model: torch.nn.Module, adapter_only: bool) -> dict[str, Any]:
    state = get_model_state_dict(run.engine.states.state_root(model))
    return {name: state[name] for name in adapter_names(model, state).values()} if adapter_only else state


def _parts_at(run: Run, folder: Folder, name: str) -> Path:
    place = Path(folder) / name

    def find() -> None:
        if not (place / METADATA).exists():
            raise FileNotFoundError(f"{place} has no {METADATA}: nothing was saved there in parts.")

    # On all processes, as one that raises alone would leave the others in their next collective.
    run_on_all_ranks(find, run.process, f"looking for {name}")
    return place


def _write_whole(run: Run, state: dict[str, Any], folder: Folder, name: str) -> None:
    each_node = run.project_configuration.save_on_each_node

    def write() -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)  # several calls save into one folder
        tensors.save(values.encode(state, name), Path(folder) / name, save_on_each_node=each_node)

    run_on_all_ranks(write, run.process, f"writing {name}")


def _read_whole(run: Run, folder: Folder, name: str) -> Any:
    path = Path(folder) / name

    def read() -> Any:
        return values.decode(tensors.load(path, map_location="cpu"))

    return run_on_all_ranks(read, run.process, f"reading {name}")
