"""Inference over several processes, under its documented path: re-exports."""

from __future__ import annotations

from accel.big_models.pipeline.cut import generate_device_map
from accel.big_models.pipeline.prepare import (
    build_pipeline,
    find_pippy_batch_size,
    pippy_forward,
    prepare_pippy,
)

__all__ = [
    "build_pipeline",
    "find_pippy_batch_size",
    "generate_device_map",
    "pippy_forward",
    "prepare_pippy",
]
