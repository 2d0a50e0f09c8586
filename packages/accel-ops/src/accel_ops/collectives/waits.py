"""Where operations wait for collectives that they have started.

The watchdog takes a thread in this file for one that waits, and statistics time these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, meanwhile: Callable[[], _T]
) -> _T:
    """Gather a small buffer of all processes, and do something while it is on its way.

    Args:
        output: Where the buffers go, one after the other, in rank order: of shape (world_size * n,).
        tensor: This process's, of shape (n,).
        group: The group of all processes.
        meanwhile: What to call; it leaves both alone.

    Returns:
        What `meanwhile` returns.
    """
    if output.device.type == "cpu":
        # The group's own function, as torch's checks around it cost a tenth of such a collective.
        start = getattr(group, "all_gather_single", None) or group._allgather_base
        work = start(output, tensor)
    else:
        work = start_all_gather(output, tensor, group, async_op=False)  # the device's stream waits
    result = meanwhile()
    if work is not None:
        work.wait()
    return result


def start_all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = True
) -> Any:
    """Start to gather a buffer of all processes, as `all_gather`; return what to `wait` for."""
    # all_gather_into_tensor is called all_gather_single from torch 2.13 on, and warns under its old name.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, tensor, group=group, async_op=async_op)


def wait(work: Any) -> None:
    """Wait for a collective that was started."""
    work.wait()
