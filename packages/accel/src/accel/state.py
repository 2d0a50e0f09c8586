"""Process, Accelerator and gradient state, under their documented path: re-exports of accel-state."""

from __future__ import annotations

from accel_state.accelerator_state import AcceleratorState, do_nothing, is_initialized
from accel_state.gradient import GradientState
from accel_state.process.facts import Process
from accel_state.process.shared_dict import ThreadLocalSharedDict
from accel_state.process.state import PartialState, current_process

__all__ = [
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "Process",
    "ThreadLocalSharedDict",
    "current_process",
    "do_nothing",
    "is_initialized",
]
