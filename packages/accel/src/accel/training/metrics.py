"""gather_for_metrics: every sample once, in the global order."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_data.order.layout import StepRows
from accel_data.stream.dataset import IterableDatasetShard
from accel_ops.collectives.objects import gather_object
from accel_ops.collectives.operations import gather
from accel_ops.collectives.padding import pad_across_processes
from accel_ops.trees.walk import children, flatten, is_namedtuple, rebuild, recursively_apply
from accel_state.logging.warning import warn
from accel_state.open_loaders import LoaderPass, describe

if TYPE_CHECKING:
    from accel_data.loader.uneven import UnevenLoaderMonitor
    from accel_state.gradient import GradientState
    from accel_state.process.info import ProcessInfo


def gather_for_metrics(
    data: Any,
    *,
    passes: Sequence[LoaderPass],
    process: ProcessInfo,
    shard: tuple[int, int],
    use_gather_object: bool = False,
    shares_sequences: bool = False,
    is_training: bool = False,
) -> Any:
    """Gather `data` from all processes and drop the rows that only padded the batch it was made from.

    A loader knows how many rows each process has in a padded step, and how many of them are real samples.
    Objects are cut before they travel and tensors after. Where batches differ in size, because nothing is
    padded (`even_batches=False`) or a batch sampler has no batch size, the processes exchange how many rows
    they have. On one process nothing is padded: in a last batch that is incomplete, one number that is
    repeated for each sample of a full batch is cut to its samples.

    Args:
        data: A tree of tensors (rows, *), or any objects.
        passes: Over the loaders that it may be made from, the likeliest first; see `current_passes`.
        process: This process.
        shard: (rank, size) of this process among the data-parallel ones.
        use_gather_object: Gather by pickling although all leaves are tensors.
        shares_sequences: Whether processes with the same samples may have computed on parts of them. What
            differs between them is refused, except one floating number that is repeated for each sample of
            the batch, as transformers' Trainer gathers its mean loss: of that the mean is taken.
        is_training: Whether a model is in training mode, so that the data is hardly of a loop that has ended
            inside of another one.

    Returns:
        The tree with rows of all processes in rank order; for objects the flat list over the processes.

    Raises:
        RuntimeError: If some processes have no batch in this step, so that they do not participate.
        ValueError: On all processes, if `data` differs between processes that share sequences.
    """
    copies = process.world_size // shard[1]  # processes with the same samples: the first of them counts
    loader = passes[0].loader if passes and passes[0].is_open else None
    step = _step_rows(loader, shard[1])
    if step is not None and not all(step.rows):
        raise RuntimeError(_some_are_missing(loader, step.rows))
    padding = _padding(passes, shard[1], is_training)
    for one in passes:
        one.is_gathered = True
    # Before the first collective: a process that has left the loop would leave the others in it.
    uneven_monitor = getattr(loader, "uneven_monitor", None)
    if uneven_monitor is not None:
        _wait_for_all_ranks(loader, uneven_monitor, process)
    if use_gather_object or not _has_only_tensors(data):
        if padding is not None:
            data = _cut_objects(data, padding.of(shard[0]))
        if shares_sequences and copies > 1:
            _check_equal_objects(gather_object([data], process=process), copies)
        # Of the processes with the same samples, the first gives its objects for all.
        return gather_object([] if process.rank % copies else data, process=process)
    sequences = _batch_sizes(loader, step, shard[1]) if shares_sequences else None
    # Two more collectives, of sizes and padding, which even loaders never need.
    if process.world_size > 1 and any(_may_be_uneven(one.loader) for one in passes):
        return _gather_uneven(data, padding, process, copies, sequences)
    gathered = gather(data, process=process)
    if copies > 1:
        gathered = recursively_apply(_one_copy, gathered, shard[1], copies, sequences)
    if padding is not None:
        return recursively_apply(_drop_padding, gathered, padding, shard[1])
    left, size = getattr(loader, "remainder", -1), getattr(loader, "batch_size", None)
    if shard[1] > 1 or not getattr(loader, "end_of_dataloader", False) or size is None or not 0 < left < size:
        return gathered
    return recursively_apply(_drop_beyond_end, gathered, left, size)


def current_passes(state: GradientState, loader: Any = None) -> list[LoaderPass]:
    """Return the passes over the loaders whose batches may be current, the likeliest first.

    Args:
        state: Whose loaders they are.
        loader: The one that the user names.

    Raises:
        TypeError: If it is not a prepared loader.
        ValueError: If it was not iterated.
    """
    if loader is None:
        return state._loaders.current
    inner = getattr(loader, "loader", loader)  # of what wraps a prepared loader
    if not hasattr(inner, "real_samples"):
        raise TypeError(
            f"gather_for_metrics(loader=...) got a {type(loader).__name__}. Pass the loader that prepare() "
            "returned."
        )
    found = inner.gradient_state._loaders.find(inner)
    if found is None:
        raise ValueError(
            f"gather_for_metrics(loader=...) got {describe(inner)}, which was not iterated. Pass the loader "
            "that the loop reads (what skip_first_batches returns is another one)."
        )
    return [found]


def warn_of_reduced_padding(state: GradientState, size: int, reduction: str) -> None:
    """Warn of padding that a sum over the processes may count.

    Args:
        state: Whose loaders may be padded.
        size: Number of data-parallel processes.
        reduction: How values are reduced.
    """
    one = next(iter(state._loaders.current), None)
    step = None if one is None or one.is_gathered else _step_rows(one.loader, size)
    if one is None or step is None or step.real == step.rows or reduction not in ("sum", "mean"):
        return
    one.is_gathered = True
    warn(
        f"reduce(..., {reduction!r}) is called for {describe(one.loader)}, whose last step repeats "
        f"{sum(step.rows) - sum(step.real)} samples to fill up the batches: a sum or a mean over its batches "
        "counts them twice. gather_for_metrics leaves them out, and loader.real_samples says how many to "
        "count.",
        UserWarning,
    )


@dataclass(frozen=True)
class _Padding:
    """How many rows are real, in the current batches and in epochs that have ended.

    Args:
        real: By the numbers of rows of all processes: how many of them are real. The rest follows them.
        unclear: Numbers of rows that batches of several loaders have, of which different ones are real.
        warns: Whether to warn of other numbers of rows.
    """

    real: dict[tuple[int, ...], tuple[int, ...]]
    unclear: frozenset[tuple[int, ...]]
    warns: bool

    def of(self, rank: int) -> dict[int, int]:
        """How many rows of one process are real, by its number of rows; the likeliest loader first."""
        return {rows[rank]: real[rank] for rows, real in reversed(self.real.items())}


def _padding(passes: Sequence[LoaderPass], size: int, is_training: bool) -> _Padding | None:
    """Return what is known of padding; None if no loader has padded a batch."""
    if not any(one.padded_batches for one in passes):
        return None
    real: dict[tuple[int, ...], tuple[int, ...]] = {}
    unclear = set()
    for one in passes:
        for rows, real_rows in _real_rows_of(one, size).items():
            # One batch is not enough to tell that loaders are read side by side.
            is_enough = one.is_open and min(one.batches, passes[0].batches) > 1
            if real.setdefault(rows, real_rows) != real_rows and is_enough:
                unclear.add(rows)
    if real and all(rows == real_rows for rows, real_rows in real.items()):
        return None
    # After a loop that gathered its batches nothing is left that could count padding.
    uncounted = [one for one in passes if one.is_open or not one.is_gathered]
    warns = any(_step_rows(one.loader, size) and (one is passes[0] or not is_training) for one in uncounted)
    return _Padding(real, frozenset(unclear), warns)


def _real_rows_of(one: LoaderPass, size: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the rows of the current batch, or of the full epoch after its end, and how many are real."""
    step, each = _step_rows(one.loader, size), getattr(one.loader, "batch_size", None)
    if step is None and isinstance(each, int):
        step = StepRows((each,) * size, (each,) * size)
    if step is None:
        return {}
    before = 0
    # After the loop, as many rows as its last batch had may be anything: those of the whole epoch count, if
    # no other step was padded.
    if not one.is_open and one.batches > 1:
        if not isinstance(each, int) or one.padded_batches != (step.real != step.rows):
            return {}
        before = each * (one.batches - 1)
    return {tuple(before + n for n in step.rows): tuple(before + n for n in step.real)}


