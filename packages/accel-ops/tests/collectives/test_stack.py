from __future__ import annotations

import weakref

import pytest
import torch

from accel_ops.collectives import stack
from accel_ops.collectives.pack_sections import SHARED_BYTES, as_bytes
from accel_ops.collectives.stack import stack_if_uniform

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex128, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _no_memory() -> None:
    stack._kind.cache_clear()


def gathered(trees: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """What each process gets if each of them has one of the trees."""
    stacks = [stack_if_uniform(tensors, len(trees)) for tensors in trees]
    assert all(stacks)
    sent = torch.cat([each.buffers.sent for each in stacks])  # type: ignore[union-attr]
    stacks[0].buffers.received.copy_(sent)  # type: ignore[union-attr]
    memory, results = stacks[0].make_results()  # type: ignore[union-attr]
    stacks[0].finish(memory)  # type: ignore[union-attr]
    return list(results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("copies", [2, 3])
def test_tensors_of_one_kind_are_stacked_and_put_together(
    shape: tuple[int, ...], dtype: torch.dtype, copies: int
) -> None:
    trees = [[torch.randn(shape).to(dtype) for _ in range(4)] for _ in range(copies)]

    results = gathered(trees)

    assert len(results) == 4
    for result, sections in zip(results, zip(*trees, strict=True), strict=True):
        expected = torch.cat([torch.atleast_1d(section) for section in sections])
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert torch.equal(as_bytes(result), as_bytes(expected))
        assert result._base is None  # not a view for autograd


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), torch.zeros(1, 2), torch.zeros(2)],
        [torch.zeros(3), torch.zeros(2), torch.zeros(4), torch.zeros(3)],
        [torch.zeros(2), torch.zeros(2, dtype=torch.int32)],
        [torch.zeros(2), torch.zeros(2, device="meta")],
        [torch.zeros(SHARED_BYTES // 16 + 1)] * 2,
        [torch.zeros(0)] * 2,
    ],
)
def test_other_tensors_are_not_stacked(tensors: list[torch.Tensor]) -> None:
    assert stack_if_uniform(tensors, 2) is None


def test_what_comes_back_of_tensors_with_gradients_has_none() -> None:
    losses = [torch.ones(3, requires_grad=True) * 2 for _ in range(2)]
    results = gathered([losses, losses])

    assert [result.tolist() for result in results] == [[2.0] * 6] * 2
    assert not any(result.requires_grad for result in results)
    results[0].add_(1)
    assert results[1].tolist() == [2.0] * 6
    for tensors in ([torch.ones(3), losses[0]], [losses[0], torch.ones(3)]):
        assert stack_if_uniform(tensors, 2) is not None
    between = [torch.ones(3), losses[0], torch.ones(3)]
    assert stack_if_uniform(between, 2) is None
    with torch.no_grad():
        assert stack_if_uniform(between, 2) is not None


@pytest.mark.filterwarnings("ignore:.*uantiz")
def test_quantized_tensors_are_not_stacked() -> None:
    assert stack_if_uniform([torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)] * 2, 2) is None


def test_a_stack_that_failed_leaves_nothing_behind() -> None:
    good = [torch.ones(3) for _ in range(4)]
    assert stack_if_uniform([*good[:2], torch.zeros(5), good[3]], 2) is None

    assert [result.tolist() for result in gathered([good, good])] == [[1.0] * 6] * 4


def test_tensors_in_another_order_of_memory_are_stacked_in_that_of_their_shape() -> None:
    images = torch.arange(24.0).view(1, 2, 3, 4)
    last = [images.to(memory_format=torch.channels_last), images.flip(2)]

    results = gathered([last, last])

    assert torch.equal(results[0], torch.cat([images, images]))
    assert all(result.is_contiguous() for result in results)


def test_buffers_are_used_again_and_results_are_not_in_them() -> None:
    tensors = [torch.zeros(3), torch.zeros(3)]
    first = gathered([tensors])
    kind = stack._kind(2, torch.Size([3]), torch.float32, torch.device("cpu"), 1)
    (buffers,) = kind._kept

    second = gathered([[torch.ones(3), torch.ones(3)]])

    assert kind._kept == [buffers]
    assert [result.tolist() for result in first + second] == [[0.0] * 3] * 2 + [[1.0] * 3] * 2


def test_nobody_gets_buffers_that_are_in_use() -> None:
    one, other = (stack_if_uniform([torch.zeros(3)], 2) for _ in range(2))

    assert one is not None
    assert other is not None
    assert one.buffers.sent.data_ptr() != other.buffers.sent.data_ptr()


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    with torch.inference_mode():
        gathered([tensors])

    results = gathered([tensors])

    assert not any(result.is_inference() for result in results)


def test_few_kinds_and_buffers_are_remembered() -> None:
    gathered([[torch.zeros(2), torch.zeros(2)]])
    (buffers,) = stack._kind(2, torch.Size([2]), torch.float32, torch.device("cpu"), 1)._kept
    memory = weakref.ref(buffers.stack)
    del buffers
    assert memory() is not None

    for n in range(1, 101):
        gathered([[torch.zeros(n)]])

    assert stack._kind.cache_info().currsize <= 32
    assert memory() is None
