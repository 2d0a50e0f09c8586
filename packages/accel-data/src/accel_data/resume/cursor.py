"""The position of a loader: the epoch, and how much of its global order has been yielded.

Positions are counted in the global order, so a state is valid on any number of processes. Prefetched batches
are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from accel_data.resume.stream_position import PositionHistory, StreamPosition

# Increase it when older states would be read incorrectly.
_VERSION = 1


@dataclass(frozen=True)
class Cursor:
    """A position in the data. The fields are the keys of a saved state.

    Args:
        epoch: Number of the epoch, from 0.
        consumed: Samples of the epoch's global order yielded over all processes (batches, if the batch size
            is unknown).
        batches: Batches yielded on each process in this epoch.
        step_size: Samples of one step over all processes, in the run that stopped here.
        generator: State of the user's generator when the epoch began; if it has ended, that for the next.
        stream: The position in a stream; None for other datasets, and if unknown, so that `consumed` samples
            are skipped.
        part: (index, number) of the process whose samples these are, if the data was sharded before it was
            passed to the loader, so that another number of processes cannot continue; else None.
        ended: Whether the last batch of the epoch was yielded, so that the next epoch comes next.
        order: State of the generator from which the order of this epoch is drawn, if a plain loader of
            torchdata began it; None if seed or generator determine the order.
    """

    epoch: int = 0
    consumed: int = 0
    batches: int = 0
    step_size: int = 1
    generator: torch.Tensor | None = None
    stream: StreamPosition | None = None
    part: tuple[int, int] | None = None
    ended: bool = False
    order: torch.Tensor | None = None

    def after(self, num_batches: int, step_size: int) -> int:
        """Return the number of samples in the epoch's first `num_batches` batches.

        Args:
            num_batches: Counted as in that run; or in steps of `step_size`, if they end here.
            step_size: Samples of one step over all processes, in the run that continues.
        """
        # The same position, counted in steps of the run that continues.
        if self.consumed == num_batches * step_size:
            return self.consumed
        return max(self.consumed + (num_batches - self.batches) * self.step_size, 0)


@dataclass
class EpochRun:
    """One iteration over a loader, from `begin` on.

    Args:
        begin: Where it began.
        limit: Length of the global order, after which there is only padding; None if unknown.
        steps: Batches yielded since.
        generator: State of the user's generator when it began.
        loaded: Whether it began at a loaded position.
        resumed: Whether it continues an epoch that another run began.
        ended: Whether the last batch was yielded.
        history: Where the batches of a stream were read.
    """

    begin: Cursor
    limit: int | None = None
    steps: int = 0
    generator: torch.Tensor | None = None
    loaded: bool = False
    resumed: bool = False
    ended: bool = False
    history: PositionHistory | None = None

    def cursor(self, generator: torch.Tensor | None) -> Cursor:
        """Return the current position, given the state of the user's generator."""
        begin = self.begin
        consumed = begin.consumed + self.steps * begin.step_size
        if self.limit is not None:
            # The last step may be padded: padding is not consumed.
            consumed = min(consumed, max(self.limit, begin.consumed))
        batches = begin.batches + self.steps
        if self.ended:
            return replace(
                begin, consumed=consumed, batches=batches, generator=generator, stream=None, ended=True
            )
        stream = begin.stream if self.history is None else self.history.position_after(self.steps)
        return replace(begin, consumed=consumed, batches=batches, generator=self.generator, stream=stream)


