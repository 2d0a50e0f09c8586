"""Saving and loading the state of a training run: what goes into which file of a checkpoint folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accel_ckpt import background, layout, recovery, tensors
from accel_ckpt.agree import together
from accel_ckpt.errors import CheckpointError
from accel_ckpt.gradients import set_gradients
from accel_ckpt.reading import Reading, open_checkpoint
from accel_ckpt.rng import get_rng_state, set_rng_state
from accel_ckpt.staging import opened_at, staged
from accel_ops.modules import extract_model_from_parallel
from accel_state.process import Process, current_process

__all__ = ["load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state"]

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
    process: Process | None = None,
) -> str:
    """Save models, optimizers, schedules, loaders, the loss scale and the random generators. Every process
    must call it.

    The main process writes what is the same everywhere; each process writes its random generators. Into a
    folder that `staged` has opened, the files are written as they are; any other folder appears, or is
    replaced, as a whole.

    Args:
        output_dir: The checkpoint folder.
        model_states: State dict of each model, full; only read where shared files are written.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The loaders; what has a `state_dict` is saved, the loader itself or its sampler.
        process_index: Rank of this process, for the name of its random generators.
        step: Micro-batches in the open accumulation window.
        scaler: The loss scaler of fp16 training.
        save_on_each_node: Whether each machine with a disk of its own gets the shared files too.
        safe_serialization: Whether weights are safetensors, or torch files.
        gradients: What `get_gradients` returned here, in the middle of an accumulation window.
        process: This process; by default the current one.

    Returns:
        The checkpoint folder.

    Raises:
        ValueError: If safetensors cannot hold a weight.
        Exception: What else went wrong here; a CheckpointError on the other processes. The folder is as it
            was before.
    """
    process = current_process() if process is None else process
    with staged(output_dir, save_on_each_node=save_on_each_node, process=process) as staging:
        staging.facts["step"] = step
        parts: dict[str, Any] = {}
        if staging.writes_shared:
            names = [layout.model_file(index, safe_serialization) for index in range(len(model_states))]
            parts |= zip(names, model_states, strict=True)
            parts |= _shared_parts(optimizers, schedulers, dataloaders, scaler)
        parts[layout.random_states_file(process_index)] = {"step": step, **get_rng_state(process)}
        if gradients is not None:
            staging.facts["open_window"] = True
            parts[layout.gradients_file(process_index)] = gradients
        staging.progress.total = sum(map(_tensor_bytes, parts.values()))
        for name, part in parts.items():
            role = layout.role_of(name)
            staging.write(part, name, role == "gradients" or (role == "model" and safe_serialization))
        return str(staging.target)


def load_accelerator_state(
    input_dir: Folder,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | torch.device | None = None,
    load_kwargs: dict[str, Any] | None = None,
    *,
    process: Process | None = None,
    verify: bool = True,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load what `save_accelerator_state` has saved. Every process must call it.

    Every file is checked against the manifest before anything is changed; the processes of a machine share
    this work. A folder without a manifest (of another implementation) is loaded unchecked, with a warning.
    What the folder has and nobody asked for, and the reverse where that does not stop the run, is told in a
    warning.

    Args:
        input_dir: The checkpoint folder.
        models: The models, prepared or not.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The loaders.
        process_index: Rank of this process.
        scaler: The loss scaler of fp16 training.
        map_location: Where files are read to: "cpu" (the default), "on_device" for this process's device, or
            a device. Models and optimizers copy from there to where they are.
        load_kwargs: Options of `torch.load` for everything but safetensors; see `tensors.load`.
        process: This process; by default the current one.
        verify: Whether to check the digests of the files.
        **load_model_func_kwargs: Options of the models' `load_state_dict`, such as `strict`.

    Returns:
        {"step": micro-batches in the open accumulation window}, if the folder says.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing or changed.
        CheckpointError: If a file for a given object is not there, or another process has failed.
    """
    process = current_process() if process is None else process
    background.wait()
    reading = open_checkpoint(Path(input_dir), process, map_location, dict(load_kwargs or {}), verify)

    def load() -> dict[str, Any]:
        reading.require(
            *(_model_files(index) for index in range(len(models))),
            *([layout.optimizer_file(index)] for index in range(len(optimizers))),
            *([layout.scheduler_file(index)] for index in range(len(schedulers))),
        )
        for index, model in enumerate(models):
            _load_model(model, reading.load(*_model_files(index)), load_model_func_kwargs)
        for index, optimizer in enumerate(optimizers):
            optimizer.load_state_dict(reading.load(layout.optimizer_file(index)))
        for index, scheduler in enumerate(schedulers):
            scheduler.load_state_dict(reading.load(layout.scheduler_file(index)))
        for index, loader in enumerate(dataloaders):
            _load_loader(reading, loader, index)
        if scaler is not None:
            _load_scaler(reading, scaler)
        result = _load_random(reading, process_index, process)
        _load_gradients(reading, models, process_index)
        reading.tell(process)
        return result

    return together(load, process, "loading the checkpoint")


