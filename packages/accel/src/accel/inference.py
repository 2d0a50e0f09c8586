"""Inference over several processes, under its documented path: re-exports."""

from accel.big_models.pipeline.cut import generate_device_map as generate_device_map
from accel.big_models.pipeline.prepare import build_pipeline as build_pipeline
from accel.big_models.pipeline.prepare import find_pippy_batch_size as find_pippy_batch_size
from accel.big_models.pipeline.prepare import pippy_forward as pippy_forward
from accel.big_models.pipeline.prepare import prepare_pippy as prepare_pippy