class Progress:
    """The runs over a loader and over the loaders made from it by skipping batches.

    Args:
        epoch: Number of the first epoch.
        pre_shard: See `Cursor.part`.

    Attributes:
        sample_seed: The seed from which those of single samples are derived, if the order has no seed.
    """

    def __init__(self, epoch: int = 0, pre_shard: tuple[int, int] | None = None) -> None:
        self.epoch = epoch
        self.sample_seed = torch.initial_seed() >> 1  # fits into a signed 64-bit integer
        self.pre_shard = pre_shard
        self._begun = False
        self._resume: Cursor | None = None
        self._latest: EpochRun | None = None

    @property
    def resumes(self) -> bool:
        """Whether the next run begins at a loaded position."""
        return self._resume is not None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next run. A loaded position in this epoch, or just before it, is kept."""
        self.epoch = epoch
        self._begun = False
        self._latest = None
        if self._resume is not None and epoch not in (self._resume.epoch, _next_epoch(self._resume)):
            self._resume = None

    def start(self, skip_batches: int, skips_all: bool, step_size: int, limit: int | None) -> EpochRun:
        """Begin a run: at the loaded position, or with a new epoch.

        A position at the end of an epoch equals the start of the next one: skipping all batches of the former
        continues with the latter.

        Args:
            skip_batches: Batches of the epoch to skip; 0 to continue at the loaded position.
            skips_all: Whether these are known to be all batches of an epoch.
            step_size: Samples of one step over all processes.
            limit: Length of the global order; None if unknown.

        Returns:
            The run.
        """
        if self._begun:
            self.epoch += 1
        self._begun = True
        loaded, self._resume = self._resume, None
        place = loaded or Cursor(self.epoch, step_size=step_size)
        # The user's generator continues from there; everything else starts again.
        if place.ended and self.epoch > place.epoch:
            if skips_all or skip_batches == place.batches:
                skip_batches = 0
            place = Cursor(self.epoch, step_size=place.step_size, generator=place.generator)
        consumed, batches = place.consumed, place.batches
        if skip_batches:
            consumed, batches = place.after(skip_batches, step_size), skip_batches
        # Positions count the samples of all processes, a presharded stream only those of its shard.
        num_shards = self.pre_shard[1] if self.pre_shard else 1
        distance = (consumed - place.consumed) // num_shards
        stream = place.stream and place.stream.moved(distance, consumed // num_shards)
        # The user's generator as it was when this epoch began: its order is drawn again.
        generator, ended = place.generator, place.ended
        begin = Cursor(
            self.epoch, consumed, batches, step_size, generator, stream, self.pre_shard, ended, place.order
        )
        resumed = loaded is not None and place.batches > 0
        self._latest = EpochRun(begin, limit, loaded=loaded is not None, resumed=resumed)
        return self._latest

    def finish(self, run: EpochRun, exhausted: bool) -> None:
        """End a run: the next one begins a new epoch.

        After leaving a run early, its position is kept until then.
        """
        # An older run that is closed late, when its iterator is garbage-collected, changes nothing.
        if run is not self._latest:
            return
        if self._begun and self.epoch == run.begin.epoch:
            self.epoch += 1
            self._begun = False
        if exhausted:
            self._latest = None

    def cursor(self, step_size: int, generator: torch.Tensor | None) -> Cursor:
        """Return the current position.

        Args:
            step_size: Samples of one step over all processes.
            generator: Current state of the user's generator.
        """
        if self._resume is not None:
            return self._resume
        if self._latest is None:
            return Cursor(self.epoch, step_size=step_size, generator=generator, part=self.pre_shard)
        return self._latest.cursor(generator)

    def resume(self, cursor: Cursor) -> None:
        """Begin the next run at a position: it finishes that epoch, or is the next one if that has ended."""
        self.set_epoch(_next_epoch(cursor))
        self._resume = cursor


def _next_epoch(cursor: Cursor) -> int:
    """Return the epoch that comes after a position."""
    return cursor.epoch + cursor.ended


@dataclass(frozen=True)
class LoaderDescription:
    """The properties of a loader that a state must match.

    Args:
        seed: Seed of its order; None if there is none.
        length: Length of its dataset; None if unknown.
        limit: Length of its global order; None if unknown.
        is_stream: Whether its dataset is a stream.
        pre_shard: See `Cursor.part`.
        is_keyed: Whether its order is computed from a key, see `SeedableRandomSampler`.
    """

    seed: int | None
    length: int | None
    limit: int | None = None
    is_stream: bool = False
    pre_shard: tuple[int, int] | None = None
    is_keyed: bool = False


def to_state(cursor: Cursor, description: LoaderDescription, sample_seed: int) -> dict[str, Any]:
    """Return the state dict of a loader.

    Args:
        cursor: Its position.
        description: Its properties.
        sample_seed: The seed from which those of single samples are derived.

    Returns:
        A dict of numbers, None and one tensor, which torch.save and weights-only loading accept, and the
        dataset's own states if it has any.
    """
    properties = {
        "seed": description.seed,
        "keyed": description.is_keyed,
        "sample_seed": sample_seed,
        "length": description.length,
    }
    stream = None if cursor.stream is None else cursor.stream.to_state()
    place = {**asdict(replace(cursor, stream=None)), "stream": stream}
    return {"version": _VERSION, **properties, "is_stream": description.is_stream, **place}


_CURSOR_FIELDS = ("epoch", "consumed", "batches", "step_size", "generator", "ended")
_REQUIRED_KEYS = {"version", "seed", "sample_seed", "length", "is_stream", *_CURSOR_FIELDS, "stream", "part"}
_FIX = "Load the states in the order in which the loaders were prepared when they were saved."


def from_state(state: Mapping[str, Any], description: LoaderDescription) -> Cursor:
    """Read and check the state dict of a loader.

    Args:
        state: What `to_state` returned, possibly in another run.
        description: The properties of the loader that loads it.

    Returns:
        The position.

    Raises:
        ValueError: If it is not the state of a loader, or that of another loader or dataset, or its position
            does not exist.
    """
    if not isinstance(state, Mapping) or not set(state) >= _REQUIRED_KEYS:
        seen = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"This is not the state of a prepared loader: it has {seen}, but {sorted(_REQUIRED_KEYS)} are "
            "needed. Pass what the loader's state_dict() returned."
        )
    if state["version"] != _VERSION:
        raise ValueError(
            f"Loader state of version {state['version']!r}, but this version reads only {_VERSION}."
        )
    _check_fits(state, description)
    stream = None if state["stream"] is None else StreamPosition.from_state(state["stream"])
    if stream is not None and state["part"] is not None and tuple(state["part"]) != description.pre_shard:
        stream = stream.without_states()  # counted in the samples of another process
    fields = {name: state[name] for name in _CURSOR_FIELDS}
    # `order` and `keyed` are not required: older states do not have them.
    cursor = Cursor(**fields, stream=stream, part=description.pre_shard, order=state.get("order"))
    _check_cursor(cursor, description.limit)
    return cursor


def start_of_next_epoch(state: Mapping[str, Any]) -> Cursor | None:
    """Return the start of the epoch that comes after a state; None if the state is in the middle of one.

    Args:
        state: What `to_state` returned for any loader, or anything else.
    """
    if not isinstance(state, Mapping) or not set(state) >= _REQUIRED_KEYS or state["version"] != _VERSION:
        return None
    place = Cursor(**{name: state[name] for name in _CURSOR_FIELDS})
    _check_cursor(place, None)
    if place.batches and not place.ended:
        return None
    return Cursor(_next_epoch(place), step_size=place.step_size, generator=place.generator)


def _check_fits(state: Mapping[str, Any], description: LoaderDescription) -> None:
    if bool(state["is_stream"]) != description.is_stream:
        kinds = {True: "a stream (an iterable dataset)", False: "a dataset that is read by index"}
        raise ValueError(
            f"The state is that of a loader over {kinds[not description.is_stream]}, but this is "
            f"{kinds[description.is_stream]}. {_FIX}"
        )
    if (
        description.length is not None
        and state["length"] is not None
        and state["length"] != description.length
    ):
        raise ValueError(
            f"The state is that of a loader over {state['length']} samples, but this dataset has "
            f"{description.length}. {_FIX}"
        )
    shuffled = description.seed is not None
    if (state["seed"] is not None) != shuffled:
        kinds = {True: "a shuffled", False: "an unshuffled"}
        raise ValueError(
            f"The state is that of {kinds[not shuffled]} loader, but this is {kinds[shuffled]} one. {_FIX}"
        )
    # Only the number of processes must be the same: each of them has saved its own position.
    saved, current = (part and int(part[1]) for part in (state["part"], description.pre_shard))
    if saved != current:
        ways = [f"sharded over {count} processes" if count else "not sharded" for count in (saved, current)]
        raise ValueError(
            f"The state is that of a loader whose data was {ways[0]} before it was prepared, but now it is "
            f"{ways[1]}, so it is unknown which samples have been seen. Continue with as many processes as "
            "before. To continue on any number, pass the loader the full dataset from the beginning of a "
            "run. (A stream of `datasets` with as many shards as processes is sharded by these, unless "
            "dispatch_batches=True.)"
        )


def _check_cursor(cursor: Cursor, limit: int | None) -> None:
    for name, low in (("epoch", 0), ("consumed", 0), ("batches", 0), ("step_size", 1)):
        value = getattr(cursor, name)
        # A state may come from an edited file, or from another library.
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(
                f"Loader state with an impossible {name}={value!r}: it must be an integer of at least {low}."
            )
    if not isinstance(cursor.ended, bool):
        raise ValueError(f"Loader state with an impossible ended={cursor.ended!r}: it must be True or False.")
    if limit is not None and cursor.consumed > limit:
        raise ValueError(
            f"Loader state with an impossible consumed={cursor.consumed}: an epoch of this loader has "
            f"{limit} samples."
        )
