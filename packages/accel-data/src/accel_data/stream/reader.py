"""Reading a stream from its start or from a position, in the main process or in a worker of a loader."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_data.resume.stream_position import BlockPosition, ShardPosition, StreamPosition
from accel_data.stream.hugging_face import steps_of


class Stream(NamedTuple):
    """A dataset that is being read, possibly in a worker of a loader.

    Args:
        samples: The remaining samples.
        worker: Index of the worker; 0 if there is none.
        num_workers: Number of workers; 1 if there are none.
        split_by_workers: Whether the dataset yields different samples to each worker, so that they need not
            take turns.
    """

    samples: Iterator[Any]
    worker: int = 0
    num_workers: int = 1
    split_by_workers: bool = False


class StreamReader(NamedTuple):
    """A stream that is being read from some position on.

    Args:
        worker: Index of the worker that reads; 0 if there is none.
        num_workers: Number of workers; 1 if there are none.
        split_by_workers: Whether the dataset yields different samples to each worker.
        take: Returns the next samples, fewer only at the end.
        position: Returns the current position.
        head: The first samples of its epoch, as many as may be needed to pad the last step.
    """

    worker: int
    num_workers: int
    split_by_workers: bool
    take: Callable[[int], list[Any]]
    position: Callable[[], StreamPosition | BlockPosition]
    head: list[Any]


class CountingIterator:
    """Yields samples and counts them.

    Args:
        samples: The samples.
        count: Number of samples before the first one.
    """

    def __init__(self, samples: Iterator[Any], count: int = 0) -> None:
        self.samples = samples
        self.count = count
        self.ended = False

    def take(self, number: int) -> list[Any]:
        """Return the next samples, fewer only at the end."""
        # Fewer samples than requested are the only sign that an iterator has ended.
        taken = list(islice(self.samples, number))
        self.count += len(taken)
        self.ended = len(taken) < number
        return taken


class Source:
    """A dataset that is opened repeatedly, at its start or at one of its states.

    Args:
        dataset: The dataset. It has states if it has `state_dict` and `load_state_dict`, like those of
            Hugging Face `datasets`.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self.has_state = has_state(dataset) and not _loses_samples(dataset)
        self._initial: bytes | None = None

    def open(self, shard: ShardPosition | None = None, worker: tuple[int, int] | None = None) -> Stream:
        """Start reading.

        Args:
            shard: Where to start; None for the start of the epoch.
            worker: (index, number) of the worker that the dataset should see instead of this one; a number of
                0 for none.
        """
        # The state of a dataset at its end may equal that of its start.
        if shard is not None and shard.ended:
            return Stream(iter(()))
        state = shard.state if shard is not None and self.has_state else None
        if self.has_state:
            self._load_dataset_state(state)
        stream = open_stream(self.dataset, worker)
        if shard is None or state is not None:
            return stream
        return stream._replace(samples=islice(stream.samples, shard.read, None))

    def shard_position(self, samples: CountingIterator) -> ShardPosition:
        """Return how far the dataset has been read."""
        if samples.ended or not self.has_state:
            return ShardPosition(samples.count, None, samples.ended)
        # Pickled immediately: the object from state_dict may change while the dataset is read.
        return ShardPosition(samples.count, pickle.dumps(self.dataset.state_dict()))  # type: ignore[attr-defined]

    def _load_dataset_state(self, state: bytes | None) -> None:
        dataset: Any = self.dataset
        if self._initial is None:  # nothing has been read yet
            self._initial = pickle.dumps(dataset.state_dict())
            if state is None:
                return
        dataset.load_state_dict(pickle.loads(state or self._initial))


def read(
    source: Source, chunk: int, start: int, resume_from: StreamPosition | None, head: int
) -> StreamReader:
    """Start reading a stream.

    Args:
        source: The dataset.
        chunk: Samples that a worker yields per turn, if the dataset splits itself.
        start: Samples to skip, if there is no position. A dataset that splits itself over workers is read
            from the start of its shards: how far each of them was is unknown.
        resume_from: Where to start.
        head: How many of the first samples of the epoch may be needed to pad the last step; of a dataset that
            splits itself, at most `chunk`.
    """
    if resume_from is None:
        return _from_start(source, chunk, start, head)
    info = get_worker_info()
    # Between two turns every shard is at its recorded position; within a turn some samples are missing.
    is_between_turns = resume_from.left == resume_from.chunk == chunk and not resume_from.ahead
    if is_between_turns and info is not None and resume_from.num_workers == info.num_workers:
        return _resume_one_shard(source, chunk, resume_from, info.id, head)
    return _resume_all_shards(source, resume_from, head)


def _from_start(source: Source, chunk: int, start: int, count: int) -> StreamReader:
    stream = source.open()
    head = list(islice(stream.samples, min(count, chunk) if stream.split_by_workers else count))
    samples = chain(head, stream.samples)
    # How many of the first `start` samples belong to this worker is unknown.
    iterator = (
        CountingIterator(samples)
        if stream.split_by_workers
        else CountingIterator(islice(samples, start, None), start)
    )

    def position() -> StreamPosition | BlockPosition:
        shard = source.shard_position(iterator)
        if stream.split_by_workers:
            return BlockPosition(stream.worker, stream.num_workers, chunk, shard)
        return StreamPosition(chunk, chunk, 0, (shard,))

    return StreamReader(
        stream.worker, stream.num_workers, stream.split_by_workers, iterator.take, position, head
    )


