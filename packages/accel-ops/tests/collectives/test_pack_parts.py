from __future__ import annotations

import pytest
import torch

from accel_ops.collectives.pack_parts import as_bytes, put_together, stack_if_alike


def test_as_bytes_resolves_lazy_conjugates_and_negatives() -> None:
    number = torch.tensor([1 + 2j])

    assert as_bytes(number.conj()).view(torch.complex64).tolist() == [1 - 2j]
    assert as_bytes(number.conj().imag).view(torch.float32).tolist() == [-2]
    assert as_bytes(number).data_ptr() == number.data_ptr()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2), (2, 0)])
def test_tensors_of_one_kind_are_stacked_and_put_together(shape: tuple[int, ...]) -> None:
    mine = [torch.randn(shape) for _ in range(4)]
    theirs = [torch.randn(shape) for _ in range(4)]
    stacks = [stack_if_alike(tensors, 10_000) for tensors in (mine, theirs)]

    results = put_together(torch.cat(stacks), 2)  # type: ignore[arg-type]

    assert len(results) == 4
    for one, other, result in zip(mine, theirs, results, strict=True):
        assert torch.equal(result, torch.cat([torch.atleast_1d(one), torch.atleast_1d(other)]))
        assert result._base is None  # not a view for autograd


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), torch.zeros(2, dtype=torch.int32)],
        [torch.zeros(2), torch.zeros(2, device="meta")],
        [torch.zeros(51)] * 2,
        [torch.zeros(2).to_sparse()] * 2,
    ],
)
def test_other_tensors_are_not_stacked(tensors: list[torch.Tensor]) -> None:
    sparse = bool(tensors) and tensors[0].is_sparse
    if sparse:
        with pytest.raises(RuntimeError, match="nbytes"):  # the caller says it better
            stack_if_alike(tensors, 400)
    else:
        assert stack_if_alike(tensors, 400) is None


def test_a_stack_is_contiguous() -> None:
    images = torch.arange(24.0).view(1, 2, 3, 4)
    stack = stack_if_alike([images.to(memory_format=torch.channels_last)] * 2, 10_000)

    assert stack is not None
    assert stack.is_contiguous()
    assert torch.equal(stack[0], images)
