from __future__ import annotations

import subprocess
import sys

import accel_launch


def test_every_public_name_is_there() -> None:
    assert [name for name in accel_launch.__all__ if not hasattr(accel_launch, name)] == []
    assert set(accel_launch.__all__) <= set(dir(accel_launch))


def test_importing_the_package_imports_next_to_nothing() -> None:
    code = "import sys, accel_launch; print([n for n in ('torch', 'yaml', 'argparse') if n in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout == "[]\n"
