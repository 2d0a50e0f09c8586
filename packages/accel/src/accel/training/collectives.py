"""The collectives of the Accelerator; every process calls each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from accel_ops.collectives import operations, padding

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_state.literals import Reduction

_T = TypeVar("_T")


def gather(run: Run, tensor: _T) -> _T:
    """See `Accelerator.gather`."""
    return operations.gather(tensor, process=run.process)


def gather_for_metrics(run: Run, data: Any, use_gather_object: bool, loader: Any) -> Any:
    """See `Accelerator.gather_for_metrics`."""
    from accel.training import metrics  # imported on first use, as a run may never evaluate

    parallelism = run.state.parallelism_config
    return metrics.gather_for_metrics(
        data,
        passes=metrics.current_passes(run.gradient_state, loader),
        process=run.process,
        shard=run.engine.data_parallel.rank_and_size,
        use_gather_object=use_gather_object,
        shares_sequences=parallelism is not None and parallelism.cp_enabled,
        is_training=is_training(run),
    )


def reduce(run: Run, tensor: _T, reduction: Reduction, scale: float) -> _T:
    """See `Accelerator.reduce`."""
    # In training, samples that fill up the last batch are trained on like others.
    if run.process.world_size > 1 and not is_training(run):
        from accel.training import metrics

        metrics.warn_of_reduced_padding(run.gradient_state, run.engine.data_parallel.size, reduction)
    return operations.reduce(tensor, reduction, scale, process=run.process)


def pad_across_processes(run: Run, tensor: _T, dim: int, pad_index: int, pad_first: bool) -> _T:
    """See `Accelerator.pad_across_processes`."""
    return padding.pad_across_processes(tensor, dim, pad_index, pad_first, process=run.process)


def is_training(run: Run) -> bool:
    """Whether a prepared model is in training mode."""
    return any(model.training for model in run.prepared.models)
