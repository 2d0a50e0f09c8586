"""Training on one process: the base engine's defaults are all it needs."""

from __future__ import annotations

from accel.engines.base import Engine


class SingleEngine(Engine):
    """One process on one device."""

    name = "single"
    takes_gradient = True
