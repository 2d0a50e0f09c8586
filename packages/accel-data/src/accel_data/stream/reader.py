"""Reading a stream from its start or from a place in it, in the main process or in a worker of a loader."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_data.resume.stream_position import Mark, PartPosition, StreamPosition
from accel_data.stream.hugging_face import steps_of


class Stream(NamedTuple):
    """A dataset that is being read, maybe in a worker of a loader.

    Args:
        samples: What is left of it.
        worker: Index of the worker; 0 where there is none.
        num_workers: Number of workers; 1 where there are none.
        divided: Whether the dataset gives each worker samples of its own, so that they need not take turns.
    """

    samples: Iterator[Any]
    worker: int = 0
    num_workers: int = 1
    divided: bool = False


class Reading(NamedTuple):
    """A stream that is being read from some place on.

    Args:
        worker: Index of the worker that reads; 0 where there is none.
        num_workers: Number of workers; 1 where there are none.
        divided: Whether the dataset gives each worker samples of its own.
        take: Returns the next samples, fewer only at the end.
        mark: Returns where the stream is.
        head: The first samples of its epoch, as many as may be needed to pad the last step.
    """

    worker: int
    num_workers: int
    divided: bool
    take: Callable[[int], list[Any]]
    mark: Callable[[], StreamPosition | Mark]
    head: list[Any]


class Counted:
    """Gives samples and counts them.

    Args:
        samples: What it gives.
        count: Samples before the first one.
    """

    def __init__(self, samples: Iterator[Any], count: int = 0) -> None:
        self.samples = samples
        self.count = count
        self.ended = False

    def take(self, number: int) -> list[Any]:
        """Return the next samples, fewer only at the end."""
        # Fewer than asked for is the only way in which an iterator says that it has ended.
        taken = list(islice(self.samples, number))
        self.count += len(taken)
        self.ended = len(taken) < number
        return taken


class Source:
    """A dataset that is opened again and again, at its start or at a state of its own.

    Args:
        dataset: The dataset. It has states of its own if it has `state_dict` and `load_state_dict`, as
            those of Hugging Face `datasets` have.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self.has_state = has_state(dataset) and not _forgets(dataset)
        self._initial: bytes | None = None

    def open(self, part: PartPosition | None = None, worker: tuple[int, int] | None = None) -> Stream:
        """Start reading.

        Args:
            part: Where to start; None for the start of the epoch.
            worker: (index, number) of the worker that the dataset is to think it is in, in place of this one;
                a number of 0 for none.
        """
        # The state of a dataset at its end may be that of its start.
        if part is not None and part.ended:
            return Stream(iter(()))
        state = part.state if part is not None and self.has_state else None
        if self.has_state:
            self._go_to(state)
        stream = open_stream(self.dataset, worker)
        if part is None or state is not None:
            return stream
        return stream._replace(samples=islice(stream.samples, part.read, None))

    def part(self, samples: Counted) -> PartPosition:
        """Return how far the dataset has been read."""
        if samples.ended or not self.has_state:
            return PartPosition(samples.count, None, samples.ended)
        # Pickled at once: what state_dict returns may change while the dataset is read.
        return PartPosition(samples.count, pickle.dumps(self.dataset.state_dict()))  # type: ignore[attr-defined]

    def _go_to(self, state: bytes | None) -> None:
        dataset: Any = self.dataset
        if self._initial is None:  # nothing has been read yet
            self._initial = pickle.dumps(dataset.state_dict())
            if state is None:
                return
        dataset.load_state_dict(pickle.loads(state or self._initial))


def read(source: Source, group: int, start: int, place: StreamPosition | None, head: int) -> Reading:
    """Start reading a stream.

    Args:
        source: The dataset.
        group: Samples that a worker gives when it is its turn, if the dataset divides itself.
        start: Samples to pass over, if there is no place. A dataset that divides itself over workers is read
            from the start of its parts: how far each of them was is not known.
        place: Where to start.
        head: How many of the first samples of the epoch may be needed, to pad the last step; of a dataset
            that divides itself, `group` at most.
    """
    if place is None:
        return _from_start(source, group, start, head)
    info = get_worker_info()
    # Between two turns every part stands where its mark says; inside of one some samples are still to come.
    in_turn = place.left == place.chunk == group and not place.ahead
    if in_turn and info is not None and place.num_workers == info.num_workers:
        return _one_part(source, group, place, info.id, head)
    return _all_parts(source, place, head)


def _from_start(source: Source, group: int, start: int, count: int) -> Reading:
    stream = source.open()
    head = list(islice(stream.samples, min(count, group) if stream.divided else count))
    samples = chain(head, stream.samples)
    # How many of the first `start` samples are those of this worker is not known.
    counted = Counted(samples) if stream.divided else Counted(islice(samples, start, None), start)

    def mark() -> StreamPosition | Mark:
        part = source.part(counted)
        if stream.divided:
            return Mark(stream.worker, stream.num_workers, group, part)
        return StreamPosition(group, group, 0, (part,))

    return Reading(stream.worker, stream.num_workers, stream.divided, counted.take, mark, head)


