"""The questions of `accel config`: what only the user can know, in the order in which it is asked.

How many GPUs and cores there are, the number of processes where it follows from them, and the kind of device
are detected and never asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_launch.schema import SETTINGS, Setting

__all__ = ["Answers", "Question", "questions"]

Answers = Mapping[str, Any]
_Test = Callable[[Answers], bool]


def _no_default(answers: Answers) -> None:
    """There is none."""


def _always(answers: Answers) -> bool:
    """Whatever the answers are."""
    return True


def _anything(value: Any, answers: Answers) -> None:
    """Every value fits."""


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        name: Name of the answer; that of a launch setting where the answer is one.
        title: The question.
        choices: What can be chosen, each with what it means; empty to let the user write.
        default: The default answer, from the answers so far.
        when: Tells from the answers so far whether it is asked.
        check: Raises ValueError for an answer that does not fit those so far.
    """

    name: str
    title: str
    choices: tuple[tuple[Any, str], ...] = ()
    default: Callable[[Answers], Any] = _no_default
    when: _Test = _always
    check: Callable[[Any, Answers], None] = _anything

    @property
    def setting(self) -> Setting | None:
        """The launch setting that the answer is, if it is one."""
        return SETTINGS.get(self.name)

    def read(self, text: str, answers: Answers) -> Any:
        """Read and check a written answer.

        Args:
            text: What was written.
            answers: The answers so far.

        Raises:
            ValueError: If it is not allowed.
        """
        value = self.setting.parse(text) if self.setting and text else text
        self.check(value, answers)
        return value


_YES_NO = ((False, "no"), (True, "yes"))


def _several(answers: Answers) -> bool:
    return bool(answers["place"] == "several")


def _is_gpu(answers: Answers) -> bool:
    return bool(answers["device"] != "cpu")


def _is_fsdp(answers: Answers) -> bool:
    return answers.get("engine") == "fsdp"


def _version(number: int) -> _Test:
    return lambda answers: _is_fsdp(answers) and answers["fsdp_version"] == number


def _wraps_by(policy: str) -> _Test:
    return lambda answers: _is_fsdp(answers) and answers["fsdp_auto_wrap_policy"] == policy


def _is_mesh(answers: Answers) -> bool:
    return answers.get("engine") == "mesh"


def _ask(name: str, title: str, default: Any = None, **rest: Any) -> Question:
    """Make the question of a launch setting: its default, and its choices where it has some."""
    setting = SETTINGS[name]
    found = setting.default if default is None else default
    choices = _YES_NO if setting.spec.kind == "flag" else tuple((c, str(c)) for c in setting.spec.choices)
    rest.setdefault("default", found if callable(found) else lambda answers: found)
    return Question(name, title, rest.pop("choices", choices), **rest)


def _needed(what: str) -> Callable[[Any, Answers], None]:
    def check(value: Any, answers: Answers) -> None:
        if not value:
            raise ValueError(f"{what} is needed.")

    return check


def _check_machines(value: Any, answers: Answers) -> None:
    if not isinstance(value, int) or value < 2:
        raise ValueError(f"{value} is not allowed; allowed: 2 or more machines.")


def _check_rank(value: Any, answers: Answers) -> None:
    if value >= answers["num_machines"]:
        raise ValueError(f"{value} is not allowed; allowed: 0 to {answers['num_machines'] - 1}.")


def _check_processes(value: Any, answers: Answers) -> None:
    machines = answers.get("num_machines", 1)
    if value % machines:
        raise ValueError(f"{value} is not allowed; allowed: a multiple of {machines}, the machines.")


_MESH = ("dp_replicate", "tp", "cp", "sp", "dp_shard")  # the last one takes what the others leave


def _mesh_sizes(answers: Answers) -> dict[str, int]:
    return {axis: answers.get(f"parallelism_config_{axis}_size", 1) for axis in _MESH}


