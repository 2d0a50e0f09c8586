from __future__ import annotations

import datetime
import inspect
import os
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import env
from accel_state.devices import affinity, table
from accel_state.devices.spec import DeviceSpec
from accel_state.enums import DistributedType
from accel_state.process import state as state_module
from accel_state.process.info import ProcessInfo
from accel_state.process.state import PartialState, current_process, wait_for_everyone
from accel_world.pool import World
from accel_world.warned import warns_once

ALONE = ProcessInfo(0, 1, 0, 1, torch.device("cpu"), None, DistributedType.NO, False)
SIZES = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _clean(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_process_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        ALONE.rank = 1  # type: ignore[misc]
    assert (ALONE.is_main, ALONE.is_local_main, ALONE.is_last, ALONE.node_rank) == (True, True, True, 0)


def test_one_process_needs_no_launcher_and_no_group() -> None:
    state = PartialState()

    assert state.process == ALONE
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.device == state.default_device == torch.device("cpu")
    assert not state.use_distributed
    assert not state.fork_launched
    assert not dist.is_initialized()


def test_world_size_one_in_the_environment_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)

    assert PartialState().process == ALONE
    assert not dist.is_initialized()


def test_all_instances_are_handles_on_the_same_facts() -> None:
    first, second = PartialState(), PartialState()

    assert first.process is second.process
    assert PartialState._shared_state


def test_current_process_initialises_and_stores_nothing() -> None:
    assert current_process() == ALONE
    assert PartialState._shared_state == {}
    assert not dist.is_initialized()


def test_current_process_is_what_the_state_holds() -> None:
    assert current_process() is not PartialState().process
    assert current_process() is PartialState().process


def test_reset_is_noticed_by_handles_and_undone_by_a_new_one() -> None:
    handle = PartialState()
    PartialState._reset_state()

    assert PartialState._shared_state == {}
    assert not handle.initialized
    for name in [name for name, value in inspect.getmembers(type(handle)) if isinstance(value, property)]:
        if name not in ("initialized", "default_device"):  # these need no state
            assert not hasattr(handle, name), name
    with pytest.raises(AttributeError, match=r"_reset_state\(\) was called.*Make a new PartialState"):
        _ = handle.num_processes
    assert repr(handle) == "PartialState(reset)"

    PartialState()

    assert handle.process == ALONE


def test_repr_has_the_facts() -> None:
    assert "Num processes: 1" in repr(PartialState())


def test_debug_mode_and_fork_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    state = PartialState()

    assert state.debug
    assert state.fork_launched


def test_unknown_option_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"unknown option.* time_out; it takes cpu .*timeout"):
        PartialState(time_out=5)


def test_options_of_the_group_do_not_matter_to_one_process() -> None:
    PartialState(timeout=datetime.timedelta(seconds=5), backend="gloo")

    assert PartialState(timeout=datetime.timedelta(seconds=9)).process == ALONE


def test_cpu_after_another_device_is_rejected() -> None:
    PartialState()
    # A machine with a GPU, as the second PartialState would see it.
    elsewhere = ProcessInfo(0, 1, 0, 1, torch.device("cuda", 0), None, DistributedType.NO)
    PartialState._shared_state["process"] = elsewhere

    with pytest.raises(ValueError, match=r"cpu=True, but this process is on cuda:0 already.*_reset_state"):
        PartialState(cpu=True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2 processes"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK has the value 'x'"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "Local rank 1 of 1 process.*LOCAL_WORLD_SIZE",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT is not set.*accel launch"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "but MASTER_PORT is not set"),
    ],
)
def test_bad_environment_is_rejected(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=message):
        PartialState()
    assert PartialState._shared_state == {}


def test_hardware_for_one_process_gives_way_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    single = DeviceSpec("mps", DistributedType.NO, None, None, frozenset(), lambda: True, indexed=False)
    monkeypatch.setattr(table, "DEVICES", {"mps": single, "cpu": table.DEVICES["cpu"]})
    monkeypatch.delenv("ACCELERATE_USE_CPU")

    assert state_module._find_hardware(False, {})[0] is single

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="mps runs one process only, but there are 2: running on the CPU"):
        assert state_module._find_hardware(False, {})[0].type == "cpu"


def _bound(sysfs: Path) -> bool:
    before = os.sched_getaffinity(0)
    node = sysfs / "devices" / "system" / "node" / f"node{env.get('LOCAL_RANK')}"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(str(min(before)))
    affinity._SYSFS = node.parents[3]
    try:
        PartialState()
        return os.sched_getaffinity(0) == {min(before)}
    finally:
        affinity._SYSFS = Path("/sys")
        affinity.set_numa_affinity.cache_clear()
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to cores")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_affinity_is_set_where_it_is_requested(world: World, tmp_path: Path) -> None:
    assert world.run(_bound, tmp_path, size=1, env={"ACCELERATE_CPU_AFFINITY": "true"}) == [True]
    assert world.run(_bound, tmp_path / "not", size=1) == [False]


def _facts() -> tuple[ProcessInfo, bool, ProcessInfo]:
    before = current_process()
    state = PartialState()
    state.wait_for_everyone()
    wait_for_everyone()
    return state.process, PartialState().process is state.process, before


