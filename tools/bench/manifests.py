"""What the main process does to seal a checkpoint that 8,192 processes have written: by simulation.

Each process describes its files, and sends that as bytes; the files here are as large as they say, and hold
nothing. Unpacking, finding, describing and writing the manifest is the real code. The index of
torch.distributed.checkpoint is no part of it.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import tracemalloc
from pathlib import Path

from .row import Row
from .workers import run_workers

RANKS, QUICK_RANKS = 8_192, 256
FILE_BYTES, CHUNK_BYTES = 96 << 20, 16 << 20
LIMIT_S, LIMIT_MB = 2.0, 100.0


def manifest_rows(*, quick: bool = False) -> list[Row]:
    """Measure the CPU time and the memory of sealing, in processes of their own."""
    ranks = QUICK_RANKS if quick else RANKS
    what = f"manifest of a checkpoint of {ranks:,} processes, 3 files each, on the main process"
    timed, traced = (
        run_workers("manifests:measure_manifest", 1, ranks=ranks, traces=on) for on in (False, True)
    )
    return [
        Row(f"{what}: CPU time", timed["seconds"], LIMIT_S, unit="s"),
        Row(f"{what}: peak memory of Python", traced["megabytes"], LIMIT_MB, unit="MB"),
    ]


def measure_manifest(rank: int, size: int, ranks: int, traces: bool) -> dict[str, float]:
    """Seal the folder; runs in a worker."""
    from accel_ckpt.folder import commit, manifest

    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        sent = [pickle.dumps(_written(folder, one)) for one in range(ranks)]
        if traces:
            tracemalloc.start()
        start = time.process_time()
        known = [entry for entries in map(pickle.loads, sent) for entry in entries]
        commit.seal(folder, {"world_size": ranks}, known=known)
        seconds = time.process_time() - start
        megabytes = tracemalloc.get_traced_memory()[1] / 1e6 if traces else 0.0
        found = manifest.read(folder)
        if found is None or sorted(found.files, key=str) != sorted(known, key=str):
            raise RuntimeError("the manifest does not say what the processes have written")
    return {"seconds": seconds, "megabytes": megabytes}


def _written(folder: Path, rank: int) -> list[object]:
    """Make the files of a process, and describe them as the process that writes them does."""
    from accel_ckpt import file_names
    from accel_ckpt.files.digests import FileEntry

    parts = [file_names.sharded_model_folder(), file_names.sharded_optimizer_folder()]
    sizes = {f"{part}/__{rank}_0.distcp": FILE_BYTES for part in parts}
    sizes[file_names.random_states_file(rank)] = 1 << 14
    entries: list[object] = []
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.truncate(path, size)
        chunks = tuple(f"{rank * 31 + chunk:032x}" for chunk in range(-(-size // CHUNK_BYTES)))
        entries.append(FileEntry(name, size, file_names.role_of(name), chunks))
    return entries