def _one_part(source: Source, group: int, place: StreamPosition, worker: int, count: int) -> Reading:
    """Go on with one part of a divided stream; the loader's first worker gets the one whose turn it is."""
    workers = place.num_workers
    number = (worker + place.turn) % workers
    part = place.parts[number]
    head = _head(source, min(count, group), (number, workers))
    counted = Counted(source.open(part, (number, workers)).samples, part.read)

    def mark() -> Mark:
        return Mark(number, workers, group, source.part(counted))

    return Reading(number, workers, True, counted.take, mark, head)


def _all_parts(source: Source, place: StreamPosition, count: int) -> Reading:
    """Go on with all parts of a stream, in the order in which the workers took turns."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    head = _head(source, count, (0, place.num_workers))
    turns = _Turns(source, place)
    turns.pass_over(place.ahead)
    return Reading(worker, workers, False, turns.take, turns.place, head)


def _head(source: Source, count: int, worker: tuple[int, int]) -> list[Any]:
    if not count:
        return []
    return list(islice(source.open(worker=worker).samples, count))


class _Turns:
    """The samples of the parts of a stream, chunk by chunk in turn."""

    def __init__(self, source: Source, start: StreamPosition) -> None:
        self.chunk, self.left, self.turn = start.chunk, start.left, start.turn
        self.parts = list(start.parts)
        self.num_workers = start.num_workers
        # Before `open` moves the state: all copies start alike.
        copied = source.has_state and len(self.parts) > 1  # one dataset has one state
        self.sources = [copy.deepcopy(source) if copied else source for _ in self.parts]
        # A part is opened when it is its turn: opening reads a sample ahead.
        self.open: list[Counted | None] = [None] * len(self.parts)
        self.ended = 0  # parts in a row that had nothing to give in a whole turn

    def take(self, number: int) -> list[Any]:
        """Return the next samples, fewer only at the end."""
        taken: list[Any] = []
        while len(taken) < number and self.ended < len(self.parts):
            taken += self._turn(number - len(taken))[0]
        return taken

    def pass_over(self, samples: int) -> None:
        """Leave out samples, counted as a run counts them: a part's last, short chunk as a whole one."""
        while samples > 0 and self.ended < len(self.parts):
            samples -= self._turn(samples)[1]

    def place(self) -> StreamPosition:
        """Return where the stream is."""
        for number, samples in enumerate(self.open):
            if samples is not None:
                self.parts[number] = self.sources[number].part(samples)
        return StreamPosition(self.chunk, self.left, self.turn, tuple(self.parts), self.num_workers)

    def _turn(self, most: int) -> tuple[list[Any], int]:
        """Read from the part whose turn it is.

        Args:
            most: Samples to read, at most.

        Returns:
            The samples, and how many of the turn they take: more if the part ends with them.
        """
        wanted = min(self.left, most)
        taken = self._opened().take(wanted)
        has_ended = not taken and self.left == self.chunk
        self.ended = self.ended + 1 if has_ended else 0
        # A short chunk at the end of a part counts as a whole one, as it did when the place was counted.
        used = wanted if len(taken) == wanted else 0 if has_ended else self.left
        self.left -= used
        if has_ended or not self.left:
            self.turn, self.left = (self.turn + 1) % len(self.parts), self.chunk
        return taken, used

    def _opened(self) -> Counted:
        found = self.open[self.turn]
        if found is None:
            part = self.parts[self.turn]
            stream = self.sources[self.turn].open(part, (self.turn, self.num_workers))
            found = self.open[self.turn] = Counted(stream.samples, part.read)
        return found


def open_stream(dataset: Iterable[Any], worker: tuple[int, int] | None = None) -> Stream:
    """Start reading a dataset.

    Args:
        dataset: The dataset. If it asks for the number of workers before it gives its first sample, it
            divides itself over them.
        worker: (index, number) of the worker that it is to think it is in, a number of 0 for none; this one
            by default.

    Returns:
        The stream.
    """
    info = get_worker_info()
    if worker is None:
        worker = (0, 0) if info is None else (info.id, info.num_workers)
    if info is None and not worker[1]:
        return Stream(iter(dataset))
    watch = _Watch(info, *worker)
    with _shown(watch if worker[1] else None):
        samples = iter(dataset)
        # A generator asks for its worker when its first sample is asked for.
        head = list(islice(samples, 1))
    return Stream(chain(head, samples), worker[0], max(worker[1], 1), watch.asked)


class _Watch:
    """A worker's information that notes whether somebody asks for the number of workers."""

    def __init__(self, info: Any, index: int, number: int) -> None:
        self.info = info
        self.id = index
        self.number = number
        self.asked = False

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.info, name)


@contextmanager
def _shown(watch: _Watch | None) -> Iterator[None]:
    # torch has no public way to see this; get_worker_info returns this variable.
    before = torch_worker._worker_info
    torch_worker._worker_info = watch  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_worker._worker_info = before


def has_state(item: Any) -> bool:
    """Return whether something can say its own state, and load it."""
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))


def _forgets(dataset: Any) -> bool:
    """Whether a state of a Hugging Face dataset leaves samples out: those in the buffer of a shuffle."""
    return any(type(step).__name__ == "BufferShuffledExamplesIterable" for step in steps_of(dataset))
