"""Places in a stream: how far it has been read when a batch was handed out, and what goes into a state.

A dataset may be one stream, or divide itself over the workers of a loader, which take turns at it. Then a
place says how far each worker's part has been read, and whose turn it is, so that any number of workers can
go on.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

_MARKS = 64  # noted before those are looked through that are not needed any more


class PartPosition(NamedTuple):  # made for every batch: a frozen dataclass takes four times as long
    """How far one part of a stream has been read.

    Args:
        read: Samples read.
        state: The dataset's own state at this point, pickled; None if it has none.
        ended: Whether nothing is left. The state of a dataset may then be that of its start.
    """

    read: int = 0
    state: bytes | None = None
    ended: bool = False


class StreamPosition(NamedTuple):
    """A place in a stream.

    Args:
        chunk: Samples that each part gives when it is its turn.
        left: How many of them the part whose turn it is has still to give.
        turn: Number of that part.
        parts: How far each part has been read; one part for a dataset that does not divide itself.
        num_workers: Number of workers that the dataset divides itself over; 0 if it does not, or is read
            without workers. (In a single worker a dataset may have another order than without.)
        ahead: Samples to pass over from here.
    """

    chunk: int
    left: int
    turn: int = 0
    parts: tuple[PartPosition, ...] = (PartPosition(),)
    num_workers: int = 0
    ahead: int = 0

    def moved(self, distance: int, position: int) -> StreamPosition:
        """Return another place of the same stream.

        Args:
            distance: How many samples further on it is; negative for one that lies before.
            position: How many samples lie before it, to find it from the start.
        """
        # A stream cannot be read backwards: from the start again.
        if distance < 0:
            parts = (PartPosition(),) * len(self.parts)
            return StreamPosition(self.chunk, self.chunk, 0, parts, self.num_workers, position)
        return self._replace(ahead=self.ahead + distance)

    def without_states(self) -> StreamPosition:
        """Return this place for a dataset that has other samples, of which as many have been read."""
        return self._replace(parts=tuple(PartPosition(part.read) for part in self.parts))

    def to_state(self) -> dict[str, Any]:
        """Return what goes into a state dict: numbers, and the dataset's own states."""
        parts = [
            {**part._asdict(), "state": None if part.state is None else pickle.loads(part.state)}
            for part in self.parts
        ]
        return {**self._asdict(), "parts": parts}

    @classmethod
    def from_state(cls, state: Any) -> StreamPosition:
        """Read what `to_state` returned.

        Raises:
            ValueError: If it is something else, or no place.
        """
        try:
            numbers = {name: state[name] for name in ("chunk", "left", "turn", "num_workers", "ahead")}
            parts = tuple(_part(part) for part in state["parts"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Loader state with an impossible stream={state!r:.200}: it lacks {error}. Pass what the "
                "loader's state_dict() returned."
            ) from error
        place = cls(parts=parts, **numbers)
        values = [*numbers.values(), *(part.read for part in parts)]
        is_place = all(type(value) is int and value >= 0 for value in values) and place.chunk > 0
        counted = len(parts) == max(place.num_workers, 1) > place.turn if is_place else False
        if not counted or place.left > place.chunk:
            raise ValueError(
                f"Loader state with an impossible stream={state!r:.200}: all numbers must be integers from 0 "
                "on, `turn` below the number of parts, one part for each worker, and `left` at most `chunk`, "
                "which is positive."
            )
        return place


class Mark(NamedTuple):
    """How far one worker has read its own part of the stream, when it made a batch.

    Args:
        worker: Number of the part.
        num_workers: Number of parts.
        chunk: Samples that each part gives when it is its turn.
        part: How far it has been read.
    """

    worker: int
    num_workers: int
    chunk: int
    part: PartPosition

    def after(self, place: StreamPosition | None) -> StreamPosition:
        """Return the place after this worker's turn, if all others are where they were."""
        parts = (PartPosition(),) * self.num_workers if place is None else place.parts
        parts = (*parts[: self.worker], self.part, *parts[self.worker + 1 :])
        turn = (self.worker + 1) % self.num_workers
        return StreamPosition(self.chunk, self.chunk, turn, parts, self.num_workers)


class Trail:
    """Where the batches of a pass were read, while readers are ahead of what is handed out.

    Args:
        start: Where the pass started; None at the start of an epoch.
        per_step: Batches that make a step.
    """

    def __init__(self, start: StreamPosition | None, per_step: int) -> None:
        self.per_step = per_step
        self._place = start
        self._passed = 0  # batches handed out before the first one in _marks
        self._marks: deque[StreamPosition | Mark] = deque()
        self._lock = Lock()  # one thread may read ahead while another asks for the place

    def add(self, mark: StreamPosition | Mark, steps: int) -> None:
        """Note the next batch.

        Args:
            mark: Where the stream is after it: as a whole, or in the part of the worker that read it.
            steps: Steps handed out so far.
        """
        self._marks.append(mark)
        # Only now and then: a lock for every batch would cost more than the memory of some marks.
        if len(self._marks) > _MARKS:
            with self._lock:
                self._advance(steps)

    def pass_over(self, mark: StreamPosition | Mark) -> None:
        """Note a batch that is not handed out, before the first one that is."""
        with self._lock:
            self._place = _after(mark, self._place)

    def place(self, steps: int) -> StreamPosition | None:
        """Return where the stream was when so many steps had been handed out."""
        with self._lock:
            self._advance(steps)
            return self._place

    def _advance(self, steps: int) -> None:
        # Only what has been handed out: readers may be some batches ahead.
        while self._marks and self._passed < steps * self.per_step:
            self._place = _after(self._marks.popleft(), self._place)
            self._passed += 1


def _after(mark: StreamPosition | Mark, before: StreamPosition | None) -> StreamPosition:
    return mark.after(before) if isinstance(mark, Mark) else mark


def _part(state: Mapping[str, Any]) -> PartPosition:
    inner = state["state"]
    return PartPosition(state["read"], None if inner is None else pickle.dumps(inner), bool(state["ended"]))
