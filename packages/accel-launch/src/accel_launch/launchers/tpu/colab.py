"""Install torch_xla in a Colab notebook."""

from __future__ import annotations

import importlib.util
import subprocess
import sys


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits the installed torch, in a Google Colab notebook.

    Args:
        upgrade: Bring torch to its newest version first.

    Raises:
        RuntimeError: If this is no Colab notebook; elsewhere an environment is its owner's.
        subprocess.CalledProcessError: If pip fails.

    Example:
        >>> from accel.utils import install_xla
        >>> install_xla(upgrade=True)  # doctest: +SKIP
    """
    if not _in_colab():
        raise RuntimeError(
            "install_xla installs packages in Google Colab alone. Elsewhere run: pip install "
            "'torch_xla[tpu]', in the version of your torch."
        )
    pip = [sys.executable, "-m", "pip", "install"]
    if upgrade:
        subprocess.run([*pip, "--upgrade", "torch"], check=True)
    subprocess.run([*pip, _requirement(_installed_torch())], check=True)


def _in_colab() -> bool:
    try:
        return importlib.util.find_spec("google.colab") is not None
    except ModuleNotFoundError:  # there is no package google at all
        return False


def _installed_torch() -> str:
    # In its own process: this one may have imported the version from before the upgrade.
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def _requirement(torch_version: str) -> str:
    """Return torch_xla's requirement; its versions are those of torch, patch releases aside."""
    major, minor = torch_version.split(".")[:2]
    # ~= allows patch releases alone, as torch_xla 2.9.x is built for torch 2.9.
    return f"torch_xla[tpu]~={major}.{minor}.0"
