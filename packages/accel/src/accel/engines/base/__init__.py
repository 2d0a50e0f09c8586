"""The interface between training and engines: four classes; an engine overrides what it changes."""

from accel.engines.base.engine import Engine as Engine
from accel.engines.base.gradients import Gradients as Gradients
from accel.engines.base.loaders import JoinState as JoinState
from accel.engines.base.loaders import Loaders as Loaders
from accel.engines.base.states import States as States
