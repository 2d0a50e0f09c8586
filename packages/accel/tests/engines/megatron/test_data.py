"""Loaders of Megatron's indexed datasets, as far as they go without megatron-core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from accel import skip_first_batches
from accel.engines.megatron.data import IndexedLoader


def test_an_indexed_loader_without_its_first_steps_is_one_too():
    plugin: Any = SimpleNamespace(global_batch_size=4)
    loader = IndexedLoader(range(20), plugin, 4, torch.device("cpu"))
    rest = skip_first_batches(skip_first_batches(loader, 1), 1)

    assert isinstance(rest, IndexedLoader)
    assert (len(loader), loader.consumed) == (4, 4)
    assert (len(rest), rest.consumed) == (2, 12)
