"""Every command of the page on migrating, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

PAGE = (Path(__file__).parents[1] / "docs/migrate.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
BLOCKS = re.findall(r"```sh\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_of_commands_is_run() -> None:
    assert len(BLOCKS) == PAGE.count("```sh\n") == 3


@pytest.mark.parametrize(("commands", "lines"), BLOCKS, ids=lambda text: text.split("\n")[0][:40])
def test_commands_of_the_page(tmp_path: Path, commands: str, lines: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert run.returncode == 0, run.stderr
    # An error goes on after what the page shows of it.
    printed = run.stdout.splitlines()
    for line, shown in zip(printed, lines.splitlines(), strict=True):
        assert line.startswith(shown)
