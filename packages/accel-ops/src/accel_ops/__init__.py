"""Collectives over nested data for distributed PyTorch.

Importing this package imports nothing else: each public name comes with its module, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_ops.__about__ import __version__ as __version__
from accel_state.lazy import attach

if TYPE_CHECKING:
    from accel_ops.collectives import broadcast as broadcast
    from accel_ops.collectives import copy_tensor_to_devices as copy_tensor_to_devices
    from accel_ops.collectives import gather as gather
    from accel_ops.collectives import reduce as reduce
    from accel_ops.contract import DistributedOperationException as DistributedOperationException
    from accel_ops.convert import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_ops.convert import convert_to_fp32 as convert_to_fp32
    from accel_ops.memory import clear_device_cache as clear_device_cache
    from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
    from accel_ops.memory import release_memory as release_memory
    from accel_ops.memory import should_reduce_batch_size as should_reduce_batch_size
    from accel_ops.modules import extract_model_from_parallel as extract_model_from_parallel
    from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
    from accel_ops.modules import has_compiled_regions as has_compiled_regions
    from accel_ops.modules import is_compiled_module as is_compiled_module
    from accel_ops.modules import model_has_dtensor as model_has_dtensor
    from accel_ops.modules import recursive_getattr as recursive_getattr
    from accel_ops.objects import broadcast_object_list as broadcast_object_list
    from accel_ops.objects import gather_object as gather_object
    from accel_ops.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_ops.padding import pad_across_processes as pad_across_processes
    from accel_ops.padding import pad_input_tensors as pad_input_tensors
    from accel_ops.placement import send_to_device as send_to_device
    from accel_ops.random import set_seed as set_seed
    from accel_ops.random import synchronize_rng_state as synchronize_rng_state
    from accel_ops.random import synchronize_rng_states as synchronize_rng_states
    from accel_ops.tensors import TensorInformation as TensorInformation
    from accel_ops.tensors import concatenate as concatenate
    from accel_ops.tensors import find_batch_size as find_batch_size
    from accel_ops.tensors import find_device as find_device
    from accel_ops.tensors import get_data_structure as get_data_structure
    from accel_ops.tensors import ignorant_find_batch_size as ignorant_find_batch_size
    from accel_ops.tensors import initialize_tensors as initialize_tensors
    from accel_ops.tensors import is_tensor_information as is_tensor_information
    from accel_ops.tensors import listify as listify
    from accel_ops.tensors import slice_tensors as slice_tensors
    from accel_ops.walk import flatten as flatten
    from accel_ops.walk import honor_type as honor_type
    from accel_ops.walk import is_namedtuple as is_namedtuple
    from accel_ops.walk import is_torch_tensor as is_torch_tensor
    from accel_ops.walk import recursively_apply as recursively_apply

_PUBLIC = {
    "collectives": (
        "broadcast",
        "copy_tensor_to_devices",
        "gather",
        "reduce",
    ),
    "contract": ("DistributedOperationException",),
    "convert": (
        "convert_outputs_to_fp32",
        "convert_to_fp32",
    ),
    "memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
        "should_reduce_batch_size",
    ),
    "modules": (
        "extract_model_from_parallel",
        "get_module_children_bottom_up",
        "has_compiled_regions",
        "is_compiled_module",
        "model_has_dtensor",
        "recursive_getattr",
    ),
    "objects": (
        "broadcast_object_list",
        "gather_object",
    ),
    "padding": (
        "CannotPadNestedTensorWarning",
        "pad_across_processes",
        "pad_input_tensors",
    ),
    "placement": ("send_to_device",),
    "random": (
        "set_seed",
        "synchronize_rng_state",
        "synchronize_rng_states",
    ),
    "tensors": (
        "TensorInformation",
        "concatenate",
        "find_batch_size",
        "find_device",
        "get_data_structure",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_tensor_information",
        "listify",
        "slice_tensors",
    ),
    "walk": (
        "flatten",
        "honor_type",
        "is_namedtuple",
        "is_torch_tensor",
        "recursively_apply",
    ),
}

if not TYPE_CHECKING:  # a type checker would take any name for one that __getattr__ finds
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {f"accel_ops.{module}": names for module, names in _PUBLIC.items()},
        submodules=[*_PUBLIC, "tree"],
    )
