"""Weight files and sizes, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel_ckpt.files.tensors import id_tensor_storage
from accel_ckpt.weights.files import convert_file_size_to_int
from accel_ckpt.weights.load import load_checkpoint_in_model, load_offloaded_weights, load_state_dict
from accel_ops.module_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    get_max_layer_size,
)
from accel_ops.module_tensors import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)

__all__ = [
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_max_layer_size",
    "id_tensor_storage",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]
