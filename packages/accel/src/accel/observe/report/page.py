"""The page: a summary, curves, images, tables and the configuration of each run, in one HTML file."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from accel.observe.report.curves import draw, number
from accel.observe.report.read import Image, LoggedRun, Points
from accel.observe.report.style import STYLE
from accel.observe.report.summary import summary_section

IMAGE_BYTES = 1 << 20
"""A larger image is named and not shown, in bytes."""

IMAGES_BYTES = 16 << 20
"""Images of the page together, in bytes; the newest are shown."""

ROWS = 200
"""Rows of a table that are shown."""

_COLORS = 8


def render(runs: Sequence[LoggedRun]) -> str:
    """Return the page of some runs: curves of one name are drawn together."""
    # Escaped wherever it is shown: what a run has logged may be anybody's text.
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = "".join(
        [
            f"<header><h1>{escape(title)}</h1><p class=soft>{_subtitle(runs)}</p>{_legend(runs)}</header>",
            *(summary_section(run, _run_suffix(run, runs)) for run in runs),
            _curves(runs),
            *(_texts(run, _run_suffix(run, runs)) for run in runs),
            *_images(runs),
            *(_tables(run, _run_suffix(run, runs)) for run in runs),
            *(_config(run, _run_suffix(run, runs)) for run in runs),
        ]
    )
    # All in one file, which is opened from a disk or a mail, without a network.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_color_rules()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _run_suffix(run: LoggedRun, runs: Sequence[LoggedRun]) -> str:
    """How headings name a run: not at all, where it is the only one."""
    return f" of {run.name}" if len(runs) > 1 else ""


def _color_rules() -> str:
    return "".join(
        f"polyline.c{index}{{stroke:var(--c{index})}}circle.c{index}{{fill:var(--c{index})}}"
        for index in range(_COLORS)
    )


def _subtitle(runs: Sequence[LoggedRun]) -> str:
    text = f"Drawn {time.strftime('%Y-%m-%d %H:%M')}"
    unread = sum(run.unread for run in runs)
    return text + (f"; {unread} lines could not be read" if unread else "")


def _legend(runs: Sequence[LoggedRun]) -> str:
    if len(runs) < 2:
        return ""
    items = "".join(
        f'<li><i style="background:var(--c{index % _COLORS})"></i>{escape(run.name)}</li>'
        for index, run in enumerate(runs)
    )
    return f'<ul class="legend">{items}</ul>'


def _curves(runs: Sequence[LoggedRun]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.curves)
    # What statistics measured comes after what the script logged.
    cards = [_card(name, runs) for name in sorted(names, key=lambda name: name.startswith("statistics/"))]
    return _section("Curves", f'<div class="grid">{"".join(cards)}</div>') if cards else ""


def _card(name: str, runs: Sequence[LoggedRun]) -> str:
    having = [(place % _COLORS, run.curves[name]) for place, run in enumerate(runs) if name in run.curves]
    text = "; ".join(_last(points) for _, points in having) if len(having) == 1 else ""
    note = f'<p class="soft">{text}</p>' if text else ""
    return f'<div class="card"><h3>{escape(name)}</h3>{draw(name, having)}{note}</div>'


def _last(points: Points) -> str:
    finite = [value for _, value in points if math.isfinite(value)]
    text = f"last {number(points[-1][1])}"
    if len(finite) > 1:
        text += f", lowest {number(min(finite))}, highest {number(max(finite))}"
    gaps = len(points) - len(finite)
    return text + (f", {gaps} not finite" if gaps else "")


def _texts(run: LoggedRun, of: str) -> str:
    return _pairs(f"Text{of}", run.texts) if run.texts else ""


def _config(run: LoggedRun, of: str) -> str:
    return _pairs(f"Configuration{of}", dict(_flat(run.config))) if run.config else ""


def _flat(config: Any, before: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _flat(value, f"{before}/{name}" if before else str(name))
    else:
        yield before, config if isinstance(config, str) else json.dumps(config)


def _pairs(title: str, pairs: Mapping[str, str]) -> str:
    return _table(title, "", (), [[name, value] for name, value in pairs.items()], kind="text")


def _tables(run: LoggedRun, of: str) -> str:
    sections = []
    for table in run.tables.values():
        at = "" if table.step is None else f", step {table.step}"
        left = len(table.rows) - ROWS
        note = f"The first {ROWS} of {len(table.rows)} rows." if left > 0 else ""
        title = f"Table {table.name}{of}{at}"
        sections.append(_table(title, note, table.columns, table.rows[:ROWS]))
    return "".join(sections)


def _table(
    title: str, note: str, columns: Sequence[Any], rows: Sequence[Sequence[Any]], kind: str = ""
) -> str:
    head = "".join(f"<th>{escape(str(column))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    note = f'<p class="soft">{note}</p>' if note else ""
    inner = f'<div class="card wide"><table class="{kind}">{head and f"<tr>{head}</tr>"}{body}</table></div>'
    return _section(title, inner + note)


def _cell(value: Any) -> str:
    # bool is an int to isinstance.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    return number(value)


def _images(runs: Sequence[LoggedRun]) -> Iterator[str]:
    # Base64 makes them a third larger, and browsers keep the whole page in memory.
    left = IMAGES_BYTES
    for run in runs:
        shown: list[str] = []
        out = 0
        # The newest first, so that the limit leaves out the oldest.
        for image in reversed(run.images):
            data = _bytes(image, min(left, IMAGE_BYTES))
            if data is None:
                out += 1
                continue
            left -= len(data)
            at = "" if image.step is None else f", step {image.step}"
            source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            shown.append(
                f'<figure><img src="{source}" alt="{escape(image.name)}">'
                f"<figcaption>{escape(image.name)}{at}</figcaption></figure>"
            )
        if run.images:
            note = f'<p class="soft">{out} missing, or too large to be shown here.</p>' if out else ""
            pictures = f'<div class="card pictures">{"".join(shown)}</div>' if shown else ""
            yield _section(f"Images{_run_suffix(run, runs)}", pictures + note)


def _bytes(image: Image, most: int) -> bytes | None:
    try:
        if image.path.stat().st_size > most:
            return None
        return image.path.read_bytes()
    except OSError:
        return None


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"
