"""The layer check: a small repository that passes, and one violation at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_layers
from repo_checks.tree import BELOW, packages

FILES = {
    "accel_state": {
        "__init__.py": """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from accel_state.process import PartialState as PartialState
        """,
        "env.py": "import os\nvalue = os.environ.get('A')",
        "process.py": "import torch",
    },
    "accel_ops": {"tree.py": "from accel_state.process import torch\nimport torch.nn"},
    "accel_launch": {"cli.py": "from accel_state import env\nimport yaml"},
    "accel": {"face.py": "import accel_ops.tree\ndef f():\n    import tqdm"},
}
DEPENDENCIES = {
    "accel_state": ["torch>=2.10"],
    "accel_ops": ["torch>=2.10", "accel-state>=0.1,<0.2"],
    "accel_launch": ["PyYAML", "accel-state>=0.1,<0.2"],
    "accel": ["accel-ops>=0.1,<0.2"],
}


@pytest.fixture
def repository(tmp_path):
    """Write a repository of four packages that passes every check."""
    for name, files in FILES.items():
        folder = tmp_path / "packages" / name.replace("_", "-")
        (folder / "src" / name).mkdir(parents=True)
        write_project(folder, DEPENDENCIES[name])
        for file, source in {"__init__.py": "", "__about__.py": '__version__ = "0.1.3"', **files}.items():
            write(folder / "src" / name / file, source)
    return tmp_path


def write(path: Path, source: str) -> None:
    path.write_text("\n".join(line.removeprefix(" " * 12) for line in source.splitlines()) + "\n")


def write_project(folder: Path, dependencies: list[str]) -> None:
    listed = ", ".join(f'"{each}"' for each in dependencies)
    extras = '[project.optional-dependencies]\nprogress = ["tqdm"]\n' if folder.name != "accel-ops" else ""
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{folder.name}"\ndependencies = [{listed}]\n{extras}'
    )


def plant(root: Path, module: str, source: str) -> None:
    package, _, name = module.partition(".")
    write(root / "packages" / package.replace("_", "-") / "src" / package / f"{name}.py", source)


def test_a_sound_repository(repository):
    assert check_layers.problems(repository) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("accel_state.up", "import accel_ops", "accel_state may not import accel_ops"),
        ("accel_state.up", "def f():\n    from accel_ops.tree import torch", "may not import accel_ops"),
        ("accel_state.up", "if TYPE_CHECKING:\n    import accel", "accel_state may not import accel"),
        (
            "accel_ops.up",
            "import importlib\nimportlib.import_module('accel.face')",
            "accel_ops may not import accel",
        ),
        ("accel.undeclared", "import accel_state", "accel-state is not among the dependencies of accel"),
        ("accel_ops.undeclared", "def f():\n    import yaml", "accel-ops declares pyyaml neither"),
        ("accel_ops.undeclared", "require('tqdm', 'bars')", "to install accel[bars] for tqdm, but"),
        (
            "accel_ops.undeclared",
            "require('tqdm', extra='progress', package='accel-ops')",
            "to install accel-ops[progress] for tqdm, but",
        ),
        ("accel_launch.heavy", "from accel_state.process import torch", "-> torch"),
        ("accel_launch.heavy", "from accel_state import process", "accel_state.process -> torch"),
        ("accel_launch.heavy", "from accel_state import PartialState", "accel_state.process -> torch"),
        ("accel_launch.heavy", "try:\n    import tqdm\nexcept ImportError:\n    pass", "but loads tqdm"),
        ("accel_state.enums", "import torch", "must load without torch"),
        ("accel_ops.reads", "import os\nos.environ['A']", "only accel_state.env may use os.environ"),
        ("accel_ops.reads", "import os as system\nsystem.getenv('A')", "may use os.getenv"),
        ("accel_ops.reads", "from os import environ", "may use os.environ"),
        ("accel_ops.long", "x = 1\n" * 601, "601 lines without docstrings, at most 600"),
        ("accel_ops.long", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines, at most 80"),
    ],
)
def test_a_violation_is_named(repository, module, source, expected):
    plant(repository, module, source)
    problems = check_layers.problems(repository)
    assert len(problems) == 1
    assert expected in problems[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("accel_launch.lazy", "def f():\n    import torch\n    from accel_state import PartialState"),
        ("accel_launch.typed", "if TYPE_CHECKING:\n    import torch"),
        ("accel_ops.long", 'def f():\n    """Say.\n' + "    more\n" * 90 + '    """'),
        ("accel_ops.relative", "from . import tree\nfrom .tree import torch"),
        ("accel.extra", "require('tqdm', 'progress')"),
        ("accel.extra", "require('tqdm.auto', extra='progress')"),
        ("accel.method", "parts.require('tqdm', 'other')"),
    ],
)
def test_what_is_allowed(repository, module, source):
    if "launch" in module:
        write_project(repository / "packages" / "accel-launch", [*DEPENDENCIES["accel_launch"], "torch"])
    plant(repository, module, source)
    assert check_layers.problems(repository) == []


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        ("accel-state>=0.2,<0.3", "does not admit the present version 0.1.3"),
        ("accel-state", "give a compatible range"),
    ],
)
def test_ranges_of_siblings(repository, dependency, expected):
    write_project(repository / "packages" / "accel-ops", ["torch", dependency])
    problems = check_layers.problems(repository)
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_dependency_that_points_upwards(repository):
    write_project(repository / "packages" / "accel-state", ["torch", "accel-ops>=0.1,<0.2"])
    assert "accel_state may not depend on accel_ops" in check_layers.problems(repository)[0]


def test_the_list_of_engine_names_only_shrinks(repository):
    listed = repository / "tools" / "reference" / "engine_names.txt"
    plant(repository, "accel_ops.up", "def is_deepspeed(fsdp_plugin):\n    return fsdp_plugin is None")
    named = [problem.split(" belongs")[0] for problem in check_layers.problems(repository)]
    assert named == ["accel_ops.up: fsdp_plugin", "accel_ops.up: is_deepspeed"]

    listed.parent.mkdir(parents=True)
    listed.write_text("# documented\naccel_ops.up: is_deepspeed fsdp_plugin\n")
    assert check_layers.problems(repository) == []

    plant(repository, "accel_ops.up", "def is_deepspeed():\n    return False")
    (problem,) = check_layers.problems(repository)
    assert "accel_ops.up has no fsdp_plugin any more: take the line out" in problem


def test_no_engine_imports_another_one(repository):
    plant(repository, "accel.engines.common", "import os")
    source = "from accel.engines.common import checks\nimport accel.engines.ddp"
    plant(repository, "accel.engines.ddp", source)
    assert check_layers.problems(repository) == []
    plant(repository, "accel.engines.fsdp1.flat", "def late():\n    from accel.engines.ddp import find")
    (problem,) = check_layers.problems(repository)
    assert "flat.py:2: the engine fsdp1 imports the engine ddp" in problem


def test_what_the_examples_import_comes_with_their_extra(repository):
    (repository / "examples" / "folder").mkdir(parents=True)
    write(repository / "examples" / "data.py", "import os\nimport torch")
    imports = "import yaml, data, accel_ops\nfrom sklearn import datasets"
    write(repository / "examples" / "folder" / "train.py", imports)
    (problem,) = check_layers.problems(repository)
    assert "train.py:2: imports sklearn, but the extra accel[examples] does not install it" in problem
    project = repository / "packages" / "accel" / "pyproject.toml"
    project.write_text(project.read_text() + 'examples = ["scikit-learn"]\n')
    assert check_layers.problems(repository) == []


def test_the_command_reports_and_fails(repository, capsys):
    assert check_layers.main([str(repository)]) == 0
    plant(repository, "accel_state.up", "import accel_ops")
    assert check_layers.main([str(repository)]) == 1
    assert "layers: 1 problem(s)" in capsys.readouterr().out


def test_an_empty_folder_does_not_pass(tmp_path):
    assert check_layers.problems(tmp_path) == [f"{tmp_path}: no packages here"]


def test_every_package_of_this_repository_has_a_layer():
    root = Path(__file__).parents[2]
    assert set(packages(root)) == set(BELOW)
    assert {path.name for path in (root / "packages").iterdir()} == {name.replace("_", "-") for name in BELOW}
