from __future__ import annotations

from pathlib import Path

import pytest

from accel_launch.errors import LaunchError
from accel_launch.launchers.hostfile import Host, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", [Host("a", None), Host("b", None)]),
        ("# machines\na slots=4 max_slots=8  # fast\n\nb:2\n", [Host("a", 4), Host("b", 2)]),
    ],
)
def test_hostfiles_are_read(tmp_path: Path, text: str, hosts: list[Host]) -> None:
    (tmp_path / "hosts").write_text(text)

    assert read_hostfile(str(tmp_path / "hosts")) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slot=2\n", "line 2: 'slot=2' is not understood. Did you mean slots?"),
        ("a slots=two\n", "line 1: 'two' is not allowed as the number of slots"),
        ("a:0\n", "line 1: '0' is not allowed"),
        ("slots=2\n", "line 1: 'slots=2' is not the name of a machine"),
        ("# nothing\n", "names no machine"),
    ],
)
def test_typos_of_a_hostfile_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError) as error:
        read_hostfile(str(tmp_path / "hosts"))

    assert message in str(error.value)
