"""Names of the files in a checkpoint folder. No file is touched here, and torch is not needed.

    model.safetensors, model_1.safetensors ...     weights (pytorch_model.bin ... without safetensors)
    model_extra_state.bin ...                      what modules' get_extra_state returned, except tensors
    pytorch_model_fsdp.bin ...                     the same, gathered from what FSDP has sharded
    model.safetensors.index.json ...               the same in files model-00001-of-00002.safetensors ...
    optimizer.bin, optimizer_1.bin ...             optimizers
    scheduler.bin, scheduler_1.bin ...             learning-rate schedules
    dl_state_dict.bin, dl_state_dict_1.bin ...     positions of the loaders
    sampler.bin, sampler_1.bin ...                 samplers with their own state
    pytorch_model_fsdp_0/, optimizer_0/ ...        the same of sharded models, sharded
    pytorch_model/, latest, zero_to_fp32.py ...    the same under DeepSpeed, in its own files
    megatron_lm/                                   the same under Megatron-LM, one shard per process
    local_state_<rank>.bin                         models and optimizers of one process (LOCAL_STATE_DICT)
    scaler.pt                                      fp16 loss scale
    random_states_<rank>.pkl                       random generators, one file per rank
    gradients_<rank>.safetensors                   gradients of an open accumulation window
    buffers_<rank>.safetensors                     buffers with different values on each process
    custom_checkpoint_<i>.pkl                      registered objects
    custom_checkpoint_<i>/                         the sharded tensors of their states
    accel_manifest.json                            the folder's files, with digests

With automatic naming, folders are `<project_dir>/checkpoints/checkpoint_<iteration>`.
"""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "accel_manifest.json"
SCALER = "scaler.pt"
CHECKPOINTS_DIR = "checkpoints"

ENGINE_ROLES = ("deepspeed", "megatron", "local")
"""Roles of files that engines write and read in their own format."""

_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_SHARD = r"model(_\d+)?-\d{5}-of-\d{5}\.safetensors|pytorch_model(_\d+)?-\d{5}-of-\d{5}\.bin"
_INDEX = r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)\.index\.json"
_ROLES = {
    # Full weights: one file per model, or several with an index.
    "model": r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|pytorch_model_fsdp(_\d+)?\.bin|"
    rf"{_SHARD}|{_INDEX}",
    "extra": r"model_extra_state(_\d+)?\.bin",
    "optimizer": r"optimizer(_\d+)?\.bin",
    "scheduler": r"scheduler(_\d+)?\.bin",
    "loader": r"dl_state_dict(_\d+)?\.bin",
    "sampler": r"sampler(_\d+)?\.bin",
    "scaler": r"scaler\.pt",
    "sharded": r"(pytorch_model_fsdp|optimizer)_\d+/.+",
    "registered": r"custom_checkpoint_\d+/.+",
    "buffers": r"buffers_\d+\.safetensors",
    # DeepSpeed writes these next to the folder of its tag, which is pytorch_model.
    "deepspeed": r"latest|zero_to_(fp32|torch)\.py|pytorch_model/.+",
    "megatron": r"megatron_lm/.+",
    "local": r"local_state_\d+\.bin",
    "random": r"random_states_\d+\.pkl",
    "gradients": r"gradients_\d+\.safetensors",
    "custom": r"custom_checkpoint_\d+\.pkl",
}


def _numbered(stem: str, index: int, suffix: str) -> str:
    # The first has no number: checkpoints of one model have the file names of other tools.
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def model_file(index: int = 0, safe_serialization: bool = True) -> str:
    """Return the name of a model's weights.

    Args:
        index: Which model, in the order of preparation.
        safe_serialization: Whether they are safetensors.
    """
    return (
        _numbered("model", index, ".safetensors")
        if safe_serialization
        else _numbered("pytorch_model", index, ".bin")
    )


def gathered_model_file(index: int = 0) -> str:
    """Return the name of the full weights gathered from an FSDP model."""
    return _numbered("pytorch_model_fsdp", index, ".bin")


