from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch import cli, commands
from accel_launch.__about__ import __version__
from accel_launch.cli import config_main, launch_main, main

Start = Callable[..., Any]


def modules_of_its_own(*arguments: str, folder: Path) -> list[str]:
    """Return the modules that a command imports beyond those that every interpreter starts with."""
    code = (
        "import atexit, sys; before = set(sys.modules)\n"
        "atexit.register(lambda: open('modules', 'w').write('\\n'.join({*sys.modules} - before)))\n"
        "from accel_launch.cli import main; sys.exit(main())"
    )
    environment = {**os.environ, "HF_HOME": str(folder)}
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=180,
    )
    return (folder / "modules").read_text().split()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("launch", "--help"),
        ("launch", "--dry_run", "--num_processes", "2", "script.py"),
        ("launch", "--num_processes", "2", "script.py"),
    ],
)
def test_a_command_imports_few_modules(arguments: tuple[str, ...], tmp_path: Path) -> None:
    # What a start costs is what it imports; tools/bench measures the seconds (0.1 for the 130 of today).
    (tmp_path / "script.py").touch()

    assert len(modules_of_its_own(*arguments, folder=tmp_path)) <= 200


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("launch", "--help"),
        ("launch", "--explain", "script.py"),
        ("launch", "script.py"),
        ("launch", "--num_processes", "2", "script.py"),
        ("config", "default", "--config_file", "new.yaml"),
    ],
)
def test_torch_is_not_imported(start: Start, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "fakes/torch").mkdir(parents=True)
    (tmp_path / "fakes/torch/__init__.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "script.py").touch()
    path = os.pathsep.join(filter(None, [str(tmp_path / "fakes"), os.environ.get("PYTHONPATH")]))
    run = start(*arguments, env={"PYTHONPATH": path})

    assert run.finish()[0] == 0
    assert not (tmp_path / "imported").exists()


def test_the_fake_torch_would_be_noticed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('imported', 'w').close()\n")

    assert start("launch", script="import torch\n").finish()[0] == 0
    assert (tmp_path / "imported").exists()


def test_yaml_is_read_only_with_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    code = (
        "import sys\nfrom accel_launch.cli import main\nmain(['launch', '--dry_run', 's.py'])\n"
        "print([name for name in ('yaml', 'importlib.metadata', 'torch') if name in sys.modules])"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )

    assert out.stdout.splitlines()[-1] == "[]"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    text = capsys.readouterr().out
    assert [name for name in ("launch", "config", "env") if f"  {name} " not in text] == []
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel {__version__}\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("lunch", "unknown command 'lunch'. Did you mean launch?"),
    ],
)
def test_commands_that_are_not_there(start: Start, command: str, message: str) -> None:
    code, _, error = start(command).finish()

    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "package", "folders"),
    [
        ("test", "accel", "./packages/*"),
        ("merge-weights", "accel-ckpt", "./packages/accel-state ./packages/accel-ops ./packages/accel-ckpt"),
    ],
)
def test_the_command_of_a_package_that_is_not_installed_says_how_to_install_it(
    command: str,
    package: str,
    folders: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; monkeypatch puts it back
    monkeypatch.setattr("accel_launch.cli._entry_points", list)

    assert main([command]) == 2
    assert capfd.readouterr().err == (
        f"accel: error: `accel {command}` comes with the package {package}, which is not installed. "
        f"Install it with: pip install {folders} (in a checkout of accel).\n"
    )


def test_help_is_a_command_too(start: Start) -> None:
    assert start("help").finish() == start("--help").finish()
    assert start("help", "env").finish()[:2] == start("env", "--help").finish()[:2]
    code, _, error = start("help", "lunch").finish()
    assert (code, "Did you mean launch?" in error) == (2, True)


def test_help_shows_switches_without_a_value(start: Start) -> None:
    text = " ".join(start("launch", "--help").finish()[1].split())

    assert "[=false]" not in text
    assert "--cpu Run on the CPU" in text
    assert "-m, --module Treat the script" in text
    assert "turned off by `=false`, as in --cpu=false" in text


def test_other_packages_add_commands(start: Start, tmp_path: Path) -> None:
    info = tmp_path / "plugin/other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.commands]\nhello-world = other_plugin:register\n")
    (tmp_path / "plugin/other_plugin.py").write_text(
        "def register(subparsers):\n"
        "    parser = subparsers.add_parser('hello-world')\n"
        "    parser.add_argument('--name')\n"
        "    parser.set_defaults(func=run)\n"
        "def run(args):\n    print('hello', args.name)\n    return 3\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "plugin"), os.environ.get("PYTHONPATH")]))

    code, out, _ = start("hello-world", "--name", "you", env={"PYTHONPATH": path}).finish()
    assert (code, out) == (3, "hello you\n")
    assert "hello-world       From other." in start("--help", env={"PYTHONPATH": path}).finish()[1]
    _, _, error = start("hello-wrld", env={"PYTHONPATH": path}).finish()
    assert "Did you mean hello-world?" in error


def test_the_other_console_scripts_are_the_same_commands(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; monkeypatch puts it back
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    assert launch_main(["--explain", "--num_processes", "2"]) == 0
    assert "--num_processes" in capfd.readouterr().out
    assert config_main(["update"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("accel config: error: There is no config file")
    assert error.endswith("or name another with --config_file.\n")
    with pytest.raises(SystemExit):
        launch_main(["--nope", "x.py"])
    assert capfd.readouterr().err.startswith("accel launch: error: unknown flag --nope")


def test_an_interrupt_while_classes_are_made_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "interrupted.py").write_text(
        "class Name:\n"
        "    def __set_name__(self, owner, name):\n"
        "        raise KeyboardInterrupt\n"
        "class Owner:\n    field = Name()\n"
    )
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; monkeypatch puts it back
    monkeypatch.setattr(commands, "__path__", [str(tmp_path)])
    monkeypatch.setitem(cli._COMMANDS, "env", ("interrupted:parser", ""))

    assert main(["env"]) == 130
