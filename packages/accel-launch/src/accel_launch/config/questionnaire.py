"""`accel config`: ask the questions, with a way back, and turn the answers into a config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_launch.config.file import LaunchConfig
from accel_launch.config.prompt import Back, Prompt
from accel_launch.config.questions import Answers, Question, questions
from accel_launch.schema import SETTINGS

__all__ = ["answers_of", "ask_all", "config_values"]


def ask_all(prompt: Prompt, gpus: int, before: Answers | None = None) -> dict[str, Any] | None:
    """Ask every question that applies and let the user confirm the resulting file.

    Args:
        prompt: How questions are put.
        gpus: Visible GPUs of this machine.
        before: Earlier answers, used as defaults.

    Returns:
        The content of the config file, or None if the user does not want it written.
    """
    asked = questions(gpus, before or {})
    history: list[tuple[int, dict[str, Any]]] = []  # each question that was put, and the answers before it
    answers: dict[str, Any] = {}
    index = 0
    while True:
        while index < len(asked) and not asked[index].when(_with_processes(answers, gpus)):
            if asked[index].name == "device":
                answers = {**answers, "device": "cpu"}
            index += 1
        try:
            if index == len(asked):
                return _confirm(prompt, config_values(answers, gpus))
            question = asked[index]
            answer = _put(prompt, question, _with_processes(answers, gpus))
        except Back:
            if history:
                index, answers = history.pop()
            continue
        history.append((index, answers))
        answers = {**answers, question.name: answer}
        index += 1


def _put(prompt: Prompt, question: Question, answers: Answers) -> Any:
    default = question.default(answers)
    if not question.choices:
        return question.read(
            prompt.text(question.title, _text(default), lambda text: question.read(text, answers)), answers
        )
    values = [value for value, _ in question.choices]
    labels = [label for _, label in question.choices]
    return values[prompt.choose(question.title, labels, values.index(default) if default in values else 0)]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _confirm(prompt: Prompt, values: dict[str, Any]) -> dict[str, Any] | None:
    import yaml

    LaunchConfig.from_values(values)  # the file that is shown is one that loads
    print("\nThe config file:\n")
    print("".join(f"    {line}\n" for line in yaml.safe_dump(values, sort_keys=True).splitlines()))
    return values if prompt.choose("Write it?", ("yes", "no"), 0) == 0 else None


def _with_processes(answers: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Add the number of processes as soon as it follows from the answers."""
    device = answers.get("device")
    if device == "cpu":
        total = answers.get("num_processes")
    else:
        here = len(str(answers.get("gpu_ids", "")).split(",")) if device == "some" else gpus
        total = here * answers.get("num_machines", 1)
    return dict(answers) if total is None else {**answers, "processes": total}


def config_values(answers: Answers, gpus: int) -> dict[str, Any]:
    """Return the config file that answers stand for.

    Args:
        answers: The answers by name.
        gpus: Visible GPUs of this machine.
    """
    total = _with_processes(answers, gpus)["processes"]
    cpu = answers["device"] == "cpu"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(answers, total, cpu),
        "num_machines": 1,
        "num_processes": total,
        "use_cpu": (cpu and gpus > 0) or (cpu and total > 1),
    }
    for name, answer in answers.items():
        setting = SETTINGS.get(name)
        if setting is None or answer in (None, "", [], ()):
            continue
        section = values.setdefault(setting.section, {}) if setting.section else values
        section[setting.key] = list(answer) if isinstance(answer, tuple) else answer
    if (values.get("dynamo_config") or {}).get("dynamo_backend") == "NO":
        del values["dynamo_config"]
    return values


def _kind(answers: Answers, total: int, cpu: bool) -> str:
    if answers.get("engine") == "fsdp":
        return "FSDP"
    if total == 1:
        return "NO"
    return "MULTI_CPU" if cpu else "MULTI_GPU"


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
    sections = config.values
    if config.distributed_type == "FSDP":
        answers["engine"] = "fsdp"
    elif sections.get("parallelism_config"):
        answers["engine"] = "mesh"
    return answers
