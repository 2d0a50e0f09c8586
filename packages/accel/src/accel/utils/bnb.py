"""Quantization by bitsandbytes, under its documented path: re-exports."""

from accel.big_models.quantization.load import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel.big_models.quantization.load import load_and_quantize_model as load_and_quantize_model
