"""Measure, print one table, and on request write it into the manual.

`python -m tools.bench` measures everything; `python -m tools.bench step gather` only those rows. A section
that fails is named in the table, and the others are measured all the same. Everything takes about
37 minutes on two quiet cores, and the last line says how long it took.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from .accumulate import accumulate_rows
from .big_models import hook_rows, load_peak_row, placed_load_rows, planning_rows, prefetch_row
from .checkpoints import load_rows, save_async_row, save_row
from .clipping import clip_rows
from .collectives import gather_rows
from .dispatch import dispatch_rows
from .engines import engine_memory_rows, engine_rows
from .evaluation import evaluation_rows
from .imports import dry_run_row, help_row, import_rows
from .incremental import incremental_rows
from .language_model import language_model_rows
from .launch import launch_many_row, launch_one_row, shutdown_row
from .loaders import iterate_rows, memory_rows, resume_row, shard_rows, stream_row
from .long_run import long_run_rows
from .manifests import manifest_rows
from .merging import merge_row
from .meshes import mesh_rows
from .metrics import metrics_rows
from .orders import order_rows
from .resharded import resharded_row
from .sections import Section, measure
from .statistics import statistics_rows
from .step import step_row
from .table import (
    Cells,
    beside_accelerate,
    cells,
    headlines,
    put,
    read,
    recorded_setting,
    render,
    replaced,
    setting,
    write,
)
from .tracking import log_row
from .watchdog import watchdog_row

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
README = Path(__file__).parents[2] / "README.md"
MIGRATE = Path(__file__).parents[2] / "docs" / "migrate.md"
COMPARISON = ("<!-- bench: comparison -->", "<!-- bench: comparison end -->")

SECTIONS: dict[str, Section] = {
    "step": partial(step_row, 1),
    "step-ddp": partial(step_row, 2),
    "engines": engine_rows,
    "engine-memory": engine_memory_rows,
    "meshes": mesh_rows,
    "language-model": language_model_rows,
    "evaluation": evaluation_rows,
    "clip": clip_rows,
    "accumulate": accumulate_rows,
    "statistics": statistics_rows,
    "watchdog": watchdog_row,
    "gather": gather_rows,
    "metrics": metrics_rows,
    "loader": iterate_rows,
    "stream": stream_row,
    "shard": shard_rows,
    "resume": resume_row,
    "memory": memory_rows,
    "order": order_rows,
    "dispatch": dispatch_rows,
    "save": save_row,
    "async": save_async_row,
    "incremental": incremental_rows,
    "load": load_rows,
    "resharded": resharded_row,
    "merge": merge_row,
    "manifest": manifest_rows,
    "big-load": placed_load_rows,
    "big-load-memory": load_peak_row,
    "placement": planning_rows,
    "hooks": hook_rows,
    "prefetch": prefetch_row,
    "long": long_run_rows,
    "log": log_row,
    "import": import_rows,
    "help": help_row,
    "dry-run": dry_run_row,
    "launch": launch_one_row,
    "launch-2": launch_many_row,
    "shutdown": shutdown_row,
}


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; default all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: to see that it runs, not to measure"
    )
    whole = (
        "put the table into docs/performance.md, some of its rows into README.md, and what takes less time "
        "than accelerate into docs/migrate.md; with sections, only their rows are replaced"
    )
    parser.add_argument("--write", action="store_true", help=whole)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a row misses its limit")
    args = parser.parse_args()
    unknown = sorted(set(args.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if args.write and args.quick:
        parser.error("--write records what was measured: leave out --quick")
    if args.write and args.sections and setting() != recorded_setting(PAGE):
        parser.error(
            f"the table was measured on {recorded_setting(PAGE)}, and this is {setting()}: leave out the "
            "names of sections, so that all rows are measured on one machine"
        )

    start = time.monotonic()
    chosen = {name: SECTIONS[name] for name in args.sections or SECTIONS}
    rows, failures = measure(chosen, quick=args.quick)
    table, note = cells(rows, failures), setting()
    print(f"{note}\n\n{render(table)}")
    print(f"measured in {(time.monotonic() - start) / 60:.1f} minutes", file=sys.stderr)
    if args.write:
        record(replaced(read(PAGE), table, args.sections) if args.sections else table, note)
    failed = bool(failures) or (args.check and not all(row.passed for row in rows))
    return 1 if failed else 0


def record(table: list[Cells], note: str) -> None:
    """Write a table, and what follows from it, into the pages that show it."""
    write(PAGE, render(table), note)
    write(README, headlines(table), note)
    put(MIGRATE, beside_accelerate(table), COMPARISON)


if __name__ == "__main__":
    sys.exit(main())
