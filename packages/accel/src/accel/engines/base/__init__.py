"""The interface between training and engines: four classes, of which an engine overrides what it changes."""

from accel.engines.base.engine import Engine
from accel.engines.base.gradients import Gradients
from accel.engines.base.loaders import Joining, Loaders
from accel.engines.base.states import States

__all__ = ["Engine", "Gradients", "Joining", "Loaders", "States"]
