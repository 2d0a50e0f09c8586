"""Every row of the table of environment variables: what reads it does something else when it is set."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.big_modeling import init_empty_weights
from accel.engines import plugin_class
from accel.engines.common.checks import check_multi_device_training
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel.observe import replica_check
from accel.observe.statistics import StatisticsKwargs
from accel.observe.watchdog import WatchdogKwargs
from accel.precision.fp8.recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel.tracking import GeneralTracker
from accel_ckpt.errors import CheckpointError
from accel_launch.commands.launch import launch_command_parser
from accel_launch.config.file import LaunchConfig
from accel_launch.config.paths import config_path
from accel_launch.launchers.sagemaker.estimator import prepare_sagemager_args_inputs
from accel_launch.launchers.tpu.variables import prepare_tpu, tpu_settings
from accel_launch.plan.drop_in import drop_in_environment
from accel_launch.plan.environment import without_worker_variables
from accel_launch.settings.resolve import resolve
from accel_launch.settings.slurm_job import find_step
from accel_state import env
from accel_state.accelerator_state import AcceleratorState
from accel_state.devices.affinity import set_numa_affinity
from accel_state.devices.table import DEVICES, default_device, detect
from accel_state.env.table import VARIABLES
from accel_state.handlers import TorchDynamoPlugin
from accel_state.logging.loggers import get_logger
from accel_state.logging.tracebacks import set_tracebacks
from accel_state.parallelism.config import ParallelismConfig
from accel_state.parallelism.handlers import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accel_state.process import ranks
from accel_state.process.rendezvous import _init_method
from accel_state.process.state import PartialState, current_process
from accel_state.train_plan import make_train_plan

plan = partial(make_train_plan, plugin_class=plugin_class)

pytestmark = pytest.mark.usefixtures("fresh_state")


class FailingTracker(GeneralTracker):
    name = "failing"
    requires_logging_directory = False
    tracker = None

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise ValueError("planted")


@dataclass(frozen=True)
class Reader:
    """What reads a variable.

    Args:
        result: What it makes of the environment; an error counts as a result.
        beside: Variables that have to be set for this one to count.
        text: What is written into the variable; by default something else than its default.
    """

    result: Callable[[], Any]
    beside: dict[str, str] = field(default_factory=dict)
    text: str = ""


def launch_setting(name: str) -> Callable[[], Any]:
    return lambda: resolve(launch_command_parser().parse_args(["x.py"]), None, env.snapshot()).value(name)


def make(*kinds: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [vars(kind()) for kind in kinds]


def spread_model() -> None:
    model = torch.nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    check_multi_device_training(model, False, 2)


def buffers_when_empty() -> Any:
    with init_empty_weights():
        return torch.nn.BatchNorm1d(1).running_mean.device


def traceback_hook() -> Any:
    sys.excepthook = sys.__excepthook__  # the fixture puts the test's own back
    set_tracebacks()
    return sys.excepthook


def bound_to_cores() -> int:
    """Whether the process was bound; on one NUMA node it is bound to all cores, which changes nothing."""
    cores = os.sched_getaffinity(0)
    try:
        set_numa_affinity.cache_clear()
        PartialState(cpu=True)
        return set_numa_affinity.cache_info().currsize
    finally:
        os.sched_setaffinity(0, cores)
        set_numa_affinity.cache_clear()


def names_of_observers() -> list[str]:
    return [type(item).__name__ for item in Accelerator(cpu=True).run.observers]


def replayed() -> str:
    try:
        return str(names_of_observers())
    except CheckpointError as error:  # there is no such bundle
        return str(error)


def failing_tracker() -> None:
    accelerator = Accelerator(cpu=True, log_with=FailingTracker())
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})


def steps_between_checks() -> int:
    return replica_check.steps_between_checks(replace(current_process(), world_size=2))


def facts_of_process() -> Any:
    state = PartialState(cpu=True)
    return state.process, state.fork_launched


def tpu_environment() -> Any:
    args = launch_command_parser().parse_args(["--tpu", "--mixed_precision", "bf16", "x.py"])
    return prepare_tpu(tpu_settings(resolve(args, None, env.snapshot())), {})[1]


def pod_environment() -> dict[str, str]:
    args, _ = prepare_tpu(launch_command_parser().parse_args(["x.py"]), {}, pod=True)
    return dict(text.split("=", 1) for text in args.env)


def sagemaker_environment() -> Any:
    Path("x.py").touch()
    keys = dict.fromkeys(("iam_role_name", "ec2_instance_type", "image_uri", "py_version"), "x")
    kind = {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL"}
    config = LaunchConfig.from_values(kind | keys)
    job, _ = prepare_sagemager_args_inputs(config, launch_command_parser().parse_args(["x.py"]))
    return job.environment


def left_out_of_a_run_of_its_own() -> Any:
    """A launcher inside a worker of another run keeps these from the run that it starts."""
    return {name for name in env.snapshot() if name not in without_worker_variables(env.snapshot())}


def place_on_machine() -> Any:
    return ranks.find_ranks(DEVICES["cpu"], {"rank": 1, "world_size": 6})


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[03-04]"}


def slurm(text: str, beside: dict[str, str] | None = None) -> Reader:
    return Reader(lambda: find_step(env.snapshot()), STEP if beside is None else beside, text)


def family(prefix: str, reader: Callable[[], Any], **beside: str) -> dict[str, Reader]:
    return {name: Reader(reader, beside) for name in VARIABLES if name.startswith(prefix)}


MPI_PLACE = Reader(env.get_cpu_distributed_information)
MPI_RANK = Reader(env.get_cpu_distributed_information, {"WORLD_SIZE": "64"})
ANOTHER_RUN = Reader(left_out_of_a_run_of_its_own)
ZERO_3 = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
NVME = {"OFFLOAD_OPTIMIZER_DEVICE": "nvme", "OFFLOAD_PARAM_DEVICE": "nvme"}
NVME |= {"OFFLOAD_OPTIMIZER_NVME_PATH": "/a", "OFFLOAD_PARAM_NVME_PATH": "/b"}
NVME = ZERO_3 | {f"ACCELERATE_DEEPSPEED_{name}": text for name, text in NVME.items()}
deepspeed, fsdp = make(DeepSpeedPlugin), make(FullyShardedDataParallelPlugin)

READERS: dict[str, Reader] = {
    "ACCEL_DROP_IN": Reader(launch_setting("drop_in")),
    "ACCELERATE_USE_CPU": Reader(detect, {"ACCELERATE_TORCH_DEVICE": "cuda"}),
    "ACCELERATE_MIXED_PRECISION": Reader(lambda: AcceleratorState(cpu=True).mixed_precision, text="bf16"),
    "ACCELERATE_TORCH_DEVICE": Reader(default_device, text="nowhere"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Reader(lambda: plan().accumulation),
    "ACCELERATE_DEBUG_MODE": Reader(facts_of_process),
    "ACCELERATE_CHECK_REPLICAS_STEPS": Reader(steps_between_checks),
    "ACCELERATE_GUARD": Reader(names_of_observers, text="skip"),
    "ACCELERATE_GUARD_BUNDLE": Reader(names_of_observers),
    "ACCELERATE_REPLAY": Reader(replayed),
    "ACCELERATE_WATCHDOG": Reader(make(WatchdogKwargs)),
    "ACCELERATE_WATCHDOG_ABORT": Reader(make(WatchdogKwargs)),
    "ACCELERATE_LOG_LEVEL": Reader(lambda: get_logger("environment_table").logger.level, text="ERROR"),
    "ACCELERATE_STRICT_TRACKERS": Reader(failing_tracker),
    "ACCELERATE_STATISTICS": Reader(lambda: StatisticsKwargs().every),
    "ACCELERATE_VERIFY_FOLDER": Reader(names_of_observers),
    "ACCELERATE_CPU_AFFINITY": Reader(bound_to_cores),
    "ACCELERATE_ENABLE_RICH": Reader(traceback_hook),
    "ACCELERATE_DISABLE_RICH": Reader(traceback_hook, {"ACCELERATE_ENABLE_RICH": "1"}),
    "ACCELERATE_BYPASS_DEVICE_MAP": Reader(spread_model),
    "ACCELERATE_NUM_PROCESSES": Reader(launch_setting("num_processes")),
    "ACCELERATE_DOWNCAST_BF16": Reader(tpu_environment),
    "ACCELERATE_INIT_INCLUDE_BUFFERS": Reader(buffers_when_empty),
    "ACCELERATE_GRADIENT_CLIPPING": Reader(deepspeed),
    "ACCELERATE_DEBUG_RDV_FILE": Reader(lambda: _init_method(DEVICES["cpu"], "gloo")),
    "ACCELERATE_USE_DEEPSPEED": Reader(lambda: "deepspeed_plugin" not in plan().plugins),
    "ACCELERATE_USE_FSDP": Reader(lambda: "fsdp_plugin" not in plan().plugins),
    "ACCELERATE_USE_MEGATRON_LM": Reader(lambda: "megatron_lm_plugin" not in plan().plugins),
    "ACCELERATE_USE_PARALLELISM_CONFIG": Reader(lambda: plan().parallelism is None),
    "ACCELERATE_CONFIG_DS_FIELDS": Reader(
        deepspeed,
        ZERO_3 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed.json"},
        "zero_stage",  # the error says that it is the config file's
    ),
    "RANK": MPI_RANK,
    "LOCAL_RANK": MPI_PLACE,
    "WORLD_SIZE": MPI_PLACE,
    "LOCAL_WORLD_SIZE": MPI_PLACE,
    "GROUP_RANK": ANOTHER_RUN,
    "GROUP_WORLD_SIZE": ANOTHER_RUN,
    "MASTER_ADDR": Reader(launch_setting("main_process_ip")),
    "MASTER_PORT": Reader(launch_setting("main_process_port")),
    "OMP_NUM_THREADS": Reader(launch_setting("num_cpu_threads_per_process")),
    **{name: ANOTHER_RUN for name in VARIABLES if name.startswith("TORCHELASTIC_")},
    **dict.fromkeys(("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"), MPI_RANK),
    **{
        name: MPI_PLACE
        for name in VARIABLES
        if name.startswith(("PMI_SIZE", "MPI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"))
        and not name.endswith("WORLD_RANK")
    },
    "SLURM_JOB_ID": slurm("8"),
    "SLURM_PROCID": slurm("2"),
    "SLURM_LOCALID": slurm("0"),
    "SLURM_NODEID": slurm("1"),
    "SLURM_NTASKS": Reader(place_on_machine, {"SLURM_TASKS_PER_NODE": "4,2", "WORLD_SIZE": "6"}, "6"),
    "SLURM_NNODES": slurm("3", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[03-05]"}),
    "SLURM_JOB_NUM_NODES": slurm("3", BATCH),
    "SLURM_TASKS_PER_NODE": slurm("3,1"),
    "SLURM_STEP_TASKS_PER_NODE": slurm("3,1"),
    "SLURM_CPUS_PER_TASK": slurm("5"),
    "SLURM_JOB_NODELIST": slurm("other1", BATCH),
    "SLURM_STEP_NODELIST": slurm("other1"),
    **family("ACCELERATE_DYNAMO_", make(TorchDynamoPlugin)),
    **family("ACCELERATE_DEEPSPEED_", deepspeed, **ZERO_3),
    **{name: Reader(deepspeed, NVME) for name in NVME if name.endswith("_PATH")},
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": Reader(deepspeed, text="1"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": Reader(deepspeed, text="deepspeed.json"),
    **family("FSDP_", fsdp),
    "FSDP_STATE_DICT_TYPE": Reader(fsdp, text="SHARDED_STATE_DICT"),
    "FSDP_RESHARD_AFTER_FORWARD": Reader(fsdp, {"FSDP_VERSION": "2"}, "false"),
    **family(
        "PARALLELISM_CONFIG_",
        make(ParallelismConfig, TorchContextParallelConfig, DeepSpeedSequenceParallelConfig),
    ),
    **family("ACCELERATE_FP8_", make(TERecipeKwargs, MSAMPRecipeKwargs)),
    **family("FP8_OVERRIDE_", make(TERecipeKwargs)),
    "ACCELERATE_FP8_BACKEND": Reader(lambda: plan(mixed_precision="fp8").fp8_backend),
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": Reader(lambda: AORecipeKwargs().build(True)),
    "ACCELERATE_FP8_PAD_INNER_DIM": Reader(lambda: AORecipeKwargs().build(True)),
    **family("MEGATRON_LM_", make(MegatronLMPlugin)),
    "FORK_LAUNCHED": Reader(facts_of_process),
    "CUDA_VISIBLE_DEVICES": Reader(launch_setting("gpu_ids")),
    "HF_HOME": Reader(config_path),
    "XDG_CACHE_HOME": Reader(config_path),
}

WRITTEN: dict[str, Callable[[], dict[str, str]]] = {
    "ACCEL_DROP_IN_PYTHON": lambda: drop_in_environment({}),
    "ACCELERATE_IN_TPU_POD": pod_environment,
    "ACCELERATE_USE_SAGEMAKER": sagemaker_environment,
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": sagemaker_environment,
}
"""Marks for the program itself: nothing here asks for them, and what writes them is shown."""


def another_text(name: str) -> str:
    """Something that the variable is not by default; where there is one choice alone, what is rejected."""
    variable = VARIABLES[name]
    if variable.choices:
        return str(next((choice for choice in variable.choices if choice != variable.default), "other"))
    if variable.kind == "flag":
        return str(not variable.default)
    if variable.kind == "int":
        return str((variable.default or 0) + 2)
    return {"flags": "true,false,true", "float": "0.25", "list": "One,Two", "str": "something"}[variable.kind]


def outcome(reader: Reader) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings that stand alone here
        try:
            return re.sub(" at 0x[0-9a-f]+", "", repr(reader.result()))  # an address says nothing
        except (ValueError, ImportError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*VARIABLES, *STEP, *BATCH]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    (tmp_path / "deepspeed.json").write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.chdir(tmp_path)


def test_every_row_has_a_reader_or_is_a_mark() -> None:
    assert set(READERS) | set(WRITTEN) == set(VARIABLES)
    assert not set(READERS) & set(WRITTEN)


@pytest.mark.parametrize("name", VARIABLES)
def test_what_reads_a_row_does_something_else_when_it_is_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in WRITTEN:
        assert VARIABLES[name].parse(WRITTEN[name]()[name]) not in (None, VARIABLES[name].default)
        return
    reader = READERS[name]
    for other, text in reader.beside.items():
        monkeypatch.setenv(other, text)
    without = outcome(reader)
    assert outcome(reader) == without
    monkeypatch.setenv(name, reader.text or another_text(name))

    assert outcome(reader) != without