def _expected(size: int, backend: str | None) -> list[ProcessInfo]:
    kind = DistributedType.MULTI_CPU if size > 1 else DistributedType.NO
    return [ProcessInfo(rank, size, rank, size, torch.device("cpu"), backend, kind) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_existing_group_is_joined(world: World, size: int) -> None:
    expected = _expected(size, "gloo")

    assert world.run(_facts, size=size) == [(process, True, process) for process in expected]


@pytest.mark.parametrize("size", SIZES)
def test_group_is_made_from_the_environment(world: World, size: int) -> None:
    results = world.run(_made_group, size=size, init=False)

    assert [process for process, _ in results] == _expected(size, "gloo" if size > 1 else None)
    assert [total for _, total in results] == [sum(range(size))] * size


def _made_group() -> tuple[ProcessInfo, float]:
    state = PartialState()
    total = torch.tensor([float(state.process_index)])
    if state.use_distributed:
        dist.all_reduce(total)
    return state.process, total.item()


def _facts_of_mpi() -> ProcessInfo:
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    with env.patch_environment(
        RANK="",
        WORLD_SIZE="",
        LOCAL_RANK="",
        LOCAL_WORLD_SIZE="",
        OMPI_COMM_WORLD_RANK=rank,
        OMPI_COMM_WORLD_SIZE=size,
        OMPI_COMM_WORLD_LOCAL_RANK=rank % 2,
        OMPI_COMM_WORLD_LOCAL_SIZE=2,
    ):
        state = PartialState()
        state.wait_for_everyone()
        return state.process


def test_group_is_made_from_mpi_names(world: World) -> None:
    processes = world.run(_facts_of_mpi, size=4, init=False)

    assert [process.rank for process in processes] == [0, 1, 2, 3]
    assert [process.local_rank for process in processes] == [0, 1, 0, 1]
    assert [process.node_rank for process in processes] == [0, 0, 1, 1]
    assert {process.world_size for process in processes} == {4}


def _reset_and_join() -> tuple[ProcessInfo, bool, int]:
    first = PartialState(timeout=datetime.timedelta(seconds=30), backend="gloo")
    group = dist.group.WORLD
    facts = first.process
    PartialState._reset_state()
    # The same settings again, as a library does that resets the state before its own: no warning, same group.
    second = PartialState(timeout=datetime.timedelta(seconds=30), backend="gloo")
    second.wait_for_everyone()
    return second.process, dist.group.WORLD is group, facts.rank


@pytest.mark.parametrize("init", [False, True])
def test_group_survives_a_reset_and_is_joined_again(world: World, init: bool) -> None:
    if init:
        results = world.run(_reset_and_join_foreign)
    else:
        results = world.run(_reset_and_join, init=False)

    assert results == [(process, True, process.rank) for process in _expected(2, "gloo")]


def _reset_and_join_foreign() -> tuple[ProcessInfo, bool, int]:
    group, rank = dist.group.WORLD, PartialState().process_index
    PartialState._reset_state()
    state = PartialState(backend="gloo")
    state.wait_for_everyone()
    return state.process, dist.group.WORLD is group, rank


def _ignored(first: dict[str, Any], second: dict[str, Any]) -> str:
    PartialState(**first)
    with warns_once(UserWarning, "ignored") as told:
        PartialState(**second)
    return "".join(told)


def test_other_settings_than_the_live_groups_are_not_ignored_in_silence(world: World) -> None:
    long, short = datetime.timedelta(seconds=60), datetime.timedelta(seconds=30)
    message = world.run(_ignored, {"timeout": long}, {"timeout": short, "backend": "gloo"}, init=False)[0]

    assert message.startswith(
        "timeout=datetime.timedelta(seconds=30) ignored: the process group exists already"
    )
    assert "first PartialState" in message


def test_other_backend_than_a_foreign_groups_is_not_ignored_in_silence(world: World) -> None:
    message = world.run(_ignored, {}, {"backend": "mpi"})[0]

    assert message.startswith("backend='mpi' ignored")


def _destroy() -> tuple[ProcessInfo, ProcessInfo, bool, bool]:
    state = PartialState()
    state.destroy_process_group()
    gone = not dist.is_initialized()
    state.destroy_process_group()  # nothing is left to destroy
    return state.process, PartialState().process, gone, state.is_main_process


def test_identity_outlives_the_group(world: World) -> None:
    for rank, (facts, again, gone, is_main) in enumerate(world.run(_destroy, init=False)):
        assert facts == again == _expected(2, None)[rank]
        assert gone
        assert is_main == (rank == 0)


def _destroy_and_begin_anew() -> float:
    PartialState().destroy_process_group()
    PartialState._reset_state()
    PartialState()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_reset_after_destroy_begins_again(world: World) -> None:
    assert world.run(_destroy_and_begin_anew, init=False) == [2.0, 2.0]


def _destroy_subgroup() -> bool:
    state = PartialState()
    group = dist.new_group([0, 1])
    state.destroy_process_group(group)
    state.wait_for_everyone()
    return state.backend == "gloo"


def test_destroying_a_subgroup_leaves_the_default_group(world: World) -> None:
    assert world.run(_destroy_subgroup) == [True, True]


def test_current_process_outside_a_run_costs_little() -> None:
    import timeit

    current_process()
    PartialState()

    assert min(timeit.repeat(current_process, number=1000, repeat=3)) < 0.005  # 5 us each
