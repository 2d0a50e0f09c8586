"""gather_for_metrics: every sample once, in the global order."""

from __future__ import annotations

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
        shares_sequences: Whether processes with the same samples may have computed on parts of them: of
            floating numbers, one per sample, the mean is taken. Of losses that are means over the tokens of
            each part it is the loss of whole sequences where all parts count equally many tokens.

    Returns:
        The tree with rows of all processes in rank order; for objects the flat list over the processes.

    Raises:
        RuntimeError: If some processes have no batch in this step, so that they take no part.
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
        # Of the processes with the same samples, the first gives its objects for all.
        return gather_object([] if process.rank % copies else data, process=process)
    # Two more collectives, of sizes and padding, which even loaders never need.
    if process.world_size > 1 and _may_be_uneven(loader):
        return _gather_uneven(data, fill, process, copies, shares_sequences)
    gathered = gather(data, process=process)
    if copies > 1:
        gathered = recursively_apply(_one_copy, gathered, process.world_size, copies, shares_sequences)
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


def _one_copy(gathered: torch.Tensor, world_size: int, copies: int, may_be_parts: bool) -> torch.Tensor:
    """One result per group of `copies` processes: the first one's, or of parts of sequences the mean."""
    rows = gathered.shape[0] // world_size
    # The copies of a group are neighbours in rank order: tp and cp are a mesh's last axes.
    groups = gathered.reshape(world_size // copies, copies, rows, *gathered.shape[1:])
    if may_be_parts and gathered.dim() == 1 and gathered.is_floating_point():  # a loss per sample
        return groups.mean(1).flatten()
    first = groups[:, :1]
    if may_be_parts and not _are_alike(groups, first.expand_as(groups)):
        warn(
            f"gather_for_metrics got tensors {tuple(gathered.shape[1:])} per sample that differ between the "
            "processes of a context-parallel group, and keeps those of the first, which has a part of each "
            "sequence. Evaluate outside of maybe_context_parallel, where all see whole ones.",
            UserWarning,
        )
    return first.flatten(0, 2)


def _are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    return torch.allclose(
        tensor, other, rtol=1e-2, atol=1e-3, equal_nan=True
    )  # to rounding, in any precision


def _gather_uneven(data: Any, fill: Fill | None, process: Process, copies: int, may_be_parts: bool) -> Any:
    """Gather tensors whose number of rows differs between processes."""
    leaves, rebuild = flatten(data)
    # 0-dimensional tensors come back with one row of each process.
    local = torch.tensor([leaf.shape[0] if leaf.dim() else 1 for leaf in leaves], device=process.device)
    # Of shape (leaves, groups).
    sizes = gather(local, process=process).view(process.world_size, len(leaves))[::copies].t()
    # Padded to the largest process for the way, and cut again afterwards.
    gathered, _ = flatten(gather(pad_across_processes(data, process=process), process=process))
    if copies > 1:
        gathered = [_one_copy(leaf, process.world_size, copies, may_be_parts) for leaf in gathered]
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
