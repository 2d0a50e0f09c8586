"""Bundles: a checkpoint and the window whose losses it recomputes, written completely or not at all."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.saving.save import save_state
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors
from accel_ckpt.folder.all_ranks import run_on_main
from accel_ckpt.folder.staging import staged
from accel_state import env
from accel_state.env.table import VARIABLES
from accel_state.verify import output_path

if TYPE_CHECKING:
    from accel.observe.guard.record import WindowRecorder
    from accel.training.run import Run

FACTS = "guard.json"
_VERSION = 1
# Of one process, of what starts it, or of the guard itself; other settings are those of the run.
_OF_PROCESS = ("GUARD", "GUARD_BUNDLE", "REPLAY", "NUM_PROCESSES", "TORCH_DEVICE", "DEBUG_RDV_FILE")
_PREFIXES = ("ACCELERATE_", "FSDP_")


@dataclass(frozen=True)
class Bundle:
    """The step that a bundle is about.

    Attributes:
        step: The number of the step that was wrong.
        message: What was wrong with it.
        ranks: The processes whose windows are there.
    """

    step: int
    message: str
    ranks: tuple[int, ...]


def window_file(rank: int) -> str:
    """The name of the file with the window of a process."""
    return f"guard_rank_{rank}.bin"


def display_path(folder: Path) -> str:
    """Return a folder for messages: relative to the working folder if it is inside."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def write(run: Run, folder: str | os.PathLike[str], about: Bundle, recorder: WindowRecorder) -> Path:
    """Write a bundle; every process calls it.

    Args:
        run: The run, before the step.
        folder: Where bundles are.
        about: What it is about.
        recorder: What has kept the window of this process.

    Returns:
        The bundle's folder.

    Raises:
        Exception: What went wrong here; on other processes a CheckpointError with it.
    """
    process, config = run.process, run.project_configuration
    root = Path(output_path(folder))
    target = run_on_main(lambda: _free(root, about.step), process, "naming the bundle")
    # Otherwise save_state would choose a folder by itself, and count it among the checkpoints.
    named, config.automatic_checkpoint_naming = config.automatic_checkpoint_naming, False
    try:
        with staged(target, process=process) as staging:
            # The folder that is open is written into, and not committed by it.
            save_state(run, str(staging.path), safe_serialization=True, main_process_only=False)
            # A window may be large, and those of processes whose losses were right are of no use.
            if process.rank in about.ranks:
                staging.write(recorder.to_state(), window_file(process.rank))
            if process.is_main:
                with staging.writer.open(staging.path / FACTS) as file:
                    file.write(json.dumps(_facts(run, about), indent=2).encode())
    finally:
        config.automatic_checkpoint_naming = named
    return target


def read_facts(folder: Path) -> dict[str, Any]:
    """Read what a bundle is about.

    Raises:
        CheckpointError: If there is no bundle, or a damaged one.
    """
    path = folder / FACTS
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no bundle: it has no {FACTS}. Name a folder that the guard wrote."
        )
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        version = facts["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): the bundle cannot be read.") from error
    if version != _VERSION:
        raise CheckpointError(f"{path} is of version {version!r}, but this version reads only {_VERSION}.")
    return facts


def read_window(path: Path) -> dict[str, Any]:
    """Read the window of a process.

    Raises:
        CheckpointError: If it is not there, or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there: the bundle has no window of that process.")
    window: dict[str, Any] = tensors.load(path, map_location="cpu")
    return window


def _free(folder: Path, step: int) -> Path:
    """A folder that is not there yet, absolute, as a script may change its working folder."""
    target, number = folder / f"step_{step}", 1
    while target.exists():
        number += 1
        target = folder / f"step_{step}_{number}"
    return target.absolute()


def _facts(run: Run, about: Bundle) -> dict[str, Any]:
    main = sys.modules["__main__"]
    spec, script = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return {
        "version": _VERSION,
        "step": about.step,
        "message": about.message,
        "ranks": list(about.ranks),
        "world_size": run.process.world_size,
        "engine": run.engine.name,
        "mixed_precision": str(run.state.mixed_precision),
        "num_steps": run.gradient_state.num_steps,
        # As `python -m` has it.
        "module": None if spec is None else spec.name,
        # Absolute, as `accel replay` may be called from another folder.
        "script": None if script is None else os.path.abspath(script),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": _environment(),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def _environment() -> dict[str, str]:
    # Variables of the table alone: others may hold secrets.
    of_process = {f"ACCELERATE_{name}" for name in _OF_PROCESS}
    chosen = [name for name in VARIABLES if name.startswith(_PREFIXES) and name not in of_process]
    return {name: text for name in chosen if (text := env.raw(name))}
