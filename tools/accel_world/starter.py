"""The process that imports torch once and forks workers from then on, each in a millisecond.

A fork is safe here because nothing has started a thread: torch and numpy are imported, with one thread each,
and never used.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from dataclasses import dataclass

from accel_world import worker
from accel_world.messages import Setup

__all__ = ["MESSAGE_BYTES", "Reap", "Start", "main"]

MESSAGE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Start:
    """Fork a worker; two descriptors come along: its socket, and the file for what it prints."""

    setup: Setup


@dataclass(frozen=True)
class Reap:
    """Wait for a worker's end, and answer with its exit code."""

    pid: int


def main(descriptor: int, parent_pid: int) -> None:
    """Serve requests from the test process on this socket until it closes."""
    _end_with(parent_pid)
    control = socket.socket(fileno=descriptor)
    import torch
    import torch._dynamo  # a second or two, which every optimizer's first step would take in every worker
    import torch.distributed

    torch.set_num_threads(1)
    gc.freeze()  # what is here now is shared by all workers: keep the collector from touching it
    control.send(pickle.dumps(os.getpid()))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        request = pickle.loads(message)
        if isinstance(request, Start):
            answer = _fork(control, request.setup, descriptors)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1])
        control.send(pickle.dumps(answer))


def _fork(control: socket.socket, setup: Setup, descriptors: list[int]) -> int:
    starter_pid = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    try:
        control.close()
        os.setsid()
        _end_with(starter_pid)
        connection, output = descriptors
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        worker.main(connection, setup)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # never back into the starter's loop


def _end_with(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(1)
