"""Where a loader is: the epoch, and how much of its global order has been handed out.

Places are counted in the global order, so a state is good on any number of processes. What workers or a
loader have read ahead is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from accel_data.resume.stream_position import StreamPosition, Trail

# To be raised when the states of before would be read wrongly.
_VERSION = 1


@dataclass(frozen=True)
class Cursor:
    """A place in the data.

    Args:
        epoch: Number of the epoch, from 0.
        consumed: Samples of the epoch's global order handed out, all processes together (batches, where the
            batch size is not known).
        batches: Batches handed out to each process in this epoch.
        step_size: Samples of one step, all processes together, in the run that stopped here.
        generator: State of the user's generator when the epoch began; if it has ended, that for the next.
        stream: The place in a dataset that can only be read from the front; None for others, and where it is
            not known, so that `consumed` samples are passed over.
        part: (index, number) of the process whose samples these are, where they were divided before they were
            given to the loader, so that another number of processes cannot go on; None where they were not.
        ended: Whether the last batch of the epoch was handed out, so that the next epoch comes next.
        order: State of the generator that the order of this epoch is drawn from, if a plain loader of
            torchdata has begun it; None where seed or generator say the order.
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
        """Return how many samples the epoch's first `num_batches` batches hold.

        Args:
            num_batches: Counted as that run did; or as one with steps of `step_size`, if they end here.
            step_size: Samples of one step, all processes together, in the run that goes on.
        """
        # The same place, counted with the steps of the run that goes on.
        if self.consumed == num_batches * step_size:
            return self.consumed
        return max(self.consumed + (num_batches - self.batches) * self.step_size, 0)


@dataclass
class Pass:
    """One iteration over a loader, from `begin` on.

    Args:
        begin: Where it began.
        limit: Length of the global order, beyond which there is only padding; None if not known.
        steps: Batches handed out since.
        generator: State of the user's generator when it began.
        loaded: Whether it began at a loaded place.
        resumed: Whether it goes on with an epoch that another run has begun.
        ended: Whether the last batch was handed out.
        trail: Where the batches of a stream were read.
    """

    begin: Cursor
    limit: int | None = None
    steps: int = 0
    generator: torch.Tensor | None = None
    loaded: bool = False
    resumed: bool = False
    ended: bool = False
    trail: Trail | None = None

    def cursor(self, generator: torch.Tensor | None) -> Cursor:
        """Return the present place, where the user's generator is in this state."""
        begin = self.begin
        consumed = begin.consumed + self.steps * begin.step_size
        if self.limit is not None:
            # The last step may be padded: what is beyond the end has not been consumed.
            consumed = min(consumed, max(self.limit, begin.consumed))
        batches = begin.batches + self.steps
        if self.ended:
            return replace(
                begin, consumed=consumed, batches=batches, generator=generator, stream=None, ended=True
            )
        stream = begin.stream if self.trail is None else self.trail.place(self.steps)
        return replace(begin, consumed=consumed, batches=batches, generator=self.generator, stream=stream)


