"""The release check: a small repository that passes, and one disagreement at a time."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

import check_release
from release.build import sdist_name, wheel_name
from release.contents import check_sdist, check_wheel
from release.isolated import closure
from repo_checks.tree import Package, packages

DEPENDENCIES = {
    "accel_state": ["torch>=2.10"],
    "accel_ops": ["torch>=2.10", "accel-state>=0.2,<0.3"],
    "accel": ["accel-ops>=0.2,<0.3"],
}


@pytest.fixture
def repository(tmp_path):
    """Write three packages with their changelogs, and dist/ with a wheel and a source archive of each."""
    for name in DEPENDENCIES:
        source = tmp_path / "packages" / name.replace("_", "-") / "src" / name
        (source / "parts").mkdir(parents=True)
        (source / "__init__.py").write_text("")
        (source / "py.typed").write_text("")
        (source / "parts/part.py").write_text("x = 1\n")
        folder = source.parents[1]
        (folder / "LICENSE").write_text("Apache\n")
        (folder / "README.md").write_text(f"# {name}\n")
        (folder / "CHANGELOG.md").write_text(
            f"# Changelog of {folder.name}\n\n## Unreleased\n\n- New.\n\n## 0.2.0\n\n- Old.\n"
        )
        write_version(tmp_path, name, "0.2.0")
        write_dependencies(tmp_path, name, DEPENDENCIES[name])
    (tmp_path / "dist").mkdir()
    build(tmp_path)
    return tmp_path


def write_version(root: Path, name: str, version: str) -> None:
    about = root / "packages" / name.replace("_", "-") / "src" / name / "__about__.py"
    about.write_text(f'__version__ = "{version}"\n')


def write_dependencies(root: Path, name: str, dependencies: list[str]) -> None:
    listed = ", ".join(f'"{each}"' for each in dependencies)
    (root / "packages" / name.replace("_", "-") / "pyproject.toml").write_text(
        f'[project]\nname = "{name.replace("_", "-")}"\ndependencies = [{listed}]\n'
        '[project.optional-dependencies]\nprogress = ["tqdm"]\n'
    )


def build(root: Path) -> None:
    for package in packages(root).values():
        write_wheel(root / "dist", package)
        write_sdist(root / "dist", package)


def wheel_files(package: Package) -> dict[str, bytes]:
    info = f"{package.name}-{package.version}.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in package.project["dependencies"])
    metadata = (
        f"Name: {package.folder.name}\nVersion: {package.version}\nLicense-Expression: Apache-2.0\n"
        f"License-File: LICENSE\nDescription-Content-Type: text/markdown\nRequires-Python: >=3.10\n{requires}"
        f"Requires-Dist: tqdm; extra == 'progress'\n\n{(package.folder / 'README.md').read_text()}"
    )
    files = {
        path.relative_to(package.source.parent).as_posix(): path.read_bytes()
        for path in package.source.rglob("*.*")
    }
    licence = {f"{info}/licenses/LICENSE": (package.folder / "LICENSE").read_bytes()}
    return (
        files | licence | {f"{info}/METADATA": metadata.encode(), f"{info}/RECORD": b"", f"{info}/WHEEL": b""}
    )


def write_wheel(dist: Path, package: Package, **changes: bytes | None) -> None:
    with zipfile.ZipFile(dist / wheel_name(package), "w") as archive:
        for name, data in (wheel_files(package) | changes).items():
            if data is not None:
                archive.writestr(name, data)


def write_sdist(dist: Path, package: Package, **changes: bytes | None) -> None:
    root = f"{package.name}-{package.version}"
    files = {f"{root}/PKG-INFO": b"", f"{root}/.gitignore": b""}
    for path in package.folder.rglob("*.*"):
        files[f"{root}/{path.relative_to(package.folder).as_posix()}"] = path.read_bytes()
    files[f"{root}/LICENSE"] = (package.folder / "LICENSE").read_bytes()
    with tarfile.open(dist / sdist_name(package), "w:gz") as archive:
        for name, data in (files | changes).items():
            if data is not None:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def test_a_sound_repository(repository, capsys):
    assert check_release.problems(repository) == []
    assert check_release.main([str(repository)]) == 0
    assert "accel 0.2.0, newest changes under: Unreleased\nrelease: ok\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.3.0", "need one version: accel-state 0.2.0, accel-ops 0.2.0, accel 0.3.0"),
        ("0.2", "need one version"),
        ("0.2.0-alpha", "'0.2.0-alpha' is no version; write one such as 0.2.0"),
        ("next", "'next' is no version"),
    ],
)
def test_one_version(repository, capsys, version, expected):
    write_version(repository, "accel", version)
    (problem,) = check_release.problems(repository)
    assert expected in problem
    assert check_release.main([str(repository)]) == 1
    assert "release: 1 problem(s)" in capsys.readouterr().out


@pytest.mark.parametrize("declared", ["accel-state>=0.1,<0.3", "accel-state>=0.2", "accel-state==0.2.0"])
def test_ranges_are_of_the_present_minor_version(repository, declared):
    write_dependencies(repository, "accel_ops", ["torch>=2.10", declared])
    build(repository)
    (problem,) = check_release.problems(repository)
    assert "is not the range of accel-state 0.2.0; write accel-state>=0.2,<0.3" in problem


def test_ranges_in_extras(repository):
    project = repository / "packages/accel/pyproject.toml"
    project.write_text(project.read_text() + 'more = ["accel-state>=0.1,<0.2"]\n')
    build(repository)
    (problem,) = check_release.problems(repository)
    assert "accel-state>=0.2,<0.3" in problem


def test_a_new_version_is_followed_by_ranges_changelogs_and_files(repository):
    for name in DEPENDENCIES:
        write_version(repository, name, "0.3.0")
        log = repository / "packages" / name.replace("_", "-") / "CHANGELOG.md"
        log.write_text(log.read_text().replace("Unreleased", "0.2.1"))
    found = "\n".join(check_release.problems(repository))
    assert found.count("write accel-state>=0.3,<0.4") == 1
    assert found.count("write accel-ops>=0.3,<0.4") == 1
    assert found.count("has no entry for version 0.3.0: write '## 0.3.0'") == 3
    assert found.count("0.3.0.tar.gz is missing; run hatch run wheels:build") == 3
    assert found.count("0.2.0-py3-none-any.whl is of no present version") == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "is missing"),
        ("# Changes\n\n## 0.2.0\n\n- New.\n", "does not begin with '# Changelog of accel'"),
        ("## 0.2.0\n\n## 0.1.0\n\n- Old.\n", "0.2.0 has no text"),
        ("## Unreleased\n\n## 0.2.0\n\n- Old.\n", "Unreleased has no text"),
        ("## 0.1.0\n\n- Old.\n", "has no entry for version 0.2.0: write '## 0.2.0'"),
        ("## Unreleased\n\n- Next.\n\n## 0.1.0\n\n- Old.\n", "has no entry for version 0.2.0"),
        (
            "## 0.3.0\n\n- Next.\n\n## 0.2.0\n\n- New.\n",
            "has an entry for 0.3.0, but the package's version is 0.2.0",
        ),
        ("## 0.1.0\n\n- Old.\n\n## 0.2.0\n\n- New.\n", "not in order, the newest first: 0.1.0, 0.2.0"),
        ("## 0.2.0\n\n- New.\n\n## Unreleased\n\n- Next.\n", "Unreleased is not the first entry"),
        ("## 0.2.0\n\n- New.\n\n## 0.2.0\n\n- Old.\n", "a heading is there twice"),
        ("## 0.2.0\n\n- New.\n\n## Older\n\n- Old.\n", "an entry's heading is a version, or Unreleased"),
    ],
)
def test_changelogs(repository, text, expected):
    path = repository / "packages/accel/CHANGELOG.md"
    if text is None:
        path.unlink()
    else:
        path.write_text(text if text.startswith("# ") else f"# Changelog of accel\n\n{text}")
        write_sdist(repository / "dist", packages(repository)["accel"])
    problems = check_release.problems(repository)
    assert str(path) in problems[0]
    assert expected in problems[0]
    assert len(problems) == (2 if text is None else 1)  # the source archive has the file that is missing here


def test_files_of_another_version_or_other_sources(repository):
    (repository / "dist/accel-0.1.0-py3-none-any.whl").write_bytes(b"")
    (problem,) = check_release.problems(repository)
    assert "accel-0.1.0-py3-none-any.whl is of no present version" in problem
    (repository / "dist/accel-0.1.0-py3-none-any.whl").unlink()

    part = repository / "packages/accel/src/accel/parts/part.py"
    part.write_text("x = 2\n")
    wheel, sdist = check_release.problems(repository)
    assert wheel.startswith("accel-0.2.0-py3-none-any.whl: accel/parts/part.py differs from ")
    assert sdist.startswith("accel-0.2.0.tar.gz: accel-0.2.0/src/accel/parts/part.py differs from ")
    part.write_text("x = 1\n")

    write_dependencies(repository, "accel", ["accel-ops>=0.2,<0.3", "torch"])
    write_sdist(repository / "dist", packages(repository)["accel"])
    (problem,) = check_release.problems(repository)
    assert "asks for accel-ops<0.3,>=0.2; build it again, pyproject.toml says otherwise" in problem


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("accel/parts/part.py", None, "accel/parts/part.py is missing"),
        ("accel/py.typed", None, "py.typed is missing, without which type checkers see no types"),
        ("accel-0.2.0.dist-info/licenses/LICENSE", None, "licenses/LICENSE is missing"),
        ("accel-0.2.0.dist-info/METADATA", None, "METADATA is missing"),
        ("tests/test_part.py", b"", "tests/test_part.py does not belong there"),
        ("accel/notes.txt", b"", "accel/notes.txt does not belong there"),
    ],
)
def test_what_is_in_a_wheel(repository, name, data, expected):
    package = packages(repository)["accel"]
    write_wheel(repository / "dist", package, **{name: data})
    problems = check_wheel(repository / "dist" / wheel_name(package), package)
    assert expected in "\n".join(problems)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("Name: accel", "Name: accelerate"),
        ("Version: 0.2.0", "Version: 0.1.0"),
        ("License-Expression: Apache-2.0", "License-Expression: MIT"),
        ("License-File: LICENSE\n", ""),
        ("text/markdown", "text/x-rst"),
        (">=3.10", ">=3.12"),
        ("\n# accel", "\n# another"),
    ],
)
def test_the_metadata_of_a_wheel(repository, field, other):
    package = packages(repository)["accel"]
    name = "accel-0.2.0.dist-info/METADATA"
    text = wheel_files(package)[name].decode()
    assert field in text
    write_wheel(repository / "dist", package, **{name: text.replace(field, other, 1).encode()})
    (problem,) = check_wheel(repository / "dist" / wheel_name(package), package)
    assert problem.startswith("accel-0.2.0-py3-none-any.whl: METADATA ")


@pytest.mark.parametrize("file", ["notes.txt", "m.py.orig", "tests/part.py", "test_part.py", "conftest.py"])
def test_what_is_in_the_sources_and_is_no_module(repository, file):
    package = packages(repository)["accel"]
    stray = package.source / file
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("")
    build(repository)
    problems = [
        *check_wheel(repository / "dist" / wheel_name(package), package),
        *check_sdist(repository / "dist" / sdist_name(package), package),
    ]
    assert [problem.partition(": ")[2] for problem in problems] == [
        f"{prefix}accel/{file} is neither a module nor a file that a package needs"
        for prefix in ("", "accel-0.2.0/src/")
    ]


def test_programs_stay_executable(repository):
    package = packages(repository)["accel"]
    program = package.source / "drop_in/bin/run.sh"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    build(repository)
    (problem,) = check_wheel(repository / "dist" / wheel_name(package), package)
    assert "accel/drop_in/bin/run.sh cannot be executed, as" in problem


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("accel-0.2.0/CHANGELOG.md", None, "CHANGELOG.md is missing"),
        ("accel-0.2.0/PKG-INFO", None, "PKG-INFO is missing"),
        ("accel-0.2.0/tests/test_part.py", b"", "tests/test_part.py does not belong there"),
    ],
)
def test_what_is_in_a_source_archive(repository, name, data, expected):
    package = packages(repository)["accel"]
    write_sdist(repository / "dist", package, **{name: data})
    (problem,) = check_sdist(repository / "dist" / sdist_name(package), package)
    assert expected in problem


def test_what_is_installed_with_a_package():
    found = packages(Path(__file__).parents[2])
    assert {each.name for each in closure(found["accel"], found)} == set(found)
    assert {each.name for each in closure(found["accel_launch"], found)} == {"accel_launch", "accel_state"}
    assert [each.name for each in closure(found["accel_state"], found)] == ["accel_state"]


def test_an_empty_folder_does_not_pass(tmp_path):
    assert check_release.problems(tmp_path) == [f"{tmp_path}: no packages here"]
