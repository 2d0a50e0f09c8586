"""One file reads the environment, and modules and functions stay short enough to read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from repo_checks.tree import Module

__all__ = ["ENVIRONMENT_MODULE", "MAX_FUNCTION_LINES", "MAX_MODULE_LINES", "check_environment", "check_sizes"]

ENVIRONMENT_MODULE = "accel_state.env"
MAX_MODULE_LINES = 600  # without docstrings
FACADE = "accel.accelerator"  # one class with every documented method
MAX_FACADE_LINES = 800
MAX_FUNCTION_LINES = 80  # without the docstring

ACCESS = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def check_environment(modules: Iterable[Module]) -> list[str]:
    """Only the environment table touches the environment."""
    return [
        f"{module.at(line)}: only {ENVIRONMENT_MODULE} may use os.{name}; call its functions"
        for module in modules
        if module.name != ENVIRONMENT_MODULE
        for line, name in _accesses(module.tree)
    ]


def check_sizes(modules: Iterable[Module]) -> list[str]:
    """No module and no function is too long to read."""
    return [problem for module in modules for problem in _too_long(module)]


def _accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names = {"os"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == "os" and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in names and node.attr in ACCESS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in ACCESS)


def _too_long(module: Module) -> Iterator[str]:
    lines = len(module.path.read_text().splitlines()) - _docstring_lines(module.tree)
    limit = MAX_MODULE_LINES if module.name != FACADE else MAX_FACADE_LINES
    if lines > limit:
        yield f"{module.path}: {lines} lines without docstrings, at most {limit}"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = _length(node)
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{module.at(node.lineno)}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
                )


def _docstring_lines(tree: ast.Module) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    return sum((item.end_lineno or item.lineno) - item.lineno + 1 for item in docstrings)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    last = node.end_lineno or node.lineno
    length = last - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        length -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return length
