"""Where a loader is: the epoch, and how much of its global order has been handed out.

Places are counted in the global order, so a state is good on any number of processes. What workers or a
loader have read ahead is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from accel_data.place import Place, Trail

__all__ = ["Cursor", "Pass", "Progress", "from_state", "to_state"]

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
        generator: State of the user's generator when the epoch began.
        stream: The place in a dataset that can only be read from the front; None for others, and where it is
            not known, so that `consumed` samples are passed over.
    """

    epoch: int = 0
    consumed: int = 0
    batches: int = 0
    step_size: int = 1
    generator: torch.Tensor | None = None
    stream: Place | None = None

    def after(self, num_batches: int) -> int:
        """Return how many samples the epoch's first `num_batches` batches hold, counted as that run did."""
        return max(self.consumed + (num_batches - self.batches) * self.step_size, 0)


@dataclass
class Pass:
    """One iteration over a loader, from `begin` on.

    Args:
        begin: Where it began.
        limit: Length of the global order, beyond which there is only padding; None if not known.
        steps: Batches handed out since.
        generator: State of the user's generator when it began.
        resumed: Whether it goes on with an epoch that another run has begun.
        trail: Where the batches of a stream were read.
    """

    begin: Cursor
    limit: int | None = None
    steps: int = 0
    generator: torch.Tensor | None = None
    resumed: bool = False
    trail: Trail | None = None

    def cursor(self) -> Cursor:
        """Return the present place."""
        begin = self.begin
        consumed = begin.consumed + self.steps * begin.step_size
        if self.limit is not None:
            consumed = min(consumed, max(self.limit, begin.consumed))
        batches = begin.batches + self.steps
        stream = begin.stream if self.trail is None else self.trail.place(self.steps)
        return replace(begin, consumed=consumed, batches=batches, generator=self.generator, stream=stream)


class Progress:
    """The passes of a loader and of the loaders that were made from it by skipping.

    Args:
        epoch: Number of the first epoch.

    Attributes:
        sample_seed: What the seeds of single samples are made of, where the order has no seed.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.sample_seed = torch.initial_seed() >> 1  # fits into a signed 64-bit integer
        self._begun = False
        self._resume: Cursor | None = None
        self._latest: Pass | None = None

    @property
    def resumes(self) -> bool:
        """Whether the next pass begins at a loaded place."""
        return self._resume is not None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A loaded place in this epoch is kept."""
        self.epoch = epoch
        self._begun = False
        self._latest = None
        if self._resume is not None and self._resume.epoch != epoch:
            self._resume = None

    def start(self, skip_batches: int, step_size: int, limit: int | None) -> Pass:
        """Begin a pass: at the loaded place, or else with a new epoch.

        Args:
            skip_batches: Batches of the epoch to pass over; 0 to go on where the loaded place says.
            step_size: Samples of one step, all processes together.
            limit: Length of the global order; None if not known.

        Returns:
            The pass.
        """
        if self._begun:
            self.epoch += 1
        self._begun = True
        resumed, self._resume = self._resume, None
        place = resumed or Cursor(self.epoch, step_size=step_size)
        consumed, batches = place.consumed, place.batches
        if skip_batches:
            consumed, batches = place.after(skip_batches), skip_batches
        stream = place.stream and place.stream.moved(consumed - place.consumed, consumed)
        begin = Cursor(self.epoch, consumed, batches, step_size, place.generator, stream)
        self._latest = Pass(begin, limit, resumed=resumed is not None and resumed.batches > 0)
        return self._latest

    def finish(self, done: Pass, exhausted: bool) -> None:
        """End a pass: the next one begins a new epoch.

        A pass that was left early stays the place of the loader until then.
        """
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
            return Cursor(self.epoch, step_size=step_size, generator=generator)
        return self._latest.cursor()

    def resume(self, cursor: Cursor) -> None:
        """Begin the next pass at a place, whose epoch it finishes."""
        self.set_epoch(cursor.epoch)
        self._resume = cursor


def to_state(cursor: Cursor, seed: int | None, length: int | None, sample_seed: int) -> dict[str, Any]:
    """Return the state dict of a loader.

    Args:
        cursor: Its place.
        seed: Seed of its order; None where there is none.
        length: Length of its dataset; None if not known.
        sample_seed: What the seeds of single samples are made of.

    Returns:
        A dict of numbers, None and one tensor, which torch.save and weights-only loading take, and the states
        of a dataset that has some of its own.
    """
    seeds = {"seed": seed, "sample_seed": sample_seed}
    stream = None if cursor.stream is None else cursor.stream.to_state()
    place = {**asdict(replace(cursor, stream=None)), "stream": stream}
    return {"version": _VERSION, **seeds, "length": length, **place}


def from_state(state: Mapping[str, Any], seeded: bool, length: int | None, limit: int | None) -> Cursor:
    """Read and check the state dict of a loader.

    Args:
        state: What `to_state` returned, maybe in another run.
        seeded: Whether the loader's order has a seed.
        length: Length of the loader's dataset; None if not known.
        limit: Length of its global order; None if not known.

    Returns:
        The place.

    Raises:
        ValueError: If it is not a state of a loader, or that of another loader or dataset, or its place does
            not exist.
    """
    place = ("epoch", "consumed", "batches", "step_size", "generator")
    expected = {"version", "seed", "sample_seed", "length", *place, "stream"}
    if not isinstance(state, Mapping) or not expected <= set(state):
        seen = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"This is not the state of a prepared loader: it has {seen}, but {sorted(expected)} are needed. "
            "Pass what the loader's state_dict() returned."
        )
    if state["version"] != _VERSION:
        raise ValueError(
            f"Loader state of version {state['version']!r}, but this version reads only {_VERSION}."
        )
    if length is not None and state["length"] is not None and state["length"] != length:
        raise ValueError(
            f"The state is that of a loader over {state['length']} samples, but this dataset has {length}. "
            "Load the states in the order in which the loaders were prepared when they were saved."
        )
    if (state["seed"] is not None) != seeded:
        kinds = {True: "a shuffled", False: "an unshuffled"}
        raise ValueError(
            f"The state is that of {kinds[not seeded]} loader, but this is {kinds[seeded]} one. Load the "
            "states in the order in which the loaders were prepared when they were saved."
        )
    stream = None if state["stream"] is None else Place.from_state(state["stream"])
    cursor = Cursor(**{name: state[name] for name in place}, stream=stream)
    _check_place(cursor, limit)
    return cursor


def _check_place(cursor: Cursor, limit: int | None) -> None:
    for name, low in (("epoch", 0), ("consumed", 0), ("batches", 0), ("step_size", 1)):
        value = getattr(cursor, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(
                f"Loader state with an impossible {name}={value!r}: it must be an integer from {low} on."
            )
    if limit is not None and cursor.consumed > limit:
        raise ValueError(
            f"Loader state with an impossible consumed={cursor.consumed}: an epoch of this loader has "
            f"{limit} samples."
        )
