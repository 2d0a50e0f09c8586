"""Places of prepared loaders as states of torchdata's StatefulDataLoader, and the other way round.

A plain loader counts the batches that one process would read, and keeps the state of the generator from which
the order of its epoch was drawn. It counts no epochs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_data.order.global_order import SeedableRandomSampler, draws_at_once
from accel_data.resume.cursor import Cursor
from accel_data.resume.stream_position import StreamPosition
from accel_data.stream.reader import has_state

_FINISHED = "_iterator_finished"


@dataclass(frozen=True)
class Plain:
    """The loader that would read on one process what prepared loaders divide.

    Args:
        dataset: Its dataset.
        sampler: The sampler inside, or the batch sampler where that one alone gives the order; None for a
            stream.
        batch_size: Samples in a batch; 1 where they are not counted.
        batched: Whether it makes batches.
        num_workers: Number of workers.
        generator: Where it draws the seeds of workers; None for the global generator.
        length: Samples of an epoch; None where not known.
        drop_last: Whether it drops an incomplete last batch.
        parts: Number of processes that the data was divided for before the loaders got it.
    """

    dataset: Any
    sampler: Any
    batch_size: int
    batched: bool
    num_workers: int
    generator: torch.Generator | None
    length: int | None
    drop_last: bool
    parts: int

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None where not known."""
        if self.length is None:
            return None
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)


def to_torchdata(cursor: Cursor, plain: Plain, worker_seed: int) -> dict[str, Any]:
    """Return the state that a plain StatefulDataLoader has at a place.

    Args:
        cursor: The place.
        plain: What is known of that loader.
        worker_seed: Seed of its workers.

    Returns:
        The state; empty where a plain loader would go on wrongly with it: over a sampler or a stream that has
        states of its own, of which the one at this place is not known, and in an order that torch does not
        draw.
    """
    read = 0 if cursor.ended else cursor.consumed // plain.parts
    # Rounded up: the last batch of an epoch may be short.
    number = -(-read // plain.batch_size)
    is_stream = plain.sampler is None
    dataset_state = None
    if is_stream and number and has_state(plain.dataset):
        dataset_state = _dataset_state(cursor.stream)
        if dataset_state is None:
            return {}
    order = _order_state(cursor, plain)
    # torchdata asks a sampler or dataset that has a state for it, and counts nothing then.
    if has_state(plain.sampler) or (order is None and draws_at_once(plain.sampler)):
        return {}
    if not plain.num_workers:
        fetcher = None if dataset_state is None else {"dataset_iter_state": None, "fetcher_ended": False}
        counts = {"_num_yielded": number, "fetcher_state": fetcher, "dataset_state": dataset_state}
        return {**_iterated(read, number, order, plain.batched), **counts, _FINISHED: cursor.ended}
    if is_stream:  # what each worker has read is not known: all is read again from the start
        main, since = _iterated(0, 0, None, plain.batched), number
    else:
        main, since = _iterated(read, number, order, plain.batched), 0
    snapshot = {
        "_snapshot_step": number - since,
        # The last one: the next batch is then asked of worker 0.
        "_last_yielded_worker_id": plain.num_workers - 1,
        "_main_snapshot": {**main, "_num_workers": plain.num_workers, "_base_seed": worker_seed},
        "_worker_snapshots": {},
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": since, _FINISHED: cursor.ended}


def is_from_torchdata(state: Any) -> bool:
    """Whether a state is that of a plain StatefulDataLoader."""
    known = isinstance(state, Mapping) and "version" not in state and _FINISHED in state
    return known and ("_num_yielded" in state or "_snapshot" in state)


def from_torchdata(
    state: Mapping[str, Any], plain: Plain, epoch: int, part: tuple[int, int] | None
) -> Cursor:
    """Return the place of a plain StatefulDataLoader.

    Args:
        state: What its `state_dict` returned.
        plain: What is known of it.
        epoch: Number of the epoch that its batches are taken to be of.
        part: See `Cursor`.

    Returns:
        The place. What the dataset's own state says is not used: a stream is read up to there.

    Raises:
        ValueError: If one of the loaders shuffles by a sampler of torch, and the other does not; or if the
            state is not whole.
    """
    number, order = _read(state)
    if (order is None) == draws_at_once(plain.sampler) and number:
        kinds = ("shuffles", "has a sampler that says nothing of its order")
        raise ValueError(
            f"The state is that of a StatefulDataLoader that {kinds[order is None]}, but this loader "
            f"{kinds[order is not None]}. Load it into one that is made alike: both with shuffle=True, or "
            "both without."
        )
    ended = bool(state[_FINISHED]) or number == plain.num_batches
    consumed = number * plain.batch_size * plain.parts
    if plain.length is not None:
        consumed = min(consumed, plain.length * plain.parts)
    # A plain loader's step is one batch, on one process.
    step = plain.batch_size * plain.parts
    return Cursor(epoch, consumed, number, step, part=part, ended=ended, order=order)


def _read(state: Mapping[str, Any]) -> tuple[int, torch.Tensor | None]:
    """Return how many batches a plain loader has handed out, and what its order is drawn from."""
    try:
        if "_snapshot" in state:
            snapshot = state["_snapshot"]
            number = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
            iterated = snapshot["_main_snapshot"]["_sampler_iter_state"] or {}
        else:
            number, iterated = state["_num_yielded"], state["_sampler_iter_state"] or {}
        order = iterated.get("sampler_iter_state", iterated).get("generator")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The state of a StatefulDataLoader is not whole ({type(error).__name__}: {error}). Pass what "
            "its state_dict() returned."
        ) from error
    if type(number) is not int or number < 0:
        raise ValueError(f"State of a StatefulDataLoader with an impossible number of batches: {number!r}.")
    return number, order


def _iterated(read: int, number: int, order: torch.Tensor | None, batched: bool) -> dict[str, Any]:
    """Return what a plain loader keeps of its samplers' iterators."""
    drawn = None if order is None else {"yielded": read, "generator": order}
    if batched:
        inner = {} if drawn is None else {"sampler_iter_state": drawn}
        iterator: dict[str, Any] | None = {"samples_yielded": read, **inner}
    else:
        iterator = drawn
    return {
        # Names of torchdata's StatefulDataLoader, which looks all of them up in a state.
        "_index_sampler_state": None,
        "_sampler_iter_state": iterator,
        "_sampler_iter_yielded": number,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }


def _order_state(cursor: Cursor, plain: Plain) -> torch.Tensor | None:
    """Return the state of a generator from which the order of the epoch is drawn; None if it is not drawn."""
    sampler = plain.sampler
    is_keyed = isinstance(sampler, SeedableRandomSampler) and sampler.is_keyed
    if cursor.order is not None or is_keyed or not draws_at_once(sampler):
        return cursor.order
    if cursor.generator is None and not isinstance(sampler, SeedableRandomSampler):
        return None
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.generator_of(cursor.epoch + cursor.ended).get_state()
    generator = torch.Generator()
    generator.set_state(cursor.generator)  # type: ignore[arg-type]
    if sampler.generator is plain.generator:  # torch draws the workers' seed from it first
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return generator.get_state()


def _dataset_state(place: StreamPosition | None) -> Any:
    """Return a stream's own state, if it stands at the place; None otherwise."""
    if place is None or len(place.parts) > 1 or place.ahead or place.left != place.chunk:
        return None
    state = place.parts[0].state
    return None if state is None else pickle.loads(state)
