"""Values of common types in states: they come back as they were, or the save says what no load would take."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import math
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.folder.staging import staged
from accel_ckpt.training_state.load import load_custom_state
from accel_ckpt.training_state.save import save_custom_state

pytestmark = pytest.mark.core


class Color(enum.Enum):
    RED = enum.auto()
    BLUE = enum.auto()


class Mode(str, enum.Enum):
    MIN = "min"


class Number(enum.IntEnum):
    ONE = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


Pair = namedtuple("Pair", "first second")


class Point(NamedTuple):
    x: float
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float
    folder: Path
    names: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise AssertionError("run for a file")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("value",)
    value: int


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


UTC_1 = timezone(timedelta(hours=1))
VALUES: list[Any] = [
    *(None, True, 3, 2**200, 1.5, math.inf, "text", b"bytes", 1 + 2j, range(1, 9, 2), slice(1, None)),
    *(Path("a/b"), PurePosixPath("/a"), PureWindowsPath("C:\\a")),
    *(date(2024, 2, 29), datetime(2024, 10, 27, 2, 30, 0, 7, fold=1), time(1, 2, 3, tzinfo=timezone.utc)),
    *(datetime(2024, 1, 1, tzinfo=UTC_1), datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))),
    *(timedelta(days=-1, microseconds=3), timezone.utc, UTC_1),
    *(Decimal("1.10"), Fraction(-1, 3), UUID(int=5)),
    *(Color.BLUE, Mode.MIN, Number.ONE, Right.READ, Right.READ | Right.WRITE),
    *(Pair(1, Path("a")), Point(1.0), Settings(0.1, Path("b"), ["c"]), Slotted(3)),
    *({1, 2}, {Color.RED}, frozenset([1, (2, Path("a"))]), deque([1, Color.RED], maxlen=3)),
    *(
        defaultdict(list, a=[Path("x")]),
        defaultdict(None, {Color.RED: 1}),
        Counter("aab"),
        Counter([Color.RED]),
    ),
    *(OrderedDict(a=Path("x")), {Color.RED: 1, (1, Mode.MIN): 2, Path("x"): 3, frozenset([1]): 4}),
    *((values._TAG, "date", "2024-01-01"), {values._TAG: 1}, [], (), {}),
    *(np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2024-01-01"), torch.Size([2, 3])),
    *(torch.float16, torch.device("cpu"), torch.strided),
]


def roundtrip(state: Any, folder: Path) -> Any:
    save_custom_state(Holder(state), folder)
    again = Holder(None)
    load_custom_state(again, folder)
    return again.state


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any, tmp_path: Path) -> None:
    with staged(tmp_path / "c") as staging:
        save_custom_state(Holder({"value": value, "list": [value]}), staging.path)
    loaded = Holder(None)
    load_custom_state(loaded, tmp_path / "c")

    assert loaded.state == {"value": value, "list": [value]}
    assert type(loaded.state["value"]) is type(value)
    if not isinstance(value, np.generic):  # torch opens the files, but for numpy's types
        torch.load(tmp_path / "c/custom_checkpoint_0.pkl", weights_only=True)


def test_any_nesting_of_them_comes_back_as_it_was(tmp_path: Path) -> None:
    draw = random.Random(3)

    def hashable() -> Any:
        while True:
            try:
                value = draw.choice(VALUES)
                hash(value)
            except TypeError:
                continue
            return value

    def nested(depth: int) -> Any:
        if not depth:
            return draw.choice(VALUES)
        inside = [nested(depth - 1) for _ in range(draw.randrange(4))]
        return draw.choice(
            [
                lambda: inside,
                lambda: tuple(inside),
                lambda: {hashable(): value for value in inside},
                lambda: deque(inside),
                lambda: Pair(inside, 1),
                lambda: {hashable() for _ in inside},
                lambda: Settings(1.0, Path("a"), inside),
                lambda: defaultdict(dict, enumerate(inside)),
            ]
        )()

    for _ in range(60):
        state = nested(4)
        before = copy.deepcopy(state)
        assert roundtrip(state, tmp_path) == before == state


def test_plain_states_are_written_as_they_are() -> None:
    shared = [torch.ones(2)]
    state: dict[str, Any] = OrderedDict(a=shared, b=(shared, {"c": {1, 2}}), n=np.zeros(3))
    state["self"] = state
    assert values.encode(state, "it") is state
    assert values.decode(state) is state


def test_tensors_and_arrays_inside_come_back(tmp_path: Path) -> None:
    loaded = roundtrip({"a": deque([torch.ones(2)]), "b": Pair(np.arange(3), torch.zeros(1))}, tmp_path)
    assert loaded["a"][0].tolist() == [1, 1]
    assert loaded["b"].first.tolist() == [0, 1, 2]


class Own:
    pass


class Marked(torch.Tensor):
    """A tensor of a class that is not torch's."""


