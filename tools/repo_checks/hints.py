"""Every command that installs a package of this repository works from a checkout.

On the public index `accel` is another project, and the names of its siblings are free for anyone to take.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from repo_checks.declared import extras, requirements
from repo_checks.tree import Package

__all__ = ["check_hints", "wrong_commands"]

HELPER = "install_hint"
HELPER_MODULE = "packages/accel-state/src/accel_state/imports/packages.py"
COMMAND = re.compile(r"pip install ([^`\n#&;()]*)")
ARGUMENT = re.compile(r"(?P<path>\./packages/)?(?P<name>[\w*-]+)(?:\[(?P<extras>[\w,-]+)\])?[.,:]?")
BARE_EXTRA = re.compile(r"(?<![\w/.-])accel(?:-[a-z]+)?\[[a-z][a-z0-9-]*\]")


def check_hints(root: Path, found: Mapping[str, Package]) -> list[str]:
    """Commands in the manual, the READMEs and the code work; those of the code come from one helper."""
    return [
        f"{path.relative_to(root)}: {problem}"
        for path in _files(root)
        for problem in (
            _in_python(root, path, found) if path.suffix == ".py" else wrong_commands(path.read_text(), found)
        )
    ]


def wrong_commands(text: str, found: Mapping[str, Package]) -> Iterator[str]:
    """Say what is wrong with each `pip install` in a text, and with what looks like a part of one."""
    for command in COMMAND.finditer(text):
        arguments = [ARGUMENT.fullmatch(word.strip("'\"")) for word in command[1].split()]
        own = [each for each in arguments if each and (each["path"] or _package(each["name"], found))]
        for problem in _wrong_arguments(own, found):
            yield f"{command[0].strip()!r}: {problem}"
    for bare in BARE_EXTRA.findall(COMMAND.sub("", text)):
        yield f"{bare!r} cannot be installed by that name; name only the extra, or the full command"


def _wrong_arguments(own: list[re.Match[str]], found: Mapping[str, Package]) -> Iterator[str]:
    named = {each["name"] for each in own}
    if "*" in named:
        named |= {package.folder.name for package in found.values()}
    for each in own:
        package = _package(each["name"], found)
        if not each["path"]:
            yield f"leads to a stranger's {each['name']} on the public index; name ./packages/{each['name']}"
        elif package is not None:
            siblings = {canonicalize_name(item.name) for item in requirements(package)}
            for name in sorted({other.folder.name for other in found.values()} & siblings - named):
                yield f"{each['name']} needs ./packages/{name} too, or pip takes it from the public index"
            for extra in filter(None, (each["extras"] or "").split(",")):
                if extra not in extras(package):
                    yield f"{each['name']} has no extra {extra!r}"
        elif each["name"] != "*":
            yield f"there is no ./packages/{each['name']}"


def _in_python(root: Path, path: Path, found: Mapping[str, Package]) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in parts:
            text = _written(node)
            for problem in wrong_commands(text, found):
                yield f"line {node.lineno}: {problem}"
            if re.search(r"pip install.*/packages/", text) and path != root / HELPER_MODULE:
                yield f"line {node.lineno}: a command written by hand; call {HELPER}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == HELPER:
            yield from _wrong_call(node, found)


def _wrong_call(call: ast.Call, found: Mapping[str, Package]) -> Iterator[str]:
    given = [ast.literal_eval(each) if isinstance(each, ast.Constant) else None for each in call.args]
    extra, name = [*given, "accel"][:2]
    package = _package(name or "", found)
    if extra is not None and name is not None and (package is None or extra not in extras(package)):
        yield f"line {call.lineno}: {ast.unparse(call)}: there is no {name} with an extra {extra!r}"


def _written(node: ast.Constant | ast.JoinedStr) -> str:
    """The text of a string, with `{}` for what an f-string puts in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_written(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def _package(name: str, found: Mapping[str, Package]) -> Package | None:
    return found.get(name.replace("-", "_"))


def _files(root: Path) -> Iterator[Path]:
    texts = ("*.md", "docs/**/*.md", "packages/*/*.md")
    sources = ("packages/*/src/**/*.py", "examples/**/*.py", "docs/*.py", "tests-integration/**/*.py")
    for pattern in (*texts, *sources):
        yield from sorted(root.glob(pattern))
