"""A question of `accel config`, and how those of launch settings are made."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accel_launch.settings.schema import SETTINGS, Setting

Answers = Mapping[str, Any]
Test = Callable[[Answers], bool]


def _no_default(answers: Answers) -> None:
    """There is none."""


def _any_answers(answers: Answers) -> bool:
    """Whatever the answers are."""
    return True


def _any_value(value: Any, answers: Answers) -> None:
    """Every value fits."""


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        name: Name of the answer; that of a launch setting where the answer is one.
        title: The question.
        choices: What can be chosen, each with what it means; empty to let the user write.
        default: The default answer, from the answers so far.
        when: Whether it is asked, from the answers so far.
        check: Raises ValueError for an answer that does not fit those so far.
    """

    name: str
    title: str
    choices: tuple[tuple[Any, str], ...] = ()
    default: Callable[[Answers], Any] = _no_default
    when: Test = _any_answers
    check: Callable[[Any, Answers], None] = _any_value

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
        value: Any = text
        if self.setting and text:
            # Repeated settings are several words, each of which may be quoted.
            value = shlex.split(text) if self.setting.repeated else self.setting.parse(text)
        self.check(value, answers)
        return value


_YES_NO = ((False, "no"), (True, "yes"))


def answered(name: str, *values: Any) -> Test:
    """Return a test of whether a question was answered with one of some values.

    Args:
        name: The question's name.
        *values: The values.
    """
    return lambda answers: answers.get(name) in values


def is_multi_machine(answers: Answers) -> bool:
    """Whether there are several machines, each with a launcher."""
    return answers.get("place") == "several"


def is_gpu(answers: Answers) -> bool:
    """Whether GPUs are trained on."""
    return answers.get("device") in ("all", "some")


def is_tpu(answers: Answers) -> bool:
    """Whether TPUs are trained on, those of this machine or of a pod."""
    return answers.get("device") == "tpu"


def is_sagemaker(answers: Answers) -> bool:
    """Whether Amazon SageMaker is trained on."""
    return answers.get("place") == "sagemaker"


def ask_if(when: Test, questions: Iterable[Question]) -> list[Question]:
    """Ask questions only if a condition holds, in addition to their own.

    Args:
        when: The test, which comes first: theirs may look for answers that are there only then.
        questions: The questions.
    """

    def both(question_test: Test, answers: Answers) -> bool:
        return when(answers) and question_test(answers)

    # partial, as a closure would have the test of the last question alone.
    return [replace(question, when=partial(both, question.when)) for question in questions]


def ask(name: str, title: str, default: Any = None, **rest: Any) -> Question:
    """Make the question of a launch setting, with its choices where it has some.

    Args:
        name: The setting's name.
        title: The question.
        default: The default answer, or a function of the answers so far; the setting's own if None.
        **rest: More arguments of the question.
    """
    setting = SETTINGS[name]
    found = setting.default if default is None else default
    choices = _YES_NO if setting.spec.kind == "flag" else tuple((c, str(c)) for c in setting.spec.choices)
    # Bound in a lambda, as a default may depend on the answers so far.
    rest.setdefault("default", found if callable(found) else lambda answers: found)
    return Question(name, title, rest.pop("choices", choices), **rest)


def needed(what: str) -> Callable[[Any, Answers], None]:
    """Return a check that rejects an empty answer.

    Args:
        what: What is needed.
    """

    def check(value: Any, answers: Answers) -> None:
        if not value:
            raise ValueError(f"{what} is needed.")

    return check
