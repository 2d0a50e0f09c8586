"""Lets the pages be next to mkdocs.yml, in docs/ itself, and show files of the repository and their output.

mkdocs rejects a docs_dir that contains its own configuration file, but only while it validates that file.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["on_config", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    """Take the pages from the folder of the configuration file."""
    config.docs_dir = str(Path(config.config_file_path).resolve().parent)
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace a line `# all of path/from/the/root` by the text of the file.

    A line `# output of path/from/the/root on N processes` becomes the output of the file, run on N processes.
    """
    shown = re.sub(
        r"^# all of (\S+)$",
        lambda match: (ROOT / match[1]).read_text().rstrip(),
        markdown,
        flags=re.MULTILINE,
    )
    return re.sub(
        r"^# output of (\S+) on (\d+) process(?:es)?$",
        lambda match: _output(match[1], match[2]),
        shown,
        flags=re.MULTILINE,
    )


def _output(path: str, processes: str) -> str:
    launch = "from accel_launch.cli import launch_main; launch_main()"
    command = [sys.executable, "-c", launch, "--cpu", "--num_processes", processes, str(ROOT / path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{path} failed on {processes} processes:\n{done.stderr}")
    return done.stdout.rstrip()
