"""Plugins, handlers and enumerations, under their documented path: re-exports of the packages below."""

from accel.big_models.quantization.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel.engines.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel.engines.fsdp_plugin import get_module_class_from_name as get_module_class_from_name
from accel.engines.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from accel.engines.tp_plugin import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel.precision.fp8.recipes import AORecipeKwargs as AORecipeKwargs
from accel.precision.fp8.recipes import FP8RecipeKwargs as FP8RecipeKwargs
from accel.precision.fp8.recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel.precision.fp8.recipes import TERecipeKwargs as TERecipeKwargs
from accel_ckpt.config import ProjectConfiguration as ProjectConfiguration
from accel_data.config import DataLoaderConfiguration as DataLoaderConfiguration
from accel_ops.trees.tensors import TensorInformation as TensorInformation
from accel_optim.handlers import AutocastKwargs as AutocastKwargs
from accel_optim.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_optim.handlers import GradScalerKwargs as GradScalerKwargs
from accel_state.enums import ComputeEnvironment as ComputeEnvironment
from accel_state.enums import CustomDtype as CustomDtype
from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel_state.enums import DistributedType as DistributedType
from accel_state.enums import DynamoBackend as DynamoBackend
from accel_state.enums import LoggerType as LoggerType
from accel_state.enums import PrecisionType as PrecisionType
from accel_state.enums import RNGType as RNGType
from accel_state.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_state.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.handlers import KwargsHandler as KwargsHandler
from accel_state.handlers import ProfileKwargs as ProfileKwargs
from accel_state.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from accel_state.parallelism.handlers import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accel_state.parallelism.handlers import TorchContextParallelConfig as TorchContextParallelConfig
from accel_state.parallelism.handlers import TorchTensorParallelConfig as TorchTensorParallelConfig
