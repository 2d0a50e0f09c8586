from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.config import LaunchConfig
from accel_launch.errors import LaunchError
from accel_launch.launchers.torchrun import torchrun_environment
from accel_launch.plan.machine import Machine
from accel_launch.plan.make import make_plan
from accel_launch.plan.plan import LaunchPlan
from accel_launch.settings.resolve import resolve

CPU_ONLY = Machine(gpus=0, cores=8)
FOUR_GPUS = Machine(gpus=4, cores=64)


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    script = tmp_path / "script.py"
    script.touch()

    def make(
        *flags: str,
        machine: Machine = CPU_ONLY,
        config: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
    ) -> LaunchPlan:
        args = launch_command_parser().parse_args([*flags, str(script), "--lr", "1"])
        file = None if config is None else LaunchConfig.from_values(config, Path("c.yaml"))
        settings = resolve(args, file, environ or {})
        return make_plan(settings, str(script), args.training_script_args, environ or {}, machine)

    return make


def test_one_process_without_gpus(plan: Any) -> None:
    made = plan()

    assert (made.launcher, made.processes, made.machines) == ("exec", 1, (1, 1))
    assert made.settings["num_processes"].detail == "detected: no visible GPU"
    assert made.environ == {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}
    assert made.arguments == ("--lr", "1")


@pytest.mark.parametrize(
    ("flags", "environ", "processes"),
    [
        ((), {}, 4),
        ((), {"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ((), {"CUDA_VISIBLE_DEVICES": ""}, 1),
        (("--gpu_ids", "1,3"), {"CUDA_VISIBLE_DEVICES": "0"}, 2),
        (("--gpu_ids", "all"), {}, 4),
        (("--cpu",), {}, 1),
        (("--num_processes", "3"), {}, 3),
        ((), {"ACCELERATE_NUM_PROCESSES": "2"}, 2),
        (("--num_machines", "2", "--main_process_ip", "host"), {}, 4),
    ],
)
def test_the_number_of_processes_is_that_of_the_visible_gpus(
    plan: Any, flags: tuple[str, ...], environ: dict[str, str], processes: int
) -> None:
    assert plan(*flags, machine=FOUR_GPUS, environ=environ).processes == processes


def test_gpu_ids_become_the_mask(plan: Any) -> None:
    assert plan("--gpu_ids", "3,1", machine=FOUR_GPUS).environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert "CUDA_VISIBLE_DEVICES" not in plan("--gpu_ids", "all", machine=FOUR_GPUS).environ
    config = {"gpu_ids": "0", "distributed_type": "NO"}
    assert plan(config=config, machine=FOUR_GPUS).environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("flags", "environ", "threads"),
    [
        (("--num_processes", "2"), {}, "4"),
        (("--num_processes", "16"), {}, "1"),
        (("--num_processes", "2"), {"OMP_NUM_THREADS": "3"}, "3"),
        (("--num_processes", "2"), {"OMP_NUM_THREADS": "4,2"}, "4,2"),  # for nested parallel regions
        (("--num_processes", "2", "--num_cpu_threads_per_process", "5"), {"OMP_NUM_THREADS": "3"}, "5"),
        ((), {}, None),
        (("--num_cpu_threads_per_process", "6"), {}, "6"),
    ],
)
def test_cores_are_shared_among_processes(
    plan: Any, flags: tuple[str, ...], environ: dict[str, str], threads: str | None
) -> None:
    assert plan(*flags, environ=environ).environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        ((), "exec"),
        (("--num_processes", "2"), "local"),
        (("--launcher", "local"), "local"),
        (("--tee", "3"), "local"),
        (("--log_dir", "logs"), "local"),
        (("--launcher", "torchrun"), "torchrun"),
        (("--launcher", "ray", "--num_processes", "2"), "ray"),
        (("--launcher", "ray", "--rdzv_conf", "timeout=3"), "ray"),
        (("--launcher", "ray", "--use_deepspeed"), "ray"),
        (("--max_restarts", "1"), "torchrun"),
        (("--rdzv_backend", "c10d"), "torchrun"),
        (("--rdzv_conf", "timeout=3"), "torchrun"),
        (("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "h"), "torchrun"),
    ],
)
def test_what_starts_the_workers(plan: Any, flags: tuple[str, ...], how: str) -> None:
    assert plan(*flags).launcher == how


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        (("--max_restarts", "1"), "c10d"),
        (("--num_machines", "1:2", "--num_processes", "2", "--main_process_ip", "h"), "c10d"),
        (("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "h"), "static"),
    ],
)
def test_workers_that_may_start_again_meet_by_c10d(plan: Any, flags: tuple[str, ...], backend: str) -> None:
    made = plan(*flags)

    assert made.settings.value("rdzv_backend") == backend
    # Without it torch keeps one store for all attempts, with the addresses of the one before.
    fresh = torchrun_environment(made).get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    assert fresh == (backend == "c10d")


def test_a_static_rendezvous_and_restarts_give_a_warning(plan: Any) -> None:
    with pytest.warns(UserWarning, match=r"can fail with rdzv_backend=static \(from --rdzv_backend\)"):
        plan("--max_restarts", "1", "--rdzv_backend", "static")


@pytest.mark.parametrize(
    ("flags", "machine", "messages"),
    [
        (
            ("--num_processes", "5"),
            FOUR_GPUS,
            ("num_processes=5", "only 4 GPUs", "--num_processes 4", "--cpu"),
        ),
        (("--gpu_ids", "0,9"), FOUR_GPUS, ("gpu_ids=0,9", "--gpu_ids", "GPUs 0 to 3")),
        (("--gpu_ids", "0,0"), FOUR_GPUS, ("gpu_ids=0,0", "once")),
        (("--gpu_ids", "0"), CPU_ONLY, ("gpu_ids=0", "no NVIDIA or AMD GPU")),
        (("--multi_gpu",), CPU_ONLY, ("--multi_gpu", "--cpu")),
        (("--num_machines", "2"), CPU_ONLY, ("num_machines=2", "--main_process_ip")),
        (
            ("--num_machines", "2", "--main_process_ip", "h", "--num_processes", "3"),
            CPU_ONLY,
            ("num_processes=3", "num_machines=2", "1 over"),
        ),
        (("--machine_rank", "1"), CPU_ONLY, ("machine_rank=1", "num_machines=1")),
        (
            ("--num_machines", "1:2", "--main_process_ip", "h", "--rdzv_backend", "static"),
            CPU_ONLY,
            ("num_machines=1:2", "--rdzv_backend c10d"),
        ),
        (
            ("--launcher", "local", "--max_restarts", "2"),
            CPU_ONLY,
            ("--launcher local", "max_restarts=2", "torchrun"),
        ),
        (("--launcher", "ray", "--num_machines", "2"), CPU_ONLY, ("Ray", "num_machines=2", "leave that out")),
        (("--launcher", "ray", "--tpu"), CPU_ONLY, ("Ray", "tpu=True", "leave that out")),
        (("--launcher", "ray", "--tpu", "--tpu_cluster"), CPU_ONLY, ("Ray", "tpu=True", "leave that out")),
    ],
)
def test_what_does_not_fit_is_rejected(
    plan: Any, flags: tuple[str, ...], machine: Machine, messages: tuple[str, ...]
) -> None:
    with pytest.raises(LaunchError) as error:
        plan(*flags, machine=machine)

    assert [message for message in messages if message not in str(error.value)] == []


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--role", "trainer"), "one process: --role"),
        (("--num_processes", "2", "--monitor_interval", "1"), "workers of this machine: --monitor_interval"),
        (("--launcher", "torchrun", "--grace_period", "1"), "torchrun: --grace_period"),
        (("--cpu", "--gpu_ids", "0"), "--gpu_ids is ignored"),
        (
            ("--launcher", "ray", "--use_deepspeed", "--deepspeed_hostfile", "x", "--machine_rank", "3"),
            "Ray: --machine_rank, --deepspeed_hostfile",
        ),
        (
            (
                *("--launcher", "ray", "--use_deepspeed", "--deepspeed_multinode_launcher", "pdsh"),
                *("--deepspeed_exclusion_filter", "a:0", "--deepspeed_inclusion_filter", "b"),
            ),
            "Ray: --deepspeed_multinode_launcher, --deepspeed_exclusion_filter, --deepspeed_inclusion_filter",
        ),
    ],
)
def test_flags_without_effect_give_a_warning(plan: Any, flags: tuple[str, ...], match: str) -> None:
    with pytest.warns(UserWarning, match=match):
        plan(*flags)


