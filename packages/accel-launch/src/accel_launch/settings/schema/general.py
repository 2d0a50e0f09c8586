"""Settings of the launcher itself: what to start, how often, where, and with what output."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from sys import float_info
from typing import Any

from accel_launch.settings.schema.setting import Group, Setting
from accel_state.env import VARIABLES, Variable

GENERAL_GROUPS = {
    "launch": Group("What to start"),
    "resources": Group("Processes and devices"),
    "machines": Group("Several machines and restarts"),
    "output": Group("Output"),
    "training": Group("Training"),
    "tpu": Group("TPU", "tpu", bool, "--tpu"),
    "sagemaker": Group("Amazon SageMaker"),
    "mpirun": Group("MPI"),
}


def machine_range(text: str) -> int | str:
    """Read the number of machines.

    Args:
        text: N, or MIN:MAX for an elastic run.

    Returns:
        N, or the normalised MIN:MAX.

    Raises:
        ValueError: If it is neither, below 1, or MIN is above MAX.
    """
    # int() raises ValueError for anything but a number, as this function has to.
    bounds = [int(number) for number in text.split(":")]
    if len(bounds) > 2 or min(bounds) < 1 or bounds != sorted(bounds):
        raise ValueError(text)
    return bounds[0] if bounds[0] == bounds[-1] else f"{bounds[0]}:{bounds[1]}"


def _limited(read: Callable[[str], Any], low: float, high: float, allowed: str) -> dict[str, Any]:
    """Return the keyword arguments of a setting whose number has limits."""

    def convert(text: str) -> Any:
        # nan fails the comparison too.
        if not low <= read(text) <= high:
            raise ValueError(text)
        return read(text)

    return {"convert": convert, "allowed": allowed}


_MACHINE_RANGE: dict[str, Any] = {"convert": machine_range, "allowed": "N or MIN:MAX, at least 1"}
_COUNT = _limited(int, 1, inf, "an integer, at least 1")
# OpenMP takes a list too, one number per level of nesting; the first is that of a process.
_THREADS = _limited(lambda text: int(text.partition(",")[0]), 1, inf, "an integer, at least 1")
_INDEX = _limited(int, 0, inf, "an integer, at least 0")
_PORT = _limited(int, 0, 65535, "an integer from 0 (any free port) to 65535")
# Both ends shut out what no timer takes: 0 and infinity.
_SECONDS_ABOVE_0 = _limited(float, float_info.min, float_info.max, "seconds, above 0")
_SECONDS = _limited(float, 0, inf, "seconds, at least 0")


def _option(
    group: str, name: str, kind: Any, default: Any, help: str, *, choices: tuple[Any, ...] = (), **rest: Any
) -> Setting:
    """Make a setting that has no environment variable."""
    return _setting(Variable(name, kind, default, help, choices), group, name, **rest)


def _environment(group: str, name: str, variable: str, **rest: Any) -> Setting:
    """Make a setting that is read from, and written to, an environment variable of the table."""
    return _setting(VARIABLES[variable], group, name, from_environment=True, **rest)


def _setting(
    spec: Variable, group: str, name: str, *, in_config: bool = False, key: str = "", **rest: Any
) -> Setting:
    """Make a setting; `in_config` if its key in the config file has its name."""
    key = name if in_config else key
    return Setting(spec, name, group, switch=spec.kind == "flag", key=key, **rest)


_LAUNCH = [
    _option("launch", "config_file", "str", None, "The config file to use instead of the default one."),
    _option(
        "launch",
        "module",
        "flag",
        False,
        "Treat the script as the name of a Python module, as in `python -m`.",
        short="-m",
    ),
    _option("launch", "no_python", "flag", False, "Run the script as a program, without python."),
    _environment(
        "launch",
        "drop_in",
        "ACCEL_DROP_IN",
        note="Run a program that imports accelerate on accel, and so what it starts.",
    ),
    _option(
        "launch",
        "launcher",
        "str",
        "auto",
        "How workers are started: by this process, torch.distributed.run, mpirun, Ray, or a launcher on each "
        "machine by Slurm's srun. auto takes torchrun for several machines and for restarts, mpirun with a "
        "hostfile for it, and in a Slurm job what fits the step.",
        choices=("auto", "local", "torchrun", "mpirun", "srun", "ray"),
    ),
    _option(
        "launch",
        "explain",
        "flag",
        False,
        "Print each effective setting and where it came from; start nothing.",
    ),
    _option("launch", "dry_run", "flag", False, "Print the command and the environment; start nothing."),
]

_RESOURCES = [
    _environment("resources", "cpu", "ACCELERATE_USE_CPU", key="use_cpu"),
    _option("resources", "multi_gpu", "flag", False, "Run on several GPUs."),
    _environment(
        "resources",
        "num_processes",
        "ACCELERATE_NUM_PROCESSES",
        in_config=True,
        **_COUNT,
        note="Number of processes, over all machines; by default one per visible GPU, else one.",
    ),
    _environment(
        "resources",
        "gpu_ids",
        "CUDA_VISIBLE_DEVICES",
        in_config=True,
        note="GPUs to use on this machine, e.g. 0,1; all for every visible one.",
    ),
    _environment(
        "resources",
        "num_cpu_threads_per_process",
        "OMP_NUM_THREADS",
        **_THREADS,
        note="CPU threads of each process (OMP_NUM_THREADS); by default the cores over the processes.",
    ),
    _environment("resources", "enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY", in_config=True),
]

_MACHINES = [
    _option(
        "machines",
        "num_machines",
        "str",
        1,
        "Number of machines; MIN:MAX for an elastic run.",
        in_config=True,
        **_MACHINE_RANGE,
    ),
    _option("machines", "machine_rank", "int", 0, "Rank of this machine, from 0.", in_config=True, **_INDEX),
    _environment(
        "machines",
        "main_process_ip",
        "MASTER_ADDR",
        in_config=True,
        note="Host name or address of machine 0.",
    ),
    _environment(
        "machines",
        "main_process_port",
        "MASTER_PORT",
        in_config=True,
        **_PORT,
        note="Port of rank 0; by default, or when 0, a free one on one machine and 29500 on several.",
    ),
    _option(
        "machines",
        "same_network",
        "flag",
        False,
        "Accepted for old commands; the launcher needs no such hint.",
        in_config=True,
    ),
    _option("machines", "rdzv_backend", "str", "static", "Rendezvous: static, c10d, etcd.", in_config=True),
    _option("machines", "rdzv_conf", "str", "", "More rendezvous settings: key=value,key=value."),
    _option(
        "machines",
        "max_restarts",
        "int",
        0,
        "How often the workers are started again when one fails.",
        **_INDEX,
    ),
    _option(
        "machines",
        "monitor_interval",
        "float",
        0.1,
        "Seconds between torchrun's looks at its workers.",
        **_SECONDS,
    ),
]

_OUTPUT = [
    _option("output", "quiet", "flag", False, "Say nothing about a failed script.", short="-q"),
    _option(
        "output",
        "tee",
        "str",
        "0",
        "Show each worker's streams with its rank before every line, and copy them to --log_dir: "
        "0 none, 1 stdout, 2 stderr, 3 both.",
        choices=("0", "1", "2", "3"),
    ),
    _option("output", "log_dir", "str", None, "Folder for one log file per worker and stream."),
    _option("output", "role", "str", "default", "Name of the workers, shown before their lines."),
    _option(
        "output",
        "grace_period",
        "float",
        None,
        "Seconds between asking workers to end and killing them; unset: 5 when one failed, 30 when the "
        "launcher was asked to end.",
        **_SECONDS,
    ),
]

_TRAINING = [
    _environment("training", "mixed_precision", "ACCELERATE_MIXED_PRECISION", in_config=True, always=True),
    _environment(
        "training",
        "gradient_accumulation_steps",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        section="deepspeed_config",
        in_config=True,
        **_COUNT,
    ),
    _environment("training", "debug", "ACCELERATE_DEBUG_MODE", in_config=True),
    _environment(
        "training",
        "watch",
        "ACCELERATE_WATCHDOG",
        in_config=True,
        bare="120",
        **_SECONDS_ABOVE_0,
        note="Watch the collectives: where one waits for longer than these seconds (120 if none are given), "
        "a report says where every process is.",
    ),
    _environment("training", "watch_abort", "ACCELERATE_WATCHDOG_ABORT", in_config=True),
    _environment("training", "downcast_bf16", "ACCELERATE_DOWNCAST_BF16", in_config=True),
]

_ELSEWHERE = [
    _option("tpu", "tpu", "flag", False, "Run on TPU."),
    _option("tpu", "tpu_cluster", "flag", False, "Run on a TPU pod.", key="tpu_use_cluster"),
    _option("tpu", "no_tpu_cluster", "flag", False, "Do not run on a TPU pod."),
    _option("tpu", "tpu_name", "str", None, "The pod's name.", in_config=True),
    _option("tpu", "tpu_zone", "str", None, "The pod's zone.", in_config=True),
    _option("tpu", "tpu_use_sudo", "flag", False, "Use sudo on the pod.", in_config=True),
    _option(
        "tpu", "vm", "list", (), "Without effect: a pod is reached by its name.", repeated=True, key="tpu_vm"
    ),
    _option(
        "tpu",
        "env",
        "list",
        (),
        "A variable for the pod's machines, NAME=VALUE.",
        repeated=True,
        key="tpu_env",
    ),
    _option(
        "tpu",
        "main_training_function",
        "str",
        "main",
        "Function of the script that TPU workers run.",
        in_config=True,
    ),
    _option("sagemaker", "aws_access_key_id", "str", None, "AWS access key."),
    _option("sagemaker", "aws_secret_access_key", "str", None, "AWS secret key."),
    _option(
        "mpirun",
        "mpirun_hostfile",
        "str",
        None,
        "Hostfile for mpirun.",
        section="mpirun_config",
        in_config=True,
    ),
    _option(
        "mpirun",
        "mpirun_ccl",
        "int",
        1,
        "oneCCL worker threads per process.",
        section="mpirun_config",
        in_config=True,
    ),
]

GENERAL: list[Setting] = _LAUNCH + _RESOURCES + _MACHINES + _OUTPUT + _TRAINING + _ELSEWHERE
