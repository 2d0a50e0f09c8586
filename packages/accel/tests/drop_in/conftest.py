"""Programs next to another package that is named accelerate, as the real one may be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

OTHER = {
    "accelerate/__init__.py": '__version__ = "0.0.1"\n',
    "accelerate/only_there.py": "",
    "accelerate-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: accelerate\nVersion: 0.0.1\n",
    "accelerate-0.0.1.dist-info/top_level.txt": "accelerate\n",
}


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which another accelerate is installed."""
    folder = tmp_path_factory.mktemp("other")
    for name, text in OTHER.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def python(other: Path) -> Run:
    """Run this Python, without the switch, next to the other accelerate and further folders of modules."""

    def run(*arguments: str | Path, first: Path | None = None) -> subprocess.CompletedProcess[str]:
        places = [first, other, os.environ.get("PYTHONPATH")]
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(str(place) for place in places if place)},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run