def _step_rows(loader: Any | None, size: int) -> StepRows | None:
    """The loader's `StepRows` of this step, if the loader is for so many data-parallel processes."""
    real = getattr(loader, "real_samples", None)
    if real is None or loader is None or len(real) != size:  # another Accelerator's loader
        return None
    return StepRows(real, loader.batch_rows)


def _wait_for_all_ranks(loader: Any, uneven_monitor: UnevenLoaderMonitor, process: ProcessInfo) -> None:
    """Make sure that all processes have this step, where each reads its own shard.

    Debug mode compares what processes call, and waits for those that come late by itself.
    """
    missing = uneven_monitor.exhausted_rank() if process.debug else uneven_monitor.wait_for_all()
    if missing is not None:
        raise RuntimeError(
            f"gather_for_metrics would deadlock: process {missing.rank} has only {missing.batches} "
            f"batches of the {type(loader).__name__} over {_dataset_name(loader)}, and process "
            f"{missing.current_rank} is in step {missing.step}, as {missing.reason}. To fix this, "
            f"{missing.fix}, or gather after the loop."
        )


def _dataset_name(loader: Any) -> str:
    dataset = loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset
    return type(dataset).__name__


def _some_are_missing(loader: Any, rows: tuple[int, ...]) -> str:
    there = sum(map(bool, rows))
    missing = str(there) if there == len(rows) - 1 else f"{there} to {len(rows) - 1}"
    return (
        f"gather_for_metrics would deadlock: in this last step of the {type(loader).__name__} over "
        f"{_dataset_name(loader)} (batch_size={loader.batch_size}, even_batches=False), only {there} of "
        f"{len(rows)} data-parallel processes have a batch, and number {missing} has left the loop. Use "
        "even_batches=True (the default; what only fills up the step is dropped here), "
        "DataLoader(drop_last=True), or gather after the loop."
    )


