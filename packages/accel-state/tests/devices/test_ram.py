from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_state.devices import ram
from accel_state.devices.table import DEVICES


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a kernel, for numbers that are known."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(ram, "_PROC", tmp_path / "meminfo")
    group = [str(tmp_path / name) for name in ("limit", "used", "stat")]
    monkeypatch.setattr(ram, "_CGROUPS", (tuple(group),))
    return tmp_path


def test_this_machine_has_some_memory():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert 0 < ram.available_ram() <= total
    assert DEVICES["cpu"].free_memory(0) == pytest.approx(ram.available_ram(), rel=0.5)


def test_what_the_kernel_says(machine):
    assert ram.available_ram() == 4000 * 1024


def test_a_container_has_what_its_limit_leaves(machine):
    (machine / "limit").write_text("3000\n")
    (machine / "used").write_text("2500\n")
    (machine / "stat").write_text("anon 700\ninactive_file 300\n")

    assert ram.available_ram() == 800
    (machine / "used").write_text("5000\n")
    assert ram.available_ram() == 0
    (machine / "limit").write_text("max\n")
    assert ram.available_ram() == 4000 * 1024


def test_machines_without_these_files_have_all_their_memory(machine):
    (machine / "meminfo").unlink()

    assert ram.available_ram() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
