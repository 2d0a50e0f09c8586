"""Whether the processes of a run have the same models and random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel.engines.base import is_native
from accel.engines.distributed import DistributedEngine
from accel_ops.debug import sync

if TYPE_CHECKING:
    import torch

    from accel.training.run import Run
    from accel_state.process.info import ProcessInfo


def verify_sync(
    run: Run, models: Sequence[torch.nn.Module], *, buffers: bool = True, rng: bool = True
) -> list[str]:
    """Make sure that models and random generators are the same on all processes; all of them call it.

    Args:
        run: Whose processes are compared.
        models: The models; by default all that are prepared.
        buffers: See `accel_ops.verify_sync`; likewise `rng`.
        rng: Whether to compare random generators.

    Returns:
        The names of what was not compared, as no other process has the same.

    Raises:
        DistributedOperationException: On every process, if something differs.
    """
    engine, chosen = run.engine, models or run.prepared.models
    # Those of a pipeline have other layers on each process.
    left_out = [model for model in chosen if engine.traits.splits_layers and is_native(engine, model)]
    names = sync.verify_sync(
        *(model for model in chosen if not any(model is item for item in left_out)),
        buffers=buffers,
        rng=rng,
        process=run.process,
        is_shard=engine.parameters.is_shard,
    )
    return [*(type(model).__name__ for model in left_out), *names]


def replicas_may_differ(run: Run) -> bool:
    """Whether replicas may differ now, or processes do not step at the same time."""
    uneven_inputs = run.engine.data_parallel.uneven_inputs
    in_no_sync = isinstance(run.engine, DistributedEngine) and run.engine.in_no_sync
    return in_no_sync or (uneven_inputs is not None and uneven_inputs.active)


def verify_before_save(run: Run, process: ProcessInfo) -> None:
    """In debug mode, make sure that what a checkpoint has of parameters is what all that save have.

    Buffers and random generators may differ in correct training: running statistics of batch norm, and seeds
    that belong to the process.
    """
    if not process.debug or process.world_size == 1 or not run.prepared.models:
        return
    # Replicas of LocalSGD are apart between its averages.
    if not replicas_may_differ(run):
        verify_sync(run, run.prepared.models, buffers=False, rng=False)
