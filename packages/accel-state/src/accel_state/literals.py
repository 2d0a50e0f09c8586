"""The values of enumerations as literals, for type checkers: both enums and their values are accepted."""

from __future__ import annotations

from typing import Literal

PrecisionName = Literal["no", "fp8", "fp16", "bf16"]
RNGTypeName = Literal[
    "torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator"
]
LoggerName = Literal[
    "all",
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "jsonl",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]
Reduction = Literal["sum", "mean", "max", "none"]
DynamoBackendName = Literal[
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "cudagraphs",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "tvm",
    "hpu_backend",
    "neuron",
    "NO",
    "EAGER",
    "AOT_EAGER",
    "INDUCTOR",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORCHXLA_TRACE_ONCE",
    "TVM",
    "HPU_BACKEND",
    "NEURON",
]
