"""Where the time of a run went and which processes were slow: a section of the page, and lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from accel.observe.report.read import LoggedRun

RANKS = 32
"""Processes that are shown; of more, those that waited least."""

_MEMORY = {"host": "memory", "device": "device memory"}


def summary_section(run: LoggedRun, of: str) -> str:
    """Return the summary of a run as HTML; nothing where it has no statistics.

    Args:
        run: The run.
        of: How the heading names the run.
    """
    if run.summary is None:
        slow = _slow_so_far(run)
        inner = f'<div class="card">{slow}</div>' if slow else ""
    else:
        inner = f'<div class="card">{_slow(run.summary)}{_facts(run.summary)}{_bars(run.summary)}</div>'
        inner += f'<div class="card wide">{_table(run.summary)}</div>'
    return f"<section><h2>{escape(f'Summary{of}')}</h2>{inner}</section>" if inner else ""


def _facts(summary: Mapping[str, Any]) -> str:
    facts = {
        "Samples per second": f"{summary['samples_per_second']:,.1f}",
        "Samples": f"{summary['samples']:,}",
        "Steps": f"{summary['steps']:,}",
        "Time": _duration(summary["seconds"]),
        "Processes": f"{summary['processes']:,}",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    missing = ", ".join(str(rank) for rank in summary["missing"])
    note = f'<p class="slow">No numbers of process {escape(missing)}.</p>' if missing else ""
    return f'{note}<dl class="facts">{items}</dl>'


def _slow(summary: Mapping[str, Any]) -> str:
    return "".join(
        f'<p class="slow">Process {int(slow["rank"])} is slow: {_section_name(slow["part"])}, up to '
        f"{slow['ratio']:.1f} times the median (steps {slow['steps'][0]} to {slow['steps'][1]}).</p>"
        for slow in summary["slow"]
    )


def _slow_so_far(run: LoggedRun) -> str:
    newest: dict[tuple[int, str], Mapping[str, Any]] = {}
    for slow in run.slow:
        newest[slow["rank"], slow["part"]] = slow
    return "".join(
        f'<p class="slow">Process {rank} was slow at step {slow["step"]}: {_section_name(section)}, '
        f"{slow['ratio']:.1f} times the median.</p>"
        for (rank, section), slow in newest.items()
    )


def _section_name(section: str) -> str:
    return "the rest of the script" if section == "other" else escape(section)


def _displayed_ranks(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    ranks = summary["ranks"]
    if len(ranks) > RANKS:
        # A slow process waits least, as the others wait for it.
        ranks = sorted(ranks, key=lambda row: row["seconds"]["collectives"])[:RANKS]
    return sorted(ranks, key=lambda row: int(row["rank"]))


def _bars(summary: Mapping[str, Any]) -> str:
    # 1.0 where nothing was timed, so that nothing is divided by zero.
    longest = max(sum(row["seconds"].values()) for row in summary["ranks"]) or 1.0
    sections = list(summary["ranks"][0]["seconds"])
    keys = "".join(
        f'<li><i style="background:var(--{escape(section)})"></i>{escape(section)}</li>'
        for section in sections
    )
    rows = []
    for row in _displayed_ranks(summary):
        cells = "".join(
            f'<i style="width:{100 * seconds / longest:.3f}%;background:var(--{escape(section)})" '
            f'title="{escape(section)}: {_duration(seconds)}"></i>'
            for section, seconds in row["seconds"].items()
        )
        total = _duration(sum(row["seconds"].values()))
        bar = f'<div class="bar">{cells}</div>'
        rows.append(f'<div class="rank"><b>process {row["rank"]}</b>{bar}<span>{total}</span></div>')
    left = len(summary["ranks"]) - len(rows)
    note = f'<p class="soft">{left} processes that waited longer are left out.</p>' if left else ""
    return f'{"".join(rows)}{note}<ul class="legend">{keys}</ul>'


def _table(summary: Mapping[str, Any]) -> str:
    sections = list(summary["ranks"][0]["seconds"])
    kinds = [kind for kind in _MEMORY if any(row["peak_memory"][kind] for row in summary["ranks"])]
    names = [
        "process",
        *(f"{section} s" for section in sections),
        "steps",
        *(_MEMORY[kind] for kind in kinds),
        "host",
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for row in _displayed_ranks(summary):
        seconds = [f"{row['seconds'][section]:.2f}" for section in sections]
        memory = [f"{row['peak_memory'][kind] / 2**20:,.0f} MiB" for kind in kinds]
        cells = [str(row["rank"]), *seconds, f"{row['steps']:,}", *memory, f"{row['host']} ({row['device']})"]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def render_text(summary: Mapping[str, Any]) -> str:
    """Return the summary as lines of text."""
    count, ranks = summary["processes"], summary["ranks"]
    head = (
        f"{summary['steps']:,} steps and {summary['samples']:,} samples in {summary['seconds']:.2f} s on "
        f"{count} process{'es' * (count > 1)}: {summary['samples_per_second']:,.1f} samples per second"
    )
    kinds = {"memory": "host"}
    if any(rank["peak_memory"]["device"] for rank in ranks):
        kinds["device memory"] = "device"
    sections = list(ranks[0]["seconds"])
    rows = [["process", "seconds", *sections, *kinds]]
    for rank in ranks:
        total = sum(rank["seconds"].values())
        shares = [f"{100 * rank['seconds'][section] / total:.0f} %" if total else "-" for section in sections]
        memory = [f"{rank['peak_memory'][kind] / 2**20:,.0f} MiB" for kind in kinds.values()]
        rows.append([str(rank["rank"]), f"{total:.2f}", *shares, *memory])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows
    ]
    lines = [head, *table, *(f"process {rank} did not answer" for rank in summary["missing"])]
    for slow in summary["slow"]:
        section = "the rest of the script" if slow["part"] == "other" else slow["part"]
        lines.append(
            f"process {slow['rank']} is slow: {section}, up to {slow['ratio']:.1f} times the median "
            f"(steps {slow['steps'][0]} to {slow['steps'][1]})"
        )
    return "\n".join(lines)
