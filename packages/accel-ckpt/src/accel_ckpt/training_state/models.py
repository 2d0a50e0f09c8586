"""The weights of models in a checkpoint: comparing them with the models, and loading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_ckpt import file_names
from accel_ckpt.files import tensors
from accel_ckpt.folder.reader import CheckpointReader
from accel_ckpt.weights.model_tensors import without_wrapper_names
from accel_ops.modules import extract_model_from_parallel


def compare_models(reader: CheckpointReader, models: Sequence[torch.nn.Module]) -> list[str]:
    """Return a line for each weight that is missing on one side, or has another shape.

    Args:
        reader: The checkpoint.
        models: The models, prepared or not; one without a file is skipped.
    """
    lines: list[str] = []
    for index, model in enumerate(models):
        state = _load(reader, index)
        if state is None:
            continue
        inner, state = _fitting(model, state)
        expected = inner.state_dict()
        differences = [f"the file has no {name} for model {index}" for name in expected.keys() - state.keys()]
        differences += [f"model {index} has no {name}" for name in state.keys() - expected.keys()]
        for name in expected.keys() & state.keys():
            saved, current = _shape(state[name]), _shape(expected[name])
            if saved != current and not _is_extra(name):
                differences.append(f"{name} has the shape {saved} in the file and {current} in model {index}")
        lines += sorted(differences)
        del state  # frees its memory of the file before the next is opened
    return lines


def load_models(
    reader: CheckpointReader,
    models: Sequence[torch.nn.Module],
    options: dict[str, Any],
    *,
    read_directly: bool,
) -> None:
    """Load models from their files.

    Args:
        reader: The checkpoint.
        models: The models, prepared or not; one without a file is not changed.
        options: Options of `load_state_dict`. With `strict=False` weights of another shape are skipped.
        read_directly: Whether to read files directly into the models' tensors where possible.
    """
    for index, model in enumerate(models):
        state = _load(reader, index)
        if state is None:
            continue
        already_read = reader.read_into_model(model, *file_names.model_files(index)) if read_directly else {}
        inner, state = _fitting(model, {**state, **already_read})
        if options.get("strict") is False:
            # torch skips only missing names, and raises for shapes.
            expected = inner.state_dict()
            state = {
                name: value
                for name, value in state.items()
                if name in expected and (_is_extra(name) or _shape(value) == _shape(expected[name]))
            }
        # torch's method also for the weights that `read_into_model` has read: copying a tensor onto itself
        # costs nothing, names are checked, and the model's hooks run.
        inner.load_state_dict(state, **options)
        del state, already_read  # frees their memory of the file before the next is opened


def _load(reader: CheckpointReader, index: int) -> Any:
    """Return the state of a model with its extra state; None if there is no file."""
    state = reader.load(*file_names.model_files(index))
    extra = reader.load(file_names.extra_state_file(index))
    return state if state is None or extra is None else {**state, **extra}


def _is_extra(name: str) -> bool:
    # Of any shape: its module reads it.
    return name.rpartition(".")[2] == "_extra_state"


def _fitting(model: torch.nn.Module, state: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the unwrapped model, and the state under its names."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    expected = inner.state_dict()
    state = without_wrapper_names(state, expected)
    # Another tool may have written a tied weight under any of its names.
    for names in tensors.tied_groups(expected):
        kept = next((name for name in names if name in state), None)
        for name in names:
            if kept is not None and name not in state:
                state[name] = state[kept]
    return inner, state


def _shape(value: Any) -> list[int]:
    return [*getattr(value, "shape", ())]