OUTER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500", "A": "b"}


def test_one_process_requested_inside_a_worker_is_a_run_of_its_own(plan: Any) -> None:
    made = plan("--num_processes", "1", environ={**OUTER, "TORCHELASTIC_RUN_ID": "x"})

    assert made.launcher == "exec"
    assert {"A": "b"}.items() <= made.environ.items()
    assert (
        not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & made.environ.keys()
    )


@pytest.mark.parametrize("config", [None, {"num_processes": 1}])
def test_without_a_number_a_worker_stays_in_its_run(plan: Any, config: dict[str, Any] | None) -> None:
    assert OUTER.items() <= plan(environ=OUTER, config=config).environ.items()


def test_outside_a_worker_nothing_is_dropped(plan: Any) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}

    assert environ.items() <= plan("--num_processes", "1", environ=environ).environ.items()


@pytest.mark.parametrize("processes", ["1", "4"])
def test_a_mesh_for_another_number_of_processes_is_rejected(plan: Any, processes: str) -> None:
    config = {"parallelism_config": {"parallelism_config_tp_size": 4, "parallelism_config_dp_shard_size": 2}}
    with pytest.raises(LaunchError) as error:
        plan("--num_processes", processes, config=config)

    text = str(error.value)
    assert f"dp_shard(2) * tp(4) = 8 (from c.yaml), but num_processes={processes} (from --num_proc" in text
    assert "Give --num_processes 8" in text
    assert plan("--num_processes", "8", config=config).processes == 8


def test_a_config_for_a_machine_with_more_gpus_is_rejected(plan: Any) -> None:
    with pytest.raises(LaunchError, match=r"num_processes=8 \(from c.yaml\) .* only 4 GPUs are visible"):
        plan(config={"num_processes": 8, "distributed_type": "MULTI_GPU"}, machine=FOUR_GPUS)