def _default_axis(axis: str) -> Callable[[Answers], int]:
    def default(answers: Answers) -> int:
        rest = int(answers["processes"]) // math.prod(_mesh_sizes(answers).values())
        return rest if axis == _MESH[-1] else 1

    return default


def _check_mesh(axis: str) -> Callable[[Any, Answers], None]:
    def check(value: Any, answers: Answers) -> None:
        sizes = _mesh_sizes(answers) | {axis: value}
        product = math.prod(sizes.values())
        total = answers["processes"]
        fits = product == total if axis == _MESH[-1] else value >= 1 and total % product == 0
        if not fits:
            arithmetic = " * ".join(
                f"{name}({size})" for name, size in sizes.items() if size != 1 or name == axis
            )
            raise ValueError(
                f"{arithmetic} = {product}, but there are {total} processes; the product must fit."
            )

    return check


def _check_gpus(gpus: int) -> Callable[[Any, Answers], None]:
    def check(value: Any, answers: Answers) -> None:
        names = [name.strip() for name in str(value).split(",")]
        if len(set(names)) < len(names) or not all(n.isdigit() and int(n) < gpus for n in names):
            raise ValueError(f"{value} is not allowed; allowed: 0 to {gpus - 1}, each once, e.g. 0,1.")

    return check


def _place() -> list[Question]:
    return [
        Question(
            "place",
            "Where do you train?",
            (("one", "this machine"), ("several", "several machines")),
            lambda answers: "one",
        ),
        _ask("num_machines", "How many machines?", 2, when=_several, check=_check_machines),
        _ask("machine_rank", "Which of them is this one, from 0?", when=_several, check=_check_rank),
        _ask(
            "main_process_ip",
            "Host name or address of machine 0?",
            "",
            when=_several,
            check=_needed("The address of machine 0"),
        ),
        _ask("main_process_port", "Port on machine 0?", 29500, when=_several),
        _ask(
            "rdzv_backend",
            "How do the machines meet?",
            when=_several,
            choices=(
                ("static", "static: each machine is told its rank"),
                ("c10d", "c10d: ranks are handed out, machines may restart"),
            ),
        ),
    ]


def _devices(gpus: int) -> list[Question]:
    choices: tuple[tuple[str, str], ...] = (
        ("all", f"all {gpus} GPUs"),
        ("some", "some of the GPUs"),
        ("cpu", "the CPU"),
    )
    if gpus == 1:
        choices = (("all", "the GPU"), ("cpu", "the CPU"))
    return [
        Question(
            "device",
            "What do you train on?",
            choices if gpus else (("cpu", "the CPU"),),
            lambda answers: "all" if gpus else "cpu",
            when=lambda answers: gpus > 0,
        ),
        _ask(
            "gpu_ids",
            f"Which GPUs, of 0 to {gpus - 1}?",
            "0",
            when=lambda answers: answers["device"] == "some",
            check=_check_gpus(gpus),
        ),
        _ask(
            "num_processes",
            "How many processes, over all machines?",
            lambda answers: answers.get("num_machines", 1),
            when=lambda answers: not _is_gpu(answers),
            check=_check_processes,
        ),
    ]


