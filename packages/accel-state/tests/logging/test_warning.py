from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest

from accel_state.enums import DistributedType
from accel_state.logging.warning import user_frame, warn
from accel_state.process.state import PartialState

LIBRARY = """
from accel_state.logging.warning import user_frame, warn

def between(function, *args):
    return function(*args)

def tell(about="run"):
    between(warn, "told", FutureWarning) if about == "run" else warn("told", about=about)

def where():
    return user_frame()
"""


@pytest.fixture
def library() -> Any:
    """A module of accel's own."""
    module = types.ModuleType("accel_ops.made_up")
    exec(compile(LIBRARY, "made_up.py", "exec"), module.__dict__)
    return module


def line() -> int:
    return sys._getframe(1).f_lineno


def test_a_warning_points_at_the_users_line(library: Any) -> None:
    expected = line() + 2
    with pytest.warns(FutureWarning, match="told") as found:
        library.between(library.tell)

    assert [(warning.filename, warning.lineno) for warning in found] == [(__file__, expected)]


def test_what_stands_between_is_passed_over(library: Any) -> None:
    import contextlib
    import functools

    @contextlib.contextmanager
    def block() -> Any:
        yield library.where()

    assert library.where().f_lineno == line()
    assert functools.reduce(lambda a, b: a or library.where(), [0, 0]).f_code.co_name == "<lambda>"
    with block() as frame:
        assert frame.f_code.co_name == "block"


def test_an_enumerations_warning_points_at_the_users_line() -> None:
    expected = line() + 2
    with pytest.warns(FutureWarning, match="'tpu' is an old spelling") as found:
        DistributedType("tpu")

    assert [(warning.filename, warning.lineno) for warning in found] == [(__file__, expected)]


def test_a_line_warns_once_as_python_has_it(library: Any) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            library.tell()

    assert len(found) == 1


def test_warnings_can_be_made_errors(library: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="told"):
            library.tell()


@pytest.mark.parametrize(
    ("rank", "local_rank", "told"),
    [
        ("0", "0", ["run", "machine", "process"]),
        ("1", "1", ["process"]),
        ("2", "0", ["machine", "process"]),
        ("soon", "0", ["run", "machine", "process"]),
    ],
)
def test_who_speaks_before_there_is_a_state(
    monkeypatch: pytest.MonkeyPatch, rank: str, local_rank: str, told: list[str]
) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for about in ("run", "machine", "process"):
            warn(about, about=about)  # type: ignore[arg-type]

    assert [str(warning.message) for warning in found] == told


def who_speaks() -> list[str]:
    PartialState()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for about in ("run", "machine", "process"):
            warn(about, about=about)  # type: ignore[arg-type]
    return [str(warning.message) for warning in found]


def test_who_speaks_in_a_run(world: Any) -> None:
    assert world.run(who_speaks, size=3) == [["run", "machine", "process"], ["process"], ["process"]]


def test_the_frame_is_the_callers_where_all_is_the_users() -> None:
    assert user_frame() is sys._getframe()
