"""`accel verify`: whether a script trains the same on one process and on many."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.observe.verify.compare import Verdict, compare
from accel.observe.verify.recorded_runs import read_record, record_file
from accel.trackers.systems.jsonl import valid_json
from accel_launch.errors import LaunchError
from accel_launch.settings.parser import LaunchParser, launch_flags_parser
from accel_state import env

_DESCRIPTION = (
    "Run the first optimizer steps of a script on one process and on many, with the same global batch, and "
    "report whether they are the same training: samples, losses, gradients and parameters. The first "
    "difference is named, with its cause if known. The script is not changed; it runs twice, in the current "
    "folder. What accel writes for it goes to a temporary folder, and load_state finds no checkpoint. Exit "
    "codes: 0 the same, 1 different, 2 not verified."
)
_VERIFY_FLAGS = ("--steps", "--json", "--without_dropout")
# Flags that are meaningless for one process.
_MULTI_PROCESS_FLAGS = ("--multi_gpu", "--use_parallelism_config", "--parallelism_config_")
_WIDTH = 100  # characters of a line
_FAILED_LINES = 40  # of a script's output


class _VerifyParser(LaunchParser):
    """Collects the flags that are passed on to the launcher."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        tokens = list(sys.argv[1:] if args is None else args)
        parsed, rest = super().parse_known_args(tokens, namespace)
        flags, _ = self._split(tokens)
        parsed.launch_flags = [item for item in flags if item.partition("=")[0] not in _VERIFY_FLAGS]
        return parsed, rest


