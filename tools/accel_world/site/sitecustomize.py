"""Loaded by every Python process of a launched run, so that a stuck one can be asked where it is."""

import faulthandler
import os
import signal

if "ACCEL_TEST_STACKS" in os.environ:
    # A descriptor rather than a file object: nothing is there to be closed, or warned about, at exit.
    _descriptor = os.open(f"{os.environ['ACCEL_TEST_STACKS']}/{os.getpid()}.stack", os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGRTMAX - 1, _descriptor, all_threads=True)