def save_custom_state(obj: Any, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Save the state of a registered object.

    Args:
        obj: Anything with a `state_dict`.
        path: The checkpoint folder; one that `staged` has opened, or any other.
        index: Its number, for the name of the file.
        save_on_each_node: Whether one process per machine saves, instead of one of all.
    """
    file = Path(path) / layout.custom_file(index)
    staging = opened_at(path)
    if staging is None:
        tensors.save(obj.state_dict(), file, save_on_each_node=save_on_each_node)
    elif staging.writes_shared:
        staging.write(obj.state_dict(), layout.custom_file(index))


def load_custom_state(obj: Any, path: Folder, index: int = 0, *, weights_only: bool = True) -> None:
    """Load the state of a registered object.

    Args:
        obj: Anything with a `load_state_dict`.
        path: The checkpoint folder.
        index: Its number.
        weights_only: Whether to refuse all but tensors, arrays and plain containers. False runs code that the
            file contains.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file holds other objects.
    """
    folder = recovery.find(Path(path))
    obj.load_state_dict(
        tensors.load(folder / layout.custom_file(index), map_location="cpu", weights_only=weights_only)
    )


def _model_files(index: int) -> tuple[str, str]:
    return layout.model_file(index, True), layout.model_file(index, False)


def _shared_parts(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    """The states that are the same on all processes, apart from weights, by the name of their file."""
    parts: dict[str, Any] = {layout.optimizer_file(i): item.state_dict() for i, item in enumerate(optimizers)}
    parts |= {layout.scheduler_file(i): item.state_dict() for i, item in enumerate(schedulers)}
    for index, loader in enumerate(dataloaders):
        sampler = getattr(loader, "sampler", None)
        if hasattr(loader, "state_dict"):
            parts[layout.loader_file(index)] = loader.state_dict()
        elif sampler is not None and hasattr(sampler, "state_dict"):
            parts[layout.sampler_file(index)] = sampler.state_dict()
    if scaler is not None:
        parts[layout.SCALER] = scaler.state_dict()
    return parts


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_tensor_bytes, children))


def _load_loader(reading: Reading, loader: Any, index: int) -> None:
    sampler = getattr(loader, "sampler", None)
    for target, name in ((loader, layout.loader_file(index)), (sampler, layout.sampler_file(index))):
        if target is not None and hasattr(target, "load_state_dict"):
            if name in reading.names:
                target.load_state_dict(reading.load(name))
                return
            reading.notes.append(f"loader {index} starts anew, because there is no {name}")


def _load_model(model: torch.nn.Module, state: dict[str, Any], options: dict[str, Any]) -> None:
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    expected = inner.state_dict()
    state = _without_wrapper_names(state, expected)
    for names in tensors.tied_groups(expected):
        kept = next((name for name in names if name in state), None)
        for name in names:
            if kept is not None and name not in state:
                state[name] = state[kept]
    inner.load_state_dict(state, **options)


def _without_wrapper_names(state: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Drop what wrappers (DistributedDataParallel, torch.compile) put before names, in files that have it."""
    for prefix in ("module.", "_orig_mod."):
        if state and all(name.startswith(prefix) for name in state) and expected.keys().isdisjoint(state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _load_scaler(reading: Reading, scaler: torch.amp.GradScaler) -> None:
    state = reading.load(layout.SCALER)
    if state:
        scaler.load_state_dict(state)
    elif scaler.is_enabled():
        reading.notes.append(f"the loss scale starts anew, because there is none in {layout.SCALER}")


def _load_gradients(reading: Reading, models: Sequence[torch.nn.Module], process_index: int) -> None:
    gradients = reading.load(layout.gradients_file(process_index))
    if gradients is not None:
        set_gradients(models, gradients)
    elif models and reading.facts.get("open_window"):
        raise CheckpointError(
            f"{reading.folder} was saved in the middle of an accumulation window, by "
            f"{reading.facts.get('world_size')} processes: no {layout.gradients_file(process_index)}. "
            "Load it on as many processes as saved it, or a checkpoint that was saved at a window's end."
        )


def _load_random(reading: Reading, process_index: int, process: Process) -> dict[str, Any]:
    name = layout.random_states_file(process_index)
    states = reading.load(name)
    if states is None:
        reading.notes.append(f"random generators stay as they are, because there is no {name}")
    elif missing := set_rng_state(states, process):
        reading.notes.append(f"{name} says nothing about {', '.join(missing)}")
    step = reading.facts.get("step", (states or {}).get("step"))
    return {} if step is None else {"step": step}
