from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_state import env
from accel_state.devices.table import DEVICES
from accel_state.env import CPUInformation
from accel_state.process import rendezvous
from accel_state.process.state import PartialState
from accel_world.pool import World

pytestmark = pytest.mark.core

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from accel_state.process.state import PartialState

state = PartialState(init_method=f"file://{os.environ['STORE']}")
assert dist.get_backend() == "gloo"
state.wait_for_everyone()
print("threads", torch.get_num_threads())
if sys.argv[1] == "fail":
    if state.process_index == 1:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        raise RuntimeError("boom")
    time.sleep(60)
"""


def _start(folder: Path, rank: int, mode: str) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place["STORE"] = folder / "store"
    environment = {**env.snapshot(), **{name: str(value) for name, value in place.items()}}
    environment["ACCELERATE_USE_CPU"] = "true"
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_share_the_cores_and_exit_cleanly(tmp_path: Path) -> None:
    workers = [_start(tmp_path, rank, "work") for rank in range(2)]
    outputs = [worker.communicate(timeout=180) for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for out, _ in outputs:
        # The last line: gloo of torch 2.10 prints one of its own before.
        assert out.splitlines()[-1] == f"threads {max(1, cores // 2)}"
    assert [error for _, error in outputs] == ["", ""]


def test_failed_process_ends_although_an_operation_waits_for_the_others(tmp_path: Path) -> None:
    waiting, failing = (_start(tmp_path, rank, "fail") for rank in range(2))
    try:
        out, error = failing.communicate(timeout=120)
    finally:
        waiting.kill()
        waiting.communicate()
        failing.kill()

    assert failing.returncode == 1
    assert "RuntimeError: boom" in error
    assert "threads" in out  # what was printed before is not lost


def test_options_without_a_value_are_left_out() -> None:
    assert rendezvous.check_options({"backend": None, "rank": 0}) == {"rank": 0}


def test_only_own_groups_are_destroyed_at_exit(world: World) -> None:
    assert world.run(_destroys_own, init=False) == [True, True]
    assert world.run(_destroys_foreign) == [False, False]


def _destroys_own() -> bool:
    PartialState().wait_for_everyone()  # gloo of another process may still be connecting
    rendezvous._destroy_at_exit()
    return not dist.is_initialized()


def _destroys_foreign() -> bool:
    PartialState()
    rendezvous._destroy_at_exit()
    return not dist.is_initialized()


def _destroys_later_foreign() -> bool:
    PartialState()
    dist.destroy_process_group()
    store = dist.FileStore(env.raw("STORE"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=env.get("RANK"), world_size=2)
    rendezvous._destroy_at_exit()
    return not dist.is_initialized()


def test_group_that_came_after_ours_is_foreign(world: World, tmp_path: Path) -> None:
    variables = {"STORE": str(tmp_path / "store")}

    assert world.run(_destroys_later_foreign, init=False, env=variables) == [False, False]


def _rendezvous_file(path: str) -> float:
    with env.patch_environment(ACCELERATE_DEBUG_RDV_FILE=path, MASTER_ADDR="", MASTER_PORT=""):
        PartialState()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_rendezvous_file_stands_in_for_an_address(world: World, tmp_path: Path) -> None:
    assert world.run(_rendezvous_file, str(tmp_path / "store"), init=False) == [2.0, 2.0]


def _explicit_store(path: str) -> tuple[int, int]:
    rank = env.get("RANK")
    with env.patch_environment(RANK="", WORLD_SIZE="", MASTER_ADDR="", MASTER_PORT=""):
        store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
        state = PartialState(store=store, rank=rank, world_size=2)
        state.wait_for_everyone()
        return state.process_index, state.num_processes


def test_explicit_store_rank_and_size(world: World, tmp_path: Path) -> None:
    assert world.run(_explicit_store, str(tmp_path / "store"), init=False) == [(0, 2), (1, 2)]


def test_a_process_that_no_launcher_started_binds_its_group_to_the_current_device() -> None:
    """torch rejects a device without an index, which the device of such a process is."""
    cuda = DEVICES["cuda"]
    spec = replace(cuda, calls={**cuda.calls, "current_device": lambda: 3})
    alone, options = CPUInformation(0, 1, 0, 1), {"store": dist.HashStore()}

    lone = rendezvous._settings(spec, alone, torch.device("cuda"), options)
    assert lone["device_id"] == torch.device("cuda", 3)
    one_of_two = rendezvous._settings(spec, CPUInformation(1, 2, 1, 2), torch.device("cuda", 1), options)
    assert one_of_two["device_id"] == torch.device("cuda", 1)
    assert "device_id" not in rendezvous._settings(DEVICES["cpu"], alone, torch.device("cpu"), options)


def _serves() -> tuple[str | None, str | None]:
    return rendezvous.backend_for(torch.device("cpu")), rendezvous.backend_for(torch.device("meta"))


def test_backend_of_a_device(world: World) -> None:
    assert world.run(_serves, size=1) == [("gloo", None)]


def _foreign_device() -> str:
    with pytest.raises(ValueError, match="does not support") as error:
        rendezvous._check_supports(torch.device("meta"))
    return str(error.value)


def test_group_that_cannot_serve_the_device_is_rejected(world: World) -> None:
    message = world.run(_foreign_device, size=1)[0]

    assert "does not support meta" in message
    assert "gloo supports the CPU" in message


class Collects(Dataset[int]):
    """A dataset whose reader collects garbage, as any may at any time."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def _drops_its_group_in_a_cycle(held_at_the_end: bool) -> list[Any]:
    gc.disable()
    try:
        state = PartialState()
        dist.barrier()  # a process that leaves early takes the connections of the others along
        cycle: list[Any] = [dist.group.WORLD]
        cycle.append(cycle)
        if held_at_the_end:
            state.destroy_process_group()
            del cycle
        else:
            del cycle
            state.destroy_process_group()
        return list(DataLoader(Collects(), batch_size=None, num_workers=1, timeout=20))
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked there")
@pytest.mark.parametrize("held_at_the_end", [False, True])
def test_a_forked_worker_leaves_a_group_that_is_garbage_alone(world: World, held_at_the_end: bool) -> None:
    """Otherwise the worker waits forever for the threads of gloo, which it does not have."""
    assert world.run(_drops_its_group_in_a_cycle, held_at_the_end, init=False) == [[0], [0]]


def _beside() -> list[float]:
    first, other = rendezvous.gloo_group("first use"), rendezvous.gloo_group("other use")
    assert rendezvous.gloo_group("first use") is first
    assert first is not other
    assert dist.get_backend(first) == dist.get_backend(other) == "gloo"
    value = torch.ones(1)
    dist.all_reduce(value, group=first)
    return value.tolist()


def test_groups_next_to_the_default_one_live_as_long_as_it_does(world: World) -> None:
    # The second run has another default group: with the groups of the first it would hang or raise.
    for _ in range(2):
        assert world.run(_beside, size=2) == [[2.0], [2.0]]
