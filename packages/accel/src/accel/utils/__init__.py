"""Everything documented under `accel.utils`: lazy re-exports, each imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import attach

if TYPE_CHECKING:
    from accel.adapters import is_peft_model as is_peft_model
    from accel.compilation import compile_regions as compile_regions
    from accel.compilation import compile_regions_deepspeed as compile_regions_deepspeed
    from accel.compilation import compile_regions_fsdp2 as compile_regions_fsdp2
    from accel.ds.dummies import DummyOptim as DummyOptim
    from accel.ds.dummies import DummyScheduler as DummyScheduler
    from accel.ds.runtime import GatheredParameters as GatheredParameters
    from accel.ds.runtime import deepspeed_required as deepspeed_required
    from accel.ds.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
    from accel.ds.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
    from accel.ds.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
    from accel.estimate import convert_bytes as convert_bytes
    from accel.fp8.ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
    from accel.fp8.ao import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
    from accel.fp8.ao import has_ao_layers as has_ao_layers
    from accel.fp8.ao import torchao_required as torchao_required
    from accel.fp8.recipes import AORecipeKwargs as AORecipeKwargs
    from accel.fp8.recipes import FP8RecipeKwargs as FP8RecipeKwargs
    from accel.fp8.recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from accel.fp8.recipes import TERecipeKwargs as TERecipeKwargs
    from accel.fp8.te import apply_fp8_autowrap as apply_fp8_autowrap
    from accel.fp8.te import contextual_fp8_autocast as contextual_fp8_autocast
    from accel.fp8.te import convert_model as convert_model
    from accel.fp8.te import has_transformer_engine_layers as has_transformer_engine_layers
    from accel.fsdp_files import load_fsdp_model as load_fsdp_model
    from accel.fsdp_files import load_fsdp_optimizer as load_fsdp_optimizer
    from accel.fsdp_files import save_fsdp_model as save_fsdp_model
    from accel.fsdp_files import save_fsdp_optimizer as save_fsdp_optimizer
    from accel.fsdp_steps import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
    from accel.fsdp_steps import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
    from accel.fsdp_steps import fsdp2_apply_ac as fsdp2_apply_ac
    from accel.fsdp_steps import fsdp2_canonicalize_names as fsdp2_canonicalize_names
    from accel.fsdp_steps import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
    from accel.fsdp_steps import fsdp2_prepare_model as fsdp2_prepare_model
    from accel.fsdp_steps import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
    from accel.megatron.bert import BertTrainStep as BertTrainStep
    from accel.megatron.data import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
    from accel.megatron.dummies import MegatronLMDummyScheduler as MegatronLMDummyScheduler
    from accel.megatron.gpt import GPTTrainStep as GPTTrainStep
    from accel.megatron.parsers import (
        add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    )
    from accel.megatron.steps import AbstractTrainStep as AbstractTrainStep
    from accel.megatron.steps import (
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    )
    from accel.megatron.t5 import T5TrainStep as T5TrainStep
    from accel.parallel.filling import ensure_weights_retied as ensure_weights_retied
    from accel.parallel.tensor import get_model_tp_size as get_model_tp_size
    from accel.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from accel.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel.plugins.megatron import MegatronLMPlugin as MegatronLMPlugin
    from accel.plugins.tensor_parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from accel.utils.tqdm import tqdm as tqdm
    from accel_ckpt.config import ProjectConfiguration as ProjectConfiguration
    from accel_ckpt.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_ckpt.loading import load_offloaded_weights as load_offloaded_weights
    from accel_ckpt.loading import load_state_dict as load_state_dict
    from accel_ckpt.merge import merge_fsdp_weights as merge_fsdp_weights
    from accel_ckpt.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
    from accel_ckpt.offload import PrefixedDataset as PrefixedDataset
    from accel_ckpt.offload import extract_submodules_state_dict as extract_submodules_state_dict
    from accel_ckpt.offload import load_offloaded_weight as load_offloaded_weight
    from accel_ckpt.offload import offload_state_dict as offload_state_dict
    from accel_ckpt.offload import offload_weight as offload_weight
    from accel_ckpt.offload import save_offload_index as save_offload_index
    from accel_ckpt.tensors import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
    from accel_ckpt.tensors import id_tensor_storage as id_tensor_storage
    from accel_ckpt.tensors import load as load
    from accel_ckpt.tensors import save as save
    from accel_ckpt.weights import convert_file_size_to_int as convert_file_size_to_int
    from accel_data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_launch.config.write import write_basic_config as write_basic_config
    from accel_launch.notebook import PrepareForLaunch as PrepareForLaunch
    from accel_launch.programs import is_port_in_use as is_port_in_use
    from accel_launch.programs import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
    from accel_launch.programs import prepare_multi_gpu_env as prepare_multi_gpu_env
    from accel_launch.programs import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
    from accel_launch.sagemaker.estimator import (
        prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    )
    from accel_launch.tpu.colab import install_xla as install_xla
    from accel_launch.tpu.variables import prepare_tpu as prepare_tpu
    from accel_ops.collectives import broadcast as broadcast
    from accel_ops.collectives import copy_tensor_to_devices as copy_tensor_to_devices
    from accel_ops.collectives import gather as gather
    from accel_ops.collectives import reduce as reduce
    from accel_ops.convert import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_ops.convert import convert_to_fp32 as convert_to_fp32
    from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
    from accel_ops.memory import release_memory as release_memory
    from accel_ops.modules import extract_model_from_parallel as extract_model_from_parallel
    from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
    from accel_ops.modules import has_compiled_regions as has_compiled_regions
    from accel_ops.modules import is_compiled_module as is_compiled_module
    from accel_ops.modules import model_has_dtensor as model_has_dtensor
    from accel_ops.modules import recursive_getattr as recursive_getattr
    from accel_ops.objects import broadcast_object_list as broadcast_object_list
    from accel_ops.objects import gather_object as gather_object
    from accel_ops.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_ops.padding import pad_across_processes as pad_across_processes
    from accel_ops.padding import pad_input_tensors as pad_input_tensors
    from accel_ops.placement import send_to_device as send_to_device
    from accel_ops.random import set_seed as set_seed
    from accel_ops.random import synchronize_rng_state as synchronize_rng_state
    from accel_ops.random import synchronize_rng_states as synchronize_rng_states
    from accel_ops.tensors import TensorInformation as TensorInformation
    from accel_ops.tensors import concatenate as concatenate
    from accel_ops.tensors import find_batch_size as find_batch_size
    from accel_ops.tensors import find_device as find_device
    from accel_ops.tensors import get_data_structure as get_data_structure
    from accel_ops.tensors import ignorant_find_batch_size as ignorant_find_batch_size
    from accel_ops.tensors import initialize_tensors as initialize_tensors
    from accel_ops.tensors import is_tensor_information as is_tensor_information
    from accel_ops.tensors import listify as listify
    from accel_ops.tensors import slice_tensors as slice_tensors
    from accel_ops.walk import honor_type as honor_type
    from accel_ops.walk import is_namedtuple as is_namedtuple
    from accel_ops.walk import is_torch_tensor as is_torch_tensor
    from accel_ops.walk import recursively_apply as recursively_apply
    from accel_optim.handlers import AutocastKwargs as AutocastKwargs
    from accel_optim.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_optim.handlers import GradScalerKwargs as GradScalerKwargs
    from accel_optim.precision import (
        get_mixed_precision_context_manager as get_mixed_precision_context_manager,
    )
    from accel_optim.scaler import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
    from accel_optim.scaler import get_grad_scaler as get_grad_scaler
    from accel_state.affinity import set_numa_affinity as set_numa_affinity
    from accel_state.capabilities import check_cuda_fp8_capability as check_cuda_fp8_capability
    from accel_state.capabilities import is_bf16_available as is_bf16_available
    from accel_state.capabilities import is_cuda_available as is_cuda_available
    from accel_state.capabilities import is_fp16_available as is_fp16_available
    from accel_state.capabilities import is_habana_gaudi1 as is_habana_gaudi1
    from accel_state.capabilities import is_hpu_available as is_hpu_available
    from accel_state.capabilities import is_mlu_available as is_mlu_available
    from accel_state.capabilities import is_mps_available as is_mps_available
    from accel_state.capabilities import is_musa_available as is_musa_available
    from accel_state.capabilities import is_neuron_available as is_neuron_available
    from accel_state.capabilities import is_npu_available as is_npu_available
    from accel_state.capabilities import is_rocm_available as is_rocm_available
    from accel_state.capabilities import is_sdaa_available as is_sdaa_available
    from accel_state.capabilities import is_torch_xla_available as is_torch_xla_available
    from accel_state.capabilities import (
        is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    )
    from accel_state.capabilities import is_xccl_available as is_xccl_available
    from accel_state.capabilities import is_xpu_available as is_xpu_available
    from accel_state.enums import ComputeEnvironment as ComputeEnvironment
    from accel_state.enums import CustomDtype as CustomDtype
    from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_state.enums import DistributedType as DistributedType
    from accel_state.enums import DynamoBackend as DynamoBackend
    from accel_state.enums import LoggerType as LoggerType
    from accel_state.enums import PrecisionType as PrecisionType
    from accel_state.enums import RNGType as RNGType
    from accel_state.enums import SageMakerDistributedType as SageMakerDistributedType
    from accel_state.env import are_libraries_initialized as are_libraries_initialized
    from accel_state.env import clear_environment as clear_environment
    from accel_state.env import convert_dict_to_env_variables as convert_dict_to_env_variables
    from accel_state.env import get_cpu_distributed_information as get_cpu_distributed_information
    from accel_state.env import get_int_from_env as get_int_from_env
    from accel_state.env import parse_choice_from_env as parse_choice_from_env
    from accel_state.env import parse_flag_from_env as parse_flag_from_env
    from accel_state.env import patch_environment as patch_environment
    from accel_state.env import str_to_bool as str_to_bool
    from accel_state.env_purge import purge_accelerate_environment as purge_accelerate_environment
    from accel_state.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state.handlers import KwargsHandler as KwargsHandler
    from accel_state.handlers import ProfileKwargs as ProfileKwargs
    from accel_state.handlers import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_state.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel_state.hardware import check_os_kernel as check_os_kernel
    from accel_state.hardware import get_gpu_info as get_gpu_info
    from accel_state.imports import is_4bit_bnb_available as is_4bit_bnb_available
    from accel_state.imports import is_8bit_bnb_available as is_8bit_bnb_available
    from accel_state.imports import is_aim_available as is_aim_available
    from accel_state.imports import is_amdsmi_available as is_amdsmi_available
    from accel_state.imports import (
        is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    )
    from accel_state.imports import is_bnb_available as is_bnb_available
    from accel_state.imports import is_boto3_available as is_boto3_available
    from accel_state.imports import is_clearml_available as is_clearml_available
    from accel_state.imports import is_comet_ml_available as is_comet_ml_available
    from accel_state.imports import is_datasets_available as is_datasets_available
    from accel_state.imports import is_deepspeed_available as is_deepspeed_available
    from accel_state.imports import is_dvclive_available as is_dvclive_available
    from accel_state.imports import is_fp8_available as is_fp8_available
    from accel_state.imports import is_import_timer_available as is_import_timer_available
    from accel_state.imports import is_lomo_available as is_lomo_available
    from accel_state.imports import is_matplotlib_available as is_matplotlib_available
    from accel_state.imports import is_megatron_lm_available as is_megatron_lm_available
    from accel_state.imports import is_mlflow_available as is_mlflow_available
    from accel_state.imports import is_msamp_available as is_msamp_available
    from accel_state.imports import is_pandas_available as is_pandas_available
    from accel_state.imports import is_peft_available as is_peft_available
    from accel_state.imports import is_pippy_available as is_pippy_available
    from accel_state.imports import is_pynvml_available as is_pynvml_available
    from accel_state.imports import is_pytest_available as is_pytest_available
    from accel_state.imports import is_rich_available as is_rich_available
    from accel_state.imports import is_sagemaker_available as is_sagemaker_available
    from accel_state.imports import is_schedulefree_available as is_schedulefree_available
    from accel_state.imports import is_swanlab_available as is_swanlab_available
    from accel_state.imports import is_tensorboard_available as is_tensorboard_available
    from accel_state.imports import is_timm_available as is_timm_available
    from accel_state.imports import is_torchao_available as is_torchao_available
    from accel_state.imports import is_torchdata_available as is_torchdata_available
    from accel_state.imports import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from accel_state.imports import is_torchvision_available as is_torchvision_available
    from accel_state.imports import is_trackio_available as is_trackio_available
    from accel_state.imports import is_transformer_engine_available as is_transformer_engine_available
    from accel_state.imports import is_transformers_available as is_transformers_available
    from accel_state.imports import is_triton_available as is_triton_available
    from accel_state.imports import is_wandb_available as is_wandb_available
    from accel_state.imports import is_weights_only_available as is_weights_only_available
    from accel_state.packages import compare_versions as compare_versions
    from accel_state.packages import is_torch_version as is_torch_version
    from accel_state.parallel_handlers import (
        DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    )
    from accel_state.parallel_handlers import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_state.parallel_handlers import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_state.parallelism import ParallelismConfig as ParallelismConfig
    from accel_state.process import wait_for_everyone as wait_for_everyone

_NAMES = {
    "accel.adapters": ("is_peft_model",),
    "accel.compilation": ("compile_regions", "compile_regions_deepspeed", "compile_regions_fsdp2"),
    "accel.plugins.deepspeed": ("DeepSpeedPlugin",),
    "accel.fsdp_files": (
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ),
    "accel.fsdp_steps": (
        "disable_fsdp_ram_efficient_loading",
        "enable_fsdp_ram_efficient_loading",
        "fsdp2_apply_ac",
        "fsdp2_canonicalize_names",
        "fsdp2_load_full_state_dict",
        "fsdp2_prepare_model",
        "fsdp2_switch_optimizer_parameters",
    ),
    "accel.parallel.filling": ("ensure_weights_retied",),
    "accel.parallel.tensor": ("get_model_tp_size",),
    "accel.plugins.fsdp": ("FullyShardedDataParallelPlugin",),
    "accel.plugins.tensor_parallel": ("TorchTensorParallelPlugin",),
    "accel.ds.dummies": ("DummyOptim", "DummyScheduler"),
    "accel.ds.runtime": ("GatheredParameters", "deepspeed_required"),
    "accel.ds.wrappers": (
        "DeepSpeedEngineWrapper",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedSchedulerWrapper",
    ),
    "accel.estimate": ("convert_bytes",),
    "accel.megatron.bert": ("BertTrainStep",),
    "accel.megatron.data": ("MegatronLMDummyDataLoader",),
    "accel.megatron.dummies": ("MegatronLMDummyScheduler",),
    "accel.megatron.gpt": ("GPTTrainStep",),
    "accel.megatron.parsers": ("add_model_config_to_megatron_parser",),
    "accel.megatron.steps": ("AbstractTrainStep", "avg_losses_across_data_parallel_group"),
    "accel.megatron.t5": ("T5TrainStep",),
    "accel.plugins.megatron": ("MegatronLMPlugin",),
    "accel.fp8.ao": (
        "convert_model_to_fp8_ao",
        "filter_first_and_last_linear_layers",
        "has_ao_layers",
        "torchao_required",
    ),
    "accel.fp8.recipes": ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"),
    "accel.fp8.te": (
        "apply_fp8_autowrap",
        "contextual_fp8_autocast",
        "convert_model",
        "has_transformer_engine_layers",
    ),
    "accel.utils.tqdm": ("tqdm", "tqdm"),
    "accel_ckpt.config": ("ProjectConfiguration",),
    "accel_ckpt.loading": ("load_checkpoint_in_model", "load_offloaded_weights", "load_state_dict"),
    "accel_ckpt.merge": ("merge_fsdp_weights",),
    "accel_ckpt.offload": (
        "OffloadedWeightsLoader",
        "PrefixedDataset",
        "extract_submodules_state_dict",
        "load_offloaded_weight",
        "offload_state_dict",
        "offload_weight",
        "save_offload_index",
    ),
    "accel_ckpt.tensors": ("clean_state_dict_for_safetensors", "id_tensor_storage", "load", "save"),
    "accel_ckpt.weights": ("convert_file_size_to_int",),
    "accel_data.config": ("DataLoaderConfiguration",),
    "accel_launch.config.write": ("write_basic_config",),
    "accel_launch.notebook": ("PrepareForLaunch",),
    "accel_launch.programs": (
        "is_port_in_use",
        "prepare_deepspeed_cmd_env",
        "prepare_multi_gpu_env",
        "prepare_simple_launcher_cmd_env",
    ),
    "accel_launch.sagemaker.estimator": ("prepare_sagemager_args_inputs",),
    "accel_launch.tpu.colab": ("install_xla",),
    "accel_launch.tpu.variables": ("prepare_tpu",),
    "accel_ops.collectives": ("broadcast", "copy_tensor_to_devices", "gather", "reduce"),
    "accel_ops.convert": ("convert_outputs_to_fp32", "convert_to_fp32"),
    "accel_ops.memory": ("find_executable_batch_size", "release_memory"),
    "accel_ops.modules": (
        "extract_model_from_parallel",
        "get_module_children_bottom_up",
        "has_compiled_regions",
        "is_compiled_module",
        "model_has_dtensor",
        "recursive_getattr",
    ),
    "accel_ops.objects": ("broadcast_object_list", "gather_object"),
    "accel_ops.padding": ("CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors"),
    "accel_ops.placement": ("send_to_device",),
    "accel_ops.random": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    "accel_ops.tensors": (
        "TensorInformation",
        "concatenate",
        "find_batch_size",
        "find_device",
        "get_data_structure",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_tensor_information",
        "listify",
        "slice_tensors",
    ),
    "accel_ops.walk": ("honor_type", "is_namedtuple", "is_torch_tensor", "recursively_apply"),
    "accel_optim.handlers": ("AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs"),
    "accel_optim.precision": ("get_mixed_precision_context_manager",),
    "accel_optim.scaler": ("get_fsdp2_grad_scaler", "get_grad_scaler"),
    "accel_state.affinity": ("set_numa_affinity",),
    "accel_state.capabilities": (
        "check_cuda_fp8_capability",
        "is_bf16_available",
        "is_cuda_available",
        "is_fp16_available",
        "is_habana_gaudi1",
        "is_hpu_available",
        "is_mlu_available",
        "is_mps_available",
        "is_musa_available",
        "is_neuron_available",
        "is_npu_available",
        "is_rocm_available",
        "is_sdaa_available",
        "is_torch_xla_available",
        "is_transformer_engine_mxfp8_available",
        "is_xccl_available",
        "is_xpu_available",
    ),
    "accel_state.enums": (
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
    "accel_state.env": (
        "are_libraries_initialized",
        "clear_environment",
        "convert_dict_to_env_variables",
        "get_cpu_distributed_information",
        "get_int_from_env",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "str_to_bool",
    ),
    "accel_state.env_purge": ("purge_accelerate_environment",),
    "accel_state.handlers": (
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "ProfileKwargs",
        "TorchDynamoPlugin",
    ),
    "accel_state.hardware": ("check_cuda_p2p_ib_support", "check_os_kernel", "get_gpu_info"),
    "accel_state.imports": (
        "is_4bit_bnb_available",
        "is_8bit_bnb_available",
        "is_aim_available",
        "is_amdsmi_available",
        "is_bitsandbytes_multi_backend_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp8_available",
        "is_import_timer_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_msamp_available",
        "is_pandas_available",
        "is_peft_available",
        "is_pippy_available",
        "is_pynvml_available",
        "is_pytest_available",
        "is_rich_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_timm_available",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_weights_only_available",
    ),
    "accel_state.packages": ("compare_versions", "is_torch_version"),
    "accel_state.parallel_handlers": (
        "DeepSpeedSequenceParallelConfig",
        "TorchContextParallelConfig",
        "TorchTensorParallelConfig",
    ),
    "accel_state.parallelism": ("ParallelismConfig",),
    "accel_state.process": ("wait_for_everyone",),
}
_SUBMODULES = (
    "constants",
    "dataclasses",
    "deepspeed",
    "environment",
    "imports",
    "memory",
    "missing",
    "modeling",
    "offload",
    "operations",
    "other",
    "random",
    "tqdm",
    "versions",
)

__getattr__, __dir__, __all__ = attach(__name__, _NAMES, _SUBMODULES)
