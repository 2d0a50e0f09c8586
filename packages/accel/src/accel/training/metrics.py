"""gather_for_metrics: every sample once, in the global order."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_data.order.shares import Fill
from accel_data.stream.dataset import IterableDatasetShard
from accel_ops.collectives.objects import gather_object
from accel_ops.collectives.operations import gather
from accel_ops.collectives.padding import pad_across_processes
from accel_ops.trees.walk import children, flatten, is_namedtuple, rebuild, recursively_apply
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel_data.loader.join import Attendance
    from accel_state.process.facts import Process


def gather_for_metrics(
    data: Any,
    *,
    loader: Any | None,
    process: Process,
    shard: tuple[int, int],
    use_gather_object: bool = False,
    shares_sequences: bool = False,
) -> Any:
    """Gather `data` from all processes and drop the rows that only padded the batch of `loader`.

    The loader knows how many rows each process has in a padded step, and how many of them are real samples.
    Objects are cut before they travel and tensors after. Where batches differ in size, because nothing is
    padded (`even_batches=False`) or a batch sampler has no batch size, the processes exchange how many rows
    they have. On one process nothing is padded: in a last batch that is incomplete, one number that is
    repeated for each sample of a whole batch is cut to its samples.

    Args:
        data: A tree of tensors (rows, *), or any objects.
        loader: The prepared loader being iterated, else None: then nothing is dropped.
        process: This process.
        shard: (rank, size) of this process among the data-parallel ones.
        use_gather_object: Gather by pickling although all leaves are tensors.
        shares_sequences: Whether processes with the same samples may have computed on parts of them. What
            differs between them is refused, except one floating number that is repeated for each sample of
            the batch, as transformers' Trainer gathers its mean loss: of that the mean is taken.

    Returns:
        The tree with rows of all processes in rank order; for objects the flat list over the processes.

    Raises:
        RuntimeError: If some processes have no batch in this step, so that they take no part.
        ValueError: On all processes, if `data` differs between processes that share sequences.
    """
    copies = process.world_size // shard[1]  # processes with the same samples: the first of them counts
    fill = _fill(loader, shard[1])
    if fill is not None and not all(fill.rows):
        raise RuntimeError(_some_are_missing(loader, fill.rows))
    # Before the first collective: a process that has left the loop would leave the others in it.
    attendance = getattr(loader, "attendance", None)
    if attendance is not None:
        _meet(loader, attendance, process)
    if use_gather_object or not _holds_only_tensors(data):
        if fill is not None:
            data = _cut_objects(data, fill.real[shard[0]], fill.rows[shard[0]])
        if shares_sequences and copies > 1:
            _check_equal_objects(gather_object([data], process=process), copies)
        # Of the processes with the same samples, the first gives its objects for all.
        return gather_object([] if process.rank % copies else data, process=process)
    sequences = _batch_sizes(loader, fill, shard[1]) if shares_sequences else None
    # Two more collectives, of sizes and padding, which even loaders never need.
    if process.world_size > 1 and _may_be_uneven(loader):
        return _gather_uneven(data, fill, process, copies, sequences)
    gathered = gather(data, process=process)
    if copies > 1:
        gathered = recursively_apply(_one_copy, gathered, shard[1], copies, sequences)
    if fill is not None:
        return recursively_apply(_drop_padding, gathered, fill)
    left, size = getattr(loader, "remainder", -1), getattr(loader, "batch_size", None)
    if shard[1] > 1 or not getattr(loader, "end_of_dataloader", False) or size is None or not 0 < left < size:
        return gathered
    return recursively_apply(_drop_beyond_end, gathered, left, size)


def _fill(loader: Any | None, size: int) -> Fill | None:
    """The loader's `Fill` of this step, if the loader is for so many data-parallel processes."""
    real = getattr(loader, "real_samples", None)
    if real is None or loader is None or len(real) != size:  # another Accelerator's loader
        return None
    return Fill(real, loader.batch_rows)


def _meet(loader: Any, attendance: Attendance, process: Process) -> None:
    """Make sure that all processes have this step, where each reads a part of its own.

    Debug mode compares what processes call, and waits for those that come late by itself.
    """
    missing = attendance.missing() if process.debug else attendance.meet()
    if missing is not None:
        raise RuntimeError(
            f"gather_for_metrics would wait for ever: process {missing.rank} has only {missing.batches} "
            f"batches of the {type(loader).__name__} over {_dataset_name(loader)}, and process "
            f"{missing.here} is in step {missing.step}, as {missing.why}. To mend it, {missing.fix}, or "
            "gather after the loop."
        )


def _dataset_name(loader: Any) -> str:
    dataset = loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset
    return type(dataset).__name__


