"""Writes the reference pages of the command line, the environment variables and the config file.

mkdocs runs this as a hook. The pages are made from the parsers and the tables that the programs use.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from html import escape
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from accel_launch.cli import _COMMANDS  # the one list of the launcher's commands
from accel_launch.settings.schema import CLUSTER_KEYS, GROUPS, SAGEMAKER_KEYS, SETTINGS
from accel_state.env.table import VARIABLES

__all__ = ["command_page", "configuration_page", "environment_page", "on_files", "parsers"]

_COMMAND_LINE = """# The command line

`accel COMMAND --help` prints the same. `accel launch` takes flags with hyphens and with underscores. What no
flag says comes from the environment, then from the [config file](configuration.md), then from what is
detected.
"""
_ENVIRONMENT = """# Environment variables

accel reads and sets these through one table, `accel_state.env.table`. An argument in the code comes before
the variable. A flag is true or false: 1/0, yes/no, on/off, t/f, y/n.
"""
_CONFIGURATION = """# The config file

`accel config` writes it, `accel launch` reads it: YAML or JSON. The environment comes before the file, and a
flag before both. Keys with a section before them are in that section.
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command of `accel`, those of other packages included, by name."""
    found = {}
    for name, (place, _) in _COMMANDS.items():
        module, _, function = place.partition(":")
        found[name] = getattr(import_module(f"accel_launch.commands.{module}"), function)()
    for point in entry_points(group="accel.commands"):
        actions = argparse.ArgumentParser(prog="accel").add_subparsers()
        point.load()(actions)
        found[point.name] = actions.choices[point.name]
    return dict(sorted(found.items()))


def command_page() -> str:
    """Return the page of the command line: every command with every flag."""
    parts = [_COMMAND_LINE]
    found = parsers()
    launch = {group.title for group in found["launch"]._action_groups} - {"options", "positional arguments"}
    for name, parser in found.items():
        parts += _command(f"accel {name}", parser, "##", set() if name == "launch" else launch)
    return "\n".join(parts)


def _command(name: str, parser: argparse.ArgumentParser, level: str, elsewhere: set[Any]) -> Iterator[str]:
    yield f"{level} {name}\n"
    if parser.description:
        yield f"{_text(parser.description)}\n"
    groups = parser._action_groups  # argparse has no public way to them
    if any(group.title in elsewhere for group in groups):
        yield "It also takes the flags of [`accel launch`](#accel-launch).\n"
    for group in groups:
        if group.title in elsewhere:
            continue
        rows = [_flag(action) for action in group._group_actions if _is_shown(action)]
        if rows:
            yield _table(str(group.title), ("flag", "value", "default", "what it does"), rows, f"{level}#")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, nested in action.choices.items():
                yield from _command(f"{name} {sub}", nested, f"{level}#", elsewhere)


def _is_shown(action: argparse.Action) -> bool:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return action.help is not argparse.SUPPRESS and not isinstance(action, hidden)


def _flag(action: argparse.Action) -> tuple[str, ...]:
    # One spelling of each: those with hyphens are the same flags.
    spellings = dict.fromkeys(name.replace("_", "-") for name in action.option_strings)
    kept = [
        next(name for name in action.option_strings if name.replace("_", "-") == one) for one in spellings
    ]
    names = ", ".join(f"`{name}`" for name in kept) or f"`{action.metavar or action.dest}`"
    if action.nargs == 0:
        value = ""
    elif action.choices:
        value = ", ".join(f"`{choice}`" for choice in action.choices)
    else:
        value = getattr(action.type, "__name__", "") if action.type else ""
    default = "" if action.default in (None, False, argparse.SUPPRESS, []) else f"`{action.default}`"
    text = (action.help or "") % {**vars(action), "prog": "accel"}
    text = text.replace(str(Path.home()), "~")
    return names, value if value.isidentifier() or "`" in value else "", default, _text(text)


def environment_page() -> str:
    """Return the page of the environment variables."""
    rows = [
        (f"`{variable.name}`", _kind(variable), _default(variable.default), _text(variable.help))
        for variable in sorted(VARIABLES.values(), key=lambda variable: variable.name)
    ]
    return _ENVIRONMENT + "\n" + _table("", ("variable", "value", "default", "what it does"), rows)


def configuration_page() -> str:
    """Return the page of the config file's keys."""
    parts = [_CONFIGURATION]
    for key, group in GROUPS.items():
        rows = [
            (
                f"`{setting.section}: {setting.key}`" if setting.section else f"`{setting.key}`",
                f"`{setting.flag}`",
                f"`{setting.spec.name}`" if setting.from_environment else "",
                _kind(setting.spec),
                _default(setting.default),
                _text(setting.help),
            )
            for setting in SETTINGS.values()
            if setting.group == key and setting.key
        ]
        if rows:
            columns = ("key", "flag", "variable", "value", "default", "what it does")
            parts.append(_table(group.title, columns, rows, "##"))
    others = ", ".join(f"`{name}`" for name in sorted(CLUSTER_KEYS))
    sagemaker = ", ".join(f"`{name}`" for name in sorted(SAGEMAKER_KEYS))
    parts.append(f"## Keys without a flag\n\n{others}\n\nFor Amazon SageMaker: {sagemaker}\n")
    return "\n".join(parts)


def _kind(variable: Any) -> str:
    if variable.choices:
        return ", ".join(f"`{choice}`" for choice in variable.choices)
    return {"str": "text", "int": "integer", "float": "number", "list": "names, by commas"}.get(
        variable.kind, variable.kind
    )


def _default(value: Any) -> str:
    return "" if value is None or value == "" else f"`{value}`"


def _text(text: str) -> str:
    return " ".join(escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").split())


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], level: str = "") -> str:
    lines = [f"{level} {title}\n"] if title else []
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages to the files of the site."""
    pages = {
        "command-line": command_page(),
        "environment": environment_page(),
        "configuration": configuration_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files
