"""Local SGD, under its documented path: a re-export of accel-optim."""

from __future__ import annotations

from accel_optim.local_sgd import LocalSGD

__all__ = [
    "LocalSGD",
]
