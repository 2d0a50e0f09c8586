"""Measures sections of a bench, one after the other, and continues after one that fails."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping

from .row import Row

__all__ = ["Section", "measure"]

Section = Callable[..., Row | list[Row]]


def measure(sections: Mapping[str, Section], *, quick: bool) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the sections, and why others failed, by their names."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name, section in sections.items():
        print(f"measuring {name} ...", file=sys.stderr, end=" ", flush=True)
        start = time.monotonic()
        try:
            measured = section(quick=quick)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"failed:\n{traceback.format_exc()}", file=sys.stderr)
        else:
            found = measured if isinstance(measured, list) else [measured]
            rows += found
            print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
            for row in found:  # now: the table comes after the last section, and a run may be stopped
                print(f"  {_brief(row)}", file=sys.stderr, flush=True)
    return rows, failures


def _brief(row: Row) -> str:
    more = [f"{name} {value:.3f}" for name, value in row.peers.items()]
    if row.noise is not None:
        more.append(f"noise {row.noise.median:.3f} ({row.noise.low:.3f} to {row.noise.high:.3f})")
    if row.base:
        more.append(f"baseline {row.base}")
    return "; ".join([f"{row.value:.3f} {row.unit}  {row.what}", *more])
