"""Settings of quantization, which need no bitsandbytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel.utils import (
    BnbQuantizationConfig,
    CustomDtype,
    bnb,
    dataclasses,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)


def test_defaults() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)

    assert vars(config) == {
        "load_in_8bit": True,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": torch.float16,
        "torch_dtype": torch.float16,
        "skip_modules": None,
        "keep_in_fp32_modules": None,
        "target_dtype": torch.int8,
    }
    assert BnbQuantizationConfig(load_in_4bit=True).target_dtype is CustomDtype.INT4


@pytest.mark.parametrize(
    ("options", "compute", "plain"),
    [
        ({}, torch.float16, torch.float16),
        ({"bnb_4bit_compute_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
        ({"bnb_4bit_compute_dtype": torch.float32}, torch.float32, torch.float32),
        ({"bnb_4bit_compute_dtype": "bf16", "torch_dtype": "fp32"}, torch.bfloat16, torch.float32),
        ({"torch_dtype": torch.bfloat16}, torch.float16, torch.bfloat16),
    ],
)
def test_dtypes_by_name(options: dict[str, Any], compute: torch.dtype, plain: torch.dtype) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, **options)

    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (compute, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "load_in_8bit and load_in_4bit are both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit and load_in_4bit are both True"),
        ({"load_in_8bit": "yes"}, "load_in_8bit must be True or False, not 'yes'"),
        ({"load_in_4bit": 1}, "load_in_4bit must be True or False, not 1"),
        (
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": None},
            "bnb_4bit_use_double_quant must be True or False, not None",
        ),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold must be a number, not '6'"),
        ({"load_in_8bit": True, "llm_int8_threshold": True}, "llm_int8_threshold must be a number, not True"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type must be 'fp4' or 'nf4', not 'int4'",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"},
            "bnb_4bit_compute_dtype must be one of 'fp32', 'fp16', 'bf16', .*not 'float16'",
        ),
        ({"load_in_8bit": True, "torch_dtype": torch.int8}, r"torch_dtype must be .*not torch\.int8"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules must be a list .*not 'head'"),
        (
            {"load_in_8bit": True, "keep_in_fp32_modules": [1]},
            r"keep_in_fp32_modules must be a list .*not \[1\]",
        ),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BnbQuantizationConfig(**options)


def test_documented_paths() -> None:
    assert dataclasses.BnbQuantizationConfig is BnbQuantizationConfig
    assert bnb.load_and_quantize_model is load_and_quantize_model
    assert bnb.has_4bit_bnb_layers is has_4bit_bnb_layers


def test_a_plain_model_has_no_4bit_layers() -> None:
    assert not has_4bit_bnb_layers(nn.Linear(2, 2))


def test_a_missing_bitsandbytes_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)

    with pytest.raises(ImportError, match=r"bitsandbytes .*accel\[bitsandbytes\]"):
        load_and_quantize_model(nn.Linear(2, 2), BnbQuantizationConfig(load_in_8bit=True))


def test_another_configuration_is_named() -> None:
    with pytest.raises(TypeError, match="must be a BnbQuantizationConfig, not dict"):
        load_and_quantize_model(nn.Linear(2, 2), {"load_in_8bit": True})  # type: ignore[arg-type]
