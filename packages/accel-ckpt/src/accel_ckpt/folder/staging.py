"""A checkpoint that all processes write: open, write, synchronize, commit.

    with staged("my_checkpoint") as staging:
        ...  # every process writes its files into staging.path

When every process leaves the block without an error, "my_checkpoint" appears, complete. Otherwise every
process raises and nothing has changed. With `blocking=False`, `staging.write` copies its argument, which is
written in the background when the block is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from accel_ckpt import file_names
from accel_ckpt.background import thread
from accel_ckpt.background.buffers import SnapshotBuffer
from accel_ckpt.background.snapshot import freeze
from accel_ckpt.files import tensors
from accel_ckpt.files.digests import FileEntry
from accel_ckpt.files.progress import Progress
from accel_ckpt.files.writer import Writer
from accel_ckpt.folder import commit, recovery, rotation
from accel_ckpt.folder.all_ranks import all_gather_object, raise_if_any_failed, run_on_all_ranks, run_on_main
from accel_ckpt.folder.links import PreviousCheckpoint, find_previous, small_content
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process


@dataclass(frozen=True)
class Staging:
    """A checkpoint folder that is being written.

    Args:
        path: The folder to write its files into.
        target: The folder that it becomes.
        commits: Whether this process commits it: the main process, and the local main process of each machine
            with its own disk.
        writes_shared: Whether this process writes the files that are the same for all processes.
        writer: Writes its files.
        progress: Counts their bytes.
        buffer: The memory of copies that are written later; None to write at once.
        previous: The checkpoint that unchanged files are linked to; None to write all files.
        cached: Whether the page cache keeps the files that are the same for all processes: an incremental
            save reads those of the previous save.
        facts: The manifest's facts about the run (JSON values); more may be added until the end of the block.
    """

    path: Path
    target: Path
    commits: bool
    writes_shared: bool
    writer: Writer
    progress: Progress
    buffer: SnapshotBuffer | None = None
    previous: PreviousCheckpoint | None = None
    cached: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    _collective_writes: list[Callable[[Any], None]] = field(default_factory=list)
    _deferred_writes: list[Callable[[], None]] = field(default_factory=list)
    _post_commit: list[Callable[[], object]] = field(default_factory=list)

    def __fspath__(self) -> str:
        return str(self.path)

    def write(self, obj: Any, name: str, safe_serialization: bool = False) -> None:
        """Write an object into a file of the checkpoint, or copy it, to be written later.

        Args:
            obj: What to write.
            name: The file's path inside the folder.
            safe_serialization: Whether to write safetensors.

        Raises:
            ValueError: If safetensors cannot hold the object; it names the entry.
        """
        self._write(obj, name, safe_serialization)
        self._wait()

    def write_all(self, objects: Mapping[str, Any]) -> None:
        """Write objects as `write` does, and copy all of them in parallel.

        Args:
            objects: The objects by the file's path inside the folder. Those named `*.safetensors` are written
                as safetensors.

        Raises:
            ValueError: As `write`.
        """
        for name, obj in objects.items():
            self._write(obj, name, name.endswith(".safetensors"))
        self._wait()

    def _write(self, obj: Any, name: str, safe_serialization: bool) -> None:
        if self.buffer is not None:
            frozen = freeze(obj, safe_serialization, self.buffer)
            self._deferred_writes.append(lambda: self._write_file(name, frozen))
        else:
            self._write_file(name, tensors.make_writer(obj, safe_serialization))

    def _wait(self) -> None:
        """Wait until the written objects may change.

        Copies from a device are ordered by its stream, and complete after `SnapshotBuffer.synchronize`.
        """
        if self.buffer is not None:
            self.buffer.wait_for_cpu()

    def write_bytes(self, content: bytes, name: str) -> None:
        """Write bytes into a file of the checkpoint.

        Args:
            content: What to write.
            name: The file's path inside the folder.
        """
        write = _bytes_writer(content)
        if self.buffer is not None:
            self._deferred_writes.append(lambda: self._write_file(name, write))
        else:
            self._write_file(name, write)

    def _write_file(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        path = self.path / name
        previous = self.previous
        if previous is not None and previous.is_small(name):
            # Small content is built once, both to compare it and to write it.
            content = small_content(write)
            if content is None:
                previous = None  # it is larger now
            else:
                write = _bytes_writer(content)
        linked = None if previous is None else previous.link(name, path, write, self.writer.digest)
        if linked is not None:
            self.writer.link(path, linked.chunks)
            return
        with self.writer.open(path, self.cached) as file:
            write(file)

    def write_collectively(self, function: Callable[[Any], None]) -> None:
        """Write files by a collective function, at once or in the background.

        Args:
            function: Writes them, called with the process group for collectives (None for the default group).
                Every process passes the same number of functions; each fails on all processes or on none.
        """
        if self.buffer is None:
            function(None)
        else:
            self._collective_writes.append(function)

    def after_commit(self, function: Callable[[], object]) -> None:
        """Register a function to call on every process that commits, after the commit.

        Args:
            function: The function.
        """
        self._post_commit.append(function)


def _bytes_writer(content: bytes | memoryview) -> Callable[[IO[bytes]], object]:
    return lambda file: file.write(content)


# Open staging folders of this process, by their path, which save_custom_state is called with.
_OPEN: dict[Path, Staging] = {}


def find_open_staging(folder: str | os.PathLike[str]) -> Staging | None:
    """Return the open staging folder of this path, or None."""
    return _OPEN.get(Path(os.path.abspath(folder)))


@contextmanager
def staged(
    folder: str | os.PathLike[str],
    *,
    save_on_each_node: bool = False,
    process: ProcessInfo | None = None,
    blocking: bool = True,
    incremental: bool = False,
) -> Iterator[Staging]:
    """Write a checkpoint: the folder appears, or is replaced, atomically at the end of the block.

    Every process must enter and leave. If the folder is the `path` of an open staging folder, that one is
    used again, and is committed by the call that opened it. A save that still runs in the background is
    waited for first.

    Args:
        folder: The checkpoint folder.
        save_on_each_node: Whether each machine with its own disk gets the shared files too.
        process: This process; by default the current one.
        blocking: False to write and commit in the background; `thread.wait` waits for it.
        incremental: Whether to link a file instead of writing it, if the newest complete checkpoint in or
            next to the folder has the same file. Only files that are the same for all processes are linked.

    Yields:
        The staging folder.

    Raises:
        Exception: The error of this process, or of the previous save in the background.
        CheckpointError: On every other process, with that error. The target is unchanged.
    """
    already_open = find_open_staging(folder)
    if already_open is not None:
        yield already_open
        return
    thread.wait()
    process = current_process() if process is None else process
    # Created here, by every process in the same order, and not in the thread.
    group = None if blocking else thread.group_for(process)
    staging = _open(Path(os.path.realpath(folder)), save_on_each_node, process, blocking, incremental)
    _OPEN[staging.path] = staging
    error: Exception | None = None
    is_taken_over = False
    try:
        try:
            yield staging
        except Exception as caught:
            error = caught
        finally:  # also after an error, as threads may still be copying
            try:
                if staging.buffer is not None:
                    staging.buffer.synchronize()
            except Exception as caught:
                error = error or caught
        # Every process gets here: a failed one must not leave the others waiting in a collective.
        raise_if_any_failed(error, process, "writing the checkpoint")
        if blocking:
            is_taken_over = True
            _finish(staging, process, None)
        else:
            thread.start(lambda: _finish(staging, process, group))
            is_taken_over = True
    finally:
        del _OPEN[staging.path]
        if not is_taken_over:
            _close(staging, sealed=False)


_buffer: SnapshotBuffer | None = None


def _reset_buffer(process: ProcessInfo) -> SnapshotBuffer:
    """Return the memory of saves in the background, which run one at a time."""
    global _buffer
    if _buffer is None or _buffer.device != process.device:
        _buffer = SnapshotBuffer(process)
    _buffer.reset()
    return _buffer


def release_buffer() -> None:
    """Free the memory that is kept for copies of the state; the next save allocates it again."""
    global _buffer
    thread.join()
    _buffer = None


def _open(target: Path, each_node: bool, process: ProcessInfo, blocking: bool, incremental: bool) -> Staging:
    def prepare() -> tuple[str, str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        recovery.restore_name(target)
        # Created on the main process: one name for the save, also on machines with their own disks.
        token = commit.new_token()
        path = commit.staging_path(target, token)
        path.mkdir(parents=True)
        # Relative, as another machine may mount the same folder elsewhere.
        return path.relative_to(target.parent).as_posix(), token

    name, token = run_on_main(prepare, process, "opening the checkpoint folder")
    path = target.parent / name

    def join() -> bool:
        # If the main process's folder does not exist here, the machine has its own disk.
        if process.is_main or not process.is_local_main or path.is_dir():
            return process.is_main
        path.mkdir(parents=True)
        return True

    commits = run_on_all_ranks(join, process, "opening the checkpoint folder")
    buffer = None if blocking else _reset_buffer(process)
    # No progress bar for a save in the background: it would be drawn across the output of training.
    progress = Progress(f"Saving {target.name}", shown=process.is_main and blocking)
    writes_shared = process.is_main or (each_node and commits)
    previous = find_previous(target) if incremental and writes_shared else None
    writer, facts = Writer(progress), {"save": token}
    return Staging(
        path, target, commits, writes_shared, writer, progress, buffer, previous, incremental, facts
    )


def _finish(staging: Staging, process: ProcessInfo, group: Any) -> None:
    """Write the deferred files, seal and commit."""
    sealed = False
    try:
        # First, as these are collectives, which all processes must reach in the same state.
        for function in staging._collective_writes:
            function(group)
        # Each step synchronizes before the next begins: no process seals before all have written, and none
        # commits before all have sealed.
        entries = run_on_all_ranks(lambda: _write_deferred(staging), process, "writing the checkpoint", group)
        written = all_gather_object(entries, process, group)
        run_on_all_ranks(lambda: _seal(staging, process, written), process, "writing the checkpoint", group)
        sealed = True
        run_on_all_ranks(lambda: _commit(staging), process, "committing the checkpoint", group)
        run_on_all_ranks(
            lambda: _run_post_commit(staging), process, "cleaning up after the checkpoint", group
        )
    finally:
        _close(staging, sealed)


def _write_deferred(staging: Staging) -> tuple[list[FileEntry], int | None]:
    """Write the copies in memory; return the entries of this process, and the next sequence number here."""
    for function in staging._deferred_writes:
        function()
    # Read before the commit by each machine, and the largest is used: their disks
    # may have different checkpoints.
    numbered = staging.commits and file_names.iteration_of(staging.target.name) is not None
    sequence = rotation.next_sequence(staging.target.parent) if numbered else None
    return staging.writer.entries(staging.path), sequence


def _seal(staging: Staging, process: ProcessInfo, written: list[tuple[list[FileEntry], int | None]]) -> None:
    if not staging.commits:
        return
    facts = {"world_size": process.world_size, "topology": _topology(process), **staging.facts}
    sequences = [sequence for _, sequence in written if sequence is not None]
    if sequences:
        facts["sequence"] = max(sequences)  # above those on the disks of all machines
    if staging.path.parent == staging.target:
        facts["in_place"] = True  # the folder contains other files
        # Before the manifest: once that is written, the move must succeed.
        recovery.check_room(staging.path, staging.target)
    commit.seal(staging.path, facts, staging.writer, [entry for entries, _ in written for entry in entries])


def _commit(staging: Staging) -> None:
    if staging.commits:
        commit.commit(staging.path, staging.target)


def _run_post_commit(staging: Staging) -> None:
    if staging.commits:
        for function in staging._post_commit:
            function()


def _topology(process: ProcessInfo) -> dict[str, Any]:
    return {
        "machines": process.world_size // process.local_world_size,
        "processes_per_machine": process.local_world_size,
        "distributed_type": str(process.distributed_type.value),
        "device": process.device.type,
    }


def _close(staging: Staging, sealed: bool) -> None:
    """End the threads, and delete the leftovers of a failed save.

    Args:
        staging: The staging folder.
        sealed: Whether all processes have sealed, so that it may contain the only checkpoint.
    """
    staging.writer.close()
    staging.progress.close()
    # They refer to the staging folder, and it to them. Python collects cycles late, if at all, in a process
    # with many objects, and their memory would pile up from save to save.
    for functions in (staging._collective_writes, staging._deferred_writes, staging._post_commit):
        functions.clear()
    # Sealed and not committed: this may be the only checkpoint, which `abandon` checks first.
    if staging.commits and sealed:
        recovery.abandon(staging.path, staging.target)
    elif staging.commits:
        recovery.discard(staging.path)
