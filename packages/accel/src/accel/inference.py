"""Inference over several processes, under its documented path: re-exports."""

from __future__ import annotations

from accel.big_models.pipeline import (
    build_pipeline,
    find_pippy_batch_size,
    pippy_forward,
    prepare_pippy,
)
from accel.big_models.pipeline_cut import generate_device_map

__all__ = [
    "build_pipeline",
    "find_pippy_batch_size",
    "generate_device_map",
    "pippy_forward",
    "prepare_pippy",
]