def _some_are_missing(loader: Any, rows: tuple[int, ...]) -> str:
    there = sum(map(bool, rows))
    missing = str(there) if there == len(rows) - 1 else f"{there} to {len(rows) - 1}"
    return (
        f"gather_for_metrics would wait for ever: in this last step of the {type(loader).__name__} over "
        f"{_dataset_name(loader)} (batch_size={loader.batch_size}, even_batches=False), only {there} of "
        f"{len(rows)} data-parallel processes have a batch, and number {missing} has left the loop. Use "
        "even_batches=True (the default; what only fills up the step is dropped here), "
        "DataLoader(drop_last=True), or gather after the loop."
    )


def _holds_only_tensors(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return True
    inside = children(data)
    if inside is None:
        return False
    # The usual tree, for many leaves at once.
    return set(map(type, inside)) == {torch.Tensor} or all(map(_holds_only_tensors, inside))


def _may_be_uneven(loader: Any | None) -> bool:
    """Whether batches of the loader may have fewer rows on some processes than on others."""
    if loader is not None and getattr(loader, "batch_size", 1) is None:  # batches are made by the user
        return True
    for name in ("", "batch_sampler", "sampler", "dataset"):
        holder = getattr(loader, name, None) if name else loader
        # `is`: samplers of others may have anything there.
        if getattr(holder, "even_batches", True) is False:
            return True
    return False


def _batch_sizes(loader: Any | None, fill: Fill | None, size: int) -> set[int]:
    """Return how many sequences a process with most of them may have in this step, as far as is known."""
    if fill is not None:
        return set(fill.rows)
    total = getattr(loader, "total_batch_size", None)
    return set() if total is None else {total // size, getattr(loader, "remainder", -1)}


def _one_copy(
    gathered: torch.Tensor,
    size: int,
    copies: int,
    sequences: set[int] | None,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """One result for each of `size` groups of `copies` processes; they have the same, or share `sequences`.

    Each process of a group has `counts[group]` rows, by default all; what follows them is padding.
    """
    rows = gathered.shape[0] // (size * copies)
    counts = counts or (rows,) * size
    # The copies of a group are neighbours in rank order: tp and cp are a mesh's last axes.
    groups = gathered.reshape(size, copies, rows, *gathered.shape[1:])
    first = groups[:, :1]
    if sequences is None or _are_equal(groups, first.expand_as(groups)):
        return first.flatten(0, 2)
    is_loss = gathered.dim() == 1 and gathered.is_floating_point() and max(counts) in sequences
    if is_loss and all(map(_is_repeated, groups, counts)):
        return groups.mean(1).flatten()
    raise ValueError(_differs(f"tensors {tuple(gathered.shape[1:])} per row ({gathered.dtype}, {rows} rows)"))


def _is_repeated(group: torch.Tensor, count: int) -> bool:
    return _are_equal(group[:, :count], group[:, :1].expand(-1, count))


def _are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, up to rounding in kernels that add in any order."""
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    finite = other[other.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    # Of the largest value: small ones, such as probabilities, would all be close to each other.
    atol = largest * max(1e-4, 2 * torch.finfo(tensor.dtype).eps)
    return torch.allclose(tensor, other, rtol=0.0, atol=atol, equal_nan=True)


def _check_equal_objects(objects: Sequence[Any], copies: int) -> None:
    for rank, value in enumerate(objects):
        if not _is_equal(objects[rank - rank % copies], value):
            raise ValueError(_differs(f"objects ({type(value).__name__})"))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and _are_equal(one, other)
    values, others = children(one), children(other)
    if values is None or others is None:  # pickled, as arrays and objects have no == that gives a bool
        return pickle.dumps(one) == pickle.dumps(other)
    return len(values) == len(others) and all(map(_is_equal, values, others))


def _differs(what: str) -> str:
    return (
        f"gather_for_metrics got {what} that differ between the processes of a context-parallel group, which "
        "have parts of the same sequences: it cannot tell how to merge them. Evaluate outside of "
        "maybe_context_parallel, where all see whole sequences, or combine the parts yourself: "
        "accelerator.reduce(x, 'mean') for a mean loss, accelerator.reduce(x, 'sum') for a sum or a count, "
        "accelerator.gather(x) for the values of all processes."
    )


def _gather_uneven(
    data: Any, fill: Fill | None, process: Process, copies: int, sequences: set[int] | None
) -> Any:
    """Gather tensors whose number of rows differs between processes."""
    leaves, rebuild = flatten(data)
    # 0-dimensional tensors come back with one row of each process.
    local = torch.tensor([leaf.shape[0] if leaf.dim() else 1 for leaf in leaves], device=process.device)
    # Of shape (leaves, groups).
    sizes = gather(local, process=process).view(process.world_size, len(leaves))[::copies].t()
    # Padded to the largest process for the way, and cut again afterwards.
    gathered, _ = flatten(gather(pad_across_processes(data, process=process), process=process))
    if copies > 1:
        gathered = [
            _one_copy(leaf, len(rows), copies, sequences, rows)
            for leaf, rows in zip(gathered, sizes.tolist(), strict=True)
        ]
    return rebuild(
        [
            _kept_rows(leaf, _real_rows(tuple(rows), fill), max(rows))
            for leaf, rows in zip(gathered, sizes.tolist(), strict=True)
        ]
    )


def _drop_padding(gathered: torch.Tensor, fill: Fill) -> torch.Tensor:
    """Keep the real rows of each process; what is not one row per sample stays whole."""
    rows = gathered.shape[0] // len(fill.rows)  # the same of each process, as gather takes no others
    return _kept_rows(gathered, _real_rows((rows,) * len(fill.rows), fill), rows)


def _drop_beyond_end(gathered: torch.Tensor, left: int, size: int) -> torch.Tensor:
    """Cut one number that is repeated for each sample of a whole batch to the samples of the last one."""
    # transformers' Trainer repeats the loss of a batch so, for the mean to weigh samples equally. Other
    # tensors of that length may have two rows per sample, or one per class.
    repeats = gathered.dim() == 1 and gathered.is_floating_point() and gathered.shape[0] == size
    return gathered[:left] if repeats and torch.equal(gathered, gathered[:1].expand(size)) else gathered


def _real_rows(rows: tuple[int, ...], fill: Fill | None) -> tuple[int, ...]:
    """Return how many of the rows that each process gave are real: all, if they are not one per sample."""
    if fill is None or rows == fill.rows:
        return rows if fill is None else fill.real
    if set(rows) != {1}:  # one row per process: a mean, which no padding is in
        warn(
            f"gather_for_metrics got {sum(rows)} rows from {len(rows)} processes, whose batches have "
            f"{', '.join(map(str, fill.rows))} rows in this padded step: it cannot tell which rows belong to "
            "padding and keeps all. Return one row per sample to have the padding dropped.",
            UserWarning,
        )
    return rows


def _kept_rows(gathered: torch.Tensor, counts: Sequence[int], rows: int) -> torch.Tensor:
    # Nothing to drop: the gathered tensor itself, without a copy.
    if len(set(counts)) == 1 and counts[0] == rows:
        return gathered
    return torch.cat([gathered[rank * rows : rank * rows + count] for rank, count in enumerate(counts)])


def _cut_objects(data: Any, count: int, rows: int) -> Any:
    """Cut what has one entry per sample (lists, tuples, tensors, arrays) to the real samples."""
    shape = getattr(data, "shape", None)
    if shape is not None:
        return data[:count] if len(shape) > 0 and shape[0] == rows else data
    is_list = isinstance(data, list | tuple) and not is_namedtuple(data)
    if is_list and len(data) == rows and not _is_structure(data, rows):
        return data[:count]
    values = children(data)
    return data if values is None else rebuild(data, [_cut_objects(value, count, rows) for value in values])


def _is_structure(data: Sequence[Any], rows: int) -> bool:
    """Whether the entries of a list or tuple of `rows` entries are not samples, but hold one row per sample.

    So it is where each of them has `rows` rows, in a tuple, as `(predictions, labels)`, or in a list of
    things that differ in kind. A list of things that are alike is taken for one entry per sample, as
    gathering objects makes one list of all entries; with a warning, as it may be meant otherwise.
    """
    if not all(_has_rows(value, rows) for value in data):
        return False
    # Samples of one batch are alike; predictions and labels usually are not.
    if isinstance(data, tuple) or len({_kind(value) for value in data}) > 1:
        return True
    if rows > 1:
        warn(
            f"gather_for_metrics got a list of {rows} entries with {rows} rows each, from a padded batch of "
            f"{rows} samples: it is taken for one entry per sample. If each entry has a row per sample, as "
            "in [predictions, labels], pass a tuple or a dict.",
            UserWarning,
        )
    return False


def _has_rows(value: Any, rows: int) -> bool:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) > 0 and bool(shape[0] == rows)
    return isinstance(value, list | tuple) and len(value) == rows


def _kind(value: Any) -> tuple[Any, ...]:
    """Return what samples of one batch have in common: type, shape but for the rows, and dtype."""
    shape = getattr(value, "shape", None)
    inner = type(value[0]) if shape is None and len(value) else None
    return type(value), None if shape is None else tuple(shape[1:]), getattr(value, "dtype", None), inner
