"""A process group for a single process without a launcher, which sharded engines need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from accel_state.devices.table import device_spec
from accel_state.env import CPUInformation
from accel_state.process import rendezvous

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def ensure_process_group(process: ProcessInfo) -> None:
    """Create a process group of one process if there is none.

    Args:
        process: This process.
    """
    if process.world_size == 1 and not rendezvous.has_group():
        # Rank 0 of 1, on this machine too.
        single = CPUInformation(0, 1, 0, 1)
        # In memory: a TCP store would need a free port, and a file store a folder.
        store = dist.HashStore()  # type: ignore[attr-defined]
        rendezvous.start(device_spec(process.device), single, process.device, {"store": store})
