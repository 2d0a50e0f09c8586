from __future__ import annotations

import pytest

from accel_state.devices.spec import DeviceSpec
from accel_state.devices.table import DEVICES
from accel_state.enums import DistributedType
from accel_state.env import CPUInformation
from accel_state.process import ranks
from accel_world.pool import World

CPU = DEVICES["cpu"]


def hardware(count: int, **options: object) -> DeviceSpec:
    """Describe hardware with some devices; nothing of it is touched by finding a place."""
    return DeviceSpec(
        "cuda",
        DistributedType.MULTI_GPU,
        "nccl",
        None,
        frozenset(),
        lambda: True,
        visible_devices="CUDA_VISIBLE_DEVICES",
        calls={"device_count": lambda: count},
        **options,
    )


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_NTASKS", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_torchrun_names(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)

    assert ranks.find_ranks(CPU, {}) == CPUInformation(5, 8, 1, 4)


def test_explicit_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)

    assert ranks.find_ranks(CPU, {"rank": 2, "world_size": 3}) == CPUInformation(2, 3, 2, 3)


def test_one_machine_is_assumed_where_nothing_names_the_place_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=1, WORLD_SIZE=3)

    assert ranks.find_ranks(CPU, {}) == CPUInformation(1, 3, 1, 3)


def test_slurm_names_the_place_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_NTASKS=8, SLURM_LOCALID=3, SLURM_TASKS_PER_NODE="4(x2)")

    assert ranks.find_ranks(CPU, {"rank": 7, "world_size": 8}) == CPUInformation(7, 8, 3, 4)


@pytest.mark.parametrize(
    ("tasks", "place"),
    [
        ("4,2", CPUInformation(5, 6, 1, 2)),
        ("2,4", CPUInformation(5, 6, 3, 4)),
        ("2(x3)", CPUInformation(3, 6, 1, 2)),
        ("3,2,1", CPUInformation(4, 6, 1, 2)),
    ],
)
def test_slurm_tells_uneven_tasks_by_the_machine(
    monkeypatch: pytest.MonkeyPatch, tasks: str, place: CPUInformation
) -> None:
    variables = {"SLURM_NTASKS": 6, "SLURM_LOCALID": place.local_rank, "SLURM_NODEID": 1}
    _set(monkeypatch, **variables, SLURM_TASKS_PER_NODE=tasks)

    assert ranks.find_ranks(CPU, {"rank": place.rank, "world_size": 6}) == place


def test_runtime_of_the_hardware_is_asked_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=1, WORLD_SIZE=3)
    spec = DeviceSpec(
        "xla",
        DistributedType.XLA,
        "xla",
        None,
        frozenset(),
        lambda: True,
        calls={"launched_as": lambda: (3, 4, 1, 2)},
    )

    assert ranks.find_ranks(spec, {}) == CPUInformation(3, 4, 1, 2)


@pytest.mark.parametrize("options", [{"rank": 2, "world_size": 2}, {"rank": 1}, {"world_size": 2}])
def test_rank_outside_the_run_is_rejected(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"Rank -?\d is not one of -?\d process.*both, or neither"):
        ranks.find_ranks(CPU, options)


def _place_in_group() -> CPUInformation:
    return ranks.find_ranks(CPU, {})


def test_group_knows_rank_and_size_and_the_environment_the_machine(world: World) -> None:
    machines = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    stale = {"WORLD_SIZE": "64", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}

    assert world.run(_place_in_group, env=machines) == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert world.run(_place_in_group, env=stale) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_device_of_a_process_is_its_local_rank() -> None:
    assert ranks.device_index(hardware(4), CPUInformation(7, 8, 3, 4)) == 3


def test_hardware_without_indices_has_none() -> None:
    assert ranks.device_index(CPU, CPUInformation(7, 8, 3, 4)) is None


def test_one_process_keeps_an_index_that_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:64")

    assert ranks.device_index(CPU, CPUInformation(0, 1, 0, 1)) == 64


def test_one_process_keeps_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.device_index(hardware(4), CPUInformation(0, 1, 0, 1)) is None
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:2")
    assert ranks.device_index(hardware(4), CPUInformation(0, 1, 0, 1)) == 2


def test_processes_that_see_one_device_each_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")

    assert ranks.device_index(hardware(1), CPUInformation(3, 4, 3, 4)) == 0


def test_more_processes_than_devices_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Local rank 2 .* sees 2 cuda device\(s\) for 4 processes"):
        ranks.device_index(hardware(2), CPUInformation(2, 4, 2, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun gives all processes the same devices
    with pytest.raises(ValueError, match=r"Local rank 1 .*widen CUDA_VISIBLE_DEVICES.*ACCELERATE_USE_CPU"):
        ranks.device_index(hardware(1), CPUInformation(1, 2, 1, 2))
