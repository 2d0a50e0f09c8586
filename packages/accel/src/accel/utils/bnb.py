"""Quantization by bitsandbytes, under its documented path: re-exports."""

from __future__ import annotations

from accel.big_models.quantization.load import has_4bit_bnb_layers, load_and_quantize_model

__all__ = ["has_4bit_bnb_layers", "load_and_quantize_model"]
