"""The memory of this machine that is free, in bytes, within the limit of its container."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc/meminfo")
# A container's control group: (limit, used, statistics) of versions 2 and 1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def available_ram() -> int:
    """Return the memory that a program can take without swapping, in bytes.

    On Linux the kernel's `MemAvailable`, or the rest of the container's limit if that is less; on macOS all
    memory of the machine.

    Raises:
        RuntimeError: On Windows, where Python's library cannot read it.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            "accel cannot see how much memory is free on Windows. Pass how much a model may take, such as "
            'max_memory={"cpu": "16GiB"}.'
        )
    if not _PROC.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([_number(_PROC.read_text(), "MemAvailable:") * 1024, *_free_in_cgroups()]))


def _free_in_cgroups() -> Iterator[int]:
    for limit, used, statistics in _CGROUPS:
        if Path(limit).exists() and (limit_text := Path(limit).read_text().strip()) != "max":
            # Unused pages of files count as used, and are dropped when memory is needed.
            cached = _number(Path(statistics).read_text(), "inactive_file")
            yield int(limit_text) - int(Path(used).read_text()) + cached


def _number(text: str, key: str) -> int:
    match = re.search(rf"^{key}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0
