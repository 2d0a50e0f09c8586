from __future__ import annotations

import weakref

import pytest
import torch

from accel_ops.collectives import pack, pack_sections
from accel_ops.collectives.pack import Plan, plan
from accel_ops.collectives.pack_sections import as_bytes


@pytest.fixture(autouse=True)
def _no_memory() -> None:
    pack._plan.cache_clear()


def round_trip(tensors: list[torch.Tensor], copies: int = 1) -> list[torch.Tensor]:
    """Pack, repeat the packs as if each of `copies` processes had sent the same, and unpack."""
    found = plan(tensors, copies)
    back = list(tensors)
    for each in found.packs:
        buffers = each.buffers()
        each.pack(tensors, buffers)
        buffers.received.copy_(buffers.sent.repeat(copies))
        each.unpack(buffers, back)
        each.keep(buffers)
    return back


MIXED = [
    torch.arange(3, dtype=torch.uint8),
    torch.tensor(True),
    torch.randn(2, 3, dtype=torch.complex128),
    torch.randn(5).bfloat16(),
    torch.empty(0, 4),
    torch.randn(4, 3).t(),
    torch.randn(2).to(torch.float8_e4m3fn),
    torch.arange(7, dtype=torch.int16)[::2],
]


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_mixed_dtypes_come_back_bit_for_bit(
    copies: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(pack_sections, "SHARED_BYTES", 0)

    back = round_trip(MIXED, copies)

    for tensor, result in zip(MIXED, back, strict=True):
        expected = tensor if copies == 1 else torch.cat([torch.atleast_1d(tensor)] * copies)
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        assert result.is_contiguous()
        assert torch.equal(as_bytes(result), as_bytes(expected))


def test_one_pack_holds_all_dtypes_with_the_larger_ones_first() -> None:
    found = plan(MIXED)

    assert len(found.packs) == 1
    itemsizes = [section.dtype.itemsize for section in found.packs[0].sections]
    assert itemsizes == sorted(itemsizes, reverse=True)
    assert found.packs[0].nbytes % 16 == 0
    assert found.large == []


def test_large_tensors_travel_alone() -> None:
    small = torch.zeros(pack.SMALL_BYTES, dtype=torch.uint8)
    large = torch.zeros(pack.SMALL_BYTES + 1, dtype=torch.uint8)

    found = plan([small, large, small])

    assert found.large == [1]
    assert [list(section.positions) for pack in found.packs for section in pack.sections] == [[0, 2]]


def test_a_full_pack_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "BUFFER_BYTES", 64)

    def sizes(found: Plan) -> list[int]:
        return [pack.nbytes for pack in found.packs]

    tensors = [torch.zeros(6) for _ in range(5)]

    assert sizes(plan(tensors)) == [72, 48]
    assert sizes(plan(tensors, copies=2)) == [48, 48, 24]
    assert [list(tensor) for tensor in round_trip(tensors, 2)] == [[0.0] * 12] * 5


def test_devices_are_kept_apart() -> None:
    found = plan([torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(3)])

    assert [str(pack.device) for pack in found.packs] == ["cpu", "meta"]
    assert [str(device) for device in found.devices] == ["cpu", "meta"]


def test_plans_are_remembered_by_shape_dtype_and_device() -> None:
    assert plan([torch.zeros(2)]) is plan([torch.ones(2)])
    assert plan([torch.zeros(2)]) is not plan([torch.zeros(2, dtype=torch.int32)])
    assert plan([torch.zeros(2)]) is not plan([torch.zeros(1, 2)])
    assert plan([torch.zeros(2)]) is not plan([torch.zeros(2, device="meta")])
    assert plan([torch.zeros(2)]) is not plan([torch.zeros(2)], copies=2)


def test_few_plans_and_buffers_are_remembered() -> None:
    (first,) = plan([torch.zeros(2), torch.zeros(3)]).packs
    buffers = first.buffers()
    memory = weakref.ref(buffers.sent)
    first.keep(buffers)
    del first, buffers
    assert memory() is not None

    for n in range(100):
        round_trip([torch.zeros(n), torch.zeros(5)], 2)

    assert pack._plan.cache_info().currsize <= 32
    assert memory() is None


def test_small_results_share_memory_and_others_do_not() -> None:
    def storages(n: int) -> int:
        back = round_trip([torch.zeros(n) for _ in range(4)], 2)
        return len({tensor.untyped_storage().data_ptr() for tensor in back})

    fits = pack_sections.SHARED_BYTES // (4 * 2 * 4)
    assert storages(fits) == 1
    assert storages(fits + 1) == 4


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_results_are_not_views_for_autograd(shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        first, second = round_trip([torch.ones(shape), torch.ones(3)], 2)
    weight = torch.ones(1, requires_grad=True)

    first.mul_(weight)  # rejected for a view that was made without gradients

    assert first.requires_grad
    assert second._base is None


def test_tensors_in_channels_last_order_are_laid_out_in_their_own_order() -> None:
    images = torch.arange(24.0).view(1, 2, 3, 4)
    last = [
        images.to(memory_format=torch.channels_last),
        (images + 100).to(memory_format=torch.channels_last),
    ]

    back = round_trip(last, 2)

    assert torch.equal(back[0], torch.cat([images, images]))
    assert torch.equal(back[1], torch.cat([images, images]) + 100)


def test_works_with_deterministic_algorithms() -> None:
    torch._C._set_deterministic_algorithms(True)  # the public function imports the compiler: seconds
    try:
        back = round_trip(MIXED, 2)
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert torch.equal(as_bytes(back[0]), as_bytes(MIXED[0]).repeat(2))


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("tensors", [[torch.zeros(3)], [torch.zeros(3), torch.zeros(2)], MIXED])
def test_buffers_are_used_again_and_results_are_not_in_them(tensors: list[torch.Tensor], copies: int) -> None:
    (pack,) = plan(tensors, copies).packs
    first = round_trip(tensors, copies)
    before = [result.clone() for result in first]
    buffers = pack.buffers()
    pack.keep(buffers)

    round_trip([torch.ones_like(tensor) for tensor in tensors], copies)

    assert pack.buffers() is buffers
    for result, expected in zip(first, before, strict=True):
        assert torch.equal(as_bytes(result), as_bytes(expected))


def test_nobody_gets_buffers_that_are_in_use() -> None:
    (pack,) = plan([torch.zeros(3)]).packs
    one, other = pack.buffers(), pack.buffers()

    assert one.sent.data_ptr() != other.sent.data_ptr()


def test_large_buffers_are_not_kept() -> None:
    tensors = [torch.zeros(pack_sections.SHARED_BYTES // 4), torch.zeros(1)]
    (pack,) = plan(tensors).packs
    buffers = pack.buffers()
    pack.keep(buffers)

    assert pack.buffers() is not buffers


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
    with torch.inference_mode():
        round_trip(tensors, 2)

    results = round_trip(tensors, 2)

    assert [result.tolist() for result in results] == [[1.0] * 6, [1] * 4]
    assert not any(result.is_inference() for result in results)
