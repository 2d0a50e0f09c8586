"""Saving the state of a training run into the files of a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_ckpt import file_names
from accel_ckpt.files import tensors, values
from accel_ckpt.folder.staging import find_open_staging, staged
from accel_ckpt.training_state.frozen_weights import split_into_files
from accel_ckpt.training_state.rng import get_rng_state
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

Folder = str | os.PathLike[str]


def save_accelerator_state(
    output_dir: Folder,
    model_states: Sequence[dict[str, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
    *,
    gradients: dict[str, torch.Tensor] | None = None,
    window: dict[str, Any] | None = None,
    frozen: Sequence[Collection[str]] = (),
    gathered: bool = False,
    process: ProcessInfo | None = None,
) -> str:
    """Save models, optimizers, schedulers, loaders, the loss scale and the random generators. Every process
    must call it.

    The main process writes what is the same on all ranks; each process writes its random generators. If
    `staged` has opened the folder, the files are written into it; any other folder appears, or is replaced,
    atomically.

    Args:
        output_dir: The checkpoint folder.
        model_states: The full state dict of each model; only used on processes that write shared files.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The loaders; the state of the loader is saved, or else that of its sampler.
        process_index: Rank of this process, for the name of its random generators.
        step: Micro-batches in the open accumulation window.
        scaler: The loss scaler of fp16 training.
        save_on_each_node: Whether each machine with its own disk gets the shared files too.
        safe_serialization: Whether weights are safetensors, or torch files.
        gradients: What `get_gradients` returned on this process, in the middle of an accumulation window.
        window: This process's state of the accumulation window; plain values.
        frozen: For each model, the names of the weights that get their own file; if empty, each model is in
            one file.
        gathered: Whether the models' states were gathered from FSDP. Their files, unless `frozen` splits
            them, are then `pytorch_model_fsdp.bin` and so on, even with `safe_serialization`: other
            implementations look for these.
        process: This process; by default the current one.

    Returns:
        The checkpoint folder.

    Raises:
        ValueError: If safetensors cannot store a weight, or a state has a value that no load would accept.
        Exception: Any other error of this process; a CheckpointError on the other processes. The folder is
            unchanged.
    """
    process = current_process() if process is None else process
    with staged(output_dir, save_on_each_node=save_on_each_node, process=process) as staging:
        staging.facts["step"] = step
        # Collected before any is written: a failing state_dict leaves no partial checkpoint.
        contents: dict[str, Any] = {}
        if staging.writes_shared:
            for index, state in enumerate(model_states):
                names = frozen[index] if frozen else ()
                weights, indexes = split_into_files(
                    state, index, names, safe_serialization, gathered=gathered
                )
                contents |= {
                    name: state if name.endswith(".safetensors") else values.encode(state, f"model {index}")
                    for name, state in weights.items()
                }
                for name, content in indexes.items():
                    staging.write_bytes(content, name)
            contents |= _shared_states(optimizers, schedulers, dataloaders, scaler)
            staging.facts["loaders"] = [_order(state) for name, state in contents.items() if _is_loader(name)]
        window_state = {"step": step} if window is None else {"step": step, "window": window}
        contents[file_names.random_states_file(process_index)] = {**window_state, **get_rng_state(process)}
        # In the facts of every process; `_seal` writes those of the process that commits.
        if gradients is not None:
            staging.facts["open_window"] = True
            contents[file_names.gradients_file(process_index)] = gradients
        if staging.buffer is None:
            # Only tensors, as the rest is small: a progress bar needs no exact total.
            staging.progress.total = sum(map(_tensor_bytes, contents.values()))
        staging.write_all(contents)
        return str(staging.target)


def save_custom_state(obj: Any, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Save the state of a registered object.

    Args:
        obj: Anything with a `state_dict`.
        path: The checkpoint folder, opened by `staged` or not.
        index: Its number, for the name of the file.
        save_on_each_node: Whether one process per machine saves, instead of only the main process.

    Raises:
        ValueError: If its state has a value that no load would accept; it names it.
    """
    file = Path(path) / file_names.custom_file(index)
    staging = find_open_staging(path)
    if staging is None or staging.writes_shared:
        state = values.encode(obj.state_dict(), f"registered object {index} ({type(obj).__name__})")
    if staging is None:
        tensors.save(state, file, save_on_each_node=save_on_each_node)
    elif staging.writes_shared:
        staging.write(state, file_names.custom_file(index))


def _shared_states(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    """Return the states that are the same on all processes, except weights, by file name."""
    states: dict[str, Any] = {
        file_names.optimizer_file(i): _state_of(item, f"optimizer {i}") for i, item in enumerate(optimizers)
    }
    states |= {
        file_names.scheduler_file(i): _state_of(item, f"scheduler {i}") for i, item in enumerate(schedulers)
    }
    for index, loader in enumerate(dataloaders):
        sampler = getattr(loader, "sampler", None)
        if hasattr(loader, "state_dict"):
            states[file_names.loader_file(index)] = _state_of(loader, f"loader {index}")
        # The order of `_check_loader`: the loader's state comes before its sampler's.
        elif sampler is not None and hasattr(sampler, "state_dict"):
            states[file_names.sampler_file(index)] = _state_of(sampler, f"sampler {index}")
    if scaler is not None:
        states[file_names.SCALER] = scaler.state_dict()
    return states


def _state_of(item: Any, what: str) -> Any:
    inner = getattr(item, "optimizer" if what.startswith("optimizer") else "scheduler", item)
    return values.encode(item.state_dict(), f"{what} ({type(inner).__name__})")


def _is_loader(name: str) -> bool:
    return file_names.role_of(name) in ("loader", "sampler")


def _order(state: Any) -> dict[str, int]:
    """Return the seed and the epoch of a loader's order, for readers of the manifest."""
    values = state if isinstance(state, dict) else {}
    return {key: values[key] for key in ("seed", "epoch") if isinstance(values.get(key), int)}


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_tensor_bytes, children))
