from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_state.devices.hardware import check_cuda_p2p_ib_support, check_os_kernel, get_gpu_info

Install = Callable[[str], None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a program of that name, which has no driver to ask here, alone on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(body: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return install


def test_gpus_are_named_and_counted(nvidia_smi: Install) -> None:
    query = "--query-gpu=name --format=csv,noheader"
    nvidia_smi(f'[ "$*" = "{query}" ] && echo "NVIDIA H100 80GB HBM3" && echo "NVIDIA L4"')

    assert get_gpu_info() == (["NVIDIA H100 80GB HBM3", "NVIDIA L4"], 2)


def test_without_a_driver_there_is_no_gpu(nvidia_smi: Install) -> None:
    assert get_gpu_info() == ([], 0)
    assert check_cuda_p2p_ib_support()


def test_a_failing_driver_is_named(nvidia_smi: Install) -> None:
    nvidia_smi('echo "Driver/library version mismatch"; exit 18')
    with pytest.raises(RuntimeError, match="ended with 18: Driver/library version mismatch"):
        get_gpu_info()


@pytest.mark.parametrize(
    ("names", "supported"),
    [
        (["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"], True),
        (["NVIDIA RTX 4000 Ada Generation"], True),
        (["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"], False),
        (["NVIDIA GeForce RTX 5080"], False),
    ],
)
def test_newer_geforce_cards_do_without_peer_to_peer(
    nvidia_smi: Install, names: list[str], supported: bool
) -> None:
    nvidia_smi("\n".join(f'echo "{name}"' for name in names))

    assert check_cuda_p2p_ib_support() == supported


@pytest.mark.parametrize("release", ["5.4.0-150-generic", "4.18.0-372.el8.x86_64", "3.10.0"])
def test_an_old_kernel_is_warned_of(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "release", lambda: release)
    with pytest.warns(UserWarning, match=f"kernel is {release}; with one older than 5.5"):
        check_os_kernel()


@pytest.mark.parametrize(
    ("system", "release"), [("Linux", "5.5.0"), ("Linux", "6.1.0-13-amd64"), ("Darwin", "4.1.0")]
)
def test_other_kernels_are_not(monkeypatch: pytest.MonkeyPatch, system: str, release: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_os_kernel()
