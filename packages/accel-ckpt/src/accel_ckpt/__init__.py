"""Checkpoints and weight files for distributed PyTorch.

Importing this package imports nothing else: each public name comes with its module, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_ckpt.__about__ import __version__ as __version__
from accel_state.lazy import attach

if TYPE_CHECKING:
    from accel_ckpt.config import ProjectConfiguration as ProjectConfiguration
    from accel_ckpt.errors import CheckpointError as CheckpointError
    from accel_ckpt.errors import CorruptCheckpointError as CorruptCheckpointError
    from accel_ckpt.staging import Staging as Staging
    from accel_ckpt.staging import staged as staged
    from accel_ckpt.state import load_accelerator_state as load_accelerator_state
    from accel_ckpt.state import load_custom_state as load_custom_state
    from accel_ckpt.state import save_accelerator_state as save_accelerator_state
    from accel_ckpt.state import save_custom_state as save_custom_state
    from accel_ckpt.tensors import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
    from accel_ckpt.tensors import id_tensor_storage as id_tensor_storage
    from accel_ckpt.tensors import load as load
    from accel_ckpt.tensors import save as save

_NAMES = {
    "accel_ckpt.config": ("ProjectConfiguration",),
    "accel_ckpt.errors": ("CheckpointError", "CorruptCheckpointError"),
    "accel_ckpt.staging": ("Staging", "staged"),
    "accel_ckpt.state": (
        "load_accelerator_state",
        "load_custom_state",
        "save_accelerator_state",
        "save_custom_state",
    ),
    "accel_ckpt.tensors": ("clean_state_dict_for_safetensors", "id_tensor_storage", "load", "save"),
}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)
