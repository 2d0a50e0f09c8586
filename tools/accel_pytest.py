"""The project's pytest plugin, loaded with `-p accel_pytest`.

Fixtures:
    world: run a module-level function as every rank of a real gloo world, in tens of milliseconds.
    launched: run a script under a real launcher; nothing of it outlives the test.
    fresh_state: forget accel's process-wide state after the test, for tests that make an Accelerator.

Every test is also checked for leaks: it must leave the environment, the working folder, threads, child
processes, signal handlers, process groups, accel's state and torch's settings as it found them. What leaked
is put back, so that the next test starts clean, and the test fails naming it.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from accel_world import leaks
from accel_world.guard import Guard
from accel_world.launched import LaunchedRun, launch
from accel_world.pool import World
from accel_world.start_method import fork_by_default

__all__ = ["fresh_state", "launched", "world"]

# NVIDIA, AMD, Intel, WSL; without importing torch.
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")
# Of CUDA, ROCm and XPU, in this order. The last is an index that no device has, as an empty mask hides none.
# No variable hides Apple's GPU (MPS). Only that of CUDA has been tried with a device.
_HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "127"}

# hypothesis' own limit of 200 ms for each example is broken by any pause of a busy machine.
hypothesis.settings.register_profile("accel", deadline=None)
hypothesis.settings.register_profile("few", deadline=None, max_examples=5)

_world = pytest.StashKey[World]()
_guard = pytest.StashKey[Guard]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the world and the guard; their processes start when a test first needs them."""
    config.stash[_world] = World()
    config.stash[_guard] = Guard()
    fork_by_default()
    # All other tests are of the CPU, and would find the GPU; `hatch run gpu:test` selects by `-m gpu`.
    if not re.match(r"gpu( and |$)", config.option.markexpr) and any(map(os.path.exists, _GPU_DRIVERS)):
        os.environ.update(_HIDING)
    if not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("accel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run in several processes, so that `-m "not processes"` leaves them out."""
    for item in items:
        if {"world", "launched"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start importing torch for the workers while the first tests run, if any test needs them."""
    gc.collect()
    gc.freeze()  # modules and tests live to the end: a collection, which some tests request, passes over them
    if any("world" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_world].warm_up()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers and the guard."""
    if _world in config.stash:
        config.stash[_world].close()
        config.stash[_guard].close()


@pytest.fixture(scope="session")  # so that hypothesis lets a property test use it
def world(request: pytest.FixtureRequest) -> World:
    """Run functions on a persistent pool of gloo workers; see `accel_world.pool.World.run`."""
    return request.config.stash[_world]


@pytest.fixture(scope="session")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., LaunchedRun]:
    """Run a script under a launcher; see `accel_world.launched.launch`, whose folder is a fresh one."""

    def run(script: str | Path, *script_args: str, **options: Any) -> LaunchedRun:
        __tracebackhide__ = True
        folder = tmp_path_factory.mktemp("launched")
        return launch(request.config.stash[_guard], folder, script, *script_args, **options)

    return run


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
        pytest.fail("The test leaked:\n" + "\n".join(lines), pytrace=False)
