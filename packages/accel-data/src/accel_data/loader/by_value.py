"""Small batches that workers send as bytes.

Torch shares the memory of each tensor that a worker sends: the main process asks the worker for a handle, by
a connection of its own, which takes longer than to send some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_ops.collectives.pack_parts import as_bytes

SMALL_BYTES = 2**19
"""The most that a batch may have to be sent as bytes. Above 1 MiB sharing is faster."""


@contextmanager
def sending_by_value(loader: DataLoader[Any]) -> Iterator[None]:
    """Let the workers that start inside send small batches as bytes; the main process gets the same tensors.

    Args:
        loader: The loader that is iterated.
    """
    if not loader.num_workers:
        yield
        return
    # Torch's iterator takes it when it starts; users see theirs afterwards.
    collate = loader.collate_fn
    loader.collate_fn = CollateByValue(collate)
    try:
        yield
    finally:
        loader.collate_fn = collate


class CollateByValue:
    """Collates, and marks what is small to be sent as bytes.

    Args:
        collate: What collates.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch, with its tensors marked if all of them together are small."""
        batch = self.collate(samples)
        tensors: list[torch.Tensor] = []
        _find(batch, tensors)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        # Those that share memory shall share it afterwards; so does torch send them.
        small = sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES
        if tensors and small and len(storages) == len(tensors) and all(map(is_plain, tensors)):
            return _marked(batch)
        return batch


class _ByValue:
    """A tensor that is pickled as its bytes; what is unpickled is the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        content = bytearray(as_bytes(self._tensor).numpy())
        return _received, (self._tensor.dtype, self._tensor.shape, content)


def _received(dtype: torch.dtype, shape: torch.Size, content: bytearray) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # A copy, as torch aligns its own memory, on which the last bits of a result may depend.
    return torch.frombuffer(content, dtype=dtype).view(shape).clone()


def _find(batch: Any, found: list[torch.Tensor]) -> None:
    if isinstance(batch, torch.Tensor):
        found.append(batch)
    elif type(batch) in (list, tuple):
        for item in batch:
            _find(item, found)
    elif type(batch) is dict:
        for item in batch.values():
            _find(item, found)


def _marked(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return _ByValue(batch)
    if type(batch) in (list, tuple):
        return type(batch)(map(_marked, batch))
    if type(batch) is dict:
        return {key: _marked(item) for key, item in batch.items()}
    return batch


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than its bytes, dtype and shape, in the CPU's memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )
