"""The project's pytest plugin, loaded with `-p accel_pytest`.

Fixtures:
    world: run a module-level function as every rank of a real gloo world, in tens of milliseconds.
    fresh_state: forget accel's process-wide state after the test, for tests that make an Accelerator.

Every test is also checked for leaks: it must leave the environment, the working folder, threads, child
processes, process groups, accel's state and torch's settings as it found them. What leaked is put back, so
that the next test starts clean, and the test fails naming it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_world import leaks
from accel_world.pool import World

__all__ = ["fresh_state", "world"]

_world = pytest.StashKey[World]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the world; its workers start when a test first asks for them."""
    config.stash[_world] = World()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    if _world in config.stash:
        config.stash[_world].close()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Run functions on a persistent pool of gloo workers; see `accel_world.pool.World.run`."""
    return request.config.stash[_world]


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Forget accel's process-wide state before and after the test."""
    leaks.reset_singletons()
    yield
    leaks.reset_singletons()


@pytest.fixture(autouse=True)
def _leaks() -> Iterator[None]:
    before = leaks.capture()
    yield
    found = leaks.restore(before)
    if found:
        lines = [f"{name}: {'; '.join(changes)}" for name, changes in found.items()]
        pytest.fail("The test leaked. " + "\n".join(lines), pytrace=False)
