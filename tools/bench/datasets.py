"""What a loader of the bench reads: an ordinary dataset, or a TensorDataset, which accel reads by batches."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, TensorDataset

__all__ = ["KINDS", "Samples", "make", "suffix"]

KINDS = ("ordinary", "tensors")
"""The first is what programs have: samples are read one by one, as by torch."""


class Samples(Dataset[tuple[torch.Tensor, ...]]):
    """Rows of tensors, as a program's own class reads them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


def make(kind: str, *tensors: torch.Tensor) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return a dataset of one of the KINDS."""
    return Samples(*tensors) if kind == "ordinary" else TensorDataset(*tensors)


def suffix(kind: str) -> str:
    """Return what a row's name says of the dataset: nothing of an ordinary one."""
    return "" if kind == "ordinary" else " over a TensorDataset"
