"""Programs of programs/, each run on accel and on accelerate itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_world.compared import Compared, compare

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def compared(launched, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compared]:
    """Run programs/NAME.py on both sides, once for the same arguments; see `accel_world.compared.compare`."""

    @functools.cache
    def run(name: str, *arguments: str, **options: Any) -> Compared:
        __tracebackhide__ = True
        folder = tmp_path_factory.mktemp(name)
        return compare(launched, folder, PROGRAMS / f"{name}.py", *arguments, **options)

    return run
