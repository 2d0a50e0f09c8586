"""Models and files, under their documented path: re-exports of the packages below."""

from accel.saving.adapters import is_peft_model as is_peft_model
from accel_ckpt.files.tensors import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accel_ckpt.files.tensors import load as load
from accel_ckpt.files.tensors import save as save
from accel_ops.modules import extract_model_from_parallel as extract_model_from_parallel
from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accel_ops.modules import get_pretty_name as get_pretty_name
from accel_ops.modules import has_compiled_regions as has_compiled_regions
from accel_ops.modules import is_compiled_module as is_compiled_module
from accel_ops.modules import model_has_dtensor as model_has_dtensor
from accel_ops.modules import recursive_getattr as recursive_getattr
from accel_ops.trees.walk import merge_dicts as merge_dicts
from accel_state.process.state import wait_for_everyone as wait_for_everyone
