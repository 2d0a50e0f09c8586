"""Weights on the disk, under their documented path: re-exports of the packages below."""

from accel_ckpt.weights.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_ckpt.weights.offload import PrefixedDataset as PrefixedDataset
from accel_ckpt.weights.offload import extract_submodules_state_dict as extract_submodules_state_dict
from accel_ckpt.weights.offload import load_offloaded_weight as load_offloaded_weight
from accel_ckpt.weights.offload import offload_state_dict as offload_state_dict
from accel_ckpt.weights.offload import offload_weight as offload_weight
from accel_ckpt.weights.offload import save_offload_index as save_offload_index
