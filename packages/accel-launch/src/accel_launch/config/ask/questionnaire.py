"""`accel config`: ask the questions and turn the answers into a config file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from accel_launch.config.ask.prompt import Back, Prompt
from accel_launch.config.ask.question import Answers, Question, is_sagemaker, is_tpu
from accel_launch.config.ask.questions import questions
from accel_launch.config.file import LaunchConfig
from accel_launch.settings.redact import redact_values
from accel_launch.settings.schema import CLUSTER_KEYS, SAGEMAKER_KEYS, SETTINGS

_ELSEWHERE = {"pod": "tpu", "sagemaker": "sagemaker"}  # where training does not run on this machine
_KINDS = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED", "megatron": "MEGATRON_LM"}


def ask_all(
    prompt: Prompt, gpus: int, before: Answers | None = None, tpu: bool = False
) -> dict[str, Any] | None:
    """Ask every question that applies and let the user confirm the resulting file.

    Args:
        prompt: Asks the questions.
        gpus: Visible GPUs of this machine.
        before: Previous answers, used as defaults.
        tpu: Whether this machine has TPUs.

    Returns:
        The content of the config file, or None if the user does not want it written.
    """
    question_list = questions(gpus, before or {}, tpu)
    history: list[tuple[int, dict[str, Any]]] = []  # each asked question, and the answers before it
    answers: dict[str, Any] = {}
    index = 0
    while True:
        while index < len(question_list) and not question_list[index].when(_with_processes(answers, gpus)):
            # Later questions need the device, whether it was asked or follows from the place.
            if question_list[index].name == "device" and "device" not in answers:
                answers = {**answers, "device": _ELSEWHERE.get(answers["place"], "cpu")}
            index += 1
        try:
            if index == len(question_list):
                return _confirm(prompt, config_values(answers, gpus))
            question = question_list[index]
            answer = _put(prompt, question, _with_processes(answers, gpus))
        except Back:
            if history:
                # The answers at that point: later ones may no longer apply.
                index, answers = history.pop()
            continue
        history.append((index, answers))
        answers = {**answers, question.name: answer}
        index += 1


def _put(prompt: Prompt, question: Question, answers: Answers) -> Any:
    default = question.default(answers)
    if not question.choices:
        return question.read(
            prompt.text(question.title, _text(question, default), lambda text: question.read(text, answers)),
            answers,
        )
    values = [value for value, _ in question.choices]
    labels = [label for _, label in question.choices]
    return values[prompt.choose(question.title, labels, values.index(default) if default in values else 0)]


def _text(question: Question, value: Any) -> str:
    if question.setting and question.setting.repeated:
        return shlex.join(value)
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _confirm(prompt: Prompt, values: dict[str, Any]) -> dict[str, Any] | None:
    # Slow to import, and only needed at the end.
    import yaml

    LaunchConfig.from_values(values)  # the file that is shown can be loaded
    print("\nThe config file:\n")
    print(
        "".join(
            f"    {line}\n" for line in yaml.safe_dump(redact_values(values), sort_keys=True).splitlines()
        )
    )
    return values if prompt.choose("Write it?", ("yes", "no"), 0) == 0 else None


def _with_processes(answers: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Add the number of processes as soon as it follows from the answers."""
    device = answers.get("device")
    total: int | None
    if device in _ELSEWHERE.values():
        total = 0  # determined where it runs
    elif device == "cpu":
        total = answers.get("num_processes")
    else:
        here = len(str(answers.get("gpu_ids", "")).split(",")) if device == "some" else gpus
        total = here * answers.get("num_machines", 1)
    return dict(answers) if total is None else {**answers, "processes": total}


def config_values(answers: Answers, gpus: int) -> dict[str, Any]:
    """Return the config file for the answers.

    Args:
        answers: The answers by name.
        gpus: Visible GPUs of this machine.
    """
    values = _kind_values(answers, _with_processes(answers, gpus)["processes"], gpus)
    # Empty answers are left out, so that later defaults apply.
    for name, answer in answers.items():
        setting = SETTINGS.get(name)
        if answer in (None, "", [], ()):
            continue
        if name == "commands":
            values[name] = [command.strip() for command in answer.split(";")]
        elif name in CLUSTER_KEYS | SAGEMAKER_KEYS:
            values[name] = answer
        if setting is None:
            continue
        section = values.setdefault(setting.section, {}) if setting.section else values
        section[setting.key] = list(answer) if isinstance(answer, tuple) else answer
    if (values.get("dynamo_config") or {}).get("dynamo_backend") == "no":
        del values["dynamo_config"]
    return values


def _kind_values(answers: Answers, total: int, gpus: int) -> dict[str, Any]:
    """Return the keys for the kind of run."""
    if is_sagemaker(answers):
        return {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": answers["distribution"]}
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1}
    if is_tpu(answers):
        pod = {"tpu_use_cluster": True} if answers["place"] == "pod" else {}
        return {**values, **pod, "distributed_type": "XLA"}
    cpu = answers["device"] == "cpu"
    multi = "MULTI_CPU" if cpu else "MULTI_GPU"
    kind = "NO" if total == 1 else _KINDS.get(answers.get("engine", ""), multi)
    # Without a GPU one process runs on the CPU anyway; a file that says so would hide a GPU added later.
    use_cpu = (cpu and gpus > 0) or (cpu and total > 1)
    return {**values, "distributed_type": kind, "num_processes": total, "use_cpu": use_cpu}


def answers_of(config: LaunchConfig) -> dict[str, Any]:
    """Return the answers that a config file stands for.

    Args:
        config: The config.
    """
    answers = dict(config.settings)
    answers["place"] = "several" if str(answers.get("num_machines", 1)) != "1" else "one"
    answers["device"] = "cpu" if answers.get("cpu") else "some" if "gpu_ids" in answers else "all"
    if str(answers.get("gpu_ids", "")).lower() == "all":
        answers["device"] = "cpu" if answers.get("cpu") else "all"
        del answers["gpu_ids"]
    if config.compute_environment == "AMAZON_SAGEMAKER":
        answers |= {"place": "sagemaker", "distribution": config.distributed_type}
    elif config.distributed_type == "XLA":
        answers |= {"place": "pod" if answers.get("tpu_cluster") else "one", "device": "tpu"}
    answers |= {key: config.values[key] for key in CLUSTER_KEYS | SAGEMAKER_KEYS if config.values.get(key)}
    if "commands" in answers:
        answers["commands"] = "; ".join(answers["commands"])
    engines = {kind: engine for engine, kind in _KINDS.items()}
    if config.distributed_type in engines:
        answers["engine"] = engines[config.distributed_type]
    elif config.values.get("parallelism_config"):
        answers["engine"] = "mesh"
    return answers
