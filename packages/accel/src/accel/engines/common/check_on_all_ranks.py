"""Raising on all ranks if one raises, and rejecting models without weights to start from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from accel_ops.collectives import operations
from accel_ops.modules import unsaved_buffers

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


@contextlib.contextmanager
def check_on_all_ranks(
    models: Sequence[tuple[torch.nn.Module, bool]], source: str, process: ProcessInfo
) -> Iterator[None]:
    """A context for local checks; at its end all ranks raise if one has raised.

    Every process enters it, with the same number of models. It costs one small reduction; nothing without
    models.

    Args:
        models: The models to train, each with whether its weights are needed here.
        source: Which processes' weights are used, for the message.
        process: This process.

    Raises:
        Exception: What was raised inside, on the processes where it was raised.
        ValueError: On all others then; and on all processes, if parameters or buffers of a model are on the
            meta device where they are needed.
    """
    error: Exception | None = None
    try:
        yield
    # Raised below: a process that raised here would leave the others hanging in the first collective of
    # prepare.
    except Exception as caught:
        error = caught
    failed, missing = 0, [0] * len(models)
    if models:
        without_values = [is_needed and any(True for _ in _meta_names(model)) for model, is_needed in models]
        # In float32, which every backend reduces; counts of processes are exact in it up to 2**24.
        counts = torch.tensor(
            [error is not None, *without_values], dtype=torch.float32, device=process.device
        )
        failed, *missing = map(int, operations.reduce(counts, "sum", process=process).tolist())
    # The process's own error first: it has the traceback.
    if error is not None:
        raise error
    if failed:
        raise ValueError(
            f"prepare failed on {failed} of {process.world_size} processes, and not on this one: the "
            "errors there say why. Prepare the same objects on all processes."
        )
    for (model, _), number in zip(models, missing, strict=True):
        if number:
            _raise_missing(model, number, source, process)


def _meta_names(model: torch.nn.Module) -> Iterator[str]:
    """The names of parameters and buffers without values.

    They include buffers that are not persistent: torch cannot move those from meta, and `to_empty` would
    leave them uninitialised.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    return (name for name, tensor in tensors if tensor.is_meta)


def _raise_missing(model: torch.nn.Module, number: int, source: str, process: ProcessInfo) -> None:
    names = list(_meta_names(model))
    listed = f" ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" if names else ""
    fix = "Load them there, or give them memory with to_empty() and initialise them"
    if names and _unsaved_buffer_names(model).issuperset(names):
        fix = "They are not persistent, so no checkpoint has them: compute them there"
    raise ValueError(
        f"{type(model).__name__} has parameters or buffers{listed} without values to start from: they are on "
        f"the meta device on {number} of {process.world_size} processes, and those of {source} are used. "
        f"{fix}. Under FSDP all processes but the first may stay on meta with "
        "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)."
    )


def _unsaved_buffer_names(model: torch.nn.Module) -> set[str]:
    """The names of buffers that are not persistent."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in unsaved_buffers(module)
    }
