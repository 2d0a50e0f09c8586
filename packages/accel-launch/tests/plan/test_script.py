from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from accel_launch.commands.launch import launch_command_parser
from accel_launch.errors import LaunchError
from accel_launch.plan.script import worker_command
from accel_launch.settings.resolve import resolve


def command(*tokens: str) -> list[str]:
    args = launch_command_parser().parse_args(list(tokens))
    environ = {"PATH": os.environ["PATH"]}
    return worker_command(resolve(args, None, {}), args.training_script, args.training_script_args, environ)


def test_a_script_runs_under_this_python(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()

    assert command(str(script), "-x", "1") == [sys.executable, str(script), "-x", "1"]


def test_a_folder_with_a_main_runs(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()

    assert command(str(tmp_path)) == [sys.executable, str(tmp_path)]


def test_a_module_runs_with_m() -> None:
    assert command("-m", "json.tool", "x") == [sys.executable, "-m", "json.tool", "x"]


def test_a_module_of_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_module_here.py").touch()
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)

    assert command("-m", "my_module_here")[-1] == "my_module_here"
    assert sys.path == before


def test_a_program_is_found_on_the_path() -> None:
    assert command("--no_python", "sh", "-c", "true")[1:] == ["-c", "true"]
    assert Path(command("--no_python", "sh")[0]).is_absolute()


@pytest.mark.parametrize(("flags", "devices"), [((), "all"), (("--num_processes", "1"), "one")])
def test_tpus_are_used_one_or_all(flags: tuple[str, ...], devices: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert command("--tpu", *flags, str(tmp_path / "s.py"))[3:6] == ["main", devices, "file"]


def test_another_number_of_tpus_is_ignored_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()

    with pytest.warns(UserWarning, match=r"--tpu ignores num_processes=4 \(from --num_processes\)"):
        assert command("--tpu", "--num_processes", "4", str(tmp_path / "s.py"))[4] == "all"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("none.py",), "'none.py' does not exist in "),
        (("none",), "--module or --no_python"),
        (("folder",), "folder without __main__.py"),
        (("-m", "no_such_module_anywhere.x"), "no module 'no_such_module_anywhere.x'"),
        (("-m", "plain.txt"), "is a file: leave --module out"),
        (("--no_python", "plain.txt"), "not on the PATH|no program 'plain.txt'|not executable; run `chmod"),
        (("--no_python", "./plain.txt"), "not executable; run `chmod"),
        (("--no_python", "no-such-program"), "no program 'no-such-program' on the PATH"),
    ],
)
def test_what_cannot_run_is_rejected(
    tokens: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain.txt").touch()

    with pytest.raises(LaunchError) as error:
        command(*tokens)

    assert re.search(message, str(error.value))
