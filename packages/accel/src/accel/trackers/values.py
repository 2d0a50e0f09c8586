"""Logged values and configurations in the plain types that trackers take."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accel_state.logging.warning import warn


def plain(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Convert to dicts with string keys, lists, numbers, strings, booleans and None.

    Tensors, arrays and numpy scalars of one element become numbers, whatever their shape; larger ones become
    nested lists, and other objects text.

    Args:
        value: Any value; dicts, lists and tuples are converted at any depth.
        other: Converts larger tensors and arrays, and other objects, instead; `unchanged` leaves them to a
            library that has its own types for media.
    """
    # Exact types: numpy's float64 is a float, and an IntEnum an int, that not every library writes.
    if value is None or type(value) in (int, float, str, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, other) for item in value]
    if isinstance(value, enum.Enum):
        return plain(value.value, other)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Tensors and arrays of any library, without importing it.
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item") and math.prod(shape) == 1:  # not a pandas DataFrame
        return plain(value.item(), str)  # a complex number, for one, is text
    if other is not None:
        return other(value)
    if shape is not None and hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def unchanged(value: Any) -> Any:
    """Return the value; for `plain(other=)`."""
    return value


def is_number(value: Any) -> bool:
    """Whether a plain value is a number, NaN and booleans included."""
    return isinstance(value, int | float)


def flatten(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Give the values of nested dicts names joined by `separator`; an empty dict stays one.

    Example:
        >>> flatten({"lr": 0.1, "model": {"layers": [2, 3], "norm": {"eps": 1e-5}}})
        {'lr': 0.1, 'model/layers': [2, 3], 'model/norm/eps': 1e-05}
    """
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{key}{separator}{name}": item for name, item in flatten(value, separator).items()})
        else:
            flat[str(key)] = value
    return flat


def numbers(values: Mapping[str, Any]) -> tuple[dict[str, int | float], dict[str, Any]]:
    """Split values into numbers and the rest, both plain and flat, with names as `outer/inner`.

    Returns:
        The numbers (booleans as 0 and 1), and the rest, in which objects without a plain form are unchanged.
    """
    flat = flatten(plain(values, unchanged))
    # Booleans become 0 and 1, which can be plotted.
    found = {key: int(value) if value is True or value is False else value for key, value in flat.items()}
    return (
        {key: value for key, value in found.items() if is_number(value)},
        {key: value for key, value in found.items() if not is_number(value)},
    )


def warn_left_out(tracker: str, takes: str, values: Mapping[str, Any]) -> None:
    """Warn of values that a tracker cannot log, if there are any."""
    if values:
        names = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in values.items())
        warn(f"The {tracker} tracker logs {takes}; it leaves out {names}.")


def images(value: Any) -> list[Any]:
    """Return one image, a batch or a list of images, each as an array that all libraries take.

    Args:
        value: Tensors or arrays of (height, width), (height, width, channels) or (channels, height, width),
            with a first dimension more for a batch; floats from 0 to 1, integers from 0 to 255, or booleans
            (masks). Where the shape leaves it open, channels come first in tensors and last in arrays. Images
            of PIL become arrays; anything else, such as a path or an image object of a tracker's library, is
            passed on.

    Returns:
        Arrays (height, width, channels) or (height, width) of bytes, and what is passed on.

    Raises:
        ValueError: If a tensor or an array has another number of dimensions.
    """
    if isinstance(value, list | tuple):
        return [image for item in value for image in images(item)]
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # PIL's, without importing it
        return [_from_pil(value)]
    if not (hasattr(value, "ndim") and hasattr(value, "shape")):
        return [value]
    channels_first = isinstance(value, torch.Tensor)
    if not channels_first and hasattr(value, "copy"):
        value = value.copy()  # torch takes no view that runs backwards ([..., ::-1]), nor a read-only array
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.ndim == 4:
        return [_image(item, channels_first) for item in tensor]
    return [_image(tensor, channels_first)]


def named_images(values: Mapping[str, Any], separator: str = "/") -> Iterator[tuple[str, Any]]:
    """Name each image: by its value, and from the second image on by its index too."""
    for name, value in values.items():
        for index, image in enumerate(images(value)):
            yield name if index == 0 else f"{name}{separator}{index}", image


def _image(tensor: torch.Tensor, channels_first: bool) -> Any:
    if tensor.ndim not in (2, 3):
        raise ValueError(
            f"An image is a tensor or an array of 2 or 3 dimensions, a batch of 4; got {tuple(tensor.shape)}."
        )
    if tensor.ndim == 3:
        first, last = tensor.shape[0] in (1, 3, 4), tensor.shape[2] in (1, 3, 4)
        # Tensors have channels first, as torch has them; arrays last, unless only their
        # first dimension can be channels.
        if first and (channels_first or not last):
            tensor = tensor.permute(1, 2, 0)
        if tensor.shape[2] == 1:  # grey: libraries disagree about a single channel
            tensor = tensor[:, :, 0]
    # Such images have values from 0 to 1.
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        tensor = (tensor.float() * 255).round()
    elif tensor.dtype != torch.uint8:
        tensor = tensor.long()  # uint16 and its like have no clamp
    return tensor.clamp(0, 255).to(torch.uint8).contiguous().numpy()


def _from_pil(image: Any) -> Any:
    image = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1)
    return _image(pixels, channels_first=False)


def table_rows(
    columns: list[str] | None, data: list[list[Any]] | None, dataframe: Any
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a table that is given as lists or as a DataFrame.

    Raises:
        ValueError: If neither rows nor a DataFrame are given, or a row has not one value per column.
    """
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], dataframe.values.tolist()
    if data is None:
        raise ValueError("log_table needs `data`, a list of rows, or a `dataframe`.")
    rows = [list(row) for row in data]
    width = len(columns) if columns is not None else max(map(len, rows), default=0)
    wrong = [len(row) for row in rows if len(row) != width]
    if wrong:
        raise ValueError(f"log_table got a row of {wrong[0]} values for {width} columns.")
    return list(columns) if columns is not None else [str(index) for index in range(width)], rows
