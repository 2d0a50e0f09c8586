"""Weight files and sizes, under their documented path: re-exports of the packages below."""

from accel.big_models.offload.module_device import align_module_device as align_module_device
from accel.big_models.offload.module_device import get_state_dict_from_offload as get_state_dict_from_offload
from accel.big_models.offload.module_device import has_offloaded_params as has_offloaded_params
from accel.big_models.placement.device_map import check_device_map as check_device_map
from accel.big_models.placement.device_map import clean_device_map as clean_device_map
from accel.big_models.placement.device_map import infer_auto_device_map as infer_auto_device_map
from accel.big_models.placement.memory import get_balanced_memory as get_balanced_memory
from accel.big_models.placement.memory import get_max_memory as get_max_memory
from accel_ckpt.files.tensors import id_tensor_storage as id_tensor_storage
from accel_ckpt.weights.files import convert_file_size_to_int as convert_file_size_to_int
from accel_ckpt.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_ckpt.weights.load import load_offloaded_weights as load_offloaded_weights
from accel_ckpt.weights.load import load_state_dict as load_state_dict
from accel_ops.module_sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_ops.module_sizes import compute_module_sizes as compute_module_sizes
from accel_ops.module_sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
from accel_ops.module_sizes import dtype_byte_size as dtype_byte_size
from accel_ops.module_sizes import get_max_layer_size as get_max_layer_size
from accel_ops.module_tensors import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel_ops.module_tensors import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel_ops.module_tensors import find_tied_parameters as find_tied_parameters
from accel_ops.module_tensors import named_module_tensors as named_module_tensors
from accel_ops.module_tensors import read_dtype as _get_proper_dtype  # noqa: F401
from accel_ops.module_tensors import retie_parameters as retie_parameters
from accel_ops.module_tensors import set_module_tensor_to_device as set_module_tensor_to_device
