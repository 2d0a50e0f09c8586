"""Folders of torch.distributed.checkpoint (DCP), written and read by all processes."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files.writer import Writer
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks
from accel_ckpt.sharded.dcp_index import WrittenShard, write_index, written_shards
from accel_ckpt.sharded.dcp_plan import local_write_items
from accel_ckpt.sharded.dcp_reader import SafePlanner, SafeReader, read_metadata
from accel_ckpt.sharded.layouts import Layout, common_replicas, layout_of, meshes_of
from accel_state.process.info import ProcessInfo

_T = TypeVar("_T")


def write_folder(
    state: dict[str, Any],
    folder: Path,
    process: ProcessInfo,
    group: Any = None,
    *,
    writer: Writer | None = None,
) -> None:
    """Write a sharded state dict into a folder of DCP. Every process must call it.

    Args:
        state: The state dict.
        folder: The folder.
        process: This process.
        group: The process group of its collectives; None for the default group.
        writer: Writes and flushes this process's shards; by default torch does. The index is only flushed
            with `writer=None`.

    Raises:
        Exception: The error of this process; a CheckpointError on the other processes.
    """
    if writer is not None and _write_without_plan(state, folder, process, group, writer):
        return
    storage = _storage(folder, writer)
    _collective(
        lambda: save(state, storage_writer=storage, process_group=group, no_dist=process.world_size == 1),
        process,
        f"writing {folder.name}",
        group,
    )


def _write_without_plan(
    state: dict[str, Any], folder: Path, process: ProcessInfo, group: Any, writer: Writer
) -> bool:
    """Write a state without a plan of the main process, if all processes have it in the same layout.

    Returns:
        Whether it is written.
    """
    task = f"writing {folder.name}"

    def describe() -> tuple[dict[str, Any], dict[str, Any], list[DeviceMesh], Layout | None]:
        flat, paths = flatten_state_dict(state)
        meshes = meshes_of(flat)
        return flat, paths, meshes, layout_of(flat, paths, meshes)

    flat, paths, meshes, layout = run_on_all_ranks(describe, process, task, group)
    replicas = common_replicas(all_gather_object(layout, process, group), process.rank)
    if replicas is None:
        return False
    replica_of_mesh = dict(zip(meshes, replicas, strict=True))
    storage = _storage(folder, writer)

    def write() -> list[WrittenShard]:
        items = local_write_items(flat, replica_of_mesh, process.rank, process.world_size)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(flat)
        storage.set_up_storage_writer(process.is_main)
        plan = storage.prepare_local_plan(SavePlan(items))
        if not items:
            return []
        # torch numbers the files by the index of the plan.
        *_, plan = storage.prepare_global_plan([SavePlan([])] * process.rank + [plan])
        return written_shards(storage.write_data(planner.finish_plan(plan), planner).wait(), items)

    written = _collective(write, process, task, group)
    sent: list[Any] = [pickle.dumps(written)]
    if process.world_size > 1:
        per_rank = [None] * process.world_size if process.is_main else None
        dist.gather_object(sent[0], per_rank, group=group)
        sent = per_rank or []

    def finish() -> None:
        if process.is_main:
            write_index(folder, flat, paths, sent, storage.storage_meta())

    _collective(finish, process, task, group)
    return True


def _storage(folder: Path, writer: Writer | None) -> FileSystemWriter:
    storage = FileSystemWriter(folder, sync_files=writer is None)
    if writer is not None:
        storage.fs = _Files(writer)
    return storage


class _Files(FileSystem):
    """torch's access to files, with the shards written by a `Writer`."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if Path(path).suffix == ".distcp":
            assert mode == "wb"
            with self._writer.open(Path(path)) as file:  # torch closes it
                yield cast("io.IOBase", file)
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


def read_folder(
    state: dict[str, Any], folder: Path, process: ProcessInfo, index: Metadata | None = None
) -> None:
    """Read a folder of DCP into the tensors of a state dict. Every process must call it.

    Args:
        state: The state dict, with the shards that this process needs.
        folder: The folder.
        process: This process.
        index: Its index, from `read_index`, if already read.

    Raises:
        CheckpointError: If the folder does not have what the state dict needs.
        Exception: Any other error of this process; a CheckpointError on the other processes.
    """

    def read() -> None:
        # No process_group: only the default group reads, in the foreground.
        load(
            state,
            storage_reader=SafeReader(folder, index),
            planner=SafePlanner(),
            no_dist=process.world_size == 1,
        )

    _collective(read, process, f"reading {folder.name}")


def read_index(folder: Path, process: ProcessInfo) -> Metadata:
    """Read the index of a folder of DCP: its entries and their locations. Every process must call it.

    Args:
        folder: The folder.
        process: This process.

    Raises:
        Exception: The error of this process; a CheckpointError on the other processes.
    """
    return run_on_all_ranks(lambda: read_metadata(folder), process, f"reading {folder.name}")


def _collective(function: Callable[[], _T], process: ProcessInfo, task: str, group: Any = None) -> _T:
    """Call a function of DCP, which may be a collective, and unwrap its errors."""

    def call() -> _T:
        try:
            with warnings.catch_warnings():
                # torch warns of no_dist=True, which is intended here.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                # torch 2.10 itself uses the deprecated class when it writes.
                warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
                return function()
        except CheckpointException as error:  # errors of some processes, raised on all
            # Of the lowest rank, so that every process raises the same error.
            rank, (cause, _) = sorted(error.failures.items())[0]
            if isinstance(cause, CheckpointError):
                # CheckpointException is a BaseException and has every rank's traceback as its text.
                raise type(cause)(str(cause)) from error
            raise CheckpointError(f"process {rank}: {type(cause).__name__}: {cause}") from error

    return run_on_all_ranks(call, process, task, group)
