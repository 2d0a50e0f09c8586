"""Weight files and sizes, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel_ckpt.files.tensors import id_tensor_storage
from accel_ckpt.weights.files import convert_file_size_to_int
from accel_ckpt.weights.load import load_checkpoint_in_model, load_offloaded_weights, load_state_dict

__all__ = [
    "convert_file_size_to_int",
    "id_tensor_storage",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
]
