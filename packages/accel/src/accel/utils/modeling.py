"""Weight files and sizes, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel.big_models.offload.module_device import align_module_device, has_offloaded_params
from accel.big_models.placement.device_map import check_device_map, clean_device_map, infer_auto_device_map
from accel.big_models.placement.memory import get_balanced_memory, get_max_memory
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
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]
