"""The check of install commands: what it finds, and that the helper's own commands pass it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accel.trackers import registry
from accel_state.imports.packages import install_hint
from repo_checks.declared import extras
from repo_checks.hints import check_hints, wrong_commands
from repo_checks.tree import packages

ROOT = Path(__file__).parents[2]
FOUND = packages(ROOT)
EXTRAS = [(package.folder.name, extra) for package in FOUND.values() for extra in extras(package)]


def test_no_command_of_this_repository_leads_elsewhere():
    assert check_hints(ROOT, FOUND) == []


@pytest.mark.parametrize(("package", "extra"), EXTRAS)
def test_what_the_helper_writes_is_complete(package, extra):
    hint = install_hint(extra, package)
    assert f"'./packages/{package}[{extra}]'" in hint
    assert list(wrong_commands(hint, FOUND)) == []


@pytest.mark.parametrize("package", FOUND.values(), ids=lambda package: package.folder.name)
def test_what_the_helper_writes_for_a_package_alone_is_complete(package):
    assert list(wrong_commands(install_hint(None, package.folder.name), FOUND)) == []


def test_every_tracker_has_an_extra_of_its_name():
    for name, row in registry.TRACKERS.items():
        if row.library is not None:
            assert list(wrong_commands(install_hint(name), FOUND)) == []


def test_the_readme_of_accel_has_all_its_extras():
    readme = (FOUND["accel"].folder / "README.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \|", readme, flags=re.MULTILINE)
    assert sorted(listed) == sorted(extras(FOUND["accel"]))


@pytest.mark.parametrize(
    "text",
    [
        "`pip install ./packages/*`",
        "pip install ./packages/* './packages/accel[fp8,peft]', and then",
        "pip install hatch && hatch run demo  # accel",
        "pip install -U torch",
        "in ./packages/accel[fp8] and sizes[name]",
    ],
)
def test_commands_that_work(text):
    assert list(wrong_commands(text, FOUND)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pip install accel", "leads to a stranger's accel on"),
        ("Run `pip install torch accel-data`.", "leads to a stranger's accel-data on"),
        ("pip install 'accel[fp8]'", "leads to a stranger's accel on"),
        ("with the extra accel-data[stateful]", "'accel-data[stateful]' cannot be installed by that name"),
        ("pip install './packages/accel-launch[ray]'", "accel-launch needs ./packages/accel-state too"),
        ("pip install ./packages/* './packages/accel[bars]'", "accel has no extra 'bars'"),
        ("pip install ./packages/* ./packages/accel-other", "there is no ./packages/accel-other"),
    ],
)
def test_commands_that_do_not(text, expected):
    (problem,) = wrong_commands(text, FOUND)
    assert expected in problem


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("README.md", "Then\n\n    pip install accel-ops\n", "stranger's accel-ops"),
        ("docs/page.md", "`pip install './packages/accel-ops'`", "needs ./packages/accel-state too"),
        (
            "packages/accel/src/accel/by_hand.py",
            "raise ImportError('pip install ./packages/*')",
            "line 1: a command written by hand; call install_hint",
        ),
        (
            "packages/accel/src/accel/joined.py",
            'text = (\n    f"{2} is missing: pip install "\n    f"\'accel[fp8]\' {3}"\n)',
            "line 2: \"pip install 'accel[fp8]'",
        ),
        ("examples/call.py", "packages.install_hint('bars')", "there is no accel with an extra 'bars'"),
        ("examples/call.py", "install_hint('fp8', 'accel-ops')", "no accel-ops with an extra 'fp8'"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, file, source, expected):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (problem,) = check_hints(tmp_path, FOUND)
    assert problem.startswith(f"{file}: ")
    assert expected in problem
