"""The tasks of one machine, from Slurm's variables. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accel_state import env

_NAMES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # the step's first


def tasks_on_machine(node: int, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of tasks on one machine of a Slurm step.

    Args:
        node: Rank of the machine in the step, from 0 (SLURM_NODEID).
        environ: The mapping to read; this process's environment by default.

    Returns:
        The number; None where Slurm names none.

    Raises:
        ValueError: If the text is not what Slurm sets, e.g. `8(x2),4`, or has fewer machines.
    """
    name = next((name for name in _NAMES if env.is_set(name, environ)), None)
    if name is None:
        return None
    text = env.get(name, environ)
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(f"{name}={text} is not understood; Slurm sets e.g. 8(x2),4.")
        # 8(x2) stands for two machines with 8 tasks each.
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(
            f"{name}={text} lists {len(counts)} machine(s), and this one has SLURM_NODEID={node}, which "
            "counts from 0. Start this with srun, or unset these variables for a run outside of Slurm."
        )
    return counts[node]
