from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_state.devices import affinity
from accel_state.devices.affinity import override_numa_affinity, set_numa_affinity

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to cores"
)


@pytest.fixture(autouse=True)
def _bound_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("ACCELERATE_DEBUG_MODE", raising=False)
    before = os.sched_getaffinity(0)
    affinity._allowed_cores.cache_clear()
    set_numa_affinity.cache_clear()
    yield
    os.sched_setaffinity(0, before)
    affinity._allowed_cores.cache_clear()
    set_numa_affinity.cache_clear()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Describe NUMA nodes in a folder laid out as Linux does; fill in with `_node`."""
    monkeypatch.setattr(affinity, "_SYSFS", tmp_path)
    return tmp_path / "devices" / "system" / "node"


def _node(nodes: Path, number: int, cores: str) -> None:
    (nodes / f"node{number}").mkdir(parents=True)
    (nodes / f"node{number}" / "cpulist").write_text(cores + "\n")


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set())]
)
def test_core_lists_are_read(text: str, cores: set[int], tmp_path: Path) -> None:
    (tmp_path / "cpulist").write_text(text)

    assert affinity._read_cores(tmp_path / "cpulist") == cores


def test_nodes_are_taken_in_turn_and_those_without_cores_left_out(nodes: Path) -> None:
    for number, cores in {0: "0-1", 1: "", 2: "2-3", 10: "4"}.items():
        _node(nodes, number, cores)

    assert [affinity._node_cores(index) for index in range(4)] == [{0, 1}, {2, 3}, {4}, {0, 1}]


def test_process_is_bound_to_its_nodes_cores(nodes: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    _node(nodes, 0, f"{allowed[0]},{max(allowed) + 1}")  # one core of ours and one that is not
    override_numa_affinity(0)

    assert os.sched_getaffinity(0) == {allowed[0]}


def test_affinity_is_set_once_and_can_be_overridden(nodes: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    _node(nodes, 0, str(allowed[0]))
    set_numa_affinity(0)
    os.sched_setaffinity(0, allowed)
    set_numa_affinity(0)

    assert os.sched_getaffinity(0) == set(allowed)

    override_numa_affinity(0)

    assert os.sched_getaffinity(0) == {allowed[0]}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_override_may_leave_an_earlier_binding(nodes: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    _node(nodes, 0, str(first))
    _node(nodes, 1, str(second))
    override_numa_affinity(0)
    override_numa_affinity(1)

    assert os.sched_getaffinity(0) == {second}


def test_node_without_a_core_for_us_is_reported_and_changes_nothing(nodes: Path) -> None:
    allowed = os.sched_getaffinity(0)
    other = max(allowed) + 1
    _node(nodes, 0, str(other))
    with pytest.warns(UserWarning, match=rf"ignored for local process 0.*\[{other}\].*may only use"):
        override_numa_affinity(0)

    assert os.sched_getaffinity(0) == allowed


def test_cores_nearest_to_the_device_win_over_the_nodes(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "0000:1b:00.0"
    folder = affinity._SYSFS / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    core = min(os.sched_getaffinity(0))
    (folder / "local_cpulist").write_text(f"{core}\n")
    row = affinity.detect()
    monkeypatch.setattr(type(row), "pci_address", lambda self, index: address)
    override_numa_affinity(0)

    assert os.sched_getaffinity(0) == {core}


@pytest.mark.parametrize(("verbose", "debug", "told"), [(True, "0", 1), (None, "1", 1), (False, "1", 0)])
def test_cores_are_logged_on_request(
    verbose: bool | None,
    debug: str,
    told: int,
    nodes: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", debug)
    _node(nodes, 0, str(min(os.sched_getaffinity(0))))
    with caplog.at_level(logging.INFO):
        override_numa_affinity(0, verbose)

    assert len(caplog.records) == told
    assert all(record.message.startswith("Local process 0 is bound") for record in caplog.records)
