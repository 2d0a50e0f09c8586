from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_launch.plan.machine import Machine


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    machine = Machine.detect(tmp_path)

    assert machine.gpus == 0
    assert machine.cores == len(os.sched_getaffinity(0))


def test_nvidia_device_files_are_counted(tmp_path: Path) -> None:
    touch(
        tmp_path, "dev/nvidia0", "dev/nvidia1", "dev/nvidia10", "dev/nvidiactl", "dev/nvidia-uvm", "dev/null"
    )

    assert Machine.detect(tmp_path).gpus == 3


def test_nvidia_smi_is_asked_where_a_driver_shows_no_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/nvidia-smi"
    touch(tmp_path, "dev/dxg", "bin/nvidia-smi")
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    assert Machine.detect(tmp_path).gpus == 2


def test_amd_topology_nodes_with_units_are_counted(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for index, units in enumerate((0, 304, 304)):
        (nodes / str(index)).mkdir(parents=True)
        (nodes / str(index) / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\n")

    assert Machine.detect(tmp_path).gpus == 2


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("0,7,1", ("0",)),
        ("GPU-abc, 1", ("GPU-abc", "1")),
    ],
)
def test_the_mask_counts_as_for_cuda(mask: str | None, seen: tuple[str, ...]) -> None:
    assert Machine(gpus=3, cores=1).visible_gpus(mask) == seen


def test_a_mask_shows_no_gpu_where_there_is_none() -> None:
    assert Machine(gpus=0, cores=1).visible_gpus("0,1") == ()