def _resume_one_shard(
    source: Source, chunk: int, resume_from: StreamPosition, worker: int, count: int
) -> StreamReader:
    """Continue with one shard of a split stream; the loader's first worker gets the one whose turn it is."""
    workers = resume_from.num_workers
    number = (worker + resume_from.turn) % workers
    shard = resume_from.parts[number]
    head = _head(source, min(count, chunk), (number, workers))
    iterator = CountingIterator(source.open(shard, (number, workers)).samples, shard.read)

    def position() -> BlockPosition:
        return BlockPosition(number, workers, chunk, source.shard_position(iterator))

    return StreamReader(number, workers, True, iterator.take, position, head)


def _resume_all_shards(source: Source, resume_from: StreamPosition, count: int) -> StreamReader:
    """Continue with all shards of a stream, in the order in which the workers took turns."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    head = _head(source, count, (0, resume_from.num_workers))
    turns = _Turns(source, resume_from)
    turns.skip(resume_from.ahead)
    return StreamReader(worker, workers, False, turns.take, turns.position, head)


def _head(source: Source, count: int, worker: tuple[int, int]) -> list[Any]:
    if not count:
        return []
    return list(islice(source.open(worker=worker).samples, count))


class _Turns:
    """The samples of the shards of a stream, chunk by chunk in turn."""

    def __init__(self, source: Source, start: StreamPosition) -> None:
        self.chunk, self.left, self.turn = start.chunk, start.left, start.turn
        self.shards = list(start.parts)
        self.num_workers = start.num_workers
        # Before `open` moves the state: all copies start equal.
        copied = source.has_state and len(self.shards) > 1  # one dataset has one state
        self.sources = [copy.deepcopy(source) if copied else source for _ in self.shards]
        # A shard is opened at its turn: opening reads a sample ahead.
        self.open: list[CountingIterator | None] = [None] * len(self.shards)
        self.ended = 0  # consecutive shards that yielded nothing in a full turn

    def take(self, number: int) -> list[Any]:
        """Return the next samples, fewer only at the end."""
        taken: list[Any] = []
        while len(taken) < number and self.ended < len(self.shards):
            taken += self._turn(number - len(taken))[0]
        return taken

    def skip(self, samples: int) -> None:
        """Skip samples, counted as in a run: a shard's last, short chunk counts as a full one."""
        while samples > 0 and self.ended < len(self.shards):
            samples -= self._turn(samples)[1]

    def position(self) -> StreamPosition:
        """Return the current position."""
        for number, samples in enumerate(self.open):
            if samples is not None:
                self.shards[number] = self.sources[number].shard_position(samples)
        return StreamPosition(self.chunk, self.left, self.turn, tuple(self.shards), self.num_workers)

    def _turn(self, limit: int) -> tuple[list[Any], int]:
        """Read from the shard whose turn it is.

        Args:
            limit: Maximum number of samples to read.

        Returns:
            The samples, and how many of the turn they use: more if the shard ends with them.
        """
        wanted = min(self.left, limit)
        taken = self._current().take(wanted)
        has_ended = not taken and self.left == self.chunk
        self.ended = self.ended + 1 if has_ended else 0
        # A short chunk at the end of a shard counts as a full one, as it did when the position was recorded.
        used = wanted if len(taken) == wanted else 0 if has_ended else self.left
        self.left -= used
        if has_ended or not self.left:
            self.turn, self.left = (self.turn + 1) % len(self.shards), self.chunk
        return taken, used

    def _current(self) -> CountingIterator:
        iterator = self.open[self.turn]
        if iterator is None:
            shard = self.shards[self.turn]
            stream = self.sources[self.turn].open(shard, (self.turn, self.num_workers))
            iterator = self.open[self.turn] = CountingIterator(stream.samples, shard.read)
        return iterator


def open_stream(dataset: Iterable[Any], worker: tuple[int, int] | None = None) -> Stream:
    """Start reading a dataset.

    Args:
        dataset: The dataset. If it reads the number of workers before it yields its first sample, it splits
            itself over them.
        worker: (index, number) of the worker that it should see, a number of 0 for none; by default this one.

    Returns:
        The stream.
    """
    info = get_worker_info()
    if worker is None:
        worker = (0, 0) if info is None else (info.id, info.num_workers)
    if info is None and not worker[1]:
        return Stream(iter(dataset))
    worker_info = _WorkerInfoProxy(info, *worker)
    with _patched_worker_info(worker_info if worker[1] else None):
        samples = iter(dataset)
        # A generator reads its worker info when its first sample is requested.
        head = list(islice(samples, 1))
    return Stream(chain(head, samples), worker[0], max(worker[1], 1), worker_info.was_queried)


class _WorkerInfoProxy:
    """A worker info that records whether the number of workers is read."""

    def __init__(self, info: Any, index: int, number: int) -> None:
        self.info = info
        self.id = index
        self.number = number
        self.was_queried = False

    @property
    def num_workers(self) -> int:
        self.was_queried = True
        return self.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.info, name)


@contextmanager
def _patched_worker_info(worker_info: _WorkerInfoProxy | None) -> Iterator[None]:
    # torch has no public way to detect this; get_worker_info returns this variable.
    previous = torch_worker._worker_info
    torch_worker._worker_info = worker_info  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_worker._worker_info = previous


def has_state(item: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))


def _loses_samples(dataset: Any) -> bool:
    """Whether a state of a Hugging Face dataset loses samples: those in the buffer of a shuffle."""
    return any(type(step).__name__ == "BufferShuffledExamplesIterable" for step in steps_of(dataset))
