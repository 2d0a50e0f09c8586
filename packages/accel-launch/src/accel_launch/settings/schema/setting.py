"""A launch setting: its spellings, the places that it may come from, and the values that it may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accel_state.env import Variable


@dataclass(frozen=True)
class Group:
    """Related settings that only apply when one of them, or another setting, enables them.

    Args:
        title: Heading in `--help`.
        enabled_by: Name of the setting that makes the group count; empty if it always does.
        enabled: Returns from that setting's value whether the group counts.
        remedy: What a user adds to make the group count.
    """

    title: str
    enabled_by: str = ""
    enabled: Callable[[Any], bool] = bool
    remedy: str = ""


@dataclass(frozen=True)
class Setting:
    """One launch setting.

    Args:
        spec: Kind, default, choices and help, as for an environment variable. Its name is that of the
            environment variable if `from_environment`.
        name: The flag's name without dashes, which is also the attribute of the parsed arguments.
        group: Key into the table of groups.
        switch: The flag takes no value; its presence means true.
        repeated: The flag may be repeated; the values make a list.
        short: A one-letter spelling such as `-m`.
        section: The config file's section that holds the key; empty for the top level.
        key: The key in the config file; empty if it cannot stand there.
        from_environment: The setting is read from its variable, and passed to workers in it.
        always: Workers get its default too, where its group counts: programs read the variable themselves.
        launch_default: What the launcher takes where nothing gives a value, if that is not the default of the
            variable, which holds for programs that were started without the launcher.
        convert: Reads text that the kinds of `Variable` do not cover; raises ValueError.
        allowed: What `convert` takes, for the error.
        bare: What the flag means without a value; empty if it needs one.
        note: What it does, where the variable's own help does not fit a flag.
    """

    spec: Variable
    name: str
    group: str
    switch: bool = False
    repeated: bool = False
    short: str = ""
    section: str = ""
    key: str = ""
    from_environment: bool = False
    always: bool = False
    launch_default: Any = None
    convert: Callable[[str], Any] | None = None
    allowed: str = ""
    bare: str = ""
    note: str = ""

    @property
    def flag(self) -> str:
        """The long spelling, with underscores."""
        return f"--{self.name}"

    @property
    def default(self) -> Any:
        """The value when nothing else gives one; None where it is detected or left to torch."""
        return self.spec.default if self.launch_default is None else self.launch_default

    @property
    def help(self) -> str:
        """One line on what it does."""
        return self.note or self.spec.help

    def parse(self, raw: Any) -> Any:
        """Read a value given by a flag, a variable or a config file.

        Args:
            raw: Text, or a value from YAML or JSON.

        Returns:
            The value, by kind.

        Raises:
            ValueError: If it is not allowed; the message names the value and what is allowed.
        """
        # A flag that may be repeated has a list already; a variable or a key may have one value.
        if self.repeated:
            return [str(item) for item in raw] if isinstance(raw, (list, tuple)) else [str(raw)]
        try:
            text = self._text(raw)
            return self.convert(text) if self.convert else self.spec.parse(text)
        except ValueError:
            raise ValueError(f"{raw!r} is not allowed; allowed: {self._allowed()}.") from None

    def _text(self, raw: Any) -> str:
        if raw is False and self.spec.kind == "str":
            return "no"  # YAML 1.1 reads an unquoted NO as false
        if isinstance(raw, (list, tuple)) and self.spec.kind in ("list", "flags"):
            return ",".join(map(str, raw))
        # str() of a container would be accepted as text.
        if isinstance(raw, (dict, list, tuple)):
            raise ValueError(raw)
        return str(raw)

    def _allowed(self) -> str:
        if self.allowed:
            return self.allowed
        if self.spec.choices:
            return ", ".join(map(str, self.spec.choices))
        return _KINDS[self.spec.kind]


_KINDS = {
    "flag": "true or false (also 1/0, yes/no, on/off)",
    "flags": "true or false, comma separated",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "list": "names, comma separated",
}
