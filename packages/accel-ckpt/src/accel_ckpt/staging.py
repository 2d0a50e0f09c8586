"""A checkpoint being written by all processes together: open, write, agree, commit.

    with staged("my_checkpoint") as staging:
        ...  # every process writes its files into staging.path

When the block is left on every process without an error, "my_checkpoint" appears whole. Otherwise every
process raises and nothing has changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ckpt import commit, recovery
from accel_ckpt.agree import agree, from_main, together
from accel_state.process import Process, current_process

__all__ = ["Staging", "opened_at", "staged"]


@dataclass(frozen=True)
class Staging:
    """A checkpoint folder that is being written.

    Args:
        path: Where to write its files.
        target: The folder that it will be.
        owner: Whether this process commits it: the main process, and the local main process of each machine
            whose disk is its own.
        writes_shared: Whether this process writes the files that are the same for all processes.
        facts: What the manifest will say about the run (JSON values); may be added to until the end of the
            block.
    """

    path: Path
    target: Path
    owner: bool
    writes_shared: bool
    facts: dict[str, Any] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return str(self.path)


_OPEN: dict[Path, Staging] = {}


def opened_at(folder: str | os.PathLike[str]) -> Staging | None:
    """Return the staging folder that is open at this path, or None."""
    return _OPEN.get(Path(os.path.abspath(folder)))


@contextmanager
def staged(
    folder: str | os.PathLike[str], *, save_on_each_node: bool = False, process: Process | None = None
) -> Iterator[Staging]:
    """Write a checkpoint: the folder appears, or is replaced, as a whole at the end of the block.

    Every process must enter and leave. A folder that is the `path` of an open staging folder is that one
    again, and committed where it was opened.

    Args:
        folder: The checkpoint folder.
        save_on_each_node: Whether each machine with a disk of its own gets the shared files too.
        process: This process; by default the current one.

    Yields:
        Where to write.

    Raises:
        Exception: What went wrong here.
        CheckpointError: On every other process, with what went wrong elsewhere. The target is as it was
            before.
    """
    inside = opened_at(folder)
    if inside is not None:
        yield inside
        return
    process = current_process() if process is None else process
    staging = _open(Path(os.path.realpath(folder)), save_on_each_node, process)
    _OPEN[staging.path] = staging
    error: Exception | None = None
    try:
        try:
            yield staging
        except Exception as caught:
            error = caught
        agree(error, process, "writing the checkpoint")
        _finish(staging, process)
    finally:
        del _OPEN[staging.path]
        if staging.owner:
            recovery.discard(staging.path)


def _open(target: Path, each_node: bool, process: Process) -> Staging:
    def prepare() -> tuple[str, str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        recovery.finish(target)
        token = commit.new_token()
        path = commit.staging_path(target, token)
        path.mkdir(parents=True)
        return path.relative_to(target.parent).as_posix(), token

    name, token = from_main(prepare, process, "opening the checkpoint folder")
    path = target.parent / name

    def join() -> bool:
        # Where the main process's folder is not to be seen, the disk is this machine's own.
        if process.is_main or not process.is_local_main or path.is_dir():
            return process.is_main
        path.mkdir(parents=True)
        return True

    owner = together(join, process, "opening the checkpoint folder")
    return Staging(path, target, owner, process.is_main or (each_node and owner), {"save": token})


def _finish(staging: Staging, process: Process) -> None:
    def seal() -> None:
        if staging.owner:
            commit.seal(staging.path, {"world_size": process.world_size, **staging.facts})

    def appear() -> None:
        if staging.owner:
            commit.commit(staging.path, staging.target)

    together(seal, process, "writing the checkpoint")
    together(appear, process, "committing the checkpoint")
