"""Ring attention on real gloo workers, against attention over the full sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.engines import torch_private
from accel.engines.context_parallel import Ring, balanced_positions, ring_attention

pytestmark = pytest.mark.core

LENGTH = 16


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, LENGTH, 4, dtype=dtype, generator=generator) for _ in range(4)]


def whole(dtype: torch.dtype, is_causal: bool, scale: float | None) -> list[torch.Tensor]:
    """Output and gradients of attention over the full sequence."""
    *qkv, gradient = inputs(dtype)
    qkv = [item.requires_grad_() for item in qkv]
    out = F.scaled_dot_product_attention(*qkv, is_causal=is_causal, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


def in_parts(rotation: str, scale: float | None) -> dict[Any, list[torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    ring = Ring(init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), rotation)
    positions = balanced_positions(LENGTH, rank, size)
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for is_causal in (True, False):
            *qkv, gradient = (item[:, :, positions] for item in inputs(dtype))
            qkv = [item.requires_grad_() for item in qkv]
            out = ring_attention(ring, *qkv, is_causal, scale)
            found[dtype, is_causal] = [out.detach(), *torch.autograd.grad(out, qkv, gradient)]
    return found


@pytest.mark.parametrize(
    ("rotation", "size", "scale"), [("allgather", 2, None), ("alltoall", 2, 0.3), ("alltoall", 4, None)]
)
def test_shards_attend_as_the_full_sequence_does(world, rotation, size, scale):
    results = world.run(in_parts, rotation, scale, size=size)

    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 5e-2}
    for rank, found in enumerate(results):
        positions = balanced_positions(LENGTH, rank, size)
        for (dtype, is_causal), tensors in found.items():
            for tensor, expected in zip(tensors, whole(dtype, is_causal, scale), strict=True):
                limits = {"rtol": tolerance[dtype], "atol": tolerance[dtype]}
                torch.testing.assert_close(tensor, expected[:, :, positions], **limits)


def test_parts_are_balanced_and_cover_the_sequence():
    parts = [balanced_positions(16, rank, 4).tolist() for rank in range(4)]

    assert parts[0] == [0, 1, 14, 15]
    assert parts[3] == [6, 7, 8, 9]
    assert sorted(position for part in parts for position in part) == list(range(16))
    assert {sum(position + 1 for position in part) for part in parts} == {34}  # keys that causal queries see


def test_the_kernels_of_accelerators_are_called_with_the_arguments_that_they_take():
    """On tensors without memory: shapes and signatures are real, and nothing is computed."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        ring = Ring(init_device_mesh("cpu", (2,)), "allgather")
        for dtype in (torch.bfloat16, torch.float32):
            shape = (2, 3, 64, 8)
            qkv = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
            out = ring_attention(ring, *qkv, is_causal=True)
            out.sum().backward()
            assert (out.shape, out.dtype) == (shape, dtype)
            assert [(item.grad.shape, item.grad.dtype) for item in qkv] == [(shape, dtype)] * 3
    finally:
        dist.destroy_process_group()


def test_a_torch_without_the_ring_is_distinguished(monkeypatch):
    monkeypatch.setattr(torch_private, "_RING", "torch.distributed.tensor.experimental._elsewhere")
    query = torch.ones(1, 1, 4, 4)
    with pytest.raises(RuntimeError, match=r"torch 2\.\d+\..* does not .*_elsewhere.*cp_size=1"):
        ring_attention(Ring(None, "allgather"), query, query, query)
