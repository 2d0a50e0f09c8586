"""A question of `accel config`, and functions to make those of launch settings."""

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
    """True for any answers."""
    return True


def _any_value(value: Any, answers: Answers) -> None:
    """Accept any value."""


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        name: Name of the answer; for a launch setting, its name.
        title: The question.
        choices: The choices, each with its meaning; empty to let the user enter text.
        default: The default answer, from the answers so far.
        when: Whether it is asked, from the answers so far.
        check: Raises ValueError for an answer that does not fit the previous ones.
    """

    name: str
    title: str
    choices: tuple[tuple[Any, str], ...] = ()
    default: Callable[[Answers], Any] = _no_default
    when: Test = _any_answers
    check: Callable[[Any, Answers], None] = _any_value

    @property
    def setting(self) -> Setting | None:
        """The launch setting of the answer, if it is one."""
        return SETTINGS.get(self.name)

    def read(self, text: str, answers: Answers) -> Any:
        """Parse and check an entered answer.

        Args:
            text: The entered text.
            answers: The answers so far.

        Raises:
            ValueError: If it is not allowed.
        """
        value: Any = text
        if self.setting and text:
            # Repeated settings are several words, which may be quoted.
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
    """Whether there are several machines, each with its own launcher."""
    return answers.get("place") == "several"


def is_gpu(answers: Answers) -> bool:
    """Whether training uses GPUs."""
    return answers.get("device") in ("all", "some")


def is_tpu(answers: Answers) -> bool:
    """Whether training uses TPUs, of this machine or of a pod."""
    return answers.get("device") == "tpu"


def is_sagemaker(answers: Answers) -> bool:
    """Whether training runs on Amazon SageMaker."""
    return answers.get("place") == "sagemaker"


def ask_if(when: Test, questions: Iterable[Question]) -> list[Question]:
    """Ask questions only if a condition holds, in addition to their own conditions.

    Args:
        when: The test; it runs first, as theirs may need answers that exist only if it holds.
        questions: The questions.
    """

    def both(question_test: Test, answers: Answers) -> bool:
        return when(answers) and question_test(answers)

    # partial, as a closure would have the test of the last question.
    return [replace(question, when=partial(both, question.when)) for question in questions]


def ask(name: str, title: str, default: Any = None, **rest: Any) -> Question:
    """Make the question for a launch setting, with its choices if any.

    Args:
        name: The setting's name.
        title: The question.
        default: The default answer, or a function of the answers so far; None for the setting's.
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
        what: Name of the answer.
    """

    def check(value: Any, answers: Answers) -> None:
        if not value:
            raise ValueError(f"{what} is needed.")

    return check