class Progress:
    """The passes of a loader and of the loaders that were made from it by skipping.

    Args:
        epoch: Number of the first epoch.
        part: See `Cursor`.

    Attributes:
        sample_seed: What the seeds of single samples are made of, where the order has no seed.
    """

    def __init__(self, epoch: int = 0, part: tuple[int, int] | None = None) -> None:
        self.epoch = epoch
        self.sample_seed = torch.initial_seed() >> 1  # fits into a signed 64-bit integer
        self.part = part
        self._begun = False
        self._resume: Cursor | None = None
        self._latest: Pass | None = None

    @property
    def resumes(self) -> bool:
        """Whether the next pass begins at a loaded place."""
        return self._resume is not None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A loaded place in this epoch, or just before it, is kept."""
        self.epoch = epoch
        self._begun = False
        self._latest = None
        if self._resume is not None and epoch not in (self._resume.epoch, _next_epoch(self._resume)):
            self._resume = None

    def start(self, skip_batches: int, skips_all: bool, step_size: int, limit: int | None) -> Pass:
        """Begin a pass: at the loaded place, or else with a new epoch.

        A place at the end of an epoch is that at the start of the next one: who passes over all batches of
        the former goes on with the latter.

        Args:
            skip_batches: Batches of the epoch to pass over; 0 to go on where the loaded place says.
            skips_all: Whether these are known to be all batches of an epoch.
            step_size: Samples of one step, all processes together.
            limit: Length of the global order; None if not known.

        Returns:
            The pass.
        """
        if self._begun:
            self.epoch += 1
        self._begun = True
        loaded, self._resume = self._resume, None
        place = loaded or Cursor(self.epoch, step_size=step_size)
        # The user's generator goes on from there; everything else begins anew.
        if place.ended and self.epoch > place.epoch:
            if skips_all or skip_batches == place.batches:
                skip_batches = 0
            place = Cursor(self.epoch, step_size=place.step_size, generator=place.generator)
        consumed, batches = place.consumed, place.batches
        if skip_batches:
            consumed, batches = place.after(skip_batches, step_size), skip_batches
        # Places count the samples of all processes, a divided stream only those of its own part.
        parts = self.part[1] if self.part else 1
        distance = (consumed - place.consumed) // parts
        stream = place.stream and place.stream.moved(distance, consumed // parts)
        # The user's generator as it was when this epoch began: its order is drawn again.
        generator, ended = place.generator, place.ended
        begin = Cursor(
            self.epoch, consumed, batches, step_size, generator, stream, self.part, ended, place.order
        )
        resumed = loaded is not None and place.batches > 0
        self._latest = Pass(begin, limit, loaded=loaded is not None, resumed=resumed)
        return self._latest

    def finish(self, done: Pass, exhausted: bool) -> None:
        """End a pass: the next one begins a new epoch.

        A pass that was left early stays the place of the loader until then.
        """
        # An older pass that is closed late, as its iterator is collected, changes nothing.
        if done is not self._latest:
            return
        if self._begun and self.epoch == done.begin.epoch:
            self.epoch += 1
            self._begun = False
        if exhausted:
            self._latest = None

    def cursor(self, step_size: int, generator: torch.Tensor | None) -> Cursor:
        """Return the present place.

        Args:
            step_size: Samples of one step, all processes together.
            generator: Present state of the user's generator.
        """
        if self._resume is not None:
            return self._resume
        if self._latest is None:
            return Cursor(self.epoch, step_size=step_size, generator=generator, part=self.part)
        return self._latest.cursor(generator)

    def resume(self, cursor: Cursor) -> None:
        """Begin the next pass at a place: it finishes its epoch, or is the next one if that has ended."""
        self.set_epoch(_next_epoch(cursor))
        self._resume = cursor


def _next_epoch(cursor: Cursor) -> int:
    """Return the epoch of what comes after a place."""
    return cursor.epoch + cursor.ended


@dataclass(frozen=True)
class Kind:
    """The properties of a loader that a state must match.

    Args:
        seed: Seed of its order; None where there is none.
        length: Length of its dataset; None if not known.
        limit: Length of its global order; None if not known.
        is_stream: Whether its dataset can only be read from the front.
        part: See `Cursor`.
        is_keyed: Whether its order is computed from a key, see `SeedableRandomSampler`.
    """

    seed: int | None
    length: int | None
    limit: int | None = None
    is_stream: bool = False
    part: tuple[int, int] | None = None
    is_keyed: bool = False


def to_state(cursor: Cursor, kind: Kind, sample_seed: int) -> dict[str, Any]:
    """Return the state dict of a loader.

    Args:
        cursor: Its place.
        kind: What is known of it.
        sample_seed: What the seeds of single samples are made of.

    Returns:
        A dict of numbers, None and one tensor, which torch.save and weights-only loading take, and the states
        of a dataset that has some of its own.
    """
    known = {"seed": kind.seed, "keyed": kind.is_keyed, "sample_seed": sample_seed, "length": kind.length}
    stream = None if cursor.stream is None else cursor.stream.to_state()
    place = {**asdict(replace(cursor, stream=None)), "stream": stream}
    return {"version": _VERSION, **known, "is_stream": kind.is_stream, **place}


_PLACE = ("epoch", "consumed", "batches", "step_size", "generator", "ended")
_EXPECTED = {"version", "seed", "sample_seed", "length", "is_stream", *_PLACE, "stream", "part"}
_FIX = "Load the states in the order in which the loaders were prepared when they were saved."


def from_state(state: Mapping[str, Any], kind: Kind) -> Cursor:
    """Read and check the state dict of a loader.

    Args:
        state: What `to_state` returned, maybe in another run.
        kind: What is known of the loader that gets it.

    Returns:
        The place.

    Raises:
        ValueError: If it is not a state of a loader, or that of another loader or dataset, or its place does
            not exist.
    """
    if not isinstance(state, Mapping) or not set(state) >= _EXPECTED:
        seen = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"This is not the state of a prepared loader: it has {seen}, but {sorted(_EXPECTED)} are needed. "
            "Pass what the loader's state_dict() returned."
        )
    if state["version"] != _VERSION:
        raise ValueError(
            f"Loader state of version {state['version']!r}, but this version reads only {_VERSION}."
        )
    _check_fits(state, kind)
    stream = None if state["stream"] is None else StreamPosition.from_state(state["stream"])
    if stream is not None and state["part"] is not None and tuple(state["part"]) != kind.part:
        stream = stream.without_states()  # another process has counted samples of its own
    known = {name: state[name] for name in _PLACE}
    # `order` is not among the expected names, nor is `keyed`: states of before they came have none.
    cursor = Cursor(**known, stream=stream, part=kind.part, order=state.get("order"))
    _check_place(cursor, kind.limit)
    return cursor


def between_epochs(state: Mapping[str, Any]) -> Cursor | None:
    """Return the start of the epoch that comes after a state; None where that is in the middle of one.

    Args:
        state: What `to_state` returned for any loader, or anything else.
    """
    if not isinstance(state, Mapping) or not set(state) >= _EXPECTED or state["version"] != _VERSION:
        return None
    place = Cursor(**{name: state[name] for name in _PLACE})
    _check_place(place, None)
    if place.batches and not place.ended:
        return None
    return Cursor(_next_epoch(place), step_size=place.step_size, generator=place.generator)


def _check_fits(state: Mapping[str, Any], kind: Kind) -> None:
    if bool(state["is_stream"]) != kind.is_stream:
        kinds = {True: "a stream (an iterable dataset)", False: "a dataset that is read by index"}
        raise ValueError(
            f"The state is that of a loader over {kinds[not kind.is_stream]}, but this is "
            f"{kinds[kind.is_stream]}. {_FIX}"
        )
    if kind.length is not None and state["length"] is not None and state["length"] != kind.length:
        raise ValueError(
            f"The state is that of a loader over {state['length']} samples, but this dataset has "
            f"{kind.length}. {_FIX}"
        )
    shuffled = kind.seed is not None
    if (state["seed"] is not None) != shuffled:
        kinds = {True: "a shuffled", False: "an unshuffled"}
        raise ValueError(
            f"The state is that of {kinds[not shuffled]} loader, but this is {kinds[shuffled]} one. {_FIX}"
        )
    # Only the number of processes must be the same: each of them has saved its own place.
    saved, here = (part and int(part[1]) for part in (state["part"], kind.part))
    if saved != here:
        ways = [f"divided over {count} processes" if count else "whole" for count in (saved, here)]
        raise ValueError(
            f"The state is that of a loader whose data was {ways[0]} before it was prepared, but here it is "
            f"{ways[1]}, so it is not known which samples have been seen. Go on with as many processes as "
            "before; or give the loader the whole dataset from the beginning of a run, and it will go on on "
            "any number. (A stream of `datasets` with as many shards as processes is divided by its shards, "
            "unless dispatch_batches=True.)"
        )


def _check_place(cursor: Cursor, limit: int | None) -> None:
    for name, low in (("epoch", 0), ("consumed", 0), ("batches", 0), ("step_size", 1)):
        value = getattr(cursor, name)
        # A state may come from a file that was edited, or from another library.
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(
                f"Loader state with an impossible {name}={value!r}: it must be an integer from {low} on."
            )
    if not isinstance(cursor.ended, bool):
        raise ValueError(f"Loader state with an impossible ended={cursor.ended!r}: it must be True or False.")
    if limit is not None and cursor.consumed > limit:
        raise ValueError(
            f"Loader state with an impossible consumed={cursor.consumed}: an epoch of this loader has "
            f"{limit} samples."
        )
