"""Trees of tensors (nested dicts, lists, tuples, mappings, dataclasses): everything that needs no process.

One place to import from; the functions live in `walk`, `tensors`, `placement` and `convert`.
"""

from accel_ops.convert import convert_outputs_to_fp32, convert_to_fp32
from accel_ops.placement import send_to_device
from accel_ops.tensors import (
    TensorInformation,
    concatenate,
    find_batch_size,
    find_device,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
    listify,
    slice_tensors,
)
from accel_ops.walk import flatten, honor_type, is_namedtuple, is_torch_tensor, recursively_apply

__all__ = [
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "flatten",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]
