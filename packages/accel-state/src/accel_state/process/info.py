"""The facts of a process: its rank, its device, and how it works together with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProcessInfo:
    """The facts of one process.

    Args:
        rank: Place among all processes, from 0.
        world_size: Number of processes.
        local_rank: Place among the processes of this machine, from 0.
        local_world_size: Number of processes on this machine.
        device: Where its tensors live.
        backend: Communication backend; None when it runs alone.
        distributed_type: How the processes work together.
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
        """Place of this machine among all, from 0 (every machine runs equally many processes)."""
        # Ranks follow each other on a machine, with every launcher that is supported.
        return self.rank // self.local_world_size