def _has_only_tensors(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return True
    inside = children(data)
    if inside is None:
        return False
    # The usual tree, for many leaves at once.
    return set(map(type, inside)) == {torch.Tensor} or all(map(_has_only_tensors, inside))


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


def _batch_sizes(loader: Any | None, step: StepRows | None, size: int) -> set[int]:
    """Return how many sequences a process with most of them may have in this step, as far as is known."""
    if step is not None:
        return set(step.rows)
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
    raise ValueError(_differs(f"tensors of shape {(rows, *gathered.shape[1:])} ({gathered.dtype})"))


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
        "maybe_context_parallel, where all see full sequences, or combine the shards yourself: "
        "accelerator.reduce(x, 'mean') for a mean loss, accelerator.reduce(x, 'sum') for a sum or a count, "
        "accelerator.gather(x) for the values of all processes."
    )


def _gather_uneven(
    data: Any, padding: _Padding | None, process: ProcessInfo, copies: int, sequences: set[int] | None
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
            _kept_rows(leaf, _real_rows(tuple(rows), padding), max(rows))
            for leaf, rows in zip(gathered, sizes.tolist(), strict=True)
        ]
    )


def _drop_padding(gathered: torch.Tensor, padding: _Padding, size: int) -> torch.Tensor:
    """Keep the real rows of each process; what is not one row per sample is kept as it is."""
    rows = gathered.shape[0] // size  # the same of each process, as gather takes no others
    return _kept_rows(gathered, _real_rows((rows,) * size, padding), rows)


