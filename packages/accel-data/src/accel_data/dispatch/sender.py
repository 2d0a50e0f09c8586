"""Sending each step that process 0 has read, over a connection that the loader keeps."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from accel_data.checks import explained
from accel_data.dispatch.channel import Message, Receiver, Sender, open_line
from accel_data.order.layout import StepRows

Parts = tuple[list[Any], StepRows | None, bool]
"""The batches of all processes in one step, what is known of them, and whether it is the last step."""


def hand_out(rounds: Iterator[Parts], sender: Sender, num_workers: int) -> Message | None:
    """Read one step and send it. Whatever fails, the others get the error.

    Args:
        rounds: What is read.
        sender: Sends.
        num_workers: Number of worker processes that read.

    Returns:
        What process 0 itself gets; None if there is no step.
    """
    try:
        found = next(rounds, None)
        # Packed before anything is sent: what fails up to here reaches the others as an error.
        packets = sender.pack(found[0]) if found else {}
    except Exception as raised:
        error = explained(raised, num_workers)
        sender.fail(error)
        raise error from (None if error is raised else raised)
    if found is None:
        sender.stop()
        return None
    parts, fill, last = found
    sender.send(packets, fill, last)
    return Message(parts[0], fill, last)


@dataclass
class Link:
    """The way between process 0 and the others, which a loader shares with those made from it by skipping.

    Args:
        end: This process's end of it.
        reading: What process 0 reads for the latest pass.
    """

    end: Sender | Receiver | None = None
    reading: Generator[Message, None, None] | None = None

    def sender(self, owners: list[int]) -> Sender:
        """Return the end of process 0, when nothing is read for an older pass any more."""
        # A loop that was left early may still have a thread that reads.
        if self.reading is not None:
            self.reading.close()
        line = open_line()
        # A new end after destroy_process_group and a new init: the line belongs to one process group.
        if not isinstance(self.end, Sender) or self.end.line is not line:
            self.end = Sender(line, owners)
        return self.end

    def receiver(self, owners: list[int]) -> Receiver:
        """Return the end of another process."""
        line = open_line()
        if not isinstance(self.end, Receiver) or self.end.line is not line:
            self.end = Receiver(line, owners)
        return self.end
