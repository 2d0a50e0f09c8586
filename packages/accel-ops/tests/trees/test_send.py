from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from accel_ops.trees.send import send_to_device

META = torch.device("meta")


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's batch: a mapping with its own `to`."""

    def to(self, device: Any, non_blocking: bool = False) -> Encoding:
        self.sent = (device, non_blocking)
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Image:
    """Has a `to` that knows nothing of non_blocking."""

    device = "cpu"

    def to(self, device: Any) -> Image:
        moved = Image()
        moved.device = str(device)
        return moved


@dataclasses.dataclass
class Mail:
    body: torch.Tensor
    to: str = "someone"


def test_moves_every_tensor_and_keeps_the_rest() -> None:
    data = {"a": torch.ones(2), "b": [(torch.ones(1), "text")], "c": None}

    result = send_to_device(data, "meta")

    assert result["a"].device == result["b"][0][0].device == META
    assert result["b"][0][1] == "text"
    assert result["c"] is None
    assert data["a"].device == torch.device("cpu")


@pytest.mark.parametrize("skip", ["keep", ["keep", "other"]])
def test_skip_keys_at_any_depth(skip: Any) -> None:
    data = {"keep": torch.ones(1), "go": [{"keep": [torch.ones(1)], "go": torch.ones(1)}]}

    result = send_to_device(data, META, skip_keys=skip)

    assert result["keep"] is data["keep"]
    assert result["go"][0]["keep"] is data["go"][0]["keep"]
    assert result["go"][0]["go"].device == META


def test_skip_keys_name_fields_of_dataclasses() -> None:
    result = send_to_device([Mail(torch.ones(1))], META, skip_keys="body")

    assert result[0].body.device == torch.device("cpu")


def test_objects_are_sent_by_their_own_to() -> None:
    encoding = Encoding({"ids": torch.ones(1)})

    result = send_to_device([encoding], META, non_blocking=True)

    assert result[0] is encoding
    assert encoding.sent == (META, True)
    assert encoding["ids"].device == META


def test_a_to_without_non_blocking_is_called_without_it() -> None:
    assert send_to_device(Image(), META, non_blocking=True).device == "meta"
    assert send_to_device(Image(), META).device == "meta"


def test_skip_keys_hold_inside_a_mapping_that_has_its_own_to() -> None:
    encoding = Encoding({"ids": torch.ones(1), "keep": torch.ones(1)})

    result = send_to_device(encoding, META, skip_keys=["keep"])

    assert isinstance(result, Encoding)
    assert result["ids"].device == META
    assert result["keep"].device == torch.device("cpu")


def test_packed_sequences_are_sent_whole() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])

    result = send_to_device(packed, META)

    assert isinstance(result, PackedSequence)
    assert result.data.device == META


def test_a_field_called_to_is_not_a_method() -> None:
    result = send_to_device(Mail(torch.ones(1)), META)

    assert result.body.device == META
    assert result.to == "someone"


def test_what_is_there_already_is_not_copied() -> None:
    data = {"a": [torch.ones(1), "text"], "b": Mail(torch.ones(1))}

    assert send_to_device(data, "cpu") is data
    moved = send_to_device({"a": data["a"], "b": torch.ones(1, device="meta")}, META)
    assert moved["a"] is not data["a"]


def test_parameters_keep_their_graph() -> None:
    weight = torch.ones(1, requires_grad=True)

    assert send_to_device([weight * 2], META)[0].requires_grad
