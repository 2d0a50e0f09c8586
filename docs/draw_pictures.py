"""Puts pictures into the pages: the window, a commit, engines, and the cost of accel and its peers.

mkdocs runs this as a hook. The runs are made while the site is built, the memory is computed by accel, and
the cost is read from the table of the last full benchmark. Every SVG that a page shows by
`![...](img/NAME.svg)` and that takes the page's colours becomes a part of the page.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from pictures import commit, costs, memory, meshes, window  # noqa: E402 - next to this file, in no package

__all__ = ["on_files", "on_page_content", "pictures"]

IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*img/(?P<name>[\w-]+)\.svg"\s*/?>')


def run(script: str, processes: int) -> Any:
    """Run a script of `pictures` and return the JSON that it prints."""
    launch = "from accel_launch.cli import launch_main; launch_main()"
    command = [sys.executable, "-c", launch, "--cpu", "--num_processes", str(processes)]
    command.append(str(HERE / "pictures" / script))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr}")
    return json.loads(done.stdout)


@cache
def pictures() -> dict[str, str]:
    """Return the pictures by name."""
    return {
        "window": window.draw(run("window_run.py", 2)),
        "commit": commit.draw(run("commit_run.py", 1)),
        "memory": memory.draw(memory.needed()),
        "meshes": meshes.draw(run("mesh_run.py", 1)),
        "costs": costs.draw(costs.rows((HERE / "performance.md").read_text())),
    }


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pictures to the files of the site."""
    from mkdocs.structure.files import File  # the tests, which draw too, have no mkdocs

    for name, drawn in pictures().items():
        files.append(File.generated(config, f"img/{name}.svg", content=drawn))
    return files


def on_page_content(html: str, *, files: Any, **kwargs: Any) -> str:
    """Put the pictures into the page; others, which are wide, can be moved from side to side."""

    def put(match: re.Match[str]) -> str:
        file = files.get_file_from_path(f"img/{match['name']}.svg")
        drawn = file.content_string if file is not None else ""
        if 'class="picture"' in drawn:
            # The alternative text of the page, for screen readers.
            return f'<span class="picture" role="img" aria-label="{match["alt"]}">{drawn}</span>'
        return f'<span class="wide-picture">{match[0]}</span>'

    return IMAGE.sub(put, html)
