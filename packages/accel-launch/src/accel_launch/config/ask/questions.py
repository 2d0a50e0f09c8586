"""The questions of `accel config`: what only the user can know, in the order in which it is asked.

How many GPUs and cores there are, the number of processes where it follows from them, and the kind of device
are detected and never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accel_launch.config.ask.engine_questions import engine_questions
from accel_launch.config.ask.hosted_questions import is_tpu, sagemaker_questions, tpu_questions
from accel_launch.config.ask.question import Answers, Question, Test, ask, is_gpu, needed, several

__all__ = ["questions"]


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
            (
                ("one", "this machine"),
                ("several", "several machines"),
                ("pod", "a TPU pod"),
                ("sagemaker", "Amazon SageMaker"),
            ),
            lambda answers: "one",
        ),
        ask("num_machines", "How many machines?", 2, when=several, check=_check_machines),
        ask("machine_rank", "Which of them is this one, from 0?", when=several, check=_check_rank),
        ask(
            "main_process_ip",
            "Host name or address of machine 0?",
            "",
            when=several,
            check=needed("The address of machine 0"),
        ),
        ask("main_process_port", "Port on machine 0?", 29500, when=several),
        ask(
            "rdzv_backend",
            "How do the machines meet?",
            when=several,
            choices=(
                ("static", "static: each machine is told its rank"),
                ("c10d", "c10d: ranks are handed out, machines may restart"),
            ),
        ),
    ]


def _device(place: str, gpus: int, tpu: bool) -> Question:
    choices = [("all", "the GPU" if gpus == 1 else f"all {gpus} GPUs")] if gpus else []
    choices += [("some", "some of the GPUs")] if gpus > 1 else []
    choices += [("tpu", "the TPU")] if tpu else []
    choices += [("cpu", "the CPU")]
    return Question(
        "device",
        "What do you train on?",
        tuple(choices),
        lambda answers: choices[0][0],
        when=lambda answers: len(choices) > 1 and answers["place"] == place,
    )


def _by_mpirun(answers: Answers) -> bool:
    """Tell whether mpirun may start the processes: it tells each its rank, which c10d would hand out."""
    return several(answers) and answers["device"] == "cpu" and answers["rdzv_backend"] == "static"


def _devices(gpus: int, tpu: bool) -> list[Question]:
    return [
        _device("one", gpus, tpu),
        _device("several", gpus, tpu=False),  # TPUs of several machines are a pod
        ask(
            "gpu_ids",
            f"Which GPUs, of 0 to {gpus - 1}?",
            "0",
            when=lambda answers: answers["device"] == "some",
            check=_check_gpus(gpus),
        ),
        ask(
            "num_processes",
            "How many processes, over all machines?",
            lambda answers: answers.get("num_machines", 1),
            when=lambda answers: answers["device"] == "cpu",
            check=_check_processes,
        ),
        ask(
            "mpirun_hostfile",
            "Hostfile for mpirun, NAME slots=4 (empty: the same command on each machine)?",
            "",
            when=_by_mpirun,
        ),
        ask(
            "mpirun_ccl",
            "oneCCL worker threads per process?",
            when=lambda answers: bool(answers.get("mpirun_hostfile")),
        ),
    ]


def _compiles(answers: Answers) -> bool:
    return bool(answers["dynamo_backend"] != "no")


def _fp8() -> list[Question]:
    def of(backend: str) -> Test:
        return lambda answers: answers.get("fp8_backend") == backend

    return [
        ask("fp8_format", "Number format?", when=of("TE")),
        ask("fp8_margin", "Margin of the scaling factor, in powers of two?", when=of("TE")),
        ask("fp8_interval", "Steps between recomputations of the scaling factor?", when=of("TE")),
        ask("fp8_amax_history_len", "Steps of the history of maxima?", when=of("TE")),
        ask("fp8_amax_compute_algo", "Which maximum of the history?", when=of("TE")),
        ask("fp8_use_autocast_during_eval", "Use fp8 in evaluation, too?", when=of("TE")),
        ask(
            "fp8_override_linear_precision",
            "Higher precision in forward, gradients of inputs, of weights (three times true or false)?",
            when=of("TE"),
        ),
        ask("fp8_opt_level", "Optimization level?", when=of("MSAMP")),
        ask(
            "fp8_enable_fsdp_float8_all_gather",
            "Gather sharded parameters in fp8?",
            when=lambda answers: of("AO")(answers) and answers.get("engine") == "fsdp",
        ),
        ask("fp8_pad_inner_dim", "Pad inner dimensions to a multiple of 16?", when=of("AO")),
    ]


def _training() -> list[Question]:
    return [
        ask(
            "mixed_precision",
            "Mixed precision?",
            choices=tuple((name, name) for name in ("no", "bf16", "fp16", "fp8")),
        ),
        ask(
            "fp8_backend",
            "Which fp8 library?",
            "AO",
            when=lambda answers: answers["mixed_precision"] == "fp8",
            choices=(("AO", "AO: torchao"), ("TE", "TE: Transformer Engine"), ("MSAMP", "MSAMP: MS-AMP")),
        ),
        *_fp8(),
        ask(
            "downcast_bf16",
            "Compute double as float, and float as bfloat16?",
            when=lambda answers: is_tpu(answers) and answers["mixed_precision"] == "bf16",
        ),
        ask(
            "dynamo_backend",
            "Compile the model with torch.compile?",
            choices=(("no", "no"), ("inductor", "yes, with inductor"), ("aot_eager", "aot_eager, to debug")),
        ),
        ask("dynamo_mode", "Which mode of torch.compile?", when=_compiles),
        ask("dynamo_use_fullgraph", "Refuse graph breaks?", when=_compiles),
        ask(
            "dynamo_use_dynamic",
            "Trace with dynamic shapes?",
            "",
            when=_compiles,
            choices=(("", "as torch decides"), (False, "no"), (True, "yes")),
        ),
        ask("dynamo_use_regional_compilation", "Compile each repeated block once?", when=_compiles),
        ask(
            "enable_cpu_affinity",
            "Bind each process to the CPU cores nearest to its GPU?",
            when=lambda answers: is_gpu(answers) and answers["processes"] > 1,
        ),
        ask(
            "debug",
            "Check every collective for mismatches (slower, for debugging)?",
            when=lambda answers: answers["processes"] > 1,
        ),
    ]


def questions(gpus: int, before: Answers, tpu: bool = False) -> list[Question]:
    """Return the questions in order.

    Args:
        gpus: Visible GPUs of this machine.
        before: Answers that an existing config stands for; they are the defaults where they still fit.
        tpu: Whether this machine has TPUs.
    """
    return [
        _with_default(question, before)
        for question in [
            *_place(),
            *sagemaker_questions(),
            *_devices(gpus, tpu),
            *tpu_questions(),
            *engine_questions(),
            *_training(),
        ]
    ]


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
