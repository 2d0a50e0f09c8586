from accel.big_models.offload.module_device import align_module_device as align_module_device
from accel.big_models.offload.module_device import has_offloaded_params as has_offloaded_params
from accel.big_models.placement.device_map import check_device_map as check_device_map
from accel.big_models.placement.device_map import infer_auto_device_map as infer_auto_device_map
from accel.big_models.placement.memory import get_balanced_memory as get_balanced_memory
from accel.big_models.placement.memory import get_max_memory as get_max_memory
from accel.big_models.quantization.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel.big_models.quantization.load import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel.big_models.quantization.load import load_and_quantize_model as load_and_quantize_model
from accel.engines.common.layouts import get_model_tp_size as get_model_tp_size
from accel.engines.deepspeed.placeholders import DummyOptim as DummyOptim
from accel.engines.deepspeed.placeholders import DummyScheduler as DummyScheduler
from accel.engines.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accel.engines.deepspeed.runtime import GatheredParameters as GatheredParameters
from accel.engines.deepspeed.runtime import deepspeed_required as deepspeed_required
from accel.engines.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel.engines.deepspeed.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accel.engines.deepspeed.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel.engines.fsdp_steps import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accel.engines.fsdp_steps import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from accel.engines.fsdp_steps import fsdp2_apply_ac as fsdp2_apply_ac
from accel.engines.fsdp_steps import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accel.engines.fsdp_steps import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accel.engines.fsdp_steps import fsdp2_prepare_model as fsdp2_prepare_model
from accel.engines.fsdp_steps import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from accel.engines.initial_weights import ensure_weights_retied as ensure_weights_retied
from accel.engines.megatron.data import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accel.engines.megatron.models.bert import BertTrainStep as BertTrainStep
from accel.engines.megatron.models.gpt import GPTTrainStep as GPTTrainStep
from accel.engines.megatron.models.steps import AbstractTrainStep as AbstractTrainStep
from accel.engines.megatron.models.steps import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accel.engines.megatron.models.t5 import T5TrainStep as T5TrainStep
from accel.engines.megatron.optimizers import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accel.engines.megatron.parsers import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accel.engines.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from accel.engines.tp_plugin import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel.estimate.formulas import convert_bytes as convert_bytes
from accel.precision.compile import compile_regions as compile_regions
from accel.precision.compile import compile_regions_deepspeed as compile_regions_deepspeed
from accel.precision.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from accel.precision.fp8.ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accel.precision.fp8.ao import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from accel.precision.fp8.ao import has_ao_layers as has_ao_layers
from accel.precision.fp8.ao import torchao_required as torchao_required
from accel.precision.fp8.recipes import AORecipeKwargs as AORecipeKwargs
from accel.precision.fp8.recipes import FP8RecipeKwargs as FP8RecipeKwargs
from accel.precision.fp8.recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel.precision.fp8.recipes import TERecipeKwargs as TERecipeKwargs
from accel.precision.fp8.te import apply_fp8_autowrap as apply_fp8_autowrap
from accel.precision.fp8.te import contextual_fp8_autocast as contextual_fp8_autocast
from accel.precision.fp8.te import convert_model as convert_model
from accel.precision.fp8.te import has_transformer_engine_layers as has_transformer_engine_layers
from accel.saving.adapters import is_peft_model as is_peft_model
from accel.saving.fsdp_functions import load_fsdp_model as load_fsdp_model
from accel.saving.fsdp_functions import load_fsdp_optimizer as load_fsdp_optimizer
from accel.saving.fsdp_functions import save_fsdp_model as save_fsdp_model
from accel.saving.fsdp_functions import save_fsdp_optimizer as save_fsdp_optimizer
from accel.utils import bnb as bnb
from accel.utils import constants as constants
from accel.utils import dataclasses as dataclasses
from accel.utils import deepspeed as deepspeed
from accel.utils import environment as environment
from accel.utils import imports as imports
from accel.utils import memory as memory
from accel.utils import modeling as modeling
from accel.utils import offload as offload
from accel.utils import operations as operations
from accel.utils import other as other
from accel.utils import random as random
from accel.utils import versions as versions
from accel.utils.tqdm import tqdm as tqdm
from accel_ckpt.config import ProjectConfiguration as ProjectConfiguration
from accel_ckpt.files.tensors import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accel_ckpt.files.tensors import id_tensor_storage as id_tensor_storage
from accel_ckpt.files.tensors import load as load
from accel_ckpt.files.tensors import save as save
from accel_ckpt.sharded.merge import merge_fsdp_weights as merge_fsdp_weights
from accel_ckpt.weights.files import convert_file_size_to_int as convert_file_size_to_int
from accel_ckpt.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_ckpt.weights.load import load_offloaded_weights as load_offloaded_weights
from accel_ckpt.weights.load import load_state_dict as load_state_dict
from accel_ckpt.weights.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_ckpt.weights.offload import PrefixedDataset as PrefixedDataset
from accel_ckpt.weights.offload import extract_submodules_state_dict as extract_submodules_state_dict
from accel_ckpt.weights.offload import load_offloaded_weight as load_offloaded_weight
from accel_ckpt.weights.offload import offload_state_dict as offload_state_dict
from accel_ckpt.weights.offload import offload_weight as offload_weight
from accel_ckpt.weights.offload import save_offload_index as save_offload_index
from accel_data.config import DataLoaderConfiguration as DataLoaderConfiguration
from accel_launch.commands.embedding import is_port_in_use as is_port_in_use
from accel_launch.commands.embedding import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accel_launch.commands.embedding import prepare_multi_gpu_env as prepare_multi_gpu_env
from accel_launch.commands.embedding import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accel_launch.config.write import write_basic_config as write_basic_config
from accel_launch.launchers.sagemaker.estimator import (
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
)
from accel_launch.launchers.tpu.colab import install_xla as install_xla
from accel_launch.launchers.tpu.variables import prepare_tpu as prepare_tpu
from accel_launch.notebook import PrepareForLaunch as PrepareForLaunch
from accel_ops.collectives.objects import broadcast_object_list as broadcast_object_list
from accel_ops.collectives.objects import gather_object as gather_object
from accel_ops.collectives.operations import broadcast as broadcast
from accel_ops.collectives.operations import copy_tensor_to_devices as copy_tensor_to_devices
from accel_ops.collectives.operations import gather as gather
from accel_ops.collectives.operations import reduce as reduce
from accel_ops.collectives.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_ops.collectives.padding import pad_across_processes as pad_across_processes
from accel_ops.collectives.padding import pad_input_tensors as pad_input_tensors
from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
from accel_ops.memory import release_memory as release_memory
from accel_ops.module_sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_ops.module_sizes import compute_module_sizes as compute_module_sizes
from accel_ops.module_sizes import dtype_byte_size as dtype_byte_size
from accel_ops.module_sizes import get_max_layer_size as get_max_layer_size
from accel_ops.module_tensors import check_tied_parameters_in_config as check_tied_parameters_in_config
from accel_ops.module_tensors import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from accel_ops.module_tensors import find_tied_parameters as find_tied_parameters
from accel_ops.module_tensors import named_module_tensors as named_module_tensors
from accel_ops.module_tensors import retie_parameters as retie_parameters
from accel_ops.module_tensors import set_module_tensor_to_device as set_module_tensor_to_device
from accel_ops.modules import extract_model_from_parallel as extract_model_from_parallel
from accel_ops.modules import get_module_children_bottom_up as get_module_children_bottom_up
from accel_ops.modules import get_pretty_name as get_pretty_name
from accel_ops.modules import has_compiled_regions as has_compiled_regions
from accel_ops.modules import is_compiled_module as is_compiled_module
from accel_ops.modules import model_has_dtensor as model_has_dtensor
from accel_ops.modules import recursive_getattr as recursive_getattr
from accel_ops.rng import set_seed as set_seed
from accel_ops.rng import synchronize_rng_state as synchronize_rng_state
from accel_ops.rng import synchronize_rng_states as synchronize_rng_states
from accel_ops.trees.convert import convert_outputs_to_fp32 as convert_outputs_to_fp32
from accel_ops.trees.convert import convert_to_fp32 as convert_to_fp32
from accel_ops.trees.send import send_to_device as send_to_device
from accel_ops.trees.tensors import TensorInformation as TensorInformation
from accel_ops.trees.tensors import concatenate as concatenate
from accel_ops.trees.tensors import find_batch_size as find_batch_size
from accel_ops.trees.tensors import find_device as find_device
from accel_ops.trees.tensors import get_data_structure as get_data_structure
from accel_ops.trees.tensors import ignorant_find_batch_size as ignorant_find_batch_size
from accel_ops.trees.tensors import initialize_tensors as initialize_tensors
from accel_ops.trees.tensors import is_tensor_information as is_tensor_information
from accel_ops.trees.tensors import listify as listify
from accel_ops.trees.tensors import slice_tensors as slice_tensors
from accel_ops.trees.walk import honor_type as honor_type
from accel_ops.trees.walk import is_namedtuple as is_namedtuple
from accel_ops.trees.walk import is_torch_tensor as is_torch_tensor
from accel_ops.trees.walk import merge_dicts as merge_dicts
from accel_ops.trees.walk import recursively_apply as recursively_apply
from accel_optim.handlers import AutocastKwargs as AutocastKwargs
from accel_optim.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_optim.handlers import GradScalerKwargs as GradScalerKwargs
from accel_optim.precision import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from accel_optim.scaler import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accel_optim.scaler import get_grad_scaler as get_grad_scaler
from accel_state.devices.affinity import set_numa_affinity as set_numa_affinity
from accel_state.devices.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accel_state.devices.hardware import check_os_kernel as check_os_kernel
from accel_state.devices.hardware import get_gpu_info as get_gpu_info
from accel_state.devices.probes import check_cuda_fp8_capability as check_cuda_fp8_capability
from accel_state.devices.probes import is_bf16_available as is_bf16_available
from accel_state.devices.probes import is_cuda_available as is_cuda_available
from accel_state.devices.probes import is_fp16_available as is_fp16_available
from accel_state.devices.probes import is_habana_gaudi1 as is_habana_gaudi1
from accel_state.devices.probes import is_hpu_available as is_hpu_available
from accel_state.devices.probes import is_mlu_available as is_mlu_available
from accel_state.devices.probes import is_mps_available as is_mps_available
from accel_state.devices.probes import is_musa_available as is_musa_available
from accel_state.devices.probes import is_neuron_available as is_neuron_available
from accel_state.devices.probes import is_npu_available as is_npu_available
from accel_state.devices.probes import is_rocm_available as is_rocm_available
from accel_state.devices.probes import is_sdaa_available as is_sdaa_available
from accel_state.devices.probes import is_torch_xla_available as is_torch_xla_available
from accel_state.devices.probes import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from accel_state.devices.probes import is_xccl_available as is_xccl_available
from accel_state.devices.probes import is_xpu_available as is_xpu_available
from accel_state.devices.table import get_current_device_type as get_current_device_type
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
from accel_state.env.purge import purge_accelerate_environment as purge_accelerate_environment
from accel_state.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.handlers import KwargsHandler as KwargsHandler
from accel_state.handlers import ProfileKwargs as ProfileKwargs
from accel_state.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from accel_state.imports.available import is_4bit_bnb_available as is_4bit_bnb_available
from accel_state.imports.available import is_8bit_bnb_available as is_8bit_bnb_available
from accel_state.imports.available import is_aim_available as is_aim_available
from accel_state.imports.available import is_amdsmi_available as is_amdsmi_available
from accel_state.imports.available import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from accel_state.imports.available import is_bnb_available as is_bnb_available
from accel_state.imports.available import is_boto3_available as is_boto3_available
from accel_state.imports.available import is_clearml_available as is_clearml_available
from accel_state.imports.available import is_comet_ml_available as is_comet_ml_available
from accel_state.imports.available import is_datasets_available as is_datasets_available
from accel_state.imports.available import is_deepspeed_available as is_deepspeed_available
from accel_state.imports.available import is_dvclive_available as is_dvclive_available
from accel_state.imports.available import is_fp8_available as is_fp8_available
from accel_state.imports.available import is_import_timer_available as is_import_timer_available
from accel_state.imports.available import is_lomo_available as is_lomo_available
from accel_state.imports.available import is_matplotlib_available as is_matplotlib_available
from accel_state.imports.available import is_megatron_lm_available as is_megatron_lm_available
from accel_state.imports.available import is_mlflow_available as is_mlflow_available
from accel_state.imports.available import is_msamp_available as is_msamp_available
from accel_state.imports.available import is_pandas_available as is_pandas_available
from accel_state.imports.available import is_peft_available as is_peft_available
from accel_state.imports.available import is_pippy_available as is_pippy_available
from accel_state.imports.available import is_pynvml_available as is_pynvml_available
from accel_state.imports.available import is_pytest_available as is_pytest_available
from accel_state.imports.available import is_rich_available as is_rich_available
from accel_state.imports.available import is_sagemaker_available as is_sagemaker_available
from accel_state.imports.available import is_schedulefree_available as is_schedulefree_available
from accel_state.imports.available import is_swanlab_available as is_swanlab_available
from accel_state.imports.available import is_tensorboard_available as is_tensorboard_available
from accel_state.imports.available import is_timm_available as is_timm_available
from accel_state.imports.available import is_torchao_available as is_torchao_available
from accel_state.imports.available import is_torchdata_available as is_torchdata_available
from accel_state.imports.available import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accel_state.imports.available import is_torchvision_available as is_torchvision_available
from accel_state.imports.available import is_trackio_available as is_trackio_available
from accel_state.imports.available import is_transformer_engine_available as is_transformer_engine_available
from accel_state.imports.available import is_transformers_available as is_transformers_available
from accel_state.imports.available import is_triton_available as is_triton_available
from accel_state.imports.available import is_wandb_available as is_wandb_available
from accel_state.imports.available import is_weights_only_available as is_weights_only_available
from accel_state.imports.packages import compare_versions as compare_versions
from accel_state.imports.packages import is_torch_version as is_torch_version
from accel_state.parallelism.config import ParallelismConfig as ParallelismConfig
from accel_state.parallelism.handlers import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accel_state.parallelism.handlers import TorchContextParallelConfig as TorchContextParallelConfig
from accel_state.parallelism.handlers import TorchTensorParallelConfig as TorchTensorParallelConfig
from accel_state.process.state import wait_for_everyone as wait_for_everyone
