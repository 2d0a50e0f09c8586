"""Checkpoints and weight files for distributed PyTorch."""

from accel_ckpt.__about__ import __version__
from accel_ckpt.config import ProjectConfiguration
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.staging import Staging, staged
from accel_ckpt.state import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accel_ckpt.tensors import clean_state_dict_for_safetensors, id_tensor_storage, load, save

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "ProjectConfiguration",
    "Staging",
    "__version__",
    "clean_state_dict_for_safetensors",
    "id_tensor_storage",
    "load",
    "load_accelerator_state",
    "load_custom_state",
    "save",
    "save_accelerator_state",
    "save_custom_state",
    "staged",
]
