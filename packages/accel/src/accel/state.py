"""Process, Accelerator and gradient state, under their documented path: re-exports of accel-state."""

from importlib import import_module
from typing import Any

from accel_state.accelerator_state import AcceleratorState as AcceleratorState
from accel_state.accelerator_state import do_nothing as do_nothing
from accel_state.accelerator_state import is_initialized as is_initialized
from accel_state.gradient import GradientState as GradientState
from accel_state.process.info import ProcessInfo as ProcessInfo
from accel_state.process.shared_dict import ThreadLocalSharedDict as ThreadLocalSharedDict
from accel_state.process.state import PartialState as PartialState
from accel_state.process.state import current_process as current_process
from accel_state.train_plan import register_plugin_class as _register_plugin_class


def _plugin_class(argument: str) -> Any:
    # On first use, as it imports the engines: a program that only asks for its rank has no use for them.
    return import_module("accel.engines").plugin_class(argument)


# AcceleratorState decides as the Accelerator does, also before one is made.
_register_plugin_class(_plugin_class)
