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
    from accel_ckpt.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_ckpt.loading import load_offloaded_weights as load_offloaded_weights
    from accel_ckpt.loading import load_state_dict as load_state_dict
    from accel_ckpt.merge import merge_fsdp_weights as merge_fsdp_weights
    from accel_ckpt.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
    from accel_ckpt.offload import PrefixedDataset as PrefixedDataset
    from accel_ckpt.offload import extract_submodules_state_dict as extract_submodules_state_dict
    from accel_ckpt.offload import load_offloaded_weight as load_offloaded_weight
    from accel_ckpt.offload import offload_state_dict as offload_state_dict
    from accel_ckpt.offload import offload_weight as offload_weight
    from accel_ckpt.offload import save_offload_index as save_offload_index
    from accel_ckpt.restore import load_accelerator_state as load_accelerator_state
    from accel_ckpt.restore import load_custom_state as load_custom_state
    from accel_ckpt.sharded import load_sharded_state as load_sharded_state
    from accel_ckpt.sharded import save_sharded_state as save_sharded_state
    from accel_ckpt.staging import Staging as Staging
    from accel_ckpt.staging import staged as staged
    from accel_ckpt.state import save_accelerator_state as save_accelerator_state
    from accel_ckpt.state import save_custom_state as save_custom_state
    from accel_ckpt.tensors import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
    from accel_ckpt.tensors import id_tensor_storage as id_tensor_storage
    from accel_ckpt.tensors import load as load
    from accel_ckpt.tensors import save as save
    from accel_ckpt.weights import convert_file_size_to_int as convert_file_size_to_int
    from accel_ckpt.weights import save_weights as save_weights

_NAMES = {
    "accel_ckpt.config": ("ProjectConfiguration",),
    "accel_ckpt.errors": ("CheckpointError", "CorruptCheckpointError"),
    "accel_ckpt.loading": ("load_checkpoint_in_model", "load_offloaded_weights", "load_state_dict"),
    "accel_ckpt.merge": ("merge_fsdp_weights",),
    "accel_ckpt.offload": (
        "OffloadedWeightsLoader",
        "PrefixedDataset",
        "extract_submodules_state_dict",
        "load_offloaded_weight",
        "offload_state_dict",
        "offload_weight",
        "save_offload_index",
    ),
    "accel_ckpt.restore": ("load_accelerator_state", "load_custom_state"),
    "accel_ckpt.sharded": ("load_sharded_state", "save_sharded_state"),
    "accel_ckpt.staging": ("Staging", "staged"),
    "accel_ckpt.state": ("save_accelerator_state", "save_custom_state"),
    "accel_ckpt.tensors": ("clean_state_dict_for_safetensors", "id_tensor_storage", "load", "save"),
    "accel_ckpt.weights": ("convert_file_size_to_int", "save_weights"),
}

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)
