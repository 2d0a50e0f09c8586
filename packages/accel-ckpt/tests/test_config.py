from __future__ import annotations

import pytest

from accel_ckpt.config import ProjectConfiguration


def test_logs_are_in_the_project_unless_set() -> None:
    assert ProjectConfiguration(project_dir="here").logging_dir == "here"
    assert ProjectConfiguration(project_dir="here", logging_dir="there").logging_dir == "there"
    assert ProjectConfiguration().logging_dir is None


def test_set_directories() -> None:
    config = ProjectConfiguration()
    config.set_directories("here")
    assert (config.project_dir, config.logging_dir) == ("here", "here")
    config.set_directories("other")
    assert (config.project_dir, config.logging_dir) == ("other", "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_limit": 0}, "total_limit must be at least 1, or None to keep all checkpoints, not 0"),
        ({"iteration": -1}, "iteration must be at least 0, not -1"),
    ],
)
def test_impossible_numbers_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProjectConfiguration(**options)
