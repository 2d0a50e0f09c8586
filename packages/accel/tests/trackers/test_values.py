"""Values in the plain types of trackers: numbers, text, nested dicts, images and tables."""

from __future__ import annotations

import dataclasses
import enum
import math
import warnings
from pathlib import Path

import numpy
import pytest
import torch

from accel.trackers.values import flatten, images, numbers, plain, table_rows, unchanged, warn_left_out


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor([[3]]), 3),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (torch.tensor(True), True),
        (torch.tensor([1, 2]), [1, 2]),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(7), 7),
        (numpy.array([1.0]), 1.0),
        (numpy.array([[1, 2]]), [[1, 2]]),
        (numpy.complex64(1j), "1j"),
        ((1, "a", None), [1, "a", None]),
        ({1: {"b": torch.tensor(2)}}, {"1": {"b": 2}}),
        (Color.RED, "red"),
        (Path("folder") / "file", "folder/file"),
        ({3}, "{3}"),
        (b"x", "b'x'"),
    ],
    ids=repr,
)
def test_plain_values(value, expected):
    result = plain(value)

    assert result == expected
    assert type(result) is type(expected)


def test_a_table_of_one_value_is_text():
    class Table:
        """As a pandas DataFrame, which has a shape and no `item`."""

        shape = (1, 1)

        def __str__(self):
            return "one row"

    assert plain({"table": Table()}) == {"table": "one row"}


def test_nan_stays_a_number_and_a_library_keeps_its_objects():
    thing = object()

    assert math.isnan(plain(torch.tensor(math.nan)))
    assert plain({"a": [thing], "b": torch.tensor(1)}, unchanged) == {"a": [thing], "b": 1}


def test_flatten_names_the_values_of_nested_dicts():
    nested = {"lr": 0.1, 2: {"deep": {"x": [1], "empty": {}}}}

    assert flatten(nested) == {"lr": 0.1, "2/deep/x": [1], "2/deep/empty": {}}
    assert flatten(nested, ".") == {"lr": 0.1, "2.deep.x": [1], "2.deep.empty": {}}


def test_numbers_are_split_from_the_rest():
    thing = object()
    found, rest = numbers(
        {"loss": torch.tensor(2.0), "ok": True, "deep": {"x": {"y": 1}, "s": "t"}, "o": thing}
    )

    assert found == {"loss": 2.0, "ok": 1, "deep/x/y": 1}
    assert type(found["ok"]) is int
    assert rest == {"deep/s": "t", "o": thing}


def test_values_that_are_left_out_are_named():
    warn_left_out("system", "numbers alone", {})
    with pytest.warns(UserWarning, match=r"system tracker logs numbers alone; it leaves out 'a' \(str\)\."):
        warn_left_out("system", "numbers alone", {"a": "text"})


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        (torch.zeros(3, 5, 4), [(5, 4, 3)]),
        (torch.zeros(2, 1, 5, 4), [(5, 4), (5, 4)]),
        (torch.zeros(5, 4, 3), [(5, 4, 3)]),
        (torch.zeros(3, 5, 3), [(5, 3, 3)]),
        (numpy.zeros((5, 4, 3)), [(5, 4, 3)]),
        (numpy.zeros((3, 5, 6)), [(5, 6, 3)]),
        (numpy.zeros((3, 5, 3)), [(3, 5, 3)]),
        (numpy.zeros((5, 4)), [(5, 4)]),
        ([numpy.zeros((5, 4, 4)), torch.zeros(6, 4)], [(5, 4, 4), (6, 4)]),
    ],
    ids=lambda value: str(getattr(value, "shape", "")),
)
def test_images_have_their_channels_last(value, shapes):
    found = images(value)

    assert [image.shape for image in found] == shapes
    assert {image.dtype.name for image in found} == {"uint8"}


def test_floats_of_images_go_from_0_to_1_and_other_objects_pass():
    (image,) = images(torch.tensor([[0.0, 0.5], [1.0, 2.0]]))
    (whole,) = images(numpy.array([[0, 7], [255, 300]]))

    assert image.tolist() == [[0, 128], [255, 255]]
    assert whole.tolist() == [[0, 7], [255, 255]]
    (mask,) = images(torch.tensor([[True, False]]))
    assert mask.tolist() == [[255, 0]]
    assert images("picture.png") == ["picture.png"]
    with pytest.raises(ValueError, match=r"2 or 3 dimensions, a batch of 4; got \(2,\)"):
        images(torch.zeros(2))


@pytest.mark.parametrize("dtype", ["bool", "uint16", "uint32", "int64", "float16"])
def test_arrays_may_be_of_any_type_read_only_and_backwards(dtype):
    array = numpy.array([[[1, 0, 0]]]).astype(dtype)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (image,), (turned,) = images(array), images(array[..., ::-1])

    one = 255 if dtype in ("bool", "float16") else 1
    assert image.tolist() == [[[one, 0, 0]]]
    assert turned.tolist() == [[[0, 0, one]]]
    image[:] = 0
    assert array[0, 0, 0] == 1


@pytest.mark.parametrize(
    ("mode", "shape"), [("RGB", (2, 3, 3)), ("L", (2, 3)), ("P", (2, 3, 3)), ("1", (2, 3, 3))]
)
def test_images_of_pil(mode, shape):
    pil = pytest.importorskip("PIL.Image")
    (image,) = images(pil.new("RGB", (3, 2), (255, 255, 255)).convert(mode))

    assert image.shape == shape
    assert image.min() == 255


def test_tables_are_lists_or_a_dataframe():
    assert table_rows(["a", "b"], [(1, 2)], None) == (["a", "b"], [[1, 2]])
    assert table_rows(None, [[1, 2]], None) == (["0", "1"], [[1, 2]])
    with pytest.raises(ValueError, match="a row of 1 values for 2 columns"):
        table_rows(["a", "b"], [[1]], None)
    with pytest.raises(ValueError, match="needs `data`"):
        table_rows(["a"], None, None)
    pandas = pytest.importorskip("pandas")
    assert table_rows(None, None, pandas.DataFrame({"a": [1.5]})) == (["a"], [[1.5]])


def test_a_dataclass_is_text():
    @dataclasses.dataclass
    class Settings:
        lr: float = 0.1

    assert plain({"settings": Settings()})["settings"].endswith("Settings(lr=0.1)")