def verify_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel verify`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `verify` there; by default a
            separate parser.

    Returns:
        The parser. Its namespace is for `verify_command`, which it has as `func`.
    """
    parser = launch_flags_parser(
        "verify",
        subparsers,
        _VerifyParser,
        usage="accel verify [--num_processes N] [--steps K] [flags of accel launch] SCRIPT [arguments]",
        description=_DESCRIPTION,
        func=verify_command,
        examples=(
            "accel verify train.py",
            "accel verify --num_processes 4 --steps 10 train.py --lr 0.1",
        ),
    )
    parser.add_argument("--steps", type=int, default=5, metavar="K", help="Optimizer steps. Default: 5.")
    parser.add_argument("--json", metavar="FILE", help="Write the result there too.")
    parser.add_argument(
        "--without_dropout",
        action="store_true",
        help="Disable dropout in both runs, so that everything else can be compared.",
    )
    return parser


register = verify_command_parser  # what the entry point of `accel verify` names


def verify_command(args: argparse.Namespace) -> int:
    """Run a script on many processes and on one, and print whether they are the same training.

    Args:
        args: The parsed flags.

    Returns:
        0 if they are, else 1.

    Raises:
        LaunchError: If it cannot be verified: the script fails, makes no Accelerator, or makes no step.
    """
    size = 2 if args.num_processes is None else args.num_processes
    _check(args, size)
    with tempfile.TemporaryDirectory(prefix="accel-verify-") as folder:
        many = _run(args, Path(folder) / "many", size, batch_factor=1)
        # The processes that read different data: fewer than all with tensor parallelism.
        factor = 1 if many[0]["split_batches"] else many[0]["data_shards"]
        one = _run(args, Path(folder) / "one", 1, batch_factor=factor)
    verdict = compare(one[0], many)
    made = len(verdict.rows)
    if made < args.steps:
        note = f"The script ended after {made} of {args.steps} steps."
        verdict = dataclasses.replace(verdict, notes=(*verdict.notes, note))
    print(_text(verdict, args.training_script, size))
    if args.json is not None:
        same = {"same": verdict.difference is None, "num_processes": size}
        Path(args.json).write_text(json.dumps(valid_json(same | dataclasses.asdict(verdict)), indent=2))
    return int(verdict.difference is not None)


def _check(args: argparse.Namespace, size: int) -> None:
    if args.training_script is None:
        raise LaunchError("No script was passed: accel verify [flags] SCRIPT [arguments of the script].")
    if size < 2:
        raise LaunchError(f"--num_processes is {size}: give 2 or more, which are compared with one.")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise LaunchError(f"--json is {args.json}: its folder does not exist. Create it first.")
    if args.steps < 1:
        raise LaunchError(f"--steps is {args.steps}: give 1 or more.")
    if args.num_machines not in (None, 1):
        raise LaunchError(
            f"--num_machines is {args.num_machines}: accel verify starts processes on one machine."
        )


def _run(args: argparse.Namespace, folder: Path, size: int, batch_factor: int) -> list[dict[str, Any]]:
    """Run the script, and return what its processes recorded, in the order of their ranks."""
    folder.mkdir()
    settings = {"steps": args.steps, "batch_factor": batch_factor, "without_dropout": args.without_dropout}
    (folder / "settings.json").write_text(json.dumps(settings))
    environ = env.snapshot()
    env.put(environ, "ACCELERATE_VERIFY_FOLDER", str(folder))
    # Sources of differences between two runs of one program: sets of strings, and matrix products on GPUs.
    environ |= {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
    # One process has no mesh.
    flags = [item for item in args.launch_flags if size > 1 or not item.startswith(_MULTI_PROCESS_FLAGS)]
    # One machine, also in the batch script of a Slurm job of several.
    flags += ["--num_machines=1", f"--num_processes={size}"]
    command = [*flags, args.training_script, *args.training_script_args]
    ran = subprocess.run(
        # Not `accel` on the PATH, which may be that of another environment.
        [sys.executable, "-m", "accel_launch", "launch", *command],
        env=environ,
        stdout=subprocess.PIPE,
        # Merged, so that lines of both streams stay in order.
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    where = f"on {size} processes" if size > 1 else "on one process"
    if ran.returncode:
        shown = "\n".join(f"  {line}" for line in ran.stdout.splitlines()[-_FAILED_LINES:])
        raise LaunchError(
            f"not verified: {args.training_script} failed {where} with exit code {ran.returncode}. The end "
            f"of its output:\n{shown}"
        )
    if not all(record_file(folder, rank).exists() for rank in range(size)):
        raise LaunchError(
            f"not verified: {args.training_script} made no Accelerator {where}, which records the steps."
        )
    records = [read_record(folder, rank) for rank in range(size)]
    if not all(record["steps"] for record in records):
        prepared = ", ".join(records[0]["optimizers"]) or "none"
        raise LaunchError(
            f"not verified: {args.training_script} ended {where} without a step that is recorded. Prepared "
            f"optimizers: {prepared}. Recorded are those whose class derives from torch.optim.Optimizer and "
            "calls its __init__, when step() is called; LOMO, which steps in backward, is not."
        )
    return records


def _text(verdict: Verdict, script: str, size: int) -> str:
    head = ["step", "samples", "loss on 1", f"on {size}", "gradients on 1", f"on {size}", "parameters apart"]
    rows = [
        [
            str(row.step),
            str(row.samples[0])
            if row.samples[0] == row.samples[1]
            else f"{row.samples[0]} and {row.samples[1]}",
            *(f"{value:.6g}" for value in (*row.losses, *row.norms)),
            f"{row.apart:.1e}",
        ]
        for row in verdict.rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(item.rjust(width) for item, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    sentences = [f"Note: {note}" for note in verdict.notes]
    difference = verdict.difference
    if difference is None:
        sentences.append(f"The same: {script} trains on {size} processes as it does on one.")
    else:
        when = f"from step {difference.step} on" if difference.step else "from the start"
        sentences.append(f"Different {when}: {difference.text}")
        sentences += [f"Likely cause: {cause}" for cause in verdict.causes] or ["The cause is unknown."]
    lines += [
        textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False) for text in sentences
    ]
    return "\n".join(lines)
