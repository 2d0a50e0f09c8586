"""Positions in a stream: how far it had been read when a batch was yielded, and the saved state of that.

A dataset may be one stream, or split itself over the workers of a loader, which take turns. Then a position
says how far each worker's shard has been read, and whose turn it is, so that any number of workers can
continue.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

_MAX_PENDING = 64  # recorded before unneeded ones are removed


class ShardPosition(NamedTuple):  # made for every batch: a frozen dataclass takes four times as long
    """How far one shard of a stream has been read.

    Args:
        read: Samples read.
        state: The dataset's own state at this point, pickled; None if it has none.
        ended: Whether nothing is left. The state of a dataset may then be that of its start.
    """

    read: int = 0
    state: bytes | None = None
    ended: bool = False


class StreamPosition(NamedTuple):
    """A position in a stream. The fields are keys of a saved state.

    Args:
        chunk: Samples that each worker's shard yields per turn.
        left: How many of them the current shard has still to yield.
        turn: Number of the current shard.
        parts: How far each shard has been read; one for a dataset that does not split itself.
        num_workers: Number of workers over which the dataset splits itself; 0 if it does not, or is read
            without workers. (In a single worker a dataset may have a different order than without.)
        ahead: Samples to skip from here.
    """

    chunk: int
    left: int
    turn: int = 0
    parts: tuple[ShardPosition, ...] = (ShardPosition(),)
    num_workers: int = 0
    ahead: int = 0

    def moved(self, distance: int, position: int) -> StreamPosition:
        """Return another position in the same stream.

        Args:
            distance: Distance in samples; negative for an earlier position.
            position: Number of samples before it, to find it from the start.
        """
        # A stream cannot be read backwards: start again.
        if distance < 0:
            shards = (ShardPosition(),) * len(self.parts)
            return StreamPosition(self.chunk, self.chunk, 0, shards, self.num_workers, position)
        return self._replace(ahead=self.ahead + distance)

    def without_states(self) -> StreamPosition:
        """Return this position for a dataset with other samples, of which equally many have been read."""
        return self._replace(parts=tuple(ShardPosition(shard.read) for shard in self.parts))

    def to_state(self) -> dict[str, Any]:
        """Return the content of a state dict: numbers, and the dataset's own states."""
        shards = [
            {**shard._asdict(), "state": None if shard.state is None else pickle.loads(shard.state)}
            for shard in self.parts
        ]
        return {**self._asdict(), "parts": shards}

    @classmethod
    def from_state(cls, state: Any) -> StreamPosition:
        """Read what `to_state` returned.

        Raises:
            ValueError: If it is something else, or not a position.
        """
        try:
            numbers = {name: state[name] for name in ("chunk", "left", "turn", "num_workers", "ahead")}
            shards = tuple(_shard_position(shard) for shard in state["parts"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Loader state with an impossible stream={state!r:.200}: it lacks {error}. Pass what the "
                "loader's state_dict() returned."
            ) from error
        position = cls(parts=shards, **numbers)
        values = [*numbers.values(), *(shard.read for shard in shards)]
        is_valid = all(type(value) is int and value >= 0 for value in values) and position.chunk > 0
        has_all_shards = len(shards) == max(position.num_workers, 1) > position.turn if is_valid else False
        if not has_all_shards or position.left > position.chunk:
            raise ValueError(
                f"Loader state with an impossible stream={state!r:.200}: all numbers must be integers from 0 "
                "on, `turn` below the number of parts, one part per worker, and `left` at most `chunk`, "
                "which must be positive."
            )
        return position


class BlockPosition(NamedTuple):
    """How far one worker had read its shard of the stream when it made a batch.

    Args:
        worker: Number of the shard.
        num_workers: Number of shards.
        chunk: Samples that each shard yields per turn.
        shard: How far it has been read.
    """

    worker: int
    num_workers: int
    chunk: int
    shard: ShardPosition

    def after(self, place: StreamPosition | None) -> StreamPosition:
        """Return the position after this worker's turn, given the previous position."""
        shards = (ShardPosition(),) * self.num_workers if place is None else place.parts
        shards = (*shards[: self.worker], self.shard, *shards[self.worker + 1 :])
        turn = (self.worker + 1) % self.num_workers
        return StreamPosition(self.chunk, self.chunk, turn, shards, self.num_workers)


class PositionHistory:
    """Where the batches of a run were read, while readers are ahead of what was yielded.

    Args:
        start: Where the run started; None at the start of an epoch.
        per_step: Batches per step.
    """

    def __init__(self, start: StreamPosition | None, per_step: int) -> None:
        self.per_step = per_step
        self._current = start
        self._num_passed = 0  # batches yielded before the first one in _marks
        self._pending: deque[StreamPosition | BlockPosition] = deque()
        self._lock = Lock()  # one thread may read ahead while another gets the position

    def add(self, position: StreamPosition | BlockPosition, steps: int) -> None:
        """Add the next batch.

        Args:
            position: Where the stream is after it: of the full stream, or of the shard of its worker.
            steps: Steps yielded so far.
        """
        self._pending.append(position)
        # Only occasionally: a lock for every batch would cost more than the memory of some positions.
        if len(self._pending) > _MAX_PENDING:
            with self._lock:
                self._advance(steps)

    def skip(self, position: StreamPosition | BlockPosition) -> None:
        """Add a batch that is not yielded, before the first one that is."""
        with self._lock:
            self._current = _after(position, self._current)

    def position_after(self, steps: int) -> StreamPosition | None:
        """Return where the stream was after that many yielded steps."""
        with self._lock:
            self._advance(steps)
            return self._current

    def _advance(self, steps: int) -> None:
        # Only what has been yielded: readers may be some batches ahead.
        while self._pending and self._num_passed < steps * self.per_step:
            self._current = _after(self._pending.popleft(), self._current)
            self._num_passed += 1


def _after(position: StreamPosition | BlockPosition, previous: StreamPosition | None) -> StreamPosition:
    return position.after(previous) if isinstance(position, BlockPosition) else position


def _shard_position(state: Mapping[str, Any]) -> ShardPosition:
    inner = state["state"]
    return ShardPosition(state["read"], None if inner is None else pickle.dumps(inner), bool(state["ended"]))
