"""Enumerations of the documented interface; standard library only.

Every member is also a plain string: `DistributedType.NO == "NO"`, it hashes, prints and serialises as its
value, and a string in any letter case names it.
"""

from __future__ import annotations

from enum import Enum, EnumMeta

from accel_state.logging.warning import warn


class _ContainsValues(EnumMeta):
    """Makes `"fp16" in PrecisionType` test for a value (as in Python 3.12)."""

    # Also for members, as one is made of itself.
    def __contains__(cls, value: object) -> bool:
        try:
            cls(value)
        except ValueError:
            return False
        return True


class _StringEnum(str, Enum, metaclass=_ContainsValues):
    """A string-valued enumeration with forgiving look-up and errors that list what is allowed."""

    # Enum's own `str` gives `PrecisionType.NO`, which no file or command line accepts.
    def __str__(self) -> str:
        return str.__str__(self)

    def __hash__(self) -> int:
        # Enum hashes the member's name; equality is the string's, so the hash must be the value's.
        return str.__hash__(self)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members, in order of definition."""
        return [str(member) for member in cls]

    @classmethod
    def _old_spellings(cls) -> dict[str, str]:
        return {}

    @classmethod
    def _missing_(cls, value: object) -> _StringEnum:
        if isinstance(value, str):
            # Environment variables and files of older programs differ in letter case.
            wanted = value.strip().lower()
            for member in cls:
                if str(member).lower() == wanted:
                    return member
            if wanted in cls._old_spellings():
                new = cls._old_spellings()[wanted]
                warn(f"{cls.__name__} {value!r} is an old spelling; use {new!r}.", FutureWarning)
                return cls(new)
        # Raised here: if this returned None, Enum's error would not list the allowed values.
        raise ValueError(_unknown(cls, value))


def _unknown(cls: type[_StringEnum], value: object) -> str:
    # Imported here, as this module is the first that a launcher imports.
    from difflib import get_close_matches

    # In lower case on both sides, as in look-ups.
    matches = get_close_matches(str(value).lower(), [candidates.lower() for candidates in cls.list()], n=1)
    hint = "" if not matches else f" Did you mean {cls(matches[0]).value!r}?"
    return f"{value!r} is not a valid {cls.__name__}; allowed values: {', '.join(cls.list())}.{hint}"


class DistributedType(_StringEnum):
    """The kind of distributed run: its hardware, or its engine."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def _old_spellings(cls) -> dict[str, str]:
        # What configurations had before torch_xla ran on more than TPUs.
        return {"tpu": "XLA"}


class ComputeEnvironment(_StringEnum):
    """Where a configuration file is meant to run."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(_StringEnum):
    """SageMaker's own distribution strategies."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class PrecisionType(_StringEnum):
    """Mixed precision modes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(_StringEnum):
    """Random number generators that can be synchronised between processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DynamoBackend(_StringEnum):
    """Backends of `torch.compile`; `NO` compiles nothing."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(_StringEnum):
    """Experiment trackers with built-in support; `ALL` stands for every installed one."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


class DDPCommunicationHookType(_StringEnum):
    """How `DistributedDataParallel` compresses gradients on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class CustomDtype(_StringEnum):
    """Element types that torch does not name, for sizing quantised weights."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
