"""Loaded by every Python process of a launched run."""

import faulthandler
import io
import os
import signal
import sys

if "ACCEL_TEST_STACKS" in os.environ:
    # Whole lines: with PYTHONUNBUFFERED two ranks' words mix, and with neither a kill takes them.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # To ask a stuck process where it is. A descriptor rather than a file object: nothing is there to be
    # closed, or warned about, at exit.
    _descriptor = os.open(f"{os.environ['ACCEL_TEST_STACKS']}/{os.getpid()}.stack", os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGRTMAX - 1, _descriptor, all_threads=True)
