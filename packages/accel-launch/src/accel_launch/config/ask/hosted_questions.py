"""The questions about machines of others: TPU pods and Amazon SageMaker."""

from __future__ import annotations

from dataclasses import replace

from accel_launch.config.ask.question import Answers, Question, ask, needed

__all__ = ["is_sagemaker", "is_tpu", "sagemaker_questions", "tpu_questions"]


def is_tpu(answers: Answers) -> bool:
    """Tell whether TPUs are trained on, those of this machine or of a pod.

    Args:
        answers: The answers so far.
    """
    return answers.get("device") == "tpu"


def is_sagemaker(answers: Answers) -> bool:
    """Tell whether Amazon SageMaker is trained on.

    Args:
        answers: The answers so far.
    """
    return bool(answers["place"] == "sagemaker")


def _is_pod(answers: Answers) -> bool:
    return bool(answers["place"] == "pod")


def tpu_questions() -> list[Question]:
    """Return the questions about TPUs, in order."""
    return [
        ask("tpu_name", "The pod's name?", "", when=_is_pod, check=needed("The name")),
        ask("tpu_zone", "Its zone?", "", when=_is_pod, check=needed("The zone")),
        ask("tpu_use_sudo", "Run with sudo there?", when=_is_pod),
        ask(
            "env",
            "Variables for its machines, NAME=VALUE separated by spaces (empty: none)?",
            "",
            when=_is_pod,
        ),
        Question(
            "command_file",
            "A file of commands that prepare its machines, for `accel tpu-config` (empty: none)?",
            default=lambda answers: "",
            when=_is_pod,
        ),
        Question(
            "commands",
            "Commands that prepare its machines, separated by ; (empty: none)?",
            default=lambda answers: "",
            when=lambda answers: _is_pod(answers) and not answers["command_file"],
        ),
        ask("main_training_function", "Function of the script that each process runs?", when=is_tpu),
    ]


def _sagemaker(name: str, title: str, default: str = "", what: str = "") -> Question:
    """Make a question about SageMaker that is no launch setting; `what` names an answer that is needed."""
    question = Question(name, title, default=lambda answers: default, when=is_sagemaker)
    return replace(question, check=needed(what)) if what else question


def _has_no_image(answers: Answers) -> bool:
    return is_sagemaker(answers) and not answers["image_uri"]


def sagemaker_questions() -> list[Question]:
    """Return the questions about SageMaker, in order; keys are not asked, as they belong in no file."""
    return [
        _sagemaker("profile", "AWS profile (empty: the keys of the environment or of the flags)?"),
        _sagemaker("region", "AWS region?", "us-east-1"),
        _sagemaker("iam_role_name", "IAM role of the job?", what="The role"),
        _sagemaker("ec2_instance_type", "Type of the instances?", "ml.p3.2xlarge", what="The type"),
        ask("num_machines", "How many instances?", 1, when=is_sagemaker),
        Question(
            "distribution",
            "How do they work together?",
            (
                ("NO", "each by itself"),
                ("DATA_PARALLEL", "SageMaker's data parallel library"),
                ("MODEL_PARALLEL", "SageMaker's model parallel library"),
            ),
            lambda answers: "NO",
            when=is_sagemaker,
        ),
        _sagemaker("image_uri", "Image of your own (empty: one of SageMaker's)?"),
        _sagemaker("py_version", "Version of Python in it?", "py310", what="The version"),
        *(
            Question(
                f"{name}_version",
                f"Version of {name} in SageMaker's image?",
                default=lambda answers: "",
                when=_has_no_image,
                check=needed("The version"),
            )
            for name in ("pytorch", "transformers")
        ),
        _sagemaker("base_job_name", "Beginning of the job's name?", "accel"),
        _sagemaker("sagemaker_inputs_file", "File of inputs, channel<tab>location (empty: none)?"),
        _sagemaker("sagemaker_metrics_file", "File of metrics, name<tab>expression (empty: none)?"),
    ]
