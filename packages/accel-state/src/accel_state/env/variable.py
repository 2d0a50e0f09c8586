"""An environment variable: its name, its allowed values, and how its text is read and written.

Standard library only; the variables themselves stand in `accel_state.env.table`.

Kinds:
    flag   true or false (1/0, yes/no, on/off, y/n, t/f)
    flags  several flags, comma separated
    int    an integer; `1e8` is understood
    float  a real number
    str    any text
    list   names, comma separated
A variable with choices takes one of these; letter case is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["flag", "flags", "int", "float", "str", "list"]

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
"""Words for true, in lower case."""
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off"})
"""Words for false, in lower case."""
_FLAG_WORDS = "true or false (also 1/0, yes/no, on/off)"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Args:
        name: The variable's name.
        kind: How its text is read; see the module's docstring.
        default: The value when the variable is unset or empty; None where the reader decides.
        help: One line on what it does.
        choices: The allowed values; empty for any value of the kind.
        aliases: Other spellings of choices (in lower case) and the choice that each stands for.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def parse(self, text: str) -> Any:
        """Read the variable's text.

        Args:
            text: The text in the environment.

        Returns:
            The value: bool, tuple of bools, int, float, str, or list of str, by kind.

        Raises:
            ValueError: If the text is not of this kind or not among the choices.
        """
        try:
            # Each raises a ValueError that does not name the variable.
            value = _PARSERS[self.kind](text)
        except ValueError:
            raise self._error(text) from None
        return self._choice(value, text) if self.choices else value

    def format(self, value: Any) -> str:
        """Write a value as text, such that `parse(format(value)) == value`.

        Args:
            value: A value of the variable's kind, or text that parses to one.

        Returns:
            The text for the environment.

        Raises:
            ValueError: If the value is not allowed.
        """
        # Not through parse: a name with a comma would come back as two.
        if self.kind == "list":
            return self._format_list(value)
        # A tuple of flags, as parse returns it.
        if self.kind == "flags" and not isinstance(value, str):
            value = ",".join(map(str, value))
        parsed = self.parse(str(value))
        if self.kind == "flags":
            return ",".join(str(flag).lower() for flag in parsed)
        return str(parsed).lower() if self.kind == "flag" else str(parsed)

    def _format_list(self, value: Any) -> str:
        names = _parse_list(value) if isinstance(value, str) else [str(name) for name in value]
        if any("," in name or name != name.strip() or not name for name in names):
            raise ValueError(
                f"{self.name} cannot contain {value!r}: a name is empty, has a comma, or space around it."
            )
        return ",".join(names)

    def _choice(self, value: Any, text: str) -> Any:
        if value in self.choices:
            return value
        # A choice as the user wrote it, or an old spelling of one.
        wanted = str(value).strip().lower()
        wanted = self.aliases.get(wanted, wanted).lower()
        for choice in self.choices:
            if str(choice).lower() == wanted:
                return choice
        raise self._error(text)

    def _error(self, text: str) -> ValueError:
        allowed = ", ".join(map(str, self.choices)) if self.choices else _ALLOWED[self.kind]
        return ValueError(
            f"Environment variable {self.name} has the value {text!r}; allowed: {allowed}. "
            f"Set it to one of these or unset it. ({self.help})"
        )


def parse_flag(text: str) -> bool:
    """Read a truth value.

    Args:
        text: One of `TRUE_WORDS` or `FALSE_WORDS`, in any letter case.

    Returns:
        The truth value.

    Raises:
        ValueError: If it is none of these.
    """
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"{text!r} is neither true nor false; allowed: {_FLAG_WORDS}.")


def _parse_flags(text: str) -> tuple[bool, ...]:
    # Brackets as well: "(True, False)" is how a tuple is written into a variable by str().
    return tuple(parse_flag(flag) for flag in text.strip().strip("()[]").split(","))


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # "1e8", as in YAML files
        if not number.is_integer():
            raise
        return int(number)


def _parse_list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_PARSERS: dict[str, Any] = {
    "flag": parse_flag,
    "flags": _parse_flags,
    "int": _parse_int,
    "float": float,
    "str": str,
    "list": _parse_list,
}
_ALLOWED = {
    "flag": _FLAG_WORDS,
    "flags": f"a comma-separated list, each {_FLAG_WORDS}",
    "int": "an integer",
    "float": "a number",
    "str": "any text",
    "list": "a comma-separated list of names",
}