def _engines() -> list[Question]:
    engines = (
        ("ddp", "each process has the whole model (DDP)"),
        ("fsdp", "the model is sharded over the processes (FSDP)"),
        ("mesh", "a mesh of data, tensor, context or sequence parallelism"),
    )
    return [
        Question(
            "engine",
            "How is the model spread?",
            engines,
            lambda answers: "ddp",
            when=lambda answers: answers["processes"] > 1,
        ),
        _ask(
            "fsdp_version",
            "Which FSDP?",
            2,
            when=_is_fsdp,
            choices=((2, "2: fully_shard"), (1, "1: FullyShardedDataParallel")),
        ),
        _ask("fsdp_sharding_strategy", "What is sharded?", when=_version(1)),
        _ask(
            "fsdp_reshard_after_forward",
            "Free gathered parameters after the forward pass (less memory, more communication)?",
            "true",
            when=_version(2),
            choices=(("false", "no"), ("true", "yes")),
        ),
        _ask("fsdp_auto_wrap_policy", "Which modules are wrapped?", "TRANSFORMER_BASED_WRAP", when=_is_fsdp),
        _ask(
            "fsdp_transformer_layer_cls_to_wrap",
            "Layer classes to wrap, comma separated (empty: what the model itself names)?",
            "",
            when=_wraps_by("TRANSFORMER_BASED_WRAP"),
        ),
        _ask(
            "fsdp_min_num_params",
            "Smallest module to wrap, in parameters?",
            100_000_000,
            when=_wraps_by("SIZE_BASED_WRAP"),
        ),
        _ask("fsdp_offload_params", "Keep parameters and gradients on the CPU?", when=_is_fsdp),
        _ask(
            "fsdp_state_dict_type",
            "How are checkpoints laid out?",
            "SHARDED_STATE_DICT",
            when=_is_fsdp,
            choices=(("SHARDED_STATE_DICT", "a part per process"), ("FULL_STATE_DICT", "one whole file")),
        ),
        _ask(
            "fsdp_activation_checkpointing",
            "Recompute activations in backward (less memory, more work)?",
            when=_is_fsdp,
        ),
        *(_mesh_axis(axis) for axis in _MESH),
        _ask(
            "parallelism_config_cp_comm_strategy",
            "How does context parallelism exchange keys and values?",
            when=lambda answers: _is_mesh(answers) and answers["parallelism_config_cp_size"] > 1,
        ),
    ]


def _mesh_axis(axis: str) -> Question:
    name = f"parallelism_config_{axis}_size"
    return _ask(
        name,
        f"{SETTINGS[name].help.removesuffix('.')} ({axis})?",
        when=_is_mesh,
        default=_default_axis(axis),
        check=_check_mesh(axis),
    )


def _training() -> list[Question]:
    return [
        _ask(
            "mixed_precision",
            "Mixed precision?",
            choices=tuple((name, name) for name in ("no", "bf16", "fp16", "fp8")),
        ),
        _ask(
            "fp8_backend",
            "Which fp8 library?",
            "AO",
            when=lambda answers: answers["mixed_precision"] == "fp8",
            choices=(("AO", "AO: torchao"), ("TE", "TE: Transformer Engine"), ("MSAMP", "MSAMP: MS-AMP")),
        ),
        _ask(
            "dynamo_backend",
            "Compile the model with torch.compile?",
            choices=(("NO", "no"), ("INDUCTOR", "yes, with inductor"), ("AOT_EAGER", "aot_eager, to debug")),
        ),
        _ask("dynamo_mode", "Which mode of torch.compile?", when=lambda a: a["dynamo_backend"] != "NO"),
        _ask(
            "enable_cpu_affinity",
            "Bind each process to the CPU cores nearest to its GPU?",
            when=lambda answers: _is_gpu(answers) and answers["processes"] > 1,
        ),
        _ask(
            "debug",
            "Check every collective for mismatches (slower, for debugging)?",
            when=lambda answers: answers["processes"] > 1,
        ),
    ]


def questions(gpus: int, before: Answers) -> list[Question]:
    """Return the questions in order.

    Args:
        gpus: Visible GPUs of this machine.
        before: Answers that an existing config stands for; they are the defaults where they still fit.
    """
    return [_with_default(q, before) for q in _place() + _devices(gpus) + _engines() + _training()]


def _with_default(question: Question, before: Answers) -> Question:
    """Let an earlier answer be the default, if it is one that may be given now."""
    if question.name not in before:
        return question
    earlier, own = before[question.name], question.default

    def default(answers: Answers) -> Any:
        if question.choices:
            return earlier if earlier in [value for value, _ in question.choices] else own(answers)
        try:
            question.check(earlier, answers)
        except (ValueError, TypeError):
            return own(answers)
        return earlier

    return replace(question, default=default)
