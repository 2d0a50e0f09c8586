"""Clipping on one process is torch's, to the last bit."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel import Accelerator
from accel.engines.common.gradients import tensors_with_grad
from accel_optim.parameter_map import ParameterMap

pytestmark = pytest.mark.usefixtures("fresh_state")

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def parameters_of(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        made.append(parameter)
    return [*made, torch.nn.Parameter(torch.zeros(2))]  # one without a gradient


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(shapes, min_size=1, max_size=8),
    kinds=st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    alike=st.booleans(),
    max_norm=st.sampled_from([1e-3, 0.5, 1, 1e3, 0.0, float("inf")]),
    norm_type=st.sampled_from([2, 2.0, 1, 3.5, "inf", float("inf")]),
    seed=st.integers(0, 2**32),
)
def test_gradients_and_norm_are_those_of_torch(
    shapes: list[tuple[int, ...]],
    kinds: list[torch.dtype],
    alike: bool,
    max_norm: float,
    norm_type: float,
    seed: int,
) -> None:
    dtypes = [kinds[0] if alike else kind for kind in kinds[: len(shapes)]]
    own = parameters_of(shapes, dtypes, seed)
    theirs = copy.deepcopy(own)
    for one, other in zip(own, theirs, strict=True):
        other.grad = None if one.grad is None else one.grad.clone()

    norm = Accelerator().clip_grad_norm_(own, max_norm, norm_type)

    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert norm is not None
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected)
    for one, other in zip(own, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert one.grad.equal(other.grad)


def test_torchs_function_clips_other_tensors() -> None:
    class Kind(torch.Tensor):
        pass

    (parameter, _) = parameters_of([(3,)], [torch.float32], 0)
    parameter.grad = parameter.grad.as_subclass(Kind)
    elsewhere = torch.nn.Parameter(torch.zeros(2, device="meta"))
    elsewhere.grad = torch.zeros(2, device="meta")
    torchs = torch.nn.utils.clip_grad_norm_
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", side_effect=torchs) as general:
        Accelerator().clip_grad_norm_([elsewhere], 1e-3)
        Accelerator().clip_grad_norm_([parameter], 1e-3)
        assert general.call_count == 2
        Accelerator().clip_grad_norm_(parameters_of([(3,)], [torch.float32], 0), 1e-3)
        assert general.call_count == 2
    assert float(parameter.grad.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_several_parameters_in_one_flat_one_are_clipped_once() -> None:
    first, second, flat = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    parameters = ParameterMap()
    parameters.record(first, flat)
    parameters.record(second, flat)
    other = torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    assert tensors_with_grad(parameters, [first, second, other]) == [flat, other]
