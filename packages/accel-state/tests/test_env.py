from __future__ import annotations

import os

import pytest

from accel_state import env


def test_get_parses_defaults_and_treats_empty_as_unset() -> None:
    assert env.get("ACCELERATE_MIXED_PRECISION", {}) == "no"
    assert env.get("ACCELERATE_MIXED_PRECISION", {"ACCELERATE_MIXED_PRECISION": ""}) == "no"
    assert env.get("ACCELERATE_MIXED_PRECISION", {"ACCELERATE_MIXED_PRECISION": "BF16"}) == "bf16"
    assert env.get("FSDP_MIN_NUM_PARAMS", {"FSDP_MIN_NUM_PARAMS": "1e8"}) == 100_000_000


def test_bad_value_names_variable_value_and_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"ACCELERATE_MIXED_PRECISION has the value 'fp7'; allowed: no, fp8, fp16"
    ):
        env.get("ACCELERATE_MIXED_PRECISION", {"ACCELERATE_MIXED_PRECISION": "fp7"})


def test_put_writes_what_get_reads() -> None:
    child: dict[str, str] = {}
    env.put(child, "ACCELERATE_USE_CPU", True)
    assert child == {"ACCELERATE_USE_CPU": "true"}
    assert env.get("ACCELERATE_USE_CPU", child) is True
    env.put(child, "ACCELERATE_USE_CPU", None)
    assert child == {}


def test_patch_environment_restores_after_an_exception() -> None:
    before = dict(os.environ)
    with pytest.raises(RuntimeError), env.patch_environment(aa_new=1, PATH="p"):  # noqa: PT012
        assert (os.environ["AA_NEW"], os.environ["PATH"]) == ("1", "p")
        raise RuntimeError
    assert dict(os.environ) == before