def _drop_beyond_end(gathered: torch.Tensor, left: int, size: int) -> torch.Tensor:
    """Cut one number that is repeated for each sample of a whole batch to the samples of the last one."""
    # transformers' Trainer repeats the loss of a batch so, for the mean to weigh samples equally. Other
    # tensors of that length may have two rows per sample, or one per class.
    repeats = gathered.dim() == 1 and gathered.is_floating_point() and gathered.shape[0] == size
    return gathered[:left] if repeats and torch.equal(gathered, gathered[:1].expand(size)) else gathered


def _real_rows(rows: tuple[int, ...], padding: _Padding | None) -> tuple[int, ...]:
    """Return how many of the rows that each process gave are real: all, if they are not one per sample."""
    if padding is None:
        return rows
    if rows not in padding.real and not padding.warns:
        return rows
    if rows not in padding.real:
        warn(
            f"gather_for_metrics got {sum(rows)} rows from {len(rows)} processes, and there are samples that "
            "only fill up the last step: it cannot tell which rows belong to them, and keeps all"
            f"{_expected(padding)}. Give it one row per sample; a mean over a batch counts them.",
            UserWarning,
        )
        return rows
    if rows in padding.unclear:
        warn(
            f"gather_for_metrics got {sum(rows)} rows, as many as the batches of several loaders that are "
            "read side by side have, and drops the padding of the loader that gave the last batch. Say which "
            "one they are of: gather_for_metrics(..., loader=...).",
            UserWarning,
        )
    return padding.real[rows]


def _expected(padding: _Padding) -> str:
    counts = " or ".join(str(sum(rows)) for rows in padding.real)
    return f" (it could cut {counts} rows)" if counts else ""


def _kept_rows(gathered: torch.Tensor, counts: Sequence[int], rows: int) -> torch.Tensor:
    # Nothing to drop: the gathered tensor itself, without a copy.
    if len(set(counts)) == 1 and counts[0] == rows:
        return gathered
    return torch.cat([gathered[rank * rows : rank * rows + count] for rank, count in enumerate(counts)])


def _cut_objects(data: Any, real: Mapping[int, int]) -> Any:
    """Cut what has one entry per sample (lists, tuples, tensors, arrays) to the real samples.

    Args:
        data: Any objects.
        real: How many entries are real, by the number of entries.
    """
    shape = getattr(data, "shape", None)
    if shape is not None:
        return data[: real.get(shape[0])] if len(shape) > 0 else data
    is_list = isinstance(data, list | tuple) and not is_namedtuple(data)
    if is_list and len(data) in real and not _is_structure(data, len(data)):
        return data[: real[len(data)]]
    values = children(data)
    return data if values is None else rebuild(data, [_cut_objects(value, real) for value in values])


def _is_structure(data: Sequence[Any], rows: int) -> bool:
    """Whether the entries of a list or tuple of `rows` entries are not samples, but hold one row per sample.

    So it is where each of them has `rows` rows, in a tuple, as `(predictions, labels)`, or in a list of
    things that differ in kind; and where tensors have them and what has not differs in kind, as in
    `(predictions, None)`. A list of similar things is taken for one entry per sample, as gathering
    objects makes one list of all entries; with a warning, as it may be meant otherwise.
    """
    others = [value for value in data if not _has_rows(value, rows)]
    if others:
        tensors = [value for value in data if hasattr(value, "shape") and _has_rows(value, rows)]
        # The tokens of each sample are tensors of any length, and none of them is a single number.
        with_rows, without = (
            {(type(value), getattr(value, "ndim", 1) == 0) for value in some} for some in (tensors, others)
        )
        return bool(tensors) and not with_rows & without
    # Samples of one batch have one form; predictions and labels usually are not.
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
