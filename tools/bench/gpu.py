"""Measure the rows that an accelerator changes, print one table, and on request write it into the manual.

`python -m tools.bench.gpu` measures on the first CUDA device, and the language model on two where there are
two; `python -m tools.bench.gpu step async` measures only those rows. Without a CUDA device it measures
nothing, says so in its last line, and exits with 5, as `tools/run_gpu_tests.py` does. `--device cpu` runs the
same rows on the CPU, to see that they run.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from .accumulate import accumulate_rows
from .checkpoints import save_async_row
from .compiled import compiled_row
from .devices import NOTHING_RAN, none_found
from .engines import engine_row
from .language_model import language_model_rows
from .prefetch import loader_rows
from .sections import Section, measure
from .step import step_row
from .table import cells, render, setting, write

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MARKS = ("<!-- gpu bench: begin -->", "<!-- gpu bench: end -->")

SECTIONS: dict[str, Section] = {
    "step": partial(step_row, 1),
    "accumulate": accumulate_rows,
    "loader": loader_rows,
    "async": save_async_row,
    "fsdp2": partial(engine_row, "fsdp2", 1),
    "compile": compiled_row,
    "language-model": language_model_rows,
}


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; default all"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: to see that it runs, not to measure"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    unknown = sorted(set(args.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if args.write and (args.sections or args.quick or args.device != "cuda"):
        parser.error(
            "--write records the full table of a CUDA device: leave out --quick, --device and sections"
        )

    chosen = args.sections or list(SECTIONS)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(none_found(f"{len(chosen)} sections of the bench, none run"))
        return NOTHING_RAN
    sections = {name: partial(SECTIONS[name], device=args.device) for name in chosen}
    rows, failures = measure(sections, quick=args.quick)
    table, note = render(cells(rows, failures)), f"{_device(args.device)}, {setting()}"
    print(f"{note}\n\n{table}")
    if args.write:
        write(PAGE, table, note, MARKS)
    return 1 if failures else 0


def _device(device: str) -> str:
    if device == "cpu":
        return "CPU, to see that the rows run"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())
