"""Run the tests marked `gpu`, one after the other, as they share the devices and measure their memory.

Where torch finds no CUDA device, the tests are collected and none is run. The last line says so, and the exit
code is 5, pytest's for no tests: a job that is meant for a GPU must not pass without one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from bench.devices import NOTHING_RAN, none_found

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
_PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu"]


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit code.

    Args:
        arguments: Further ones of pytest; without paths all folders of tests are looked through.
    """
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        print(f"gpu: {', '.join(names)}; torch {torch.__version__}", flush=True)
        return subprocess.run([*_PYTEST, *arguments], cwd=ROOT).returncode
    # What extensions print when the interpreter ends (triton's names of leaks) is of no use: stderr too.
    collected = subprocess.run(
        [*_PYTEST, "--collect-only", "-q", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Its closing line, as "58/8741 tests collected (8683 deselected) in 45.60s".
    found = re.search(r"^(\d+)(?:/\d+)? tests? collected", collected.stdout, re.MULTILINE)
    if found is None or collected.returncode:
        print(collected.stdout)
        return collected.returncode or 1
    print(none_found(f"{found[1]} tests collected, none run"))
    return NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
