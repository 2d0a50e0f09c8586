"""How bitsandbytes quantizes the linear layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from accel_state.enums import CustomDtype

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """Settings of `load_and_quantize_model`: either 8 or 4 bits for the weights of linear layers.

    Args:
        load_in_8bit: Quantize to 8 bits (LLM.int8: https://arxiv.org/abs/2208.07339).
        llm_int8_threshold: Columns of inputs with a value above it are multiplied in 16 bits; for 8 bits.
        load_in_4bit: Quantize to 4 bits (QLoRA: https://arxiv.org/abs/2305.14314).
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: Quantize the scales of the 4-bit blocks too.
        bnb_4bit_compute_dtype: Dtype in which 4-bit layers compute: "fp32", "fp16", "bf16", or a torch dtype.
        torch_dtype: The dtype of weights that are not quantized, as above; by default float16 for 8 bits, and
            `bnb_4bit_compute_dtype` for 4.
        skip_modules: Names of modules, or ends of their dotted paths, that stay in `torch_dtype`. By default
            the last layer of the model and layers that share their weight with another module.
        keep_in_fp32_modules: Names of modules that stay in float32.

    Attributes:
        target_dtype: The dtype of quantized weights for a device map: `torch.int8`, or `CustomDtype.INT4`.

    Raises:
        ValueError: If a value is not allowed, or not exactly one of 8 and 4 bits is selected.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: torch.dtype | CustomDtype = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            _check(name, getattr(self, name), bool, "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(
                f"load_in_8bit and load_in_4bit are both {self.load_in_8bit}: set one of them to True."
            )
        _check("llm_int8_threshold", self.llm_int8_threshold, (int, float), "a number")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(f"bnb_4bit_quant_type must be 'fp4' or 'nf4', not {self.bnb_4bit_quant_type!r}.")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list) and all(isinstance(n, str) for n in value)):
                raise ValueError(f"{name} must be a list of names of modules, not {value!r}.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        default = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _dtype("torch_dtype", default if self.torch_dtype is None else self.torch_dtype)
        # torch has no dtype of 4 bits.
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _check(name: str, value: Any, kind: Any, allowed: str) -> None:
    # In Python a bool is also an int.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} must be {allowed}, not {value!r}.")


def _dtype(name: str, value: Any) -> torch.dtype:
    found = _DTYPES.get(value, value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, _DTYPES))}, or a floating-point dtype of torch, not "
            f"{value!r}."
        )
    return found
