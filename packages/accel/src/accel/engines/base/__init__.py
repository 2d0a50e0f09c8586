"""The interface between training and engines: four classes, of which an engine overrides what it changes."""

from accel.engines.base.engine import Engine as Engine
from accel.engines.base.gradients import Gradients as Gradients
from accel.engines.base.loaders import Joining as Joining
from accel.engines.base.loaders import Loaders as Loaders
from accel.engines.base.states import States as States
