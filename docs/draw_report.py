"""Draws where the time of a run went, for observability.md, as `accel report` draws it.

What is drawn was measured: docs/slow_process.py runs on two processes while the site is built. mkdocs runs
this as a hook; the picture exists only in the site.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from accel.observe.report.curves import draw
from accel.observe.report.read import LoggedRun, read_runs

__all__ = ["on_files", "picture"]

WIDTH, LEFT, BAR, LINE, CHART = 860, 84, 24, 34, 190  # pixels
COLORS = {
    "data": "#e08a2e",
    "forward": "#4c86e0",
    "backward": "#2a4f9e",
    "optimizer": "#2e9b6b",
    "collectives": "#c9504a",
    "checkpoint": "#9259b8",
    "other": "#a9b1bd",
}
# The picture has its own background, as the page around it may be light where the reader's system is dark.
STYLE = """
.ground{fill:#fff;stroke:#ccc} text{fill:#222} .axes line{stroke:#e2e6ec} .axes text{fill:#667}
polyline{fill:none;stroke:#2f6bd0;stroke-width:1.7}
@media (prefers-color-scheme: dark){
.ground{fill:#1e2227;stroke:#444} text{fill:#ddd} .axes line{stroke:#3a424d} .axes text{fill:#9aa5b4}
polyline{stroke:#75a7ff}}
"""


def picture(run: LoggedRun) -> str:
    """Return an SVG: a bar for each process, with its time in each phase, and curves of the run."""
    assert run.summary is not None
    ranks = run.summary["ranks"]
    longest = max(sum(own["seconds"].values()) for own in ranks)
    scale = (WIDTH - LEFT - 70) / longest
    parts = [_bar(own, 14 + place * LINE, scale) for place, own in enumerate(ranks)]
    legend = 14 + len(ranks) * LINE + 6
    across = LEFT
    for part, color in COLORS.items():
        parts.append(f'<rect x="{across}" y="{legend}" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{across + 16}" y="{legend + 10}">{part}</text>')
        across += 34 + 7 * len(part)
    top = legend + 30
    for place, name in enumerate(("loss", "statistics/samples_per_second")):
        left = 12 + place * (WIDTH // 2 - 6)
        parts.append(f'<text x="{left + 50}" y="{top + 12}" font-weight="bold">{escape(name)}</text>')
        size = f'x="{left}" y="{top + 18}" width="{WIDTH // 2 - 18}" height="{CHART}"'
        parts.append(draw(name, [(0, run.curves[name])]).replace("<svg", f"<svg {size}", 1))
    height = top + CHART + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="12">'
        f"<title>Where the time of a run went</title><style>{STYLE}</style>"
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _bar(own: dict[str, Any], top: int, scale: float) -> str:
    left, cells = float(LEFT), []
    for part, seconds in own["seconds"].items():
        width = seconds * scale
        cells.append(
            f'<rect class="{part}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BAR}" '
            f'fill="{COLORS[part]}"><title>{part}: {seconds:.2f} s</title></rect>'
        )
        left += width
    total = sum(own["seconds"].values())
    name = f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end">process {own["rank"]}</text>'
    return f'{name}{"".join(cells)}<text x="{left + 8:.1f}" y="{top + 16}">{total:.2f} s</text>'


def on_files(files: Any, *, config: Any) -> Any:
    """Add the picture to the files of the site."""
    from mkdocs.structure.files import File  # the tests, which draw too, have no mkdocs

    launch = "from accel_launch.cli import launch_main; launch_main()"
    script = Path(__file__).with_name("slow_process.py")
    command = [sys.executable, "-c", launch, "--cpu", "--num_processes", "2", str(script)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"{script} failed on two processes:\n{done.stderr}")
        (run,) = read_runs(Path(folder) / "runs/slow/sums.jsonl")
    files.append(File.generated(config, "img/report.svg", content=picture(run)))
    return files
