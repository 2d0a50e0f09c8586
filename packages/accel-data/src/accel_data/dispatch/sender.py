"""Sends each step that process 0 has read, over a connection that the loader keeps."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from accel_data.checks import explain_worker_error
from accel_data.dispatch.channel import Message, Receiver, Sender, get_dispatch_group
from accel_data.order.layout import StepRows

StepItems = tuple[list[Any], StepRows | None, bool]
"""The batches of all ranks in one step, their sizes, and whether it is the last step."""


def send_step(steps: Iterator[StepItems], sender: Sender, num_workers: int) -> Message | None:
    """Read one step and send it. If that fails, the other processes get the error.

    Args:
        steps: The steps that are read.
        sender: The sender.
        num_workers: Number of worker processes.

    Returns:
        The message for process 0 itself; None if there is no step.
    """
    try:
        step = next(steps, None)
        # Packed before anything is sent: errors up to here are sent to the other processes.
        packets = sender.pack(step[0]) if step else {}
    except Exception as raised:
        error = explain_worker_error(raised, num_workers)
        sender.fail(error)
        raise error from (None if error is raised else raised)
    if step is None:
        sender.stop()
        return None
    batches, step_rows, last = step
    sender.send(packets, step_rows, last)
    return Message(batches[0], step_rows, last)


@dataclass
class Connection:
    """The connection between process 0 and the others, shared with loaders made from it by skipping batches.

    Args:
        end: This process's side of it.
        reading: What process 0 reads for the latest run.
    """

    end: Sender | Receiver | None = None
    reading: Generator[Message, None, None] | None = None

    def sender(self, data_ranks: list[int]) -> Sender:
        """Return the side of process 0, after reading for an older run has stopped."""
        # A loop that was left early may still have a reading thread.
        if self.reading is not None:
            self.reading.close()
        dispatch_group = get_dispatch_group()
        # A new one after destroy_process_group and a new init: the group belongs to one process group.
        if not isinstance(self.end, Sender) or self.end.dispatch_group is not dispatch_group:
            self.end = Sender(dispatch_group, data_ranks)
        return self.end

    def receiver(self, data_ranks: list[int]) -> Receiver:
        """Return the side of another process."""
        dispatch_group = get_dispatch_group()
        if not isinstance(self.end, Receiver) or self.end.dispatch_group is not dispatch_group:
            self.end = Receiver(dispatch_group, data_ranks)
        return self.end
