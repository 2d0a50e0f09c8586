"""The ranks, the device and the backend of a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProcessInfo:
    """Ranks, device and backend of one process.

    Args:
        rank: Rank among all processes, from 0.
        world_size: Number of processes.
        local_rank: Rank among the processes of this machine, from 0.
        local_world_size: Number of processes on this machine.
        device: The device of its tensors.
        backend: Communication backend; None for a single process.
        distributed_type: The kind of distributed run.
        debug: Whether collectives are compared between processes before they run.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str | None
    distributed_type: DistributedType
    debug: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is the first process of the run."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last process of the run."""
        return self.rank == self.world_size - 1

    @property
    def node_rank(self) -> int:
        """Rank of this machine, from 0 (every machine runs the same number of processes)."""
        # With every supported launcher the ranks of a machine are consecutive.
        return self.rank // self.local_world_size
