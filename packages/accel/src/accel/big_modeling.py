"""Models that are large for the available memory, under their documented path: re-exports."""

from accel.big_models.dispatch import dispatch_model as dispatch_model
from accel.big_models.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accel.big_models.empty import init_empty_weights as init_empty_weights
from accel.big_models.empty import init_on_device as init_on_device
from accel.big_models.layerwise_casting import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from accel.big_models.offload.models import cpu_offload as cpu_offload
from accel.big_models.offload.models import cpu_offload_with_hook as cpu_offload_with_hook
from accel.big_models.offload.models import disk_offload as disk_offload
from accel.big_models.placement.device_map import check_device_map as check_device_map
from accel.big_models.placement.device_map import infer_auto_device_map as infer_auto_device_map
from accel_ckpt.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
