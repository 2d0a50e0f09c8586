"""The argument parser of `accel launch`, built from the schema.

It differs from a plain argparse parser in three ways: underscores and hyphens are the same, nothing behind
the script is read, and an unknown flag names the nearest known one.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from accel_launch.settings.schema import GROUPS, SETTINGS, Setting, nearest

_RENAMED = {
    "--fp16": "--mixed_precision=fp16",
    "--fsdp_backward_prefetch_policy": "--fsdp_backward_prefetch",
}
_EXAMPLES = "examples:"
_WITHOUT_EFFECT = ("--use_xpu", "--ipex", "--use_mps_device")


class LaunchParser(argparse.ArgumentParser):
    """Parses flags up to the script; what follows the script is the script's own."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse flags, the script and its arguments.

        Args:
            args: The tokens; those of the command line by default.
            namespace: The object that gets the attributes.

        Returns:
            The namespace and an empty list: an unknown flag is an error.
        """
        # argparse itself would take flags of the script for its own, and fail at those it does not know.
        flags, script = self._split(list(sys.argv[1:] if args is None else args))
        parsed, rest = super().parse_known_args(flags, namespace)
        parsed.training_script = script[0] if script else None
        parsed.training_script_args = script[1:]
        return parsed, rest

    def _split(self, tokens: list[str]) -> tuple[list[str], list[str]]:
        """Return the flags, each with its value in one token, and the script with its arguments."""
        flags: list[str] = []
        # The first word that is not a flag is the script; "-" and "--" end the flags too.
        while tokens and tokens[0].startswith("-") and tokens[0] not in ("-", "--"):
            name, equals, value = self._current_flag(tokens.pop(0)).partition("=")
            if name in _WITHOUT_EFFECT:
                continue
            # A number behind a flag that can stand alone is its value: no script is called so.
            if not equals and self._may_have_value(name) and tokens and _is_number(tokens[0]):
                equals, value = "=", tokens.pop(0)
            # A flag and its value become one token: a value such as -1 would look like a flag otherwise.
            if not equals and self._option_string_actions[name].nargs is None:
                if not tokens:
                    self.error(f"{name} needs a value")
                equals, value = "=", tokens.pop(0)
            flags.append(name + equals + value)
        return flags, tokens[1:] if tokens[:1] == ["--"] else tokens

    def _may_have_value(self, name: str) -> bool:
        action = self._option_string_actions[name]
        return action.nargs == "?" and action.const is not True  # of a switch, which takes =false alone

    def _current_flag(self, token: str) -> str:
        """Return a flag in its present spelling, or stop with the nearest known one."""
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        if name in _RENAMED:
            _deprecated(f"{name} is an old spelling; use {_RENAMED[name].replace('=', ' ')}.")
            return _RENAMED[name] + equals + value
        if name in _WITHOUT_EFFECT:
            _deprecated(f"{name} has no effect any more: the device is found by itself. Leave it out.")
        elif name not in self._option_string_actions:
            self.error(
                f"unknown flag {name}.{nearest(name, self._option_string_actions)} The script's own flags go "
                "behind the script; `accel launch --help` lists the launcher's."
            )
        return name + equals + value

    def error(self, message: str) -> NoReturn:
        """Print a message without the long usage, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _deprecated(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=6)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _reader(setting: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for key, group in GROUPS.items():
        target = parser.add_argument_group(group.title)
        for setting in SETTINGS.values():
            if setting.group == key:
                _add(target, setting)


def _add(target: Any, setting: Setting) -> None:
    names = [setting.short, setting.flag] if setting.short else [setting.flag]
    # argparse formats help by %, hence the doubled percent signs.
    note = "" if setting.default in (None, False, "", ()) else f" Default: {setting.default}."
    keywords: dict[str, Any] = {"default": None, "help": (setting.help + note).replace("%", "%%")}
    if setting.repeated:
        keywords |= {"action": "append", "metavar": "TEXT"}
    elif setting.switch:
        # A switch may be written --cpu or --cpu=false; `const` is what the former means.
        keywords |= {"nargs": "?", "const": True, "type": _reader(setting)}
    elif setting.bare:
        keywords |= {"nargs": "?", "const": setting.parse(setting.bare), "type": _reader(setting)}
        keywords |= {"metavar": "SECONDS"}
    else:
        choices = "{" + ",".join(map(str, setting.spec.choices)) + "}"
        keywords |= {
            "type": _reader(setting),
            "metavar": choices if setting.spec.choices else setting.spec.kind.upper(),
        }
    target.add_argument(*names, **keywords)


class HelpFormatter(argparse.HelpFormatter):
    """Cuts no word, keeps the lines of examples, and shows a switch without its optional value."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        line_text = " ".join(text.split())
        return textwrap.wrap(line_text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.nargs == "?" and action.const is True:
            return ", ".join(action.option_strings)
        return super()._format_action_invocation(action)


def command_parser(
    name: str,
    subparsers: Any = None,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
    *,
    func: Callable[[argparse.Namespace], int | None] | None = None,
    examples: Sequence[str] = (),
    **keywords: Any,
) -> argparse.ArgumentParser:
    """Return the parser of a command, without arguments yet.

    Args:
        name: The command's name behind `accel`.
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add the command there; a parser of its
            own by default.
        kind: The parser's class.
        func: Runs the command; the namespace has it as `func`.
        examples: Commands that the help shows.
        **keywords: As for the class.

    Returns:
        The parser.
    """
    keywords["formatter_class"] = HelpFormatter
    keywords["epilog"] = "\n  ".join([_EXAMPLES, *examples])
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = kind(f"accel {name}", **keywords)
    else:
        parser = subparsers.add_parser(name, **keywords)
        parser.__class__ = kind  # add_parser has no argument for the class
    parser.set_defaults(func=func)
    return parser


def launch_flags_parser(
    name: str, subparsers: Any = None, kind: type[LaunchParser] = LaunchParser, **keywords: Any
) -> argparse.ArgumentParser:
    """Return the parser of a command that takes the flags of `accel launch`; one that is not given is None.

    Args:
        name: As for `command_parser`; likewise `subparsers` and `keywords`.
        subparsers: See there.
        kind: The parser's class.
        **keywords: See there.

    Returns:
        The parser, with every setting's flag.
    """
    parser = command_parser(name, subparsers, kind, allow_abbrev=False, **keywords)
    _add_settings(parser)
    return parser
