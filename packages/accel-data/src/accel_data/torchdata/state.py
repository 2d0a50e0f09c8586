"""Converts positions of prepared loaders to states of torchdata's StatefulDataLoader, and back.

A plain loader counts the batches that one process would read, and keeps the state of the generator from which
the order of its epoch was drawn. It does not count epochs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_data.order.global_order import SeedableRandomSampler, is_drawn_by_torch
from accel_data.resume.cursor import Cursor
from accel_data.resume.stream_position import StreamPosition
from accel_data.stream.reader import has_state

_FINISHED = "_iterator_finished"


@dataclass(frozen=True)
class PlainLoader:
    """The plain loader that would read on one process what prepared loaders shard.

    Args:
        dataset: Its dataset.
        sampler: The sampler inside, or the batch sampler if only that gives the order; None for a stream.
        batch_size: Samples in a batch; 1 if they are not counted.
        batched: Whether it makes batches.
        num_workers: Number of workers.
        generator: Where it draws the seeds of workers; None for the global generator.
        length: Samples of an epoch; None if unknown.
        drop_last: Whether it drops an incomplete last batch.
        num_shards: Number of processes for which the data was sharded before the loaders got it.
    """

    dataset: Any
    sampler: Any
    batch_size: int
    batched: bool
    num_workers: int
    generator: torch.Generator | None
    length: int | None
    drop_last: bool
    num_shards: int

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None if unknown."""
        if self.length is None:
            return None
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)


def to_torchdata(cursor: Cursor, plain: PlainLoader, worker_seed: int) -> dict[str, Any]:
    """Return the state that a plain StatefulDataLoader has at a position.

    Args:
        cursor: The position.
        plain: The plain loader.
        worker_seed: Seed of its workers.

    Returns:
        The state; empty if a plain loader would continue incorrectly with it: over a sampler or stream with
        its own states, of which the one at this position is unknown, and in an order that torch does not
        draw.
    """
    read = 0 if cursor.ended else cursor.consumed // plain.num_shards
    # Rounded up: the last batch of an epoch may be short.
    number = -(-read // plain.batch_size)
    is_stream = plain.sampler is None
    dataset_state = None
    if is_stream and number and has_state(plain.dataset):
        dataset_state = _dataset_state(cursor.stream)
        if dataset_state is None:
            return {}
    order = _order_state(cursor, plain)
    # torchdata uses the state of a sampler or dataset that has one, and counts nothing then.
    if has_state(plain.sampler) or (order is None and is_drawn_by_torch(plain.sampler)):
        return {}
    if not plain.num_workers:
        fetcher = None if dataset_state is None else {"dataset_iter_state": None, "fetcher_ended": False}
        counts = {"_num_yielded": number, "fetcher_state": fetcher, "dataset_state": dataset_state}
        return {**_sampler_states(read, number, order, plain.batched), **counts, _FINISHED: cursor.ended}
    if is_stream:  # what each worker has read is unknown: everything is read again from the start
        main, since = _sampler_states(0, 0, None, plain.batched), number
    else:
        main, since = _sampler_states(read, number, order, plain.batched), 0
    snapshot = {
        "_snapshot_step": number - since,
        # The last one: the next batch then comes from worker 0.
        "_last_yielded_worker_id": plain.num_workers - 1,
        "_main_snapshot": {**main, "_num_workers": plain.num_workers, "_base_seed": worker_seed},
        "_worker_snapshots": {},
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": since, _FINISHED: cursor.ended}


def is_from_torchdata(state: Any) -> bool:
    """Whether a state is that of a plain StatefulDataLoader."""
    is_plain = isinstance(state, Mapping) and "version" not in state and _FINISHED in state
    return is_plain and ("_num_yielded" in state or "_snapshot" in state)


def from_torchdata(
    state: Mapping[str, Any], plain: PlainLoader, epoch: int, pre_shard: tuple[int, int] | None
) -> Cursor:
    """Return the position of a plain StatefulDataLoader.

    Args:
        state: What its `state_dict` returned.
        plain: The plain loader.
        epoch: Number of the epoch that its batches are assumed to belong to.
        pre_shard: See `Cursor.part`.

    Returns:
        The position. The dataset's own state is not used: a stream is read up to there.

    Raises:
        ValueError: If one of the loaders shuffles with a sampler of torch, and the other does not; or if the
            state is incomplete.
    """
    number, order = _read(state)
    if (order is None) == is_drawn_by_torch(plain.sampler) and number:
        kinds = ("shuffles", "has a sampler without information about its order")
        raise ValueError(
            f"The state is that of a StatefulDataLoader that {kinds[order is None]}, but this loader "
            f"{kinds[order is not None]}. Load it into an equally configured one: both with shuffle=True, or "
            "both without."
        )
    ended = bool(state[_FINISHED]) or number == plain.num_batches
    consumed = number * plain.batch_size * plain.num_shards
    if plain.length is not None:
        consumed = min(consumed, plain.length * plain.num_shards)
    # A plain loader's step is one batch, on one process.
    step = plain.batch_size * plain.num_shards
    return Cursor(epoch, consumed, number, step, part=pre_shard, ended=ended, order=order)


def _read(state: Mapping[str, Any]) -> tuple[int, torch.Tensor | None]:
    """Return how many batches a plain loader has yielded, and the state from which its order is drawn."""
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
            f"The state of a StatefulDataLoader is incomplete ({type(error).__name__}: {error}). Pass what "
            "its state_dict() returned."
        ) from error
    if type(number) is not int or number < 0:
        raise ValueError(f"State of a StatefulDataLoader with an impossible number of batches: {number!r}.")
    return number, order


def _sampler_states(read: int, number: int, order: torch.Tensor | None, batched: bool) -> dict[str, Any]:
    """Return the states of a plain loader's sampler iterators."""
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


def _order_state(cursor: Cursor, plain: PlainLoader) -> torch.Tensor | None:
    """Return the state of a generator from which the order of the epoch is drawn; None if it is not drawn."""
    sampler = plain.sampler
    is_keyed = isinstance(sampler, SeedableRandomSampler) and sampler.is_keyed
    if cursor.order is not None or is_keyed or not is_drawn_by_torch(sampler):
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
    """Return a stream's own state at exactly this position; None if there is none."""
    if place is None or len(place.parts) > 1 or place.ahead or place.left != place.chunk:
        return None
    state = place.parts[0].state
    return None if state is None else pickle.loads(state)
