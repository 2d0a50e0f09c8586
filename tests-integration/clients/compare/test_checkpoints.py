"""Checkpoints go both ways: what accelerate saved loads with accel, and what accel saved with accelerate."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(1200)

SINGLE = ("safetensors", "pickled", "named", "half", "stateful", "dispatched", "dropout")
DEEPSPEED = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SINGLE, id="plain"),
        pytest.param(DEEPSPEED, id="DeepSpeed", marks=pytest.mark.slow),
    ],
)
def test_each_goes_on_from_the_checkpoints_of_the_other(compared, cases):
    saved = compared("checkpoints", "save", *cases)
    folders = [str(side.folder) for side in (saved.accel, saved.accelerate)]
    loaded = compared("checkpoints", "load", *cases, "--", *folders)

    for number, saver in enumerate((saved.accel, saved.accelerate)):
        for case in cases:
            # Bit for bit what it would be without the change of sides.
            with_accel = loaded.accel.results[case][number]
            with_accelerate = loaded.accelerate.results[case][number]
            if case == "dropout":
                # accelerate draws a seed for the second half of the epoch, so its dropout differs from that
                # of a run without a break. accel does so after a checkpoint of accelerate, too.
                continued = with_accelerate["losses"] if number else saver.results[case]["losses"]
            else:
                continued = saver.results[case]["losses"]
                assert with_accelerate["losses"] == continued, case
            assert with_accel["losses"] == continued, case
