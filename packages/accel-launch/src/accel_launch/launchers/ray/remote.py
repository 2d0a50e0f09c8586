"""A worker on a Ray cluster as its supervisor sees it: what its actor reports comes in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from accel_launch.local.output.destinations import Channel
from accel_launch.local.supervised_worker import SupervisedWorker

_STOP_S = 1.0


class RayRemote(SupervisedWorker):
    """A worker that an actor runs.

    Args:
        ray: The module.
        rank: The worker's rank.
        host: The name of its machine.
        actor: The handle of its actor.
    """

    pid = 0  # on another machine

    def __init__(self, ray: Any, rank: int, host: str, actor: Any) -> None:
        super().__init__(rank, host)
        self._ray, self._actor = ray, actor
        self._ended: int | None = None
        self._left = False
        self._thread: threading.Thread | None = None

    def start(self, events: Any, channel: Channel, wake: Callable[[], None]) -> None:
        """Call `follow` in its own thread.

        Args:
            events: As for `follow`.
            channel: The same.
            wake: The same.
        """
        self._thread = threading.Thread(target=self.follow, args=(events, channel, wake), daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end.

        Args:
            timeout_s: How long at most.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)

    def follow(self, events: Any, channel: Channel, wake: Callable[[], None]) -> None:
        """Pass on what the actor reports.

        Args:
            events: The references of its events, as they come.
            channel: The worker's streams.
            wake: Called after an end.
        """
        descriptors = {"1": channel.stdout, "2": channel.stderr}
        try:
            for reference in events:
                kind, value = self._ray.get(reference)
                if kind == "raised":
                    self.raised = value
                elif kind == "end":
                    self._ended = value
                    wake()
                else:
                    _write(descriptors[kind], value)
        except self._ray.exceptions.RayError as error:  # the machine, or the actor, is gone
            if self._ended is None:
                _write(channel.stderr, f"Ray lost the worker: {error}\n".encode())
        finally:
            if self._ended is None:  # whatever it was: a worker of which nothing is known has not succeeded
                self._ended = -int(signal.SIGKILL)
            channel.close_writing()
            self._left = True
            wake()

    def reap(self) -> bool:
        """Take note of what the actor reported; True if the worker ended since the last call."""
        left = self._left  # first: the other is set before it
        ended = self.returncode is None and self._ended is not None
        if ended:
            self.returncode = self._ended
        self.gone = left
        return ended

    def abandon(self) -> None:
        """End the actor, too."""
        super().abandon()
        self.end()

    def end(self) -> None:
        """End the actor, and with it the worker's group."""
        self._ray.kill(self._actor, no_restart=True)

    def _send(self, number: int, *, group: bool) -> None:
        sent = self._actor.send.remote(number, group)
        if number == signal.SIGSTOP:  # the launcher stops next, and could not send it any more
            self._ray.wait([sent], timeout=_STOP_S)


def _write(descriptor: int | None, data: bytes) -> None:
    assert descriptor is not None, "both streams are captured"
    with contextlib.suppress(OSError):  # the reader is gone
        while data:
            data = data[os.write(descriptor, data) :]
