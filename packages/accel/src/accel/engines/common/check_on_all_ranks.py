"""Rejecting on all processes what one of them rejects, and models that have no weights to start from."""

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
    models: Sequence[tuple[torch.nn.Module, bool]], whose: str, process: ProcessInfo
) -> Iterator[None]:
    """A context for checks that each process makes alone; at its end all know how these went.

    Every process enters it, with as many models. It costs one small reduction, without models nothing.

    Args:
        models: The models that are to be trained, each with whether its weights here count.
        whose: Which processes' weights count, for the message.
        process: This process.

    Raises:
        Exception: What was raised inside, on the processes where it was.
        ValueError: On all others then; and on all processes, if parameters or buffers of a model are on the
            meta device where they count.
    """
    error: Exception | None = None
    try:
        yield
    # Kept until the others know: a process that raised here would leave them waiting in the first collective
    # of prepare.
    except Exception as caught:
        error = caught
    failed, missing = 0, [0] * len(models)
    if models:
        bare = [is_needed and any(True for _ in _bare(model)) for model, is_needed in models]
        # In float32, which every backend adds up; counts of processes are exact in it up to 2**24.
        here = torch.tensor([error is not None, *bare], dtype=torch.float32, device=process.device)
        failed, *missing = map(int, operations.reduce(here, "sum", process=process).tolist())
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
            _raise_missing(model, number, whose, process)


def _bare(model: torch.nn.Module) -> Iterator[str]:
    """The names of parameters and buffers without values.

    Those of buffers that are not persistent are among them: to put one on a device fails in torch, and to
    give it memory leaves it with what lies there.
    """
    held = (*model.named_parameters(), *model.named_buffers())
    return (name for name, tensor in held if tensor.is_meta)


def _raise_missing(model: torch.nn.Module, number: int, whose: str, process: ProcessInfo) -> None:
    names = list(_bare(model))
    listed = f" ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})" if names else ""
    fix = "Load them there, or give them memory with to_empty() and initialise them"
    if names and _derived(model).issuperset(names):
        fix = "No checkpoint has them, as they are not persistent: compute them again there"
    raise ValueError(
        f"{type(model).__name__} has parameters or buffers{listed} without values to start from: they are on "
        f"the meta device on {number} of {process.world_size} processes, and those of {whose} count. {fix}. "
        "Under FSDP all processes but the first may stay on meta with "
        "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)."
    )


def _derived(model: torch.nn.Module) -> set[str]:
    """The names of buffers that are not persistent."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in unsaved_buffers(module)
    }
