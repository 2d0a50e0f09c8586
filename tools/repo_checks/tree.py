"""The packages, their modules, and what each module imports and when, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

__all__ = ["ABOUT", "BELOW", "Import", "Module", "Package", "packages"]

ABOUT = "__about__.py"

# Each package and those it may import: accel-state <- accel-ops <- data, optim, ckpt <- accel, and
# accel-state <- accel-launch <- accel.
BELOW: dict[str, frozenset[str]] = {
    "accel_state": frozenset(),
    "accel_ops": frozenset({"accel_state"}),
    "accel_data": frozenset({"accel_state", "accel_ops"}),
    "accel_optim": frozenset({"accel_state", "accel_ops"}),
    "accel_ckpt": frozenset({"accel_state", "accel_ops"}),
    "accel_launch": frozenset({"accel_state"}),
    "accel": frozenset(
        {"accel_state", "accel_ops", "accel_data", "accel_optim", "accel_ckpt", "accel_launch"}
    ),
}

# Functions that are called with a module's name; the last one also with the extra that installs it.
LOADERS = frozenset({"__import__", "import_module", "importlib.import_module", "require"})


@dataclass(frozen=True)
class Import:
    """One imported module, and when it is imported."""

    module: str  # full dotted name
    names: tuple[str, ...]  # of `from module import ...`
    line: int
    when: str  # "loading" the module, "calling" a function, or "typing" only
    extra: str | None = None  # named by require(module, extra, package), to be installed if it is missing
    extra_of: str = "accel"  # the package named there

    @property
    def top(self) -> str:
        """The top-level name, such as `torch` for `torch.nn`."""
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file of a package."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.path.read_text(), str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything the module imports, at any depth; for type checking also what its stub does."""
        stub = self.path.with_suffix(".pyi")
        typed = self._walk(ast.parse(stub.read_text(), str(stub)), "typing") if stub.exists() else ()
        return (*self._walk(self.tree, "loading"), *typed)

    def at(self, line: int) -> str:
        """Return `path:line` for a message."""
        return f"{self.path}:{line}"

    def _walk(self, node: ast.AST, when: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, (), child.lineno, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                names = tuple(alias.name for alias in child.names)
                yield Import(self._absolute(child), names, child.lineno, when)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from self._walk(ast.Module(child.body, []), "typing")
                yield from self._walk(ast.Module(child.orelse, []), when)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from self._walk(child, "typing" if when == "typing" else "calling")
            else:
                yield from self._loaded(child, when)
                yield from self._walk(child, when)

    def _loaded(self, node: ast.AST, when: str) -> Iterator[Import]:
        """Find `import_module("x")` and its like, where the name is written out."""
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in LOADERS:
            return
        given = dict(enumerate(node.args)) | {keyword.arg: keyword.value for keyword in node.keywords}
        module = _literal(given.get(0))
        if module is not None:
            extra = _literal(given.get("extra", given.get(1)))
            package = _literal(given.get("package", given.get(2)))
            yield Import(module, (), node.lineno, when, extra, package or "accel")

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = len(parts) - node.level + (self.path.name == "__init__.py")
        return ".".join([*parts[:kept], *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Package:
    """One distribution: its folder, its import name and what it declares."""

    folder: Path

    @property
    def name(self) -> str:
        """The import name."""
        return self.folder.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of the modules."""
        return self.folder / "src" / self.name

    @cached_property
    def project(self) -> dict[str, object]:
        """The [project] table of its pyproject.toml."""
        table: dict[str, object] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Its modules, sorted by name."""
        found = [Module(self._module_name(path), path) for path in self.source.rglob("*.py")]
        return tuple(sorted(found, key=lambda module: module.name))

    @cached_property
    def version(self) -> str:
        """The version in its `__about__.py`."""
        tree = ast.parse((self.source / ABOUT).read_text())
        return next(str(ast.literal_eval(node.value)) for node in tree.body if isinstance(node, ast.Assign))

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.source.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def packages(root: Path) -> dict[str, Package]:
    """Return the packages under `root`/packages by import name, the lowest layer first."""
    found = {name: Package(root / "packages" / name.replace("_", "-")) for name in BELOW}
    return {name: package for name, package in found.items() if package.folder.is_dir()}


def _literal(node: ast.expr | None) -> str | None:
    """Return the string that an argument writes out, if it does."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
