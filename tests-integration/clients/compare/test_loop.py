"""A plain training loop on accel and on accelerate."""

from __future__ import annotations

import pytest

from accel_world.compared import PYTHON


@pytest.mark.parametrize("processes", [1, 2])
def test_a_plain_loop(compared, processes: int):
    both = compared("loop", processes=processes)

    assert "module accel.accelerator, 1.15.0\n" in both.accel.run.stdout
    assert "module accelerate.accelerator, 1.15.0\n" in both.accelerate.run.stdout
    assert both.accelerate.results["processes"] == processes
    both.assert_same_results()
    both.assert_same_files(but=["*/accel_manifest.json", "*/dl_state_dict.bin"])  # of accel's exact resume
    both.assert_same_tensors("*.safetensors")


def test_a_missing_environment_is_named(compared, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PYTHON)
    with pytest.raises(AssertionError, match="hatch run clients:test"):
        compared("loop", "no such run")
