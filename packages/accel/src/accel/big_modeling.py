"""Models that are large for the memory at hand, under their documented path: re-exports."""

from __future__ import annotations

from accel.big_models.dispatch import dispatch_model, load_checkpoint_and_dispatch
from accel.big_models.empty import init_empty_weights, init_on_device
from accel.big_models.layerwise_casting import attach_layerwise_casting_hooks
from accel.big_models.offload.models import cpu_offload, cpu_offload_with_hook, disk_offload
from accel.big_models.placement.device_map import check_device_map, infer_auto_device_map
from accel_ckpt.weights.load import load_checkpoint_in_model

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
