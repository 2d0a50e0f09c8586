"""A worker's events as Ray would pass them on: `ray.get` of a plain value is that value."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from accel_launch.launchers.ray.remote import RayRemote
from accel_launch.local.output.destinations import Channel


class Lost(Exception):
    """The actor is gone."""


RAY = SimpleNamespace(
    get=lambda value: value, kill=lambda *_, **__: None, exceptions=SimpleNamespace(RayError=Lost)
)


def followed(events: Any, *, read: bool = True) -> tuple[RayRemote, bytes]:
    """Return a worker after all that its actor told, and its stderr."""
    out, err = os.pipe(), os.pipe()
    if not read:
        os.close(err[0])
    worker = RayRemote(RAY, 0, "host", None)
    worker.start(events, Channel([], out[1], err[1]), lambda: None)
    worker.join(10)
    assert worker.reap()
    assert worker.gone
    os.close(out[0])
    if not read:
        return worker, b""
    with open(err[0], "rb") as stderr:
        return worker, stderr.read()


def events(error: Exception | None = None) -> Iterator[tuple[str, bytes | int]]:
    yield "2", b"words\n"
    if error is not None:
        raise error


def test_a_stream_without_an_end_is_a_failure() -> None:
    assert followed(events())[0].returncode == -9


def test_a_lost_actor_is_a_failure_with_words() -> None:
    worker, words = followed(events(Lost("gone")))

    assert (worker.returncode, words) == (-9, b"words\nRay lost the worker: gone\n")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_any_other_error_is_a_failure() -> None:
    assert followed(events(MemoryError()))[0].returncode == -9


def test_what_nobody_reads_is_dropped_and_the_end_still_reported() -> None:
    assert followed([("2", b"words"), ("end", 3)], read=False)[0].returncode == 3
