"""Prints the file operations of a `save_state` as JSON: kind and paths, in their order."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from accel import Accelerator
from accel.utils import ProjectConfiguration

folder = Path(tempfile.mkdtemp()).resolve() / "checkpoints"
project = ProjectConfiguration(str(folder.parent), automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.save_state()

found: list[tuple[str, ...]] = []
recording = True


def put(kind: str, *paths: Any) -> None:
    """Keep an operation on the folder of checkpoints."""
    inside = [os.path.relpath(os.fspath(path), folder) for path in paths]
    if not any(path.startswith("..") for path in inside):
        found.append((kind, *inside))


def on_event(event: str, arguments: tuple[Any, ...]) -> None:
    """Take up an operation that Python announces."""
    if not recording or not arguments or not isinstance(arguments[0], (str, os.PathLike)):
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        put("write", arguments[0])
    elif event == "os.rename":
        put("rename", *arguments[:2])
    elif event in ("os.remove", "os.rmdir", "shutil.rmtree") and os.path.lexists(arguments[0]):
        put("delete", arguments[0])


def flushing(number: int) -> None:
    """Flush a file, and keep that."""
    put("flush", os.readlink(f"/proc/self/fd/{number}"))
    fsync(number)


fsync, os.fsync = os.fsync, flushing  # Python announces no flushes
sys.addaudithook(on_event)
accelerator.save_state()
recording = False
os.fsync = fsync
print(json.dumps(found))
accelerator.end_training()
