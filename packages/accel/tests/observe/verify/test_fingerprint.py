"""Samples are known again in other batches, and distances of tensors are found from sketches."""

from __future__ import annotations

import pytest
import torch

from accel.observe.verify.fingerprint import sample_digests, sketch


def test_a_sample_has_the_same_digest_in_any_batch():
    x, y = torch.randn(6, 2, 3), torch.arange(6)
    whole = sample_digests([x, y])

    assert len(set(whole)) == 6
    assert sample_digests((x[2:4], y[2:4])) == whole[2:4]
    assert sample_digests({"x": x[[5, 0]], "y": y[[5, 0]], "scale": 2.0}) == [whole[5], whole[0]]
    assert sample_digests([x, y + 1]) != whole
    assert sample_digests([x.flip(2), y]) != whole


def test_padding_does_not_count():
    ids, mask = torch.tensor([[5, 6, 7, 7], [1, 2, 3, 4]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    both = sample_digests({"input_ids": ids, "attention_mask": mask, "labels": labels})
    short = {"input_ids": ids[:1, :2], "attention_mask": mask[:1, :2], "labels": labels[:1, :2]}

    assert sample_digests(short) == both[:1]
    assert sample_digests([torch.tensor([[5, 6, 0]])]) == sample_digests([torch.tensor([[5, 6]])])
    assert sample_digests([torch.tensor([[5, 0, 6]])]) != sample_digests([torch.tensor([[5, 6, 0]])])


def test_other_objects_are_known_by_what_they_print():
    assert sample_digests(["one", "two"]) == sample_digests(["zero", "one", "two"])[1:]
    assert sample_digests(7) == []


@pytest.mark.parametrize("size", [1, 100, 2**16 * 3 + 5])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_the_distance_of_two_tensors_is_found_from_sketches(size, scale):
    generator = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=generator)
    other = one + scale * torch.randn(size, generator=generator)
    first, second = sketch(one), sketch(other.double())
    distance = float((one.double() - other).norm())
    squares = [(a - b) ** 2 for a, b in zip(first[1:], second[1:], strict=True)]

    assert first[0] == pytest.approx(float(one.double().norm()))
    assert 0.2 * distance < (sum(squares) / len(squares)) ** 0.5 < 3 * distance
    assert sketch(one.clone()) == first
