"""Questions for hosted platforms (TPU pods, Amazon SageMaker)."""

from __future__ import annotations

from dataclasses import replace

from accel_launch.config.ask.question import Question, answered, ask, ask_if, is_sagemaker, is_tpu, needed


def tpu_questions() -> list[Question]:
    """Return the questions about TPUs, in order."""
    pod = [
        ask("tpu_name", "The pod's name?", "", check=needed("The name")),
        ask("tpu_zone", "Its zone?", "", check=needed("The zone")),
        ask("tpu_use_sudo", "Run with sudo on it?"),
        ask("env", "Variables for its machines, NAME=VALUE separated by spaces (empty: none)?", ""),
        Question(
            "command_file",
            "A file of commands that prepare its machines, for `accel tpu-config` (empty: none)?",
            default=lambda answers: "",
        ),
        Question(
            "commands",
            "Commands that prepare its machines, separated by ; (empty: none)?",
            default=lambda answers: "",
            when=lambda answers: not answers["command_file"],
        ),
    ]
    # torch_xla calls a function in each process, where other launchers start the script again.
    function = ask("main_training_function", "Function of the script that each process runs?", when=is_tpu)
    return [*ask_if(answered("place", "pod"), pod), function]


def _text(name: str, title: str, default: str = "", what: str = "") -> Question:
    """Make a question that is not a launch setting; `what` names a required answer."""
    question = Question(name, title, default=lambda answers: default)
    return replace(question, check=needed(what)) if what else question


def _version(name: str) -> Question:
    """Make a question about a version in SageMaker's own image."""
    title = f"Version of {name} in SageMaker's image?"
    question = _text(f"{name}_version", title, what="The version")
    # A user's image determines its versions.
    return replace(question, when=lambda answers: not answers["image_uri"])


def sagemaker_questions() -> list[Question]:
    """Return the questions about SageMaker, in order; without keys, which must not be in a file."""
    questions = [
        _text("profile", "AWS profile (empty: the keys of the environment or of the flags)?"),
        _text("region", "AWS region?", "us-east-1"),
        _text("iam_role_name", "IAM role of the job?", what="The role"),
        _text("ec2_instance_type", "Type of the instances?", "ml.p3.2xlarge", what="The type"),
        ask("num_machines", "How many instances?", 1),
        Question(
            "distribution",
            "How do they work together?",
            (
                ("NO", "each by itself"),
                ("DATA_PARALLEL", "SageMaker's data parallel library"),
                ("MODEL_PARALLEL", "SageMaker's model parallel library"),
            ),
            lambda answers: "NO",
        ),
        _text("image_uri", "Your own image (empty: one of SageMaker's)?"),
        _text("py_version", "Version of Python in it?", "py310", what="The version"),
        _version("pytorch"),
        _version("transformers"),
        _text("base_job_name", "Beginning of the job's name?", "accel"),
        _text("sagemaker_inputs_file", "File of inputs, channel<tab>location (empty: none)?"),
        _text("sagemaker_metrics_file", "File of metrics, name<tab>expression (empty: none)?"),
    ]
    return ask_if(is_sagemaker, questions)
