from __future__ import annotations

import pytest

from accel_launch.launchers.tpu.colab import _installed_torch, _requirement, install_xla


def test_elsewhere_nothing_is_installed() -> None:
    with pytest.raises(RuntimeError, match="in Google Colab alone"):
        install_xla()


def test_the_version_is_that_of_torch() -> None:
    assert _requirement("2.9.1+cpu") == "torch_xla[tpu]~=2.9.0"
    assert _requirement(_installed_torch()).startswith("torch_xla[tpu]~=")