def local() -> Any:
    class Hidden(enum.Enum):
        ONE = 1

    return Hidden.ONE


@dataclasses.dataclass
class Acting:
    value: int = 0

    def __del__(self) -> None: ...


UNFIT: dict[str, tuple[Any, str]] = {
    "object": (Own(), "Own"),
    "function": (len, "builtin_function_or_method"),
    "lambda": (lambda: 0, "function"),
    "class": (Own, "builtins.type"),
    "namespace": (argparse.Namespace(a=1), "argparse.Namespace"),
    "dict of a class": (type("Mine", (dict,), {})(), "Mine"),
    "array of objects": (np.array([Own()], dtype=object), "numpy.ndarray"),
    "member of a local class": (local(), "Hidden"),
    "factory of the user": (defaultdict(Own), "defaultdict"),
    "dataclass that acts": (Acting(), "Acting"),
    "tensor": (torch.ones(2).as_subclass(Marked), "Marked"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("key", ["a", 3])
def test_what_no_load_takes_is_an_error_of_the_save(kind: str, key: Any, tmp_path: Path) -> None:
    value, name = UNFIT[kind]
    what = r"registered object 2 \(Holder\) cannot be saved"
    place = rf"{what}: its state\['x'\]\[1\]\[{key!r}\] is of type .*{name}"
    with pytest.raises(ValueError, match=place) as error:
        save_custom_state(Holder({"x": (1, {key: value})}), tmp_path, 2)
    assert "torch.serialization.add_safe_globals" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_type_that_the_user_allows_is_saved_and_loaded(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Own]):
        assert isinstance(roundtrip([Own()], tmp_path)[0], Own)
    with torch.serialization.safe_globals([Marked]):
        again = roundtrip([torch.ones(2).as_subclass(Marked), torch.zeros(3).as_subclass(Marked)], tmp_path)
    assert [(type(item), item.tolist()) for item in again] == [(Marked, [1, 1]), (Marked, [0, 0, 0])]


def test_a_class_that_is_gone_is_named_and_nothing_is_imported(tmp_path: Path) -> None:
    module = types.ModuleType("of_this_test")
    module.Kind = enum.Enum("Kind", "A", module="of_this_test")  # type: ignore[attr-defined]
    sys.modules["of_this_test"] = module
    try:
        save_custom_state(Holder([module.Kind.A]), tmp_path)
    finally:
        del sys.modules["of_this_test"]
    with pytest.raises(CheckpointError, match=r"of the class of_this_test\.Kind, and no imported module has"):
        load_custom_state(Holder(None), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        ("enum", ("os", "system", "true")),
        ("dataclass", ("subprocess", "Popen", {"args": "true"})),
        ("dataclass", (__name__, "Settings", {"rate": 1.0})),
        ("dataclass", (__name__, "Acting", {"value": 1})),
        ("namedtuple", (__name__, "Pair", [1])),
        ("enum", (__name__, "Color", "GREEN")),
        ("date", "no date"),
        ("unknown", 1),
        ([], 1),
    ],
)
def test_a_file_makes_no_other_objects(content: tuple[Any, Any], tmp_path: Path) -> None:
    tensors.write([(values._TAG, *content)], tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError):
        load_custom_state(Holder(None), tmp_path)
