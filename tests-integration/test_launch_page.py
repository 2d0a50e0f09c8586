"""Every command of the page on launching, run as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

# Torch starts in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

PAGE = (Path(__file__).parents[1] / "docs/launch.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
# A block of commands, and the words that its output has, in any order.
BLOCKS = re.findall(r"```sh\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_of_commands_is_run() -> None:
    assert len(BLOCKS) == PAGE.count("```sh\n") > 8
    assert PAGE.count("```python") == 1


@pytest.mark.parametrize(("commands", "words"), BLOCKS, ids=lambda text: text.split("\n")[0][:60])
def test_commands_of_the_page(tmp_path: Path, commands: str, words: str) -> None:
    if "mpirun" in commands and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here")
    (tmp_path / "train.py").write_text(SCRIPT)
    scripts = sysconfig.get_path("scripts")
    environ = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    run = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env={
            **environ,
            "HF_HOME": str(tmp_path / "hf"),
            "PATH": f"{scripts}{os.pathsep}{environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert run.returncode == 0, run.stderr
    assert [line for line in words.splitlines() if line not in run.stdout] == [], run.stdout + run.stderr
