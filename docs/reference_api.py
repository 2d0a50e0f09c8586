"""Writes the API reference: a page per folder of the packages, and one of the documented interface.

mkdocs runs this as a hook. The text is that of the docstrings, which mkdocstrings reads from the source. A
name that a package exports, or that is documented, and has no place on a page fails the strict build.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from repo_checks.names import public_modules  # noqa: E402 - tools are no package
from repo_checks.tree import Module, packages  # noqa: E402

__all__ = ["definition", "exported", "interface_page", "nav", "on_config", "on_files", "pages", "summary"]

_INTERFACE = """# The documented interface

The modules and names of Hugging Face Accelerate's documentation, under accel's name. Each is described where
it is defined; import it from the module that is listed here.
"""


@cache
def _modules() -> dict[str, Module]:
    return {module.name: module for module in public_modules(packages(ROOT))}


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module: of its stub, where there is one."""
    stub = _modules()[module].path.with_suffix(".pyi")
    return ast.parse(stub.read_text()).body if stub.exists() else _modules()[module].tree.body


@cache
def exported(module: str) -> tuple[str, ...]:
    """Return the names that a module exports: its `__all__`, or what it defines without an underscore."""
    defined = _defined(module)
    assigned = defined.get("__all__")
    if isinstance(assigned, ast.Assign) and isinstance(assigned.value, (ast.List, ast.Tuple)):
        return tuple(ast.literal_eval(assigned.value))
    if "__all__ = " in _modules()[module].path.read_text():  # computed, as where names come lazily
        return tuple(import_module(module).__all__)
    return tuple(sorted(name for name in defined if name[0] != "_"))


@cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Return the names that a module imports: the module that has each, and its name there."""
    found = {}
    for statement in _statements(module):
        # Also those under `if TYPE_CHECKING`.
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
    return found


@cache
def _defined(module: str) -> dict[str, ast.stmt]:
    """Return the statements that define the names of a module."""
    found: dict[str, ast.stmt] = {}
    for node in _modules()[module].tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: node for target in targets if isinstance(target, ast.Name)})
    return found


def definition(module: str, name: str) -> str | None:
    """Return the full name of what a module exports, where it is defined; a module's own name for a module.

    Args:
        module: A module of a package.
        name: A name that it exports.

    Returns:
        The dotted name; None for what is another library's, or computed.
    """
    for _ in range(9):  # re-exports of re-exports
        if f"{module}.{name}" in _modules():
            return f"{module}.{name}"
        if module not in _modules():
            return None
        if name in _defined(module):
            return f"{module}.{name}"
        if name not in _imports(module):
            return None
        module, name = _imports(module)[name]
    return None


def summary(module: str, name: str) -> str:
    """Return the first line of the docstring of a name; empty where it has none."""
    node = _defined(module).get(name)
    if node is None:
        return ""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (ast.get_docstring(node) or "").partition("\n")[0]
    body = _modules()[module].tree.body
    after = body[body.index(node) + 1 : body.index(node) + 2]
    text = after[0].value if after and isinstance(after[0], ast.Expr) else None
    return str(text.value).partition("\n")[0] if isinstance(text, ast.Constant) else ""


@cache
def pages() -> dict[str, str]:
    """Return the pages: their Markdown by path."""
    folders: dict[str, list[str]] = {}
    for module in _modules().values():
        is_folder = module.path.name == "__init__.py"
        folder = module.name if is_folder else module.name.rpartition(".")[0]
        if folder in _modules():  # else scripts, which are not imported
            folders.setdefault(folder, []).append(module.name)
    found = {}
    for folder, modules in folders.items():
        text = _page(folder, modules)
        if text is not None:
            found[_path(folder)] = text
    found["reference/interface.md"] = interface_page()
    return found


def _path(folder: str) -> str:
    return f"reference/{folder.replace('.', '/')}/index.md"


def _page(folder: str, modules: list[str]) -> str | None:
    """Return the page of a folder; None where its modules export nothing."""
    own = _modules()[folder]
    parts = []
    described = ast.get_docstring(own.tree)
    for module in sorted(modules):
        names = [name for name in exported(module) if definition(module, name) == f"{module}.{name}"]
        names = [name for name in names if f"{module}.{name}" not in _modules()]
        if names:
            parts.append(_section(module, names))
    table = "\n".join(_rows(folder))
    if not parts and not table:
        return None
    exports = f"\n## What it exports\n\n| name | |\n|---|---|\n{table}\n" if table else ""
    return f"# {folder}\n\n{described or ''}\n{exports}\n" + "\n".join(parts)


def _section(module: str, names: list[str]) -> str:
    """Return the section of a module: its docstrings, and a table of the values that have none."""
    plain = [name for name in names if not summary(module, name)]
    members = "".join(f"\n        - {name}" for name in names if name not in plain) or " []"
    path = _modules()[module].path.relative_to(ROOT)
    # The Accelerator's methods come from its bases, and are looked for here.
    inherited = "\n      inherited_members: true" if module == "accel.accelerator" else ""
    text = f"::: {module}\n    options:\n      members:{members}{inherited}\n\nSource: `{path}`\n"
    if not plain:
        return text
    rows = (f"| [](){{#{module}.{name}}}`{name}` | `{_value(module, name)}` |" for name in plain)
    return f"{text}\n| name | value |\n|---|---|\n" + "\n".join(rows) + "\n"


def _value(module: str, name: str) -> str:
    node = _defined(module)[name]
    value = ast.unparse(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value else ""
    return value.replace("|", "\\|") if len(value) <= 80 else "..."


def _rows(module: str) -> Iterator[str]:
    """Yield a row for each name that a module exports from another of ours."""
    for name in exported(module):
        place = definition(module, name)
        if place is None or place == f"{module}.{name}" or place in _modules():
            continue
        owner, _, defined = place.rpartition(".")
        yield f"| [`{name}`][{place}] | {summary(owner, defined).replace('|', chr(92) + '|')} |"


def interface_page() -> str:
    """Return the page of the documented interface: each module's names, and where they are described."""
    api = json.loads((ROOT / "tools/reference/api.json").read_text())
    parts = [_INTERFACE]
    for module, names in api.items():
        rows = []
        for name in names:
            place = definition(module, name)
            if place is None:
                raise KeyError(f"{module}.{name} is documented, and the reference has no place for it")
            owner, _, defined = place.rpartition(".")
            rows.append(f"| [`{name}`][{place}] | {summary(owner, defined).replace('|', chr(92) + '|')} |")
        parts.append(f"## {module}\n\n| name | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def nav() -> list[Any]:
    """Return the entries of the navigation: the documented interface, and each package with its folders."""
    entries: list[Any] = [{"The documented interface": "reference/interface.md"}]
    found = pages()
    for package in packages(ROOT).values():
        own = [_title(path) for path in found if path.split("/")[1] == package.name]
        front, *folders = sorted(own)  # the front page has no own title there
        entries.append({package.folder.name: [_path(front), *({name: _path(name)} for name in folders)]})
    return entries


def _title(path: str) -> str:
    return path.removeprefix("reference/").removesuffix("/index.md").replace("/", ".")


def on_config(config: Any) -> Any:
    """Fill the entry "Reference" of the navigation."""
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [*(entry["Reference"] or []), *nav()]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages to the files of the site."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
