"""Operations on nested data, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_ops.collectives.operations import broadcast, copy_tensor_to_devices, gather, reduce
from accel_ops.collectives.padding import (
    CannotPadNestedTensorWarning,
    pad_across_processes,
    pad_input_tensors,
)
from accel_ops.debug.contract import DistributedOperationException
from accel_ops.modules import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
    recursive_getattr,
)
from accel_ops.trees.convert import convert_outputs_to_fp32, convert_to_fp32
from accel_ops.trees.send import send_to_device
from accel_ops.trees.tensors import (
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
from accel_ops.trees.walk import honor_type, is_namedtuple, is_torch_tensor, recursively_apply

__all__ = [
    "CannotPadNestedTensorWarning",
    "DistributedOperationException",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_module_children_bottom_up",
    "has_compiled_regions",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_compiled_module",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "model_has_dtensor",
    "pad_across_processes",
    "pad_input_tensors",
    "recursive_getattr",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
