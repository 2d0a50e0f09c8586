"""The memory of this machine that is free, in bytes, within the limit of its container."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc/meminfo")
# A container sees its own control group here: (limit, used, statistics) of versions 2 and 1.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def available_ram() -> int:
    """Return the memory that a program can take without swapping, in bytes.

    On Linux that is what the kernel says is available (`MemAvailable`), or what is left of the container's
    limit if that is less; on macOS all memory of the machine.

    Raises:
        RuntimeError: On Windows, which Python's library does not ask for it.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            "accel cannot see how much memory is free on Windows. Say how much a model may take, such as "
            'max_memory={"cpu": "16GiB"}.'
        )
    if not _PROC.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([_number(_PROC.read_text(), "MemAvailable:") * 1024, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    for limit, used, statistics in _GROUPS:
        if Path(limit).exists() and (most := Path(limit).read_text().strip()) != "max":
            # Pages of files that nothing uses count as used, and are dropped when memory is asked for.
            cached = _number(Path(statistics).read_text(), "inactive_file")
            yield int(most) - int(Path(used).read_text()) + cached


def _number(text: str, key: str) -> int:
    found = re.search(rf"^{key}\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0
