"""Buffers that each process has its own values of, where parameters are sharded.

DDP sends the first process's buffers in every forward pass. FSDP does not: what batch norm has seen, without
synchronisation, differs between processes. A checkpoint keeps each process's own then, beside the first one's
among the weights, which are for any other number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor

from accel_ckpt import file_names
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks
from accel_ckpt.training_state.registered import digest
from accel_ops.modules import unsaved_buffers

if TYPE_CHECKING:
    from accel.training.run import Run
    from accel_ckpt.folder.reader import CheckpointReader
    from accel_ckpt.folder.staging import Staging


def save_per_rank_buffers(run: Run, staging: Staging) -> None:
    """Write the buffers of this process, if they differ between processes; every process calls it."""
    process = run.process
    buffers = dict(_buffers(run))
    # Digests, so that no buffer travels only to be compared.
    own = [digest(buffer) for buffer in buffers.values()]
    if any(other != own for other in all_gather_object(own, process)):
        # Copies: buffers may share memory, and a file of safetensors has each name by itself.
        state = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        staging.write(state, file_names.buffers_file(process.rank), safe_serialization=True)


def read_per_rank_buffers(run: Run, reader: CheckpointReader) -> dict[str, torch.Tensor]:
    """Read what `save_own_buffers` wrote; every process calls it.

    On another number of processes all have the first one's, as far as the checkpoint has them.
    """
    if not any(file_names.role_of(name) == "buffers" for name in reader.names):
        return {}
    process = run.process
    saved = reader.facts.get("world_size")
    # With another number of processes, a rank has other data than before.
    name = file_names.buffers_file(process.rank if saved == process.world_size else 0)
    return run_on_all_ranks(lambda: reader.load(name), process, f"reading {name}") or {}


def set_per_rank_buffers(run: Run, state: Mapping[str, torch.Tensor]) -> None:
    """Give buffers the values that were read."""
    for key, buffer in _buffers(run) if state else ():
        if key in state and state[key].shape == buffer.shape:
            # In place: what was compiled or wrapped holds this very tensor.
            buffer.detach().copy_(state[key])


def _buffers(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of prepared models that are saved and whole, by names that every engine gives."""
    for index, model in enumerate(run.models):
        inner = run.engine.unwrap_model(model, keep_torch_compile=False)
        for path, module in inner.named_modules():
            for name, buffer in module._buffers.items():
                is_saved = buffer is not None and name not in unsaved_buffers(module)
                if is_saved and not isinstance(buffer, DTensor) and buffer.numel():
                    # A private of torch, which takes its wrappers' names out (FSDP1, checkpointing).
                    yield clean_tensor_name(f"{index}.{path}.{name}" if path else f"{index}.{name}"), buffer
