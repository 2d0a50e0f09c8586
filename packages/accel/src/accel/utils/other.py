"""Models and files, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel.saving.adapters import is_peft_model
from accel_ckpt.files.tensors import clean_state_dict_for_safetensors, load, save
from accel_ops.modules import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    get_pretty_name,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
    recursive_getattr,
)
from accel_ops.trees.walk import merge_dicts
from accel_state.process.state import wait_for_everyone

__all__ = [
    "clean_state_dict_for_safetensors",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_peft_model",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]
