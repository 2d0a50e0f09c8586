"""Buffers with different values on each rank, where parameters are sharded.

DDP broadcasts the first rank's buffers in every forward pass. FSDP does not: the statistics of batch norm
without synchronisation differ between ranks. A checkpoint then has the buffers of each rank, besides those of
the first rank among the weights, which are used on another number of processes.
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
    # Digests, so that buffers are not sent only to be compared.
    digests = [digest(buffer) for buffer in buffers.values()]
    if any(other != digests for other in all_gather_object(digests, process)):
        # Copies: buffers may share memory, which safetensors does not support.
        state = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        staging.write(state, file_names.buffers_file(process.rank), safe_serialization=True)


def read_per_rank_buffers(run: Run, reader: CheckpointReader) -> dict[str, torch.Tensor]:
    """Read what `save_own_buffers` wrote; every process calls it.

    On another number of processes all use those of the first rank, if the checkpoint has them.
    """
    if not any(file_names.role_of(name) == "buffers" for name in reader.names):
        return {}
    process = run.process
    saved = reader.facts.get("world_size")
    # With another number of processes, a rank has other data than before.
    name = file_names.buffers_file(process.rank if saved == process.world_size else 0)
    return run_on_all_ranks(lambda: reader.load(name), process, f"reading {name}") or {}


def set_per_rank_buffers(run: Run, state: Mapping[str, torch.Tensor]) -> None:
    """Set the buffers to the values that were read."""
    for key, buffer in _buffers(run) if state else ():
        if key in state and state[key].shape == buffer.shape:
            # In place: compiled or wrapped modules refer to this tensor.
            buffer.detach().copy_(state[key])


def _buffers(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the saved, unsharded buffers of prepared models, by names that all engines share."""
    for index, model in enumerate(run.prepared.models):
        inner = run.engine.unwrap_model(model, keep_torch_compile=False)
        for path, module in inner.named_modules():
            for name, buffer in module._buffers.items():
                is_saved = buffer is not None and name not in unsaved_buffers(module)
                if is_saved and not isinstance(buffer, DTensor) and buffer.numel():
                    # A private of torch, which removes the names of wrappers (FSDP1, checkpointing).
                    yield clean_tensor_name(f"{index}.{path}.{name}" if path else f"{index}.{name}"), buffer
