"""Every availability check in one place: packages here, hardware from `devices.probes`.

Checks of packages import nothing; checks of hardware import torch. Each keeps its answer, so that it may be
asked often.
"""

from __future__ import annotations

import functools

from accel_state.devices.probes import (
    check_cuda_fp8_capability,
    is_bf16_available,
    is_cuda_available,
    is_fp16_available,
    is_habana_gaudi1,
    is_hpu_available,
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_rocm_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_transformer_engine_mxfp8_available,
    is_xccl_available,
    is_xpu_available,
)
from accel_state.imports.packages import compare_versions, is_package_available, is_torch_version, require

__all__ = [
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
    "is_fp8_available",
    "is_fp16_available",
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
]


def is_4bit_bnb_available() -> bool:
    """Tell whether bitsandbytes has 4-bit layers (version 0.39.0 or above)."""
    return is_bnb_available(min_version="0.39.0")


def is_8bit_bnb_available() -> bool:
    """Tell whether bitsandbytes has 8-bit layers (version 0.37.2 or above)."""
    return is_bnb_available(min_version="0.37.2")


def is_aim_available() -> bool:
    """Tell whether Aim is installed."""
    return is_package_available("aim")


def is_amdsmi_available() -> bool:
    """Tell whether AMD's system management library is installed."""
    return is_package_available("amdsmi")


@functools.cache
def is_bitsandbytes_multi_backend_available() -> bool:
    """Tell whether bitsandbytes runs on devices other than CUDA; bitsandbytes is imported to find out."""
    if not is_bnb_available():
        return False
    import importlib

    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_bnb_available(min_version: str | None = None) -> bool:
    """Tell whether bitsandbytes is installed.

    Args:
        min_version: Oldest version that will do.
    """
    if not is_package_available("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_boto3_available() -> bool:
    """Tell whether boto3 is installed."""
    return is_package_available("boto3")


def is_clearml_available() -> bool:
    """Tell whether ClearML is installed."""
    return is_package_available("clearml")


def is_comet_ml_available() -> bool:
    """Tell whether Comet is installed."""
    return is_package_available("comet_ml")


def is_datasets_available() -> bool:
    """Tell whether Hugging Face datasets is installed."""
    return is_package_available("datasets")


def is_deepspeed_available() -> bool:
    """Tell whether DeepSpeed is installed."""
    return is_package_available("deepspeed")


def is_dvclive_available() -> bool:
    """Tell whether DVCLive is installed."""
    return is_package_available("dvclive")


def is_fp8_available() -> bool:
    """Tell whether a library for fp8 training is installed: MS-AMP, Transformer Engine or torchao."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_import_timer_available() -> bool:
    """Tell whether import_timer is installed."""
    return is_package_available("import_timer")


def is_lomo_available() -> bool:
    """Tell whether lomo-optim is installed."""
    return is_package_available("lomo_optim")


def is_matplotlib_available() -> bool:
    """Tell whether matplotlib is installed."""
    return is_package_available("matplotlib")


def is_megatron_lm_available() -> bool:
    """Tell whether Megatron-LM's core is installed."""
    return is_package_available("megatron.core")


def is_mlflow_available() -> bool:
    """Tell whether MLflow (also its skinny edition) is installed."""
    return is_package_available("mlflow")


def is_msamp_available() -> bool:
    """Tell whether MS-AMP is installed."""
    return is_package_available("msamp")


def is_pandas_available() -> bool:
    """Tell whether pandas is installed."""
    return is_package_available("pandas")


def is_peft_available() -> bool:
    """Tell whether PEFT is installed."""
    return is_package_available("peft")


def is_pippy_available() -> bool:
    """Tell whether torch has pipeline parallelism (`torch.distributed.pipelining`, version 2.4 or above)."""
    return is_torch_version(">=", "2.4.0")


def is_pynvml_available() -> bool:
    """Tell whether NVIDIA's management library is installed."""
    return is_package_available("pynvml")


def is_pytest_available() -> bool:
    """Tell whether pytest is installed."""
    return is_package_available("pytest")


def is_rich_available() -> bool:
    """Tell whether rich is installed."""
    return is_package_available("rich")


def is_sagemaker_available() -> bool:
    """Tell whether the SageMaker SDK is installed."""
    return is_package_available("sagemaker")


def is_schedulefree_available() -> bool:
    """Tell whether schedulefree is installed."""
    return is_package_available("schedulefree")


def is_swanlab_available() -> bool:
    """Tell whether SwanLab is installed."""
    return is_package_available("swanlab")


def is_tensorboard_available() -> bool:
    """Tell whether TensorBoard, or its writer tensorboardX, is installed."""
    return is_package_available("tensorboard") or is_package_available("tensorboardX")


def is_timm_available() -> bool:
    """Tell whether timm is installed."""
    return is_package_available("timm")


def is_torchao_available() -> bool:
    """Tell whether torchao is installed, in version 0.6.1 or above (the first with stable fp8 training)."""
    return is_package_available("torchao") and compare_versions("torchao", ">=", "0.6.1")


def is_torchdata_available() -> bool:
    """Tell whether torchdata is installed."""
    return is_package_available("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Tell whether torchdata has its StatefulDataLoader (version 0.8.0 or above)."""
    return is_torchdata_available() and compare_versions("torchdata", ">=", "0.8.0")


def is_torchvision_available() -> bool:
    """Tell whether torchvision is installed."""
    return is_package_available("torchvision")


def is_trackio_available() -> bool:
    """Tell whether Trackio is installed."""
    return is_package_available("trackio")


def is_transformer_engine_available() -> bool:
    """Tell whether Transformer Engine is installed."""
    return is_package_available("transformer_engine")


def is_transformers_available() -> bool:
    """Tell whether transformers is installed."""
    return is_package_available("transformers")


def is_triton_available() -> bool:
    """Tell whether Triton is installed."""
    return is_package_available("triton")


def is_wandb_available() -> bool:
    """Tell whether Weights & Biases is installed."""
    return is_package_available("wandb")


def is_weights_only_available() -> bool:
    """Tell whether `torch.load(weights_only=True)` takes an allow-list (torch 2.4 or above)."""
    return is_torch_version(">=", "2.4.0")
