"""Process state and hardware facts for distributed PyTorch: who am I, where do I run.

Importing this package imports nothing else: each public name comes with its module, on first use, so that a
launcher can read the torch-free ones in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.__about__ import __version__ as __version__
from accel_state.lazy import attach

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState as AcceleratorState
    from accel_state.accelerator_state import do_nothing as do_nothing
    from accel_state.accelerator_state import is_initialized as is_initialized
    from accel_state.affinity import override_numa_affinity as override_numa_affinity
    from accel_state.affinity import set_numa_affinity as set_numa_affinity
    from accel_state.control import ProcessControl as ProcessControl
    from accel_state.devices import DEVICES as DEVICES
    from accel_state.devices import DeviceRow as DeviceRow
    from accel_state.enums import ComputeEnvironment as ComputeEnvironment
    from accel_state.enums import CustomDtype as CustomDtype
    from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_state.enums import DistributedType as DistributedType
    from accel_state.enums import DynamoBackend as DynamoBackend
    from accel_state.enums import LoggerType as LoggerType
    from accel_state.enums import PrecisionType as PrecisionType
    from accel_state.enums import RNGType as RNGType
    from accel_state.enums import SageMakerDistributedType as SageMakerDistributedType
    from accel_state.env import CPUInformation as CPUInformation
    from accel_state.env import are_libraries_initialized as are_libraries_initialized
    from accel_state.env import clear_environment as clear_environment
    from accel_state.env import convert_dict_to_env_variables as convert_dict_to_env_variables
    from accel_state.env import get_cpu_distributed_information as get_cpu_distributed_information
    from accel_state.env import get_int_from_env as get_int_from_env
    from accel_state.env import parse_choice_from_env as parse_choice_from_env
    from accel_state.env import parse_flag_from_env as parse_flag_from_env
    from accel_state.env import patch_environment as patch_environment
    from accel_state.env import put_here as put_here
    from accel_state.env import str_to_bool as str_to_bool
    from accel_state.env_purge import purge_accelerate_environment as purge_accelerate_environment
    from accel_state.gradient import GradientState as GradientState
    from accel_state.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state.handlers import KwargsHandler as KwargsHandler
    from accel_state.handlers import ProfileKwargs as ProfileKwargs
    from accel_state.handlers import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_state.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel_state.hardware import check_os_kernel as check_os_kernel
    from accel_state.hardware import get_gpu_info as get_gpu_info
    from accel_state.imports import check_cuda_fp8_capability as check_cuda_fp8_capability
    from accel_state.imports import compare_versions as compare_versions
    from accel_state.imports import is_4bit_bnb_available as is_4bit_bnb_available
    from accel_state.imports import is_8bit_bnb_available as is_8bit_bnb_available
    from accel_state.imports import is_aim_available as is_aim_available
    from accel_state.imports import is_amdsmi_available as is_amdsmi_available
    from accel_state.imports import is_bf16_available as is_bf16_available
    from accel_state.imports import (
        is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    )
    from accel_state.imports import is_bnb_available as is_bnb_available
    from accel_state.imports import is_boto3_available as is_boto3_available
    from accel_state.imports import is_clearml_available as is_clearml_available
    from accel_state.imports import is_comet_ml_available as is_comet_ml_available
    from accel_state.imports import is_cuda_available as is_cuda_available
    from accel_state.imports import is_datasets_available as is_datasets_available
    from accel_state.imports import is_deepspeed_available as is_deepspeed_available
    from accel_state.imports import is_dvclive_available as is_dvclive_available
    from accel_state.imports import is_fp8_available as is_fp8_available
    from accel_state.imports import is_fp16_available as is_fp16_available
    from accel_state.imports import is_habana_gaudi1 as is_habana_gaudi1
    from accel_state.imports import is_hpu_available as is_hpu_available
    from accel_state.imports import is_import_timer_available as is_import_timer_available
    from accel_state.imports import is_lomo_available as is_lomo_available
    from accel_state.imports import is_matplotlib_available as is_matplotlib_available
    from accel_state.imports import is_megatron_lm_available as is_megatron_lm_available
    from accel_state.imports import is_mlflow_available as is_mlflow_available
    from accel_state.imports import is_mlu_available as is_mlu_available
    from accel_state.imports import is_mps_available as is_mps_available
    from accel_state.imports import is_msamp_available as is_msamp_available
    from accel_state.imports import is_musa_available as is_musa_available
    from accel_state.imports import is_neuron_available as is_neuron_available
    from accel_state.imports import is_npu_available as is_npu_available
    from accel_state.imports import is_package_available as is_package_available
    from accel_state.imports import is_pandas_available as is_pandas_available
    from accel_state.imports import is_peft_available as is_peft_available
    from accel_state.imports import is_pippy_available as is_pippy_available
    from accel_state.imports import is_pynvml_available as is_pynvml_available
    from accel_state.imports import is_pytest_available as is_pytest_available
    from accel_state.imports import is_rich_available as is_rich_available
    from accel_state.imports import is_rocm_available as is_rocm_available
    from accel_state.imports import is_sagemaker_available as is_sagemaker_available
    from accel_state.imports import is_schedulefree_available as is_schedulefree_available
    from accel_state.imports import is_sdaa_available as is_sdaa_available
    from accel_state.imports import is_swanlab_available as is_swanlab_available
    from accel_state.imports import is_tensorboard_available as is_tensorboard_available
    from accel_state.imports import is_timm_available as is_timm_available
    from accel_state.imports import is_torch_version as is_torch_version
    from accel_state.imports import is_torch_xla_available as is_torch_xla_available
    from accel_state.imports import is_torchao_available as is_torchao_available
    from accel_state.imports import is_torchdata_available as is_torchdata_available
    from accel_state.imports import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from accel_state.imports import is_torchvision_available as is_torchvision_available
    from accel_state.imports import is_trackio_available as is_trackio_available
    from accel_state.imports import is_transformer_engine_available as is_transformer_engine_available
    from accel_state.imports import (
        is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    )
    from accel_state.imports import is_transformers_available as is_transformers_available
    from accel_state.imports import is_triton_available as is_triton_available
    from accel_state.imports import is_wandb_available as is_wandb_available
    from accel_state.imports import is_weights_only_available as is_weights_only_available
    from accel_state.imports import is_xccl_available as is_xccl_available
    from accel_state.imports import is_xpu_available as is_xpu_available
    from accel_state.imports import require as require
    from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
    from accel_state.logging import get_logger as get_logger
    from accel_state.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from accel_state.parallelism import ParallelismConfig as ParallelismConfig
    from accel_state.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_state.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_state.process import PartialState as PartialState
    from accel_state.process import Process as Process
    from accel_state.process import current_process as current_process
    from accel_state.process import wait_for_everyone as wait_for_everyone
    from accel_state.shared import ThreadLocalSharedDict as ThreadLocalSharedDict

_PUBLIC = {
    "accelerator_state": (
        "AcceleratorState",
        "do_nothing",
        "is_initialized",
    ),
    "affinity": (
        "override_numa_affinity",
        "set_numa_affinity",
    ),
    "control": ("ProcessControl",),
    "devices": (
        "DEVICES",
        "DeviceRow",
    ),
    "enums": (
        "ComputeEnvironment",
        "CustomDtype",
        "DDPCommunicationHookType",
        "DistributedType",
        "DynamoBackend",
        "LoggerType",
        "PrecisionType",
        "RNGType",
        "SageMakerDistributedType",
    ),
    "env": (
        "CPUInformation",
        "are_libraries_initialized",
        "clear_environment",
        "convert_dict_to_env_variables",
        "get_cpu_distributed_information",
        "get_int_from_env",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "put_here",
        "str_to_bool",
    ),
    "env_purge": ("purge_accelerate_environment",),
    "gradient": ("GradientState",),
    "handlers": (
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "ProfileKwargs",
        "TorchDynamoPlugin",
    ),
    "hardware": ("check_cuda_p2p_ib_support", "check_os_kernel", "get_gpu_info"),
    "imports": (
        "check_cuda_fp8_capability",
        "compare_versions",
        "is_4bit_bnb_available",
        "is_8bit_bnb_available",
        "is_aim_available",
        "is_amdsmi_available",
        "is_bf16_available",
        "is_bitsandbytes_multi_backend_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp16_available",
        "is_fp8_available",
        "is_habana_gaudi1",
        "is_hpu_available",
        "is_import_timer_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_mlu_available",
        "is_mps_available",
        "is_msamp_available",
        "is_musa_available",
        "is_neuron_available",
        "is_npu_available",
        "is_package_available",
        "is_pandas_available",
        "is_peft_available",
        "is_pippy_available",
        "is_pynvml_available",
        "is_pytest_available",
        "is_rich_available",
        "is_rocm_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_sdaa_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_timm_available",
        "is_torch_version",
        "is_torch_xla_available",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformer_engine_mxfp8_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_weights_only_available",
        "is_xccl_available",
        "is_xpu_available",
        "require",
    ),
    "logging": (
        "MultiProcessAdapter",
        "get_logger",
    ),
    "parallelism": (
        "DeepSpeedSequenceParallelConfig",
        "ParallelismConfig",
        "TorchContextParallelConfig",
        "TorchTensorParallelConfig",
    ),
    "process": (
        "PartialState",
        "Process",
        "current_process",
        "wait_for_everyone",
    ),
    "shared": ("ThreadLocalSharedDict",),
}

if not TYPE_CHECKING:  # a type checker would take any name for one that __getattr__ finds
    __getattr__, __dir__, __all__ = attach(
        __name__, {f"accel_state.{module}": names for module, names in _PUBLIC.items()}, submodules=_PUBLIC
    )
