"""Programs that import accelerate run on accel, unchanged.

    python -m accel.drop_in script.py
    accel launch --drop-in script.py

or, before anything imports accelerate:

    import accel.drop_in
    accel.drop_in.activate()

From then on, in this process and in those that it starts, `accelerate` and its modules are accel's modules of
the same names. The accelerate that may be installed is neither imported nor changed.
"""

from __future__ import annotations

import sys

from accel.drop_in.finder import install, is_active
from accel.drop_in.interface import INTERFACE_VERSION
from accel_state import env

__all__ = ["INTERFACE_VERSION", "activate", "is_active"]


def activate() -> None:
    """Make accel answer for accelerate in this process, and in the processes that it starts from now on.

    Calling it again does nothing.

    Raises:
        RuntimeError: If accelerate itself has been imported already.
    """
    # Here, as programs that are started with the switch on need none of it.
    from accel_launch.plan.drop_in import drop_in_environment
    from accel_state.logging.warning import warn

    if is_active():
        return
    install()
    env.update(drop_in_environment(env.snapshot()))
    if sys.flags.ignore_environment or sys.flags.no_site:
        warn(
            "accel stands for accelerate in this process alone: Python runs with -E, -I or -S, and so do "
            "the processes that multiprocessing starts. Start Python without these options."
        )
