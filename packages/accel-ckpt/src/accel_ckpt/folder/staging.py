"""A checkpoint being written by all processes together: open, write, agree, commit.

    with staged("my_checkpoint") as staging:
        ...  # every process writes its files into staging.path

When the block is left on every process without an error, "my_checkpoint" appears whole. Otherwise every
process raises and nothing has changed. With `blocking=False`, what `staging.write` is given is copied, and
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
        path: Where to write its files.
        target: The folder that it will be.
        owner: Whether this process commits it: the main process, and the local main process of each machine
            whose disk is its own.
        writes_shared: Whether this process writes the files that are the same for all processes.
        writer: What writes its files.
        progress: Counts their bytes.
        buffer: Where copies go that are written later; None to write at once.
        earlier: The checkpoint to whose files unchanged ones are linked; None to write all.
        cached: Whether the system's cache keeps the files that are the same for all processes: an incremental
            save reads those of the save before.
        facts: What the manifest will say about the run (JSON values); may be added to until the end of the
            block.
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
        """Write several objects, as `write` does, and copy them all at the same time.

        Args:
            objects: What to write, by the file's path inside the folder. Those called `*.safetensors` are
                written as such.

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
            self._write_file(name, tensors.writing(obj, safe_serialization))

    def _wait(self) -> None:
        """Wait until what was given may change.

        Copies from a device are ordered by its stream, and complete after `Memory.finish`.
        """
        if self.buffer is not None:
            self.buffer.wait_for_cpu()

    def write_bytes(self, content: bytes, name: str) -> None:
        """Write a file of the checkpoint, with the others.

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
            # It is compared to its end before it is found to differ: made once, for that and for the disk.
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
        """Have files written by collective functions, at once or in the background.

        Args:
            function: Writes them, given the process group for collectives (None for that of the run). Every
                process gives as many, and in each of them fails if one does.
        """
        if self.buffer is None:
            function(None)
        else:
            self._collective_writes.append(function)

    def after_commit(self, function: Callable[[], object]) -> None:
        """Have something done on every process that commits, once the checkpoint is there.

        Args:
            function: What to do.
        """
        self._post_commit.append(function)


def _bytes_writer(content: bytes | memoryview) -> Callable[[IO[bytes]], object]:
    return lambda file: file.write(content)


# Staging folders that are open in this process; keyed by their own path, which save_custom_state is given.
_OPEN: dict[Path, Staging] = {}


def find_open_staging(folder: str | os.PathLike[str]) -> Staging | None:
    """Return the staging folder that is open at this path, or None."""
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
    """Write a checkpoint: the folder appears, or is replaced, as a whole at the end of the block.

    Every process must enter and leave. A folder that is the `path` of an open staging folder is that one
    again, and committed where it was opened. A save that still goes on in the background is waited for first.

    Args:
        folder: The checkpoint folder.
        save_on_each_node: Whether each machine with a disk of its own gets the shared files too.
        process: This process; by default the current one.
        blocking: False to write and commit in the background; `thread.wait` waits for it.
        incremental: Whether what `Staging.write` is given is linked, and not written, where the newest
            complete checkpoint in or beside the folder has the same file. Only files that are the same for
            all processes are.

    Yields:
        Where to write.

    Raises:
        Exception: What went wrong here, or in the background before.
        CheckpointError: On every other process, with what went wrong elsewhere. The target is as it was
            before.
    """
    inside = find_open_staging(folder)
    if inside is not None:
        yield inside
        return
    thread.wait()
    process = current_process() if process is None else process
    # Made here, by every process in the same order, and not in the thread.
    group = None if blocking else thread.group_for(process)
    staging = _open(Path(os.path.realpath(folder)), save_on_each_node, process, blocking, incremental)
    _OPEN[staging.path] = staging
    error: Exception | None = None
    handed_over = False
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
        # Every process gets here: one that failed must not leave the others waiting in a collective.
        raise_if_any_failed(error, process, "writing the checkpoint")
        if blocking:
            handed_over = True
            _finish(staging, process, None)
        else:
            thread.start(lambda: _finish(staging, process, group))
            handed_over = True
    finally:
        del _OPEN[staging.path]
        if not handed_over:
            _close(staging, sealed=False)


_buffer: SnapshotBuffer | None = None


def _reset_buffer(process: ProcessInfo) -> SnapshotBuffer:
    """Return the memory of saves in the background, of which there is one at a time."""
    global _buffer
    if _buffer is None or _buffer.device != process.device:
        _buffer = SnapshotBuffer(process)
    _buffer.reset()
    return _buffer


def release_buffer() -> None:
    """Give back the memory that is kept for copies of the state; the next save makes it anew."""
    global _buffer
    thread.join()
    _buffer = None


def _open(target: Path, each_node: bool, process: ProcessInfo, blocking: bool, incremental: bool) -> Staging:
    def prepare() -> tuple[str, str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        recovery.restore_name(target)
        # Made on the main process alone: one name for the save, also on machines with disks of their own.
        token = commit.new_token()
        path = commit.staging_path(target, token)
        path.mkdir(parents=True)
        # Relative, as another machine may mount the same folder elsewhere.
        return path.relative_to(target.parent).as_posix(), token

    name, token = run_on_main(prepare, process, "opening the checkpoint folder")
    path = target.parent / name

    def join() -> bool:
        # Where the main process's folder is not to be seen, the disk is this machine's own.
        if process.is_main or not process.is_local_main or path.is_dir():
            return process.is_main
        path.mkdir(parents=True)
        return True

    commits = run_on_all_ranks(join, process, "opening the checkpoint folder")
    buffer = None if blocking else _reset_buffer(process)
    # No bar for a save in the background: it would be drawn across the output of training.
    progress = Progress(f"Saving {target.name}", shown=process.is_main and blocking)
    writes_shared = process.is_main or (each_node and commits)
    previous = find_previous(target) if incremental and writes_shared else None
    writer, facts = Writer(progress), {"save": token}
    return Staging(
        path, target, commits, writes_shared, writer, progress, buffer, previous, incremental, facts
    )


def _finish(staging: Staging, process: ProcessInfo, group: Any) -> None:
    """Write what is left, seal and commit."""
    sealed = False
    try:
        # First, as these are collectives, which all processes have to reach in the same state.
        for function in staging._collective_writes:
            function(group)
        # Every step is agreed on before the next begins: none seals before all have written, none
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
    """Write what was kept in memory; return what this process wrote, and the next sequence number here."""
    for function in staging._deferred_writes:
        function()
    # Read before the commit by each machine, and the largest taken: their disks
    # may hold different checkpoints.
    numbered = staging.commits and file_names.iteration_of(staging.target.name) is not None
    sequence = rotation.next_sequence(staging.target.parent) if numbered else None
    return staging.writer.entries(staging.path), sequence


def _seal(staging: Staging, process: ProcessInfo, written: list[tuple[list[FileEntry], int | None]]) -> None:
    if not staging.commits:
        return
    facts = {"world_size": process.world_size, "topology": _topology(process), **staging.facts}
    sequences = [sequence for _, sequence in written if sequence is not None]
    if sequences:
        facts["sequence"] = max(sequences)  # above those of all machines' disks
    if staging.path.parent == staging.target:
        facts["in_place"] = True  # other files live in the folder
        # Before the manifest: once it is written, the move has to succeed.
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
    """End the threads, and delete what a save that failed has left.

    Args:
        staging: The staging folder.
        sealed: Whether all processes have sealed theirs, so that it may hold the only checkpoint.
    """
    staging.writer.close()
    staging.progress.close()
    # They refer to the staging folder, and it to them. Python collects cycles late, if at all, in a process
    # with many objects, and what they hold would pile up from save to save.
    for functions in (staging._collective_writes, staging._deferred_writes, staging._post_commit):
        functions.clear()
    # Sealed and not committed: the staging folder may be all that there is, and `abandon` looks first.
    if staging.commits and sealed:
        recovery.abandon(staging.path, staging.target)
    elif staging.commits:
        recovery.discard(staging.path)
