from accel_ops import memory as memory
from accel_ops import modules as modules
from accel_ops.__about__ import __version__ as __version__
from accel_ops.collectives.objects import broadcast_object_list as broadcast_object_list
from accel_ops.collectives.objects import gather_object as gather_object
from accel_ops.collectives.operations import broadcast as broadcast
from accel_ops.collectives.operations import copy_tensor_to_devices as copy_tensor_to_devices
from accel_ops.collectives.operations import gather as gather
from accel_ops.collectives.operations import reduce as reduce
from accel_ops.collectives.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_ops.collectives.padding import pad_across_processes as pad_across_processes
from accel_ops.collectives.padding import pad_input_tensors as pad_input_tensors
from accel_ops.debug.check_collectives import DistributedOperationException as DistributedOperationException
from accel_ops.debug.sync import verify_sync as verify_sync
from accel_ops.memory import clear_device_cache as clear_device_cache
from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
from accel_ops.memory import release_memory as release_memory
from accel_ops.memory import should_reduce_batch_size as should_reduce_batch_size
from accel_ops.module_sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_ops.module_sizes import compute_module_sizes as compute_module_sizes
from accel_ops.module_sizes import dtype_byte_size as dtype_byte_size
from accel_ops.module_sizes import get_max_layer_size as get_max_layer_size
from accel_ops.module_tensors import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
)
from accel_ops.module_tensors import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel_ops.module_tensors import find_tied_parameters as find_tied_parameters
from accel_ops.module_tensors import named_module_tensors as named_module_tensors
from accel_ops.module_tensors import retie_parameters as retie_parameters
from accel_ops.module_tensors import set_module_tensor_to_device as set_module_tensor_to_device
from accel_ops.modules import extract_model_from_parallel as extract_model_from_parallel
from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accel_ops.modules import get_pretty_name as get_pretty_name
from accel_ops.modules import has_compiled_regions as has_compiled_regions
from accel_ops.modules import is_compiled_module as is_compiled_module
from accel_ops.modules import model_has_dtensor as model_has_dtensor
from accel_ops.modules import model_is_sharded as model_is_sharded
from accel_ops.modules import recursive_getattr as recursive_getattr
from accel_ops.rng import set_seed as set_seed
from accel_ops.rng import synchronize_rng_state as synchronize_rng_state
from accel_ops.rng import synchronize_rng_states as synchronize_rng_states
from accel_ops.trees.convert import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_ops.trees.convert import convert_to_fp32 as convert_to_fp32
from accel_ops.trees.send import send_to_device as send_to_device
from accel_ops.trees.tensors import TensorInformation as TensorInformation
from accel_ops.trees.tensors import concatenate as concatenate
from accel_ops.trees.tensors import find_batch_size as find_batch_size
from accel_ops.trees.tensors import find_device as find_device
from accel_ops.trees.tensors import get_data_structure as get_data_structure
from accel_ops.trees.tensors import ignorant_find_batch_size as ignorant_find_batch_size
from accel_ops.trees.tensors import initialize_tensors as initialize_tensors
from accel_ops.trees.tensors import is_tensor_information as is_tensor_information
from accel_ops.trees.tensors import listify as listify
from accel_ops.trees.tensors import slice_tensors as slice_tensors
from accel_ops.trees.walk import flatten as flatten
from accel_ops.trees.walk import honor_type as honor_type
from accel_ops.trees.walk import is_namedtuple as is_namedtuple
from accel_ops.trees.walk import is_torch_tensor as is_torch_tensor
from accel_ops.trees.walk import merge_dicts as merge_dicts
from accel_ops.trees.walk import recursively_apply as recursively_apply
