"""Hooks on a module's forward, under their documented path: re-exports."""

from accel.big_models.hooks.align import AlignDevicesHook as AlignDevicesHook
from accel.big_models.hooks.attach import attach_align_device_hook as attach_align_device_hook
from accel.big_models.hooks.attach import (
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
)
from accel.big_models.hooks.attach import attach_execution_device_hook as attach_execution_device_hook
from accel.big_models.hooks.base import ModelHook as ModelHook
from accel.big_models.hooks.base import SequentialHook as SequentialHook
from accel.big_models.hooks.base import add_hook_to_module as add_hook_to_module
from accel.big_models.hooks.base import remove_hook_from_module as remove_hook_from_module
from accel.big_models.hooks.base import remove_hook_from_submodules as remove_hook_from_submodules
from accel.big_models.layerwise_casting import LayerwiseCastingHook as LayerwiseCastingHook
from accel.big_models.offload.models import CpuOffload as CpuOffload
from accel.big_models.offload.models import UserCpuOffloadHook as UserCpuOffloadHook
