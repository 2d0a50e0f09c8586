"""Training on one process: the base engine's defaults are all it needs."""

from __future__ import annotations

from accel.engines.base import Engine
from accel.engines.context import EngineTraits


class SingleEngine(Engine):
    """One process on one device."""

    name = "single"
    traits = EngineTraits(takes_gradient=True)
    _follows_parameters = False
