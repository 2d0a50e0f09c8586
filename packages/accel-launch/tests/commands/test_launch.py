"""`accel launch` as a whole: one process, messages before anything starts, --explain and --dry_run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_launch import launch_command, launch_command_parser
from accel_launch.errors import LaunchError

Start = Callable[..., Any]
REPORT = """
import json, os, sys
print(json.dumps([os.getpid(), sys.argv, __name__, sys.path[0], dict(os.environ)]))
"""


def test_one_process_takes_the_launchers_place(start: Start) -> None:
    run = start("launch", "--mixed_precision", "bf16", "--cpu", "script.py", "--lr", "1")
    (run.folder / "script.py").write_text(REPORT)
    code, out, error = run.finish()
    pid, argv, name, path, environ = json.loads(out)

    assert (code, error) == (0, "")
    assert pid == run.process.pid
    assert argv == ["script.py", "--lr", "1"]
    assert name == "__main__"
    assert Path(path) == run.folder
    assert (environ["ACCELERATE_MIXED_PRECISION"], environ["ACCELERATE_USE_CPU"]) == ("bf16", "true")
    assert "WORLD_SIZE" not in environ


def test_the_environment_of_one_process_is_otherwise_unchanged(start: Start) -> None:
    outside = {"MY_OWN": "1", "RANK": "0", "WORLD_SIZE": "1"}
    run = start("launch", script=REPORT, env=outside)
    environ = json.loads(run.finish()[1])[-1]

    assert environ.items() >= outside.items()


def test_modules_and_programs(start: Start, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/mod.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")

    assert start("launch", "-m", "pkg.mod", "-x").finish()[:2] == (0, "__main__ pkg.mod ['-x']\n")
    assert start("launch", "--no_python", "echo", "-n", "hello").finish()[:2] == (0, "hello")
    two = start("launch", "--num_processes", "2", "--no-python", "sh", "-c", "echo $RANK")
    assert sorted(two.finish()[1].split()) == ["0", "1"]


def test_programs_do_not_inherit_what_python_ignores(start: Start) -> None:
    assert start("launch", "--no_python", "sh", "-c", "yes | head -n 1").finish() == (0, "y\n", "")


def test_the_exit_code_and_signals_are_the_scripts(start: Start) -> None:
    assert start("launch", script="raise SystemExit(5)\n").finish()[0] == 5
    run = start("launch", script="open('ready', 'w').close()\nimport time\ntime.sleep(60)\n")
    run.wait_for_file("ready")
    run.process.send_signal(signal.SIGTERM)

    assert run.finish()[0] == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py",), "The script 'none.py' does not exist in "),
        (("--num_processes", "2", "none.py"), "The script 'none.py' does not exist in "),
        ((".",), "folder without __main__.py"),
        ((), "No script was passed"),
        (("--num_proceses", "2", "s.py"), "unknown flag --num_proceses. Did you mean --num_processes?"),
        (("--num_processes", "0", "s.py"), "'0' is not allowed"),
        (("--mixed_precision", "fp17", "s.py"), "'fp17' is not allowed; allowed: no, fp8, fp16, bf16"),
        (("--module", "--no_python", "s.py"), "exclude each other"),
        (("--use_deepspeed", "--use_fsdp", "s.py"), "exclude each other"),
        (("--config_file", "none.yaml", "s.py"), "There is no config file none.yaml"),
    ],
)
def test_errors_are_one_line_and_start_nothing(
    start: Start, arguments: tuple[str, ...], message: str
) -> None:
    run = start("launch", *arguments)
    code, out, error = run.finish()

    assert (code, out) == (2, "")
    assert message in error
    assert error.startswith("accel launch: error: ")
    assert len(error.splitlines()) == 1


def test_warnings_are_one_line(start: Start) -> None:
    code, _, error = start("launch", "--fp16", script="pass\n").finish()

    assert code == 0
    assert error == "accel launch: warning: --fp16 is an old spelling; use --mixed_precision fp16.\n"


def test_config_files_are_read(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 2\nmixed_precision: fp16\n")
    script = "import os\nprint(os.environ['ACCELERATE_MIXED_PRECISION'], os.environ.get('WORLD_SIZE'))\n"

    named = start("launch", "--config_file", "c.yaml", script=script)
    assert named.finish()[1] == "fp16 2\n" * 2

    (tmp_path / "hf/accelerate").mkdir(parents=True)
    (tmp_path / "hf/accelerate/default_config.yaml").write_text("mixed_precision: bf16\n")
    assert start("launch", script=script).finish()[1] == "bf16 None\n"


def test_a_broken_config_file_is_named_with_the_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 2\nmixed_precision: [fp16\n")
    code, _, error = start("launch", "--config_file", "c.yaml", script="pass\n").finish()

    assert code == 2
    assert "Config file c.yaml, line 3" in error


def test_explain_shows_values_and_sources(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("mixed_precision: fp16\nfsdp_config: {fsdp_version: 2}\n")
    run = start(
        "launch",
        "--explain",
        "--num_processes",
        "2",
        "--config_file",
        "c.yaml",
        env={"ACCELERATE_DEBUG_MODE": "1"},
    )
    code, out, _ = run.finish()
    rows = [line.split(maxsplit=2) for line in out.splitlines()]

    assert code == 0
    assert ["num_processes", "2", "--num_processes"] in rows
    assert ["mixed_precision", "fp16", "c.yaml"] in rows
    assert ["debug", "true", "ACCELERATE_DEBUG_MODE"] in rows
    assert ["num_machines", "1", "default"] in rows
    assert ["fsdp_version", "2", "c.yaml (not in use: needs --use_fsdp)"] in rows


def test_explain_with_a_script_shows_what_was_detected_and_starts_nothing(start: Start) -> None:
    run = start("launch", "--explain", "--cpu", script="open('ran', 'w')\n")
    code, out, _ = run.finish()

    assert code == 0
    assert ["num_processes", "1", "detected: no visible GPU"] in [
        line.split(maxsplit=2) for line in out.splitlines()
    ]
    assert not (run.folder / "ran").exists()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_a_dry_run_prints_can_be_run(start: Start, processes: str) -> None:
    script = "import os\nopen('ran', 'a').write(os.environ.get('WORLD_SIZE', '1') + os.environ['A'])\n"
    arguments = ("launch", "--dry_run", "--num_processes", processes, "--mixed_precision", "bf16")
    run = start(*arguments, script=script, env={"A": "it's"})
    code, out, _ = run.finish()
    assert code == 0
    assert not (run.folder / "ran").exists()

    subprocess.run(["bash", "-ec", out], cwd=run.folder, env={**os.environ, "A": "it's"}, check=True)

    assert (run.folder / "ran").read_text() == f"{processes}it's"
    assert "export ACCELERATE_MIXED_PRECISION=bf16" in out.splitlines()


def test_a_dry_run_of_torchrun_shows_its_command(start: Start) -> None:
    run = start("launch", "--dry_run", "--max_restarts", "3", "--num_processes", "2", script="pass\n")
    command = run.finish()[1].splitlines()[-1]

    assert command.startswith(f"{sys.executable} -m torch.distributed.run")
    assert "--max_restarts=3" in command


def test_clients_can_parse_and_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text("import os, pathlib, sys\npathlib.Path(sys.argv[1] + os.environ['RANK']).touch()\n")
    args = launch_command_parser().parse_args(["--num_processes", "2", str(script)])
    args.training_script_args = [str(tmp_path / "ran")]

    launch_command(args)

    assert (tmp_path / "ran0").exists()
    assert (tmp_path / "ran1").exists()


def test_clients_get_exceptions_and_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(LaunchError, match="does not exist"):
        launch_command(launch_command_parser().parse_args([str(tmp_path / "none.py")]))
    with pytest.raises(LaunchError, match="No script"):
        launch_command(argparse.Namespace())

    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(4)\n")
    with pytest.raises(SystemExit) as stop:
        launch_command(launch_command_parser().parse_args(["--num_processes", "2", str(script)]))
    assert stop.value.code == 4


def test_a_worker_may_start_a_run_of_one_process(start: Start) -> None:
    script = """
        import os, subprocess, sys
        code = "import os; print(sorted(n for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR') if n in os.environ))"
        main = "import sys; from accel_launch.cli import main; sys.exit(main())"
        open("inner.py", "w").write(code)
        subprocess.run([sys.executable, "-c", main, "launch", *sys.argv[1:], "inner.py"], check=True)
    """
    inner = start("launch", "--num_processes", "2", "script.py", "--num_processes", "1")
    (inner.folder / "script.py").write_text(textwrap.dedent(script))

    assert inner.finish()[:2] == (0, "[]\n" * 2)
