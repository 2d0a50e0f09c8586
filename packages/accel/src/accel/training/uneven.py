"""Training on inputs whose number differs between processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines import UnevenInputs
    from accel.training.run import Run
    from accel_data.loader.uneven import ExhaustedRank


@contextlib.contextmanager
def join_uneven_inputs(run: Run, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    """Let processes that ran out of data shadow the gradient collectives of the others.

    Args:
        run: The run whose engine and loaders participate.
        joinables: Prepared models or torch Joinable objects.
        even_batches: Overrides the setting of prepared map-style loaders inside the context.
    """
    engine = run.engine
    if (uneven_inputs := engine.data_parallel.uneven_inputs) is None:
        if run.process.world_size > 1:
            warn(
                f"join_uneven_inputs has no effect with the {engine.name} engine: only DDP can join.",
            )
        yield
        return
    with _even_batches(run, even_batches), uneven_inputs.join(joinables):
        yield


def warn_of_uneven(joining: UnevenInputs | None, counts: tuple[int, ...] | None) -> None:
    """Warn that processes which run out of batches leave the others waiting, unless they are joined.

    Args:
        joining: Whether they are joined, by the engine of the Accelerator whose loader is iterated; None if
            it cannot join them.
        counts: Batches of each process; None if they are not known.
    """
    # Processes that are joined do not wait for each other.
    if joining is not None and joining.active:
        return
    if counts is None:
        seen = "This loader may give some processes fewer batches than others (it does not pad)"
    else:
        seen = f"This loader gives {max(counts)} batches to process {counts.index(max(counts))}, but only "
        seen += f"{min(counts)} to process {counts.index(min(counts))}"
    fix = "pass even_batches=True (the default) with the full dataset, or drop_last=True"
    warn(f"{seen}: {_DOES_NOT_PARTICIPATE}. {_to_train(joining)}{fix}.", UserWarning)


def warn_of_missing(joining: UnevenInputs | None, missing: ExhaustedRank) -> None:
    """Warn of a process that has no batch, in the step in which another one finds it.

    Args:
        joining: See `warn_of_uneven`.
        missing: The process.
    """
    if joining is not None and joining.active:
        return
    warn(
        f"Process {missing.rank} has only {missing.batches} batches of this loader, and process "
        f"{missing.current_rank} is in step {missing.step}, as {missing.reason}: {_DOES_NOT_PARTICIPATE}. "
        f"{_to_train(joining)}{missing.fix}.",
        UserWarning,
        about="process",
    )


_DOES_NOT_PARTICIPATE = (
    "a process that has run out of data stops calling backward, gather and gather_for_metrics, and the "
    "others hang"
)


def _to_train(joining: UnevenInputs | None) -> str:
    way = "iterate it inside `with accelerator.join_uneven_inputs([model]):`, or " if joining else ""
    return f"To train on it {way}"


@contextlib.contextmanager
def _even_batches(run: Run, even_batches: bool | None) -> Iterator[None]:
    """Override even_batches for the loaders that have the setting, inside the context."""
    if even_batches is None:
        yield
        return
    from accel_data.order.samplers import BatchSamplerShard

    samplers = [getattr(loader, "batch_sampler", None) for loader in run.prepared.loaders]
    shards = [sampler for sampler in samplers if isinstance(sampler, BatchSamplerShard)]
    # Streams have no length to complete, and process 0 shares out what is dispatched.
    if len(shards) < len(samplers):
        warn("join_uneven_inputs(even_batches=...) does not affect iterable-style and dispatched loaders.")
    with contextlib.ExitStack() as overridden:
        for shard in shards:
            overridden.enter_context(shard.override_even_batches(even_batches))
        yield
