"""Signatures of functions whose annotations name what does not exist when the program runs."""

import sys

import pytest

from accel_ops.signatures import signature

FORWARD = """
def forward(inputs: Tensors, scale: "Scales" = 2.0, *, mask: Masks | None = None) -> Outputs: ...
"""
# Python 3.14 evaluates annotations late by itself.
LATE = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"


def test_names_for_type_checkers_are_no_error():
    names: dict = {}
    exec(LATE + FORWARD, names)

    found = signature(names["forward"])
    assert list(found.parameters) == ["inputs", "scale", "mask"]
    assert found.parameters["scale"].default == 2.0
    assert found.bind(1, mask=3).arguments == {"inputs": 1, "mask": 3}


def test_what_has_no_signature_is_an_error():
    with pytest.raises(TypeError, match="is not a callable object"):
        signature(3)