def model_files(index: int = 0) -> tuple[str, ...]:
    """Return the names that a model's weights may have, the preferred one first."""
    return (
        model_file(index, True),
        model_file(index, False),
        gathered_model_file(index),
        index_file(index, True),
        index_file(index, False),
    )


def index_file(index: int = 0, safe_serialization: bool = True) -> str:
    """Return the name of the index of a model's weights.

    Args:
        index: Which model.
        safe_serialization: Whether they are safetensors.
    """
    return f"{model_file(index, safe_serialization)}.index.json"


def shard_file(index: int, number: int, count: int, safe_serialization: bool = True) -> str:
    """Return the name of one shard of a model's weights.

    Args:
        index: Which model.
        number: Which shard, from 1.
        count: The number of shards.
        safe_serialization: Whether they are safetensors.
    """
    stem, _, suffix = model_file(index, safe_serialization).rpartition(".")
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def is_index(name: str) -> bool:
    """Return whether a file is an index of weights."""
    return re.fullmatch(_INDEX, name) is not None


def is_shard(name: str) -> bool:
    """Return whether a file has the name of a shard."""
    return re.fullmatch(_SHARD, name) is not None


def extra_state_file(index: int = 0) -> str:
    """Return the name of the extra state of a model's modules, next to safetensors."""
    return _numbered("model_extra_state", index, ".bin")


def optimizer_file(index: int = 0) -> str:
    """Return the name of an optimizer's state."""
    return _numbered("optimizer", index, ".bin")


def scheduler_file(index: int = 0) -> str:
    """Return the name of a scheduler's state."""
    return _numbered("scheduler", index, ".bin")


def loader_file(index: int = 0) -> str:
    """Return the name of a loader's position."""
    return _numbered("dl_state_dict", index, ".bin")


def sampler_file(index: int = 0) -> str:
    """Return the name of the state of a loader's sampler."""
    return _numbered("sampler", index, ".bin")


def sharded_model_folder(index: int = 0) -> str:
    """Return the folder of a model's sharded weights."""
    return f"pytorch_model_fsdp_{index}"


def sharded_optimizer_folder(index: int = 0) -> str:
    """Return the folder of an optimizer's sharded state."""
    return f"optimizer_{index}"


def local_state_file(rank: int) -> str:
    """Return the name of the local state of a rank (LOCAL_STATE_DICT)."""
    return f"local_state_{rank}.bin"


def random_states_file(rank: int) -> str:
    """Return the name of a rank's random generators."""
    return f"random_states_{rank}.pkl"


def gradients_file(rank: int) -> str:
    """Return the name of a rank's gradients of an open accumulation window."""
    return f"gradients_{rank}.safetensors"


def buffers_file(rank: int) -> str:
    """Return the name of the buffers of a rank."""
    return f"buffers_{rank}.safetensors"


def custom_file(index: int) -> str:
    """Return the name of a registered object's state."""
    return f"custom_checkpoint_{index}.pkl"


def custom_folder(index: int) -> str:
    """Return the folder of the sharded tensors of a registered object."""
    return f"custom_checkpoint_{index}"


def role_of(name: str) -> str:
    """Return the role of a file of a checkpoint folder.

    Args:
        name: The file's path inside the folder.

    Returns:
        "model", "extra", "optimizer", "scheduler", "loader", "sampler", "scaler", "random", "gradients",
        "sharded", "registered", "buffers", "deepspeed", "megatron", "local" or "custom";
        "other" for any other file.
    """
    # Patterns do not overlap, so the order of the table does not matter.
    return next((role for role, pattern in _ROLES.items() if re.fullmatch(pattern, name)), "other")


def rank_of(name: str) -> int:
    """Return the rank in the name of a file that one rank wrote."""
    return int(re.findall(r"\d+", name)[-1])


def checkpoint_dir(project_dir: str | Path, iteration: int) -> Path:
    """Return the folder of an automatically named checkpoint.

    Args:
        project_dir: The project's folder.
        iteration: Number of the checkpoint.
    """
    return Path(project_dir) / CHECKPOINTS_DIR / f"checkpoint_{iteration}"


def iteration_of(name: str) -> int | None:
    """Return the number in an automatic folder name, or None if it is not one."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match.group(1)) if match else None
