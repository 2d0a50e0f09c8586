"""Values of a training job from the command line and from tables: hyper-parameters, inputs, metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from accel_launch.errors import ConfigError, LaunchError

Value = bool | int | float | str


def hyperparameters(arguments: Sequence[str]) -> dict[str, Value]:
    """Turn the arguments of a script into hyper-parameters, which SageMaker hands to it as `--name value`.

    Args:
        arguments: `--name value` or `--name=value`, again and again.

    Returns:
        The values by name without dashes: true or false, integers, numbers and text, as they are written.

    Raises:
        LaunchError: If an argument has no name, a name no value, or a name comes twice.
    """
    found: dict[str, Value] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("-") or _is_number(name):
            raise LaunchError(
                f"SageMaker hands a script named values alone, and {word!r} has no name. {_HOW}"
            )
        if not equals:
            # "-0.5" is a value, "-x" a flag.
            if not rest or (rest[0].startswith("-") and not _is_number(rest[0])):
                raise LaunchError(
                    f"SageMaker cannot hand over a flag without a value, such as {name}. {_HOW}"
                )
            text = rest.pop(0)
        name = name.lstrip("-")
        if name in found:
            raise LaunchError(f"--{name} is given twice; a hyper-parameter has one value.")
        found[name] = _value(text)
    return found


_HOW = "Write --name value; a script that reads true and false takes --name true."


def _is_number(text: str) -> bool:
    return not isinstance(_value(text), (bool, str))


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    # An integer before a float, so that 10 stays 10.
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def read_inputs(path: str) -> dict[str, str]:
    """Read the channels of a job: a tab-separated file of channel_name and data_location.

    Args:
        path: The file; a first line with the names of the columns is skipped.

    Returns:
        The location of each channel's data.

    Raises:
        ConfigError: If the file is missing, or a line has not two columns.
    """
    return dict(_rows(path, "sagemaker_inputs_file", ("channel_name", "data_location")))


def read_metrics(path: str) -> list[dict[str, str]]:
    """Read the metrics that SageMaker finds in a job's output: metric_name and metric_regex, tab-separated.

    Args:
        path: The file; a first line with the names of the columns is skipped.

    Returns:
        One definition per line, as an estimator takes them.

    Raises:
        ConfigError: If the file is missing, or a line has not two columns.
    """
    columns = ("metric_name", "metric_regex")
    return [{"Name": name, "Regex": regex} for name, regex in _rows(path, "sagemaker_metrics_file", columns)]


def _rows(path: str, key: str, columns: tuple[str, str]) -> list[tuple[str, str]]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"{key}: there is no file {file}. It has a line per row: {columns[0]}<tab>{columns[1]}."
        )
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.split("\t")]
        # Empty lines, and the line with the names of the columns.
        if cells in ([""], list(columns)):
            continue
        if len(cells) != 2 or not all(cells):
            raise ConfigError(
                f"{key}: {file}, line {number} has {len(cells)} columns: {line!r}. A line is "
                f"{columns[0]}<tab>{columns[1]}."
            )
        rows.append((cells[0], cells[1]))
    return rows
