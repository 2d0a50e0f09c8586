"""Reading the batches of a `TensorDataset` with one call per tensor, instead of one per sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from accel_data.seeds import WorkerInit


@contextmanager
def batched_reads(loader: DataLoader[Any]) -> Iterator[None]:
    """Make the iteration that starts inside read full batches at once, if they are bit-identical.

    This holds for a plain `TensorDataset` of contiguous CPU tensors with torch's default collate function, in
    this process or in workers. For other loaders nothing changes.

    Args:
        loader: The loader that is iterated.
    """
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    if not _supports_batched_reads(loader):
        yield
        return
    # Torch's iterator takes both when it starts; users see theirs afterwards. Bypass DataLoader.__setattr__,
    # which raises for a dataset after __init__.
    loader.__dict__.update(dataset=_BatchedDataset(dataset), collate_fn=_identity)
    try:
        yield
    finally:
        loader.__dict__.update(dataset=dataset, collate_fn=collate)


def _supports_batched_reads(loader: DataLoader[Any]) -> bool:
    # Exact types: a subclass may do anything with an index.
    return (
        type(loader.dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
        and _user_worker_init(loader) is None  # the function may access the dataset
        # Users may add functions to this table.
        and default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
        and not any(isinstance((), kind) for kind in default_collate_fn_map)
        and all(map(_is_plain, loader.dataset.tensors))
    )


def _user_worker_init(loader: DataLoader[Any]) -> Any:
    init: Any = loader.worker_init_fn
    return init.init if isinstance(init, WorkerInit) else init


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


class _BatchedDataset:
    """Replaces the dataset, so that torch's fetcher reads collated batches.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: list[Any]) -> Any:
        if set(map(type, indices)) == {int}:
            places = torch.tensor(indices, device="cpu")
            try:
                return [tensor.index_select(0, places) for tensor in self._dataset.tensors]
            # A negative index, one beyond the end, or a dtype that cannot be indexed (float8).
            except (IndexError, RuntimeError):
                pass
        return default_collate([self._dataset[index] for index in indices])


def _identity(batch: Any) -> Any:
    return batch
