"""What one question of `accel config` is, and how those of launch settings are made."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_launch.settings.schema import SETTINGS, Setting

__all__ = ["Answers", "Question", "Test", "ask", "is_gpu", "needed", "several"]

Answers = Mapping[str, Any]
Test = Callable[[Answers], bool]


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
    when: Test = _always
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
        value: Any = text
        if self.setting and text:
            value = shlex.split(text) if self.setting.repeated else self.setting.parse(text)
        self.check(value, answers)
        return value


_YES_NO = ((False, "no"), (True, "yes"))


def several(answers: Answers) -> bool:
    """Tell whether there are several machines, each with a launcher.

    Args:
        answers: The answers so far.
    """
    return bool(answers["place"] == "several")


def is_gpu(answers: Answers) -> bool:
    """Tell whether GPUs are trained on.

    Args:
        answers: The answers so far.
    """
    return answers["device"] in ("all", "some")


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
    rest.setdefault("default", found if callable(found) else lambda answers: found)
    return Question(name, title, rest.pop("choices", choices), **rest)


def needed(what: str) -> Callable[[Any, Answers], None]:
    """Return a check that refuses an empty answer.

    Args:
        what: What is needed.
    """

    def check(value: Any, answers: Answers) -> None:
        if not value:
            raise ValueError(f"{what} is needed.")

    return check
