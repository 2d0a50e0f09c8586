"""The package itself: what it exports, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import accel_state

# Names so general that they are clear only with their module before them: `env.get`, `process.info`.
WITH_MODULE_ONLY = {
    "process.methods": {"describe", "wait"},
    "devices.table": {"default_device", "detect", "existing_device", "device_spec"},
    "env": {"VARIABLES", "Variable", "get", "is_set", "put", "raw", "set", "snapshot", "update"}
    | {"keep_accelerate_environment"},
    "imports.packages": {"install_hint"},
    "process.shared_dict": {"shared_dict"},
    "train_plan": {"check_accumulation_steps", "parse_precision"},
    "logging.warning": {"is_framework_frame", "user_frame", "warn"},
}
# Modules that only the packages themselves use. A new module stands here or among the exports of the package.
INTERNAL = {
    "__about__",
    "devices",
    "devices.calls",
    "devices.spec",
    "env.fields",
    "env.table",
    "env.variable",
    "imports",
    "lazy",
    "literals",
    "logging",
    "logging.tracebacks",
    "logging.suggestion",
    "open_loaders",
    "parallelism",
    "parallelism.handlers",
    "process",
    "process.gloo_threads",
    "process.failure",
    "process.hooks",
    "process.ranks",
    "process.rendezvous",
    "process.slurm",
    "process.split",
    "process.stores",
    "step_events",
    "verify",
}
TORCH_FREE = (
    "enums",
    "env",
    "handlers",
    "imports.available",
    "lazy",
    "logging.loggers",
    "logging.warning",
    "parallelism.config",
    "process.failure",
)
HEAVY = {"torch", "numpy", "packaging", "importlib.metadata", "asyncio", "subprocess", "multiprocessing"}
README = Path(__file__).parents[1] / "README.md"
MODULES = [
    info.name.removeprefix("accel_state.")
    for info in pkgutil.walk_packages(accel_state.__path__, "accel_state.")
]
PUBLIC_MODULES = [module for module in MODULES if module not in INTERNAL]


def load(module):
    return importlib.import_module(f"accel_state.{module}")


def own_names(module):
    """What a module exports: its `__all__`, or what its statements define without an underscore."""
    loaded = load(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    return [name for name in defined(ast.parse(inspect.getsource(loaded)).body) if name[0] != "_"]


def defined(statements):
    for node in statements:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def public_names(module):
    return set(own_names(module)) - WITH_MODULE_ONLY.get(module, set())


def run_python(code):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(statement):
    return set(
        json.loads(run_python(f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"))
    )


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_is_exported_by_the_package(module):
    assert sorted(public_names(module) - set(accel_state.__all__)) == []
    for name in public_names(module):
        assert getattr(accel_state, name) is getattr(load(module), name)


def test_nothing_else_is_exported():
    public = {name for module in PUBLIC_MODULES for name in public_names(module)}
    assert sorted({*public, "__version__"}) == accel_state.__all__


@pytest.mark.parametrize("module", MODULES)
def test_all_names_exist_once_and_are_documented(module):
    loaded, names = load(module), own_names(module)
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(loaded, name)
        if isinstance(value, (type, types.FunctionType)):
            assert value.__doc__, f"{module}.{name} has no docstring"


def test_unknown_names_are_rejected():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = accel_state.nonsense


def test_modules_are_attributes():
    code = "import accel_state; print(accel_state.env.get('RANK', {}), 'env' in dir(accel_state))"
    assert run_python(code).split() == ["None", "True"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_launchers_modules_import_nothing_heavy(module):
    assert not modules_after(f"import accel_state.{module}") & HEAVY


def test_importing_the_package_imports_none_of_its_modules():
    loaded = {name for name in modules_after("import accel_state") if name.startswith("accel_state.")}
    assert loaded == {"accel_state.lazy"}


def test_the_torch_free_half_is_quick_to_import():
    code = (
        "import time; start = time.process_time()\n"
        f"import {', '.join(f'accel_state.{module}' for module in TORCH_FREE)}\n"
        "print(time.process_time() - start)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.15  # seconds; 0.03 on an idle machine


@pytest.mark.usefixtures("fresh_state")
def test_the_readmes_error_is_the_real_one():
    shown = re.search(r"```text\nValueError: (.*?)\n```", README.read_text())
    with pytest.raises(ValueError, match=re.escape(shown[1])):
        accel_state.env.get("ACCELERATE_MIXED_PRECISION", {"ACCELERATE_MIXED_PRECISION": "fp7"})


@pytest.mark.parametrize(
    ("literal", "enum"),
    [
        ("PrecisionName", "PrecisionType"),
        ("RNGTypeName", "RNGType"),
        ("LoggerName", "LoggerType"),
        ("DynamoBackendName", "DynamoBackend"),
    ],
)
def test_literals_are_the_values_of_enumerations(literal, enum):
    named = set(typing.get_args(getattr(load("literals"), literal)))
    values = {item.value for item in getattr(load("enums"), enum)}
    assert named == (values | {value.lower() for value in values} if enum == "DynamoBackend" else values)
