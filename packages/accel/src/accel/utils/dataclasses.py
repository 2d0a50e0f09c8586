"""Plugins, handlers and enumerations, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel.big_models.quantization.config import BnbQuantizationConfig
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.mesh.tensor.plugin import TorchTensorParallelPlugin
from accel.engines.sharded.layer_classes import get_module_class_from_name
from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin
from accel_ckpt.config import ProjectConfiguration
from accel_data.config import DataLoaderConfiguration
from accel_ops.trees.tensors import TensorInformation
from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_state.enums import (
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from accel_state.handlers import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accel_state.parallelism.handlers import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

__all__ = [
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "get_module_class_from_name",
]
