"""Fingerprints of tensors for `accel verify`: digests of samples, and sketches of parameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from accel_ops.debug.digest import FACTOR, as_integers
from accel_ops.trees.walk import children, flatten

PROJECTIONS = 6
"""Numbers in a sketch: the mean of as many squares estimates a distance to within about a third."""

_CHUNK = 2**16  # elements that are projected at once


def sample_digests(batch: Any) -> list[int]:
    """One number for each sample of a batch, the same in whichever batch and process it comes.

    All tensors whose first dimension is the batch's count; in a mapping with an `attention_mask` only what is
    not masked, and otherwise zeros at the end of a sample do not count: another batch may pad it to another
    length.

    Args:
        batch: Tensors in lists, tuples and mappings, or a list of other objects.

    Returns:
        The numbers, in the order of the samples; none if the batch has no samples that can be distinguished.
    """
    tensors = [item for item in flatten(batch)[0] if item.dim()]
    if not tensors:
        entries = batch if isinstance(batch, list | tuple) else []
        return [zlib.crc32(repr(entry).encode()) for entry in entries]
    size = len(tensors[0])
    mask = _attention_mask(batch)
    total = torch.zeros(size, dtype=torch.int64)
    for item in tensors:
        if len(item) == size and item.layout == torch.strided:
            total = total * FACTOR + _digests_of_rows(item.detach().cpu(), mask)
    return total.tolist()


def _attention_mask(batch: Any) -> torch.Tensor | None:
    """The first attention mask of a batch, whose rows are sequences; None without one."""
    if isinstance(batch, Mapping):
        found = batch.get("attention_mask")
        if isinstance(found, torch.Tensor) and found.dim() == 2:
            return found
    masks = map(_attention_mask, children(batch) or ())
    return next((mask for mask in masks if mask is not None), None)


def _digests_of_rows(item: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None and item.shape[:2] == mask.shape:
        chosen = mask.cpu().bool()
        rows = [row[keep] for row, keep in zip(item, chosen, strict=True)]
        return torch.stack([_digests_of_rows(row.reshape(1, -1), None)[0] for row in rows])
    numbers = as_integers(item).view(len(item), -1).long()
    places = torch.arange(1, numbers.shape[1] + 1) * FACTOR | 1
    mixed = numbers * places  # 0 for zeros, wherever they are
    return (mixed ^ (mixed >> 29)).sum(dim=1)


def sketch(tensor: torch.Tensor) -> list[float]:
    """The norm of a tensor and its projections on a few fixed random directions.

    Projections are linear: those of a difference are the differences of projections, and the mean of their
    squares estimates the square of its norm. So tensors that two runs have are compared by a few numbers.

    Args:
        tensor: A dense tensor of real numbers.

    Returns:
        1 + `PROJECTIONS` numbers.
    """
    values = tensor.detach().flatten()
    if values.device.type == "mps":  # which has no float64
        values = values.cpu()
    total = torch.zeros(1 + PROJECTIONS, dtype=torch.float64, device=values.device)
    directions = _directions().to(values.device)
    for number, start in enumerate(range(0, values.numel(), _CHUNK)):
        chunk = values[start : start + _CHUNK].double()
        # Another sign for each chunk, as they share their directions.
        sign = 1 if zlib.crc32(number.to_bytes(8, "little")) & 1 else -1
        total[0] += chunk.square().sum()
        total[1:] += sign * (chunk @ directions[: chunk.numel()])
    total[0] = total[0].sqrt()
    return total.tolist()


@lru_cache(maxsize=1)
def _directions() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # a separate one: the script's draws do not change
    return torch.randn(_CHUNK, PROJECTIONS, dtype=torch.float64, generator=generator)
