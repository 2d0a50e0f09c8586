"""Comparing signatures with documented ones."""

from __future__ import annotations

import enum
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from repo_checks.documented import api_entries
from repo_checks.signatures import differences, parse


class Choice(str, enum.Enum):
    NO = "no"


def same(model, size: int = 2, *, flag=False): ...
def extended(model, size=2, extra=None, *, flag=False, more=1, **options): ...
def inserted(model, extra=None, size=2, *, flag=False): ...
def swapped(size=2, model=None, *, flag=False): ...
def renamed(module, size=2, *, flag=False): ...
def other_default(model, size=3, *, flag=False): ...
def bool_for_int(model, size=True, *, flag=False): ...
def no_default(model, size, *, flag=False): ...
def keyword_only(model, *, size=2, flag=False): ...
def positional_flag(model, size=2, flag=False): ...
def demanding(model, size=2, extra=None, *, flag=False, more): ...
def swallowing(model, **kwargs): ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (same, None),
        (extended, None),
        (positional_flag, None),
        (inserted, "takes its positions as (model, extra, size), documented (model, size)"),
        (swapped, "takes its positions as (size, model), documented (model, size)"),
        (renamed, "lacks the parameter model"),
        (other_default, "parameter size defaults to 3, documented 2"),
        (bool_for_int, "parameter size defaults to True, documented 2"),
        (no_default, "parameter size has no default"),
        (keyword_only, "parameter size is keyword-only, documented positional or keyword"),
        (demanding, "parameter more is not documented and has no default"),
        (swallowing, "lacks the parameter size"),
    ],
)
def test_differences(function, expected):
    found = differences(
        "(model: 'torch.nn.Module', size: int = 2, *, flag=False)", inspect.signature(function)
    )
    assert found == [] if expected is None else expected in found


def test_variable_parameters():
    documented = "(func, *args, kind=<function f>, **kwargs)"
    assert differences(documented, inspect.signature(lambda func, *rest, kind=max, **options: None)) == []
    found = differences(documented, inspect.signature(lambda func, kind=max: None))
    assert found == ["does not take *args", "does not take **kwargs"]


def test_a_signature_hidden_by_a_decorator_says_nothing():
    assert differences("(*args, **kwargs)", inspect.signature(same)) == []
    assert differences("(...)", inspect.signature(same)) == []


def test_unset_and_factory_request_any_default():
    @dataclass
    class Options:
        sizes: list[int] = field(default_factory=list)

    assert differences("(sizes: list = <factory>)", inspect.signature(Options)) == []
    assert differences("(model=<unset>)", inspect.signature(renamed)) != []


def test_an_enum_member_equals_its_value():
    def choose(choice=Choice.NO): ...

    assert differences("(choice: str = 'no')", inspect.signature(choose)) == []


def test_every_documented_signature_can_be_read():
    api = json.loads((Path(__file__).parents[1] / "reference" / "api.json").read_text())
    entries = [entry for entry in api_entries(api) if entry.documented and entry.kind != "member"]
    assert len(entries) > 500
    for entry in entries:
        parse(entry.documented)
