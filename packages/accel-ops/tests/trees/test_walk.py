from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ops.trees.walk import (
    find_path,
    flatten,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    merge_dicts,
    recursively_apply,
)

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    x: torch.Tensor
    y: int = 3


class TaggedList(list):  # type: ignore[type-arg]
    tag = "none"


class TaggedDict(dict):  # type: ignore[type-arg]
    tag = "none"


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's batch: a mapping with more state next to the data."""

    def __init__(self, data: dict[str, Any], extra: str = "") -> None:
        super().__init__(data)
        self.extra = extra


class Wrapped(MutableMapping):  # type: ignore[type-arg]
    """A mapping that is no dict and has no `__copy__`: a shallow copy would share `_inner`."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self._inner = inner

    def __getitem__(self, key: str) -> Any:
        return self._inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class FrozenBase:
    ids: torch.Tensor
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Frozen(FrozenBase):
    mask: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    ids: torch.Tensor


@dataclasses.dataclass
class Late:
    ids: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)
    unset: torch.Tensor = dataclasses.field(init=False)
    made: dataclasses.InitVar[int] = 0
    calls = 0

    def __post_init__(self, made: int) -> None:
        self.total = self.ids.sum()
        type(self).calls += 1


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Like a model's output: a dataclass that is a dict of its fields, with attributes that follow."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        made, _, *rest = super().__reduce__()
        return made, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest


def double(tensor: torch.Tensor, add: int = 0) -> torch.Tensor:
    return tensor * 2 + add


ONE = torch.tensor([1.0])


def test_a_tensor_alone_is_a_tree() -> None:
    assert recursively_apply(double, ONE).item() == 2


def test_arguments_are_passed_on() -> None:
    assert recursively_apply(double, [ONE], 1)[0].item() == 3
    assert recursively_apply(double, [ONE], add=2)[0].item() == 4


def test_other_leaves_are_kept() -> None:
    data = {"a": ONE, "b": "text", "c": None, "d": {1, 2}}

    result = recursively_apply(double, data)

    assert result["a"].item() == 2
    assert [result[key] for key in "bcd"] == ["text", None, {1, 2}]


@pytest.mark.parametrize("kind", [dict, OrderedDict, TaggedDict, Encoding, Wrapped, MappingProxyType])
def test_mappings_keep_type_and_order(kind: type) -> None:
    data = kind({"z": ONE, "a": [ONE], "m": 5})

    result = recursively_apply(double, data)

    assert type(result) is kind
    assert list(result) == ["z", "a", "m"]
    assert result["z"].item() == result["a"][0].item() == 2
    assert data["z"] is ONE
    assert data["a"][0] is ONE


def test_mappings_keep_their_attributes() -> None:
    tagged = TaggedDict(a=ONE)
    tagged.tag = "mine"

    assert recursively_apply(double, tagged).tag == "mine"
    assert recursively_apply(double, Encoding({"a": ONE}, extra="kept")).extra == "kept"
    assert recursively_apply(double, defaultdict(list, a=ONE)).default_factory is list


def test_sequences_keep_type_and_attributes() -> None:
    tagged = TaggedList([ONE])
    tagged.tag = "mine"

    result = recursively_apply(double, tagged)

    assert type(result) is TaggedList
    assert result.tag == "mine"
    assert result[0].item() == 2
    assert tagged[0] is ONE


@pytest.mark.parametrize("data", [Point(ONE, 3), Typed(ONE, 3)])
def test_namedtuples(data: Any) -> None:
    result = recursively_apply(double, data)

    assert type(result) is type(data)
    assert result.x.item() == 2
    assert result.y == 3


def test_torch_tuples() -> None:
    result = recursively_apply(double, torch.tensor([[1, 5]]).max(dim=1))

    assert isinstance(result, torch.return_types.max)
    assert result.values.item() == 10
    assert type(recursively_apply(double, torch.Size([2, 3]))) is torch.Size


@pytest.mark.parametrize("data", [Batch(ONE), Frozen(ONE, "f", ONE), Slotted(ONE)])
def test_dataclasses(data: Any) -> None:
    result = recursively_apply(double, data)

    assert type(result) is type(data)
    assert result.ids.item() == 2
    assert data.ids is ONE
    if isinstance(data, Frozen):
        assert result.mask.item() == 2
        assert result.name == "f"


def test_dataclass_fields_outside_init_are_walked_and_init_is_not_run_again() -> None:
    data = Late(ONE)
    calls = Late.calls

    result = recursively_apply(double, data)

    assert result.total.item() == 2
    assert not hasattr(result, "unset")
    assert Late.calls == calls


def test_dataclass_types_are_leaves() -> None:
    assert recursively_apply(double, [Batch]) == [Batch]


def test_a_dict_that_is_a_dataclass_keeps_items_and_attributes_in_step() -> None:
    result = recursively_apply(double, Output(logits=ONE))

    assert type(result) is Output
    assert list(result) == ["logits"]
    assert result["logits"] is result.logits
    assert result.logits.item() == 2
    assert result.loss is None


def test_test_type_comes_before_containers() -> None:
    result = recursively_apply(len, {"a": [1, 2], "b": 5}, test_type=lambda node: isinstance(node, list))

    assert result == {"a": 2, "b": 5}


def test_error_on_other_type_names_place_and_value() -> None:
    with pytest.raises(TypeError, match=r"double takes .* data\['b'\]\[1\]\.name is of type str: 'batch'"):
        recursively_apply(double, {"a": ONE, "b": [ONE, Batch(ONE)]}, error_on_other_type=True)


def test_honor_type() -> None:
    assert honor_type([1], (n for n in (2, 3))) == [2, 3]
    assert honor_type((1,), iter([2, 3])) == (2, 3)
    assert honor_type(Point(1, 2), iter([3, 4])) == Point(3, 4)


def test_is_namedtuple() -> None:
    assert is_namedtuple(Point(1, 2))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple({"_fields": 1})


def test_is_torch_tensor() -> None:
    assert is_torch_tensor(torch.nn.Parameter(ONE))
    assert not is_torch_tensor(1.0)


def test_find_path() -> None:
    data = {"a": [1, Point(2, Batch(ONE))]}

    assert find_path(data, is_torch_tensor) == ("data['a'][1][1].ids", ONE)
    assert find_path(data, lambda node: node == "absent") is None


def trees() -> st.SearchStrategy[Any]:
    leaves = st.integers(0, 9).map(lambda n: torch.full((1,), float(n))) | st.sampled_from(["text", None, 3])
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=3)
            | st.tuples(inner, inner).map(lambda pair: Point(*pair))
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(Encoding)
            | st.builds(Batch, inner, inner)
        ),
        max_leaves=12,
    )


@given(trees())
def test_flatten_and_rebuild_is_the_identity(tree: Any) -> None:
    leaves, rebuild = flatten(tree)
    again = rebuild(leaves)

    assert_same(again, tree)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)


@given(trees())
def test_flatten_sees_what_recursively_apply_sees(tree: Any) -> None:
    leaves, rebuild = flatten(tree)

    assert_same(rebuild([leaf + 1 for leaf in leaves]), recursively_apply(lambda leaf: leaf + 1, tree))


def test_flatten_can_require_tensors() -> None:
    assert flatten([ONE, "text"])[0] == [ONE]
    with pytest.raises(TypeError, match=r"gather takes .* data\[1\] is of type str: 'text'"):
        flatten([ONE, "text"], required_by="gather")


def test_dicts_are_merged_at_every_level_and_the_source_counts() -> None:
    destination: dict[str, Any] = {"optimizer": {"lr": 1, "betas": {"first": 0.9}}, "kept": [1], "text": "x"}
    source = {"optimizer": {"lr": 2, "betas": {"second": 0.99}}, "new": {"a": None}, "text": {"now": "dict"}}
    before = {**source}

    assert merge_dicts(source, destination) is destination
    assert destination == {
        "optimizer": {"lr": 2, "betas": {"first": 0.9, "second": 0.99}},
        "kept": [1],
        "text": {"now": "dict"},
        "new": {"a": None},
    }
    assert source == before
    destination["new"]["a"] = 1  # its own dict
    assert source["new"] == {"a": None}
    assert merge_dicts({"optimizer": 3}, destination)["optimizer"] == 3
    assert merge_dicts({}, {}) == {}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, Batch):
        assert_same(one.ids, other.ids)
        assert_same(one.name, other.name)
    else:
        assert one == other
