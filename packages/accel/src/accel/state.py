"""Process, Accelerator and gradient state, under their documented path: re-exports of accel-state."""

from accel_state.accelerator_state import AcceleratorState as AcceleratorState
from accel_state.accelerator_state import do_nothing as do_nothing
from accel_state.accelerator_state import is_initialized as is_initialized
from accel_state.gradient import GradientState as GradientState
from accel_state.process.info import ProcessInfo as ProcessInfo
from accel_state.process.shared_dict import ThreadLocalSharedDict as ThreadLocalSharedDict
from accel_state.process.state import PartialState as PartialState
from accel_state.process.state import current_process as current_process
