"""Settings that accelerate pickled are the same settings on accel."""

from __future__ import annotations

import pickle


def test_pickled_settings(compared):
    both = compared("settings")

    both.assert_same_results()
    found, expected = (
        pickle.loads((side.folder / "settings.pkl").read_bytes()) for side in (both.accelerate, both.accel)
    )
    assert [type(setting) for setting in found] == [type(setting) for setting in expected]
    assert found == expected
