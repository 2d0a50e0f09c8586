"""What differs first between processes is named, with the processes and how far they are apart."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_ops import DistributedOperationException, set_seed, verify_sync
from accel_ops.debug.digest import digest
from accel_state.process.state import current_process


class Net(torch.nn.Module):
    def __init__(self, odd: bool = False, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        if odd and kind == "order":
            self.last = torch.nn.Linear(3, 1)
        self.first = torch.nn.Linear(2, 3, dtype=torch.float64 if odd and kind == "dtype" else None)
        if not (odd and kind == "missing"):
            self.last = torch.nn.Linear(3, 1, bias=not (odd and kind == "bias"))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def compare(kind: str) -> Any:
    """The message of the error, the same on all processes; what is not compared if there is none."""
    process = current_process()
    odd = process.rank == 1
    set_seed(0)
    model = Net(odd, kind)
    with torch.no_grad():
        if kind == "parameter":
            model.last.weight[0, 1] += 0.25 * odd
        elif kind == "buffer":
            model.mean[2] = 1.5 * odd
        elif kind == "unsaved buffer":
            model.table[0] = -3.0 * odd
        elif kind == "nan":
            model.mean[0] = float("nan")
        elif kind == "nan on one":
            model.mean[0] = float("nan") if odd else 1.0
        elif kind == "exchanged":
            model.table[:2] = model.table[:2].flip(0) if odd else model.table[:2]
    if kind == "frozen":
        model.first.bias.requires_grad_(not odd)
    set_seed(1)
    if odd and kind == "python":
        random.random()
    elif odd and kind == "numpy":
        numpy.random.random()
    elif odd and kind == "torch":
        torch.rand(1)
    try:
        return verify_sync(model)
    except DistributedOperationException as error:
        return str(error)


DIFFERENCES = {
    "parameter": (
        "parameter Net.last.weight (float32 (1, 3), requires grad) is the first to differ.",
        "up to 0.25 away from process 0",
        "each process trains different weights",
    ),
    "buffer": (
        "buffer Net.mean (float32 (3,)) is the first to differ.",
        "up to 1.5 away",
        "leave buffers out with buffers=False",
    ),
    "unsaved buffer": ("unsaved buffer Net.table (float32 (4,)) is the first to differ.", "up to 3 away"),
    "nan on one": ("buffer Net.mean (float32 (3,)) is the first to differ.", "up to nan away"),
    "exchanged": ("unsaved buffer Net.table", "up to 1 away"),
    "python": ("Python's random generator is the first to differ.", "rng=False"),
    "numpy": ("NumPy's random generator is the first to differ.", "set_seed"),
    "torch": ("torch's random generator is the first to differ.", "device_specific=True"),
    "missing": (
        "parameter Net.last.weight (float32 (1, 3), requires grad) exists on process",
        "missing on",
    ),
    "bias": ("parameter Net.last.bias is the first to differ.", "None"),
    "order": ("another order, first at position 3 (process", "parameter Net.last.weight"),
    "dtype": ("parameter Net.first.weight is the first to differ.", "float64 (3, 2), requires grad"),
    "frozen": ("parameter Net.first.bias is the first to differ.", "process 1: float32 (3,)\n"),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_the_first_difference_is_named_on_every_process(world, kind):
    told = world.run(compare, kind, size=3)

    assert len(set(told)) == 1
    for text in DIFFERENCES[kind]:
        assert text in told[0]
    assert "processes 0, 2" in told[0]
    assert "process 1" in told[0]


@pytest.mark.parametrize("kind", ["alike", "nan"])
def test_what_is_equal_passes_and_nan_is_equal_to_itself(world, kind):
    assert world.run(compare, kind, size=3) == [[], [], []]


def test_what_is_no_model_is_an_error():
    with pytest.raises(TypeError, match="verify_sync got a Tensor; it takes models"):
        verify_sync(torch.ones(3))


@pytest.mark.parametrize("kind", ["parameter", "python"])
def test_one_process_compares_nothing(world, kind):
    assert world.run(compare, kind, size=1) == [[]]


def count(buffers: bool, rng: bool) -> list[str]:
    """Which collectives a comparison of equal models takes, also wrapped and in debug mode."""
    process = dataclasses.replace(current_process(), debug=True)
    set_seed(process.rank, device_specific=not rng)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    model.module.mean += 0 if buffers else process.rank
    if rng:
        set_seed(5)
    seen = []
    for name in ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "all_reduce"):
        function = getattr(dist, name)
        setattr(dist, name, lambda *a, _f=function, _n=name, **k: (seen.append(_n), _f(*a, **k))[1])
    try:
        assert verify_sync(model, buffers=buffers, rng=rng, process=process) == []
    finally:
        for name in ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "all_reduce"):
            setattr(dist, name, getattr(dist.distributed_c10d, name))
    return seen


@pytest.mark.parametrize(("buffers", "rng"), [(True, True), (False, False)])
def test_what_is_equal_takes_one_collective_and_choices_are_left_out(world, buffers, rng):
    assert world.run(count, buffers, rng) == [["all_gather"]] * 2


def in_parts(changed: str) -> Any:
    """Tensors of a mesh of two by two: replicated along the first axis, and sharded along the second."""
    rank = current_process().rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.part = torch.nn.Parameter(distribute_tensor(torch.rand(4, 3), mesh, [Replicate(), Shard(0)]))
    model.whole = torch.nn.Parameter(distribute_tensor(torch.rand(3), mesh, [Replicate(), Replicate()]))
    model.own = torch.nn.Parameter(torch.rand(2) + rank)
    model.single = torch.nn.Parameter(distribute_tensor(torch.rand(4), mesh, [Shard(0), Shard(0)]))
    with torch.no_grad():
        if rank == 3 and changed:
            getattr(model, changed).to_local()[0] += 0.5
    own = model.own
    try:
        return verify_sync(model, is_shard=lambda item: item is own)
    except DistributedOperationException as error:
        return str(error)


def test_sharded_tensors_are_compared_where_they_are_equal(world):
    assert world.run(in_parts, "", size=4) == [["Module.own", "Module.single"]] * 4

    told = world.run(in_parts, "part", size=4)
    assert len(set(told)) == 1
    assert (
        "the parameter Module.part (float32 (4, 3), requires grad as (Replicate(), Shard(dim=0)))" in told[0]
    )
    assert "  process 1: digest" in told[0]
    assert "up to 0.5 away from process 1" in told[0]
    assert "process 0:" not in told[0]

    told = world.run(in_parts, "whole", size=4)
    assert "the parameter Module.whole" in told[0]
    assert "processes 0, 1, 2: digest" in told[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_digest_sees_each_bit_and_the_order(dtype):
    numbers = torch.arange(40).sub(20).to(dtype)
    numbers[3] = not numbers[3]
    same = digest(numbers.clone().view(5, 8).t().contiguous().t())
    assert int(digest(numbers)) == int(same)
    assert int(digest(numbers)) != int(digest(numbers.roll(1)))
    if dtype != torch.bool:  # the highest bits of two elements, whose changes a plain sum would not see
        other = numbers.clone()
        other[[5, 7]] = -other[[5, 7]]
        assert int(digest(numbers)) != int(digest(other))
    assert int(digest(numbers[:0])) == 0


def test_a_digest_of_several_rows_sees_their_order():
    numbers = torch.zeros(2**15 * 3 + 5)
    numbers[0] = 1.0
    assert int(digest(numbers)) != int(digest(numbers.roll(2**15)))
