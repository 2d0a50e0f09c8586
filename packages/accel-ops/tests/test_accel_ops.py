from __future__ import annotations

import subprocess
import sys

import accel_ops


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import accel_ops as o, sys; print('torch' in sys.modules, o.gather and 'torch' in sys.modules)"

    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert output.split() == ["False", "True"]


def test_every_public_name_is_there() -> None:
    assert sorted(accel_ops.__all__) == accel_ops.__all__
    for name in accel_ops.__all__:
        assert getattr(accel_ops, name).__doc__
        assert name in dir(accel_ops)
