"""The questions of `accel config`: what only the user can know, in the order in which it is asked.

How many GPUs and cores there are, the number of processes where it follows from them, and the kind of device
are detected and never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accel_launch.config.ask.engine_questions import engine_questions
from accel_launch.config.ask.hosted_questions import sagemaker_questions, tpu_questions
from accel_launch.config.ask.question import (
    Answers,
    Question,
    answered,
    ask,
    ask_if,
    is_gpu,
    is_multi_machine,
    is_tpu,
    needed,
)


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
    address = needed("The address of machine 0")
    machines = [
        ask("num_machines", "How many machines?", 2, check=_check_machines),
        ask("machine_rank", "Which of them is this one, from 0?", check=_check_rank),
        ask("main_process_ip", "Host name or address of machine 0?", "", check=address),
        # torch's own default.
        ask("main_process_port", "Port on machine 0?", 29500),
        ask(
            "rdzv_backend",
            "How do the machines find each other?",
            choices=(
                ("static", "static: each machine has a fixed rank"),
                ("c10d", "c10d: ranks are assigned, machines may restart"),
            ),
        ),
    ]
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
        *ask_if(is_multi_machine, machines),
    ]


def _device(place: str, gpus: int, tpu: bool) -> Question:
    choices = [("all", "the GPU" if gpus == 1 else f"all {gpus} GPUs")] if gpus else []
    # One GPU is all of them.
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
    """Whether mpirun may start the processes: it assigns ranks, as c10d would."""
    return is_multi_machine(answers) and answers["device"] == "cpu" and answers["rdzv_backend"] == "static"


def _devices(gpus: int, tpu: bool) -> list[Question]:
    return [
        _device("one", gpus, tpu),
        _device("several", gpus, tpu=False),  # TPUs of several machines are a pod
        ask(
            "gpu_ids",
            f"Which GPUs, of 0 to {gpus - 1}?",
            "0",
            when=answered("device", "some"),
            check=_check_gpus(gpus),
        ),
        ask(
            "num_processes",
            "How many processes, over all machines?",
            lambda answers: answers.get("num_machines", 1),
            when=answered("device", "cpu"),
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


def _fp8() -> list[Question]:
    transformer_engine = [
        ask("fp8_format", "Number format?"),
        ask("fp8_margin", "Margin of the scaling factor, in powers of two?"),
        ask("fp8_interval", "Steps between recomputations of the scaling factor?"),
        ask("fp8_amax_history_len", "Steps of the history of maxima?"),
        ask("fp8_amax_compute_algo", "Which maximum of the history?"),
        ask("fp8_use_autocast_during_eval", "Use fp8 in evaluation, too?"),
        ask(
            "fp8_override_linear_precision",
            "Higher precision in forward, gradients of inputs, of weights (three times true or false)?",
        ),
    ]
    torchao = [
        ask(
            "fp8_enable_fsdp_float8_all_gather",
            "Gather sharded parameters in fp8?",
            when=answered("engine", "fsdp"),
        ),
        ask("fp8_pad_inner_dim", "Pad inner dimensions to a multiple of 16?"),
    ]
    return [
        ask(
            "fp8_backend",
            "Which fp8 library?",
            "AO",
            when=answered("mixed_precision", "fp8"),
            choices=(("AO", "AO: torchao"), ("TE", "TE: Transformer Engine"), ("MSAMP", "MSAMP: MS-AMP")),
        ),
        *ask_if(answered("fp8_backend", "TE"), transformer_engine),
        ask("fp8_opt_level", "Optimization level?", when=answered("fp8_backend", "MSAMP")),
        *ask_if(answered("fp8_backend", "AO"), torchao),
    ]


def _compilation() -> list[Question]:
    details = [
        ask("dynamo_mode", "Which mode of torch.compile?"),
        ask("dynamo_use_fullgraph", "Fail on graph breaks?"),
        ask(
            "dynamo_use_dynamic",
            "Trace with dynamic shapes?",
            "",
            choices=(("", "as torch decides"), (False, "no"), (True, "yes")),
        ),
        ask("dynamo_use_regional_compilation", "Compile each repeated block once?"),
    ]
    return [
        ask(
            "dynamo_backend",
            "Compile the model with torch.compile?",
            choices=(("no", "no"), ("inductor", "yes, with inductor"), ("aot_eager", "aot_eager, to debug")),
        ),
        *ask_if(answered("dynamo_backend", "inductor", "aot_eager"), details),
    ]


def _training() -> list[Question]:
    multi_process = [
        ask("enable_cpu_affinity", "Bind each process to the CPU cores nearest to its GPU?", when=is_gpu),
        ask("debug", "Check every collective for mismatches (slower, for debugging)?"),
    ]
    return [
        ask(
            "mixed_precision",
            "Mixed precision?",
            choices=tuple((name, name) for name in ("no", "bf16", "fp16", "fp8")),
        ),
        *_fp8(),
        ask(
            "downcast_bf16",
            "Compute double as float, and float as bfloat16?",
            # A setting of torch_xla.
            when=lambda answers: is_tpu(answers) and answers["mixed_precision"] == "bf16",
        ),
        *_compilation(),
        *ask_if(lambda answers: bool(answers["processes"] > 1), multi_process),
    ]


def questions(gpus: int, before: Answers, tpu: bool = False) -> list[Question]:
    """Return the questions in order.

    Args:
        gpus: Visible GPUs of this machine.
        before: Answers of an existing config, the defaults where they still fit.
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
    """Make a previous answer the default, if it is still allowed."""
    if question.name not in before:
        return question
    previous, preset = before[question.name], question.default

    def default(answers: Answers) -> Any:
        if question.choices:
            # The file may be from another machine, which allowed other answers.
            return previous if previous in [value for value, _ in question.choices] else preset(answers)
        try:
            question.check(previous, answers)
        except (ValueError, TypeError):
            return preset(answers)
        return previous

    return replace(question, default=default)
