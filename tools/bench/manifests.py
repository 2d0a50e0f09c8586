"""What the main process does to complete a checkpoint that 8,192 processes have written: by simulation.

Manifest: each process describes its files, and sends that as bytes; the files here are as large as they say,
and are empty. Unpacking, finding, describing and writing the manifest is the real code.

Index: each process sends the layout of a 70B model's weights, or of Adam's two states of each, and then where
it has put its parts of them, as bytes. Unpacking them, choosing what the main process writes itself, making
and checking the index of torch.distributed.checkpoint, and writing it is the real code.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import tracemalloc
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from accel_ckpt.sharded import dcp_plan
from accel_ckpt.sharded.dcp_index import WrittenShard, write_index
from accel_ckpt.sharded.layouts import common_replicas, layout_of, meshes_of

from .row import Row
from .workers import run_workers

RANKS, QUICK_RANKS = 8_192, 256
FILE_BYTES, CHUNK_BYTES = 96 << 20, 16 << 20
LAYERS, QUICK_LAYERS, SHARDS = 80, 2, 128
HIDDEN, HEADS_OF_KEYS, INNER, WORDS = 8_192, 1_024, 28_672, 128_256  # Llama 3.1 70B
LIMIT_S, LIMIT_MB = 2.0, 100.0


def manifest_rows(*, quick: bool = False) -> list[Row]:
    """Measure the CPU time and the memory of sealing, in separate processes."""
    ranks = QUICK_RANKS if quick else RANKS
    layers = QUICK_LAYERS if quick else LAYERS
    manifest = f"manifest of a checkpoint of {ranks:,} processes, 3 files each, on the main process"
    mesh = f"{ranks // SHARDS} x {SHARDS} processes, on the main process"
    of_layers = f"of {layers} layers of 70B, {mesh}"
    sizes = {"ranks": ranks, "layers": layers}
    return [
        *_rows(manifest, "manifests:measure_manifest", ranks=ranks),
        *_rows(f"index {of_layers}", "manifests:measure_index", **sizes, states=1),
        *_rows(f"index of Adam's states {of_layers}", "manifests:measure_index", **sizes, states=2),
    ]


def _rows(what: str, function: str, **sizes: int) -> list[Row]:
    timed, traced = (run_workers(function, 1, traces=on, **sizes) for on in (False, True))
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
        commit.seal(folder, {"world_size": ranks}, described=known)
        seconds = time.process_time() - start
        megabytes = _megabytes(sent) if traces else 0.0
        found = manifest.read(folder)
        if found is None or sorted(found.files, key=str) != sorted(known, key=str):
            raise RuntimeError("the manifest does not say what the processes have written")
    return {"seconds": seconds, "megabytes": megabytes}


def _megabytes(sent: list[bytes]) -> float:
    """The peak since tracing began, with what the processes had sent before."""
    return (tracemalloc.get_traced_memory()[1] + sum(map(len, sent))) / 1e6


def _written(folder: Path, rank: int) -> list[object]:
    """Make the files of a process, and describe them as the process that writes them does."""
    from accel_ckpt import file_names
    from accel_ckpt.files.digests import FileEntry

    folders = [file_names.sharded_model_folder(), file_names.sharded_optimizer_folder()]
    sizes = {f"{folder}/__{rank}_0.distcp": FILE_BYTES for folder in folders}
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


def measure_index(
    rank: int, size: int, ranks: int, layers: int, states: int, traces: bool
) -> dict[str, float]:
    """Make the index; runs in a worker."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    weights = _weights(ranks, layers, states)
    sent = [pickle.dumps(shards) for shards in _shards(weights, ranks)]
    layouts = [pickle.dumps(layout_of(weights, {}, meshes_of(weights)))] * ranks
    with tempfile.TemporaryDirectory() as folder:
        if traces:
            tracemalloc.start()
        start = time.process_time()
        meshes = meshes_of(weights)
        layout_of(weights, {}, meshes)
        copies = common_replicas([pickle.loads(layout) for layout in layouts], 0) or []
        items = dcp_plan.local_write_items(weights, dict(zip(meshes, copies, strict=True)), 0, ranks)
        write_index(Path(folder), weights, {name: (name,) for name in weights}, sent)
        seconds = time.process_time() - start
        megabytes = _megabytes(sent) if traces else 0.0
        own = {shard[:3] for shard in pickle.loads(sent[0])}
        chunks = [(item.index.fqn, item.tensor_data.chunk) for item in items if item.tensor_data]
        if own != {(name, tuple(chunk.offsets), tuple(chunk.sizes)) for name, chunk in chunks}:
            raise RuntimeError("the main process writes other parts than those of the simulation")
        found = FileSystemReader(folder).read_metadata()
        if len(found.storage_data) != len(weights) * SHARDS:
            raise RuntimeError("the index does not have every part")
    dist.destroy_process_group()
    return {"seconds": seconds, "megabytes": megabytes}


def _weights(ranks: int, layers: int, states: int) -> dict[str, DTensor]:
    """The weights of the model, or several states of each, sharded by rows and replicated, as this process
    has them.
    """
    mesh = init_device_mesh("cpu", (ranks // SHARDS, SHARDS))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (WORDS, HIDDEN), "lm_head": (WORDS, HIDDEN)}
    shapes["norm"] = (HIDDEN,)
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HEADS_OF_KEYS, HIDDEN),
            "self_attn.v_proj": (HEADS_OF_KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {
        f"model.{name}.weight{state or ''}": DTensor.from_local(
            torch.empty(shape[0] // SHARDS, *shape[1:], device="meta"), mesh, [Replicate(), Shard(0)]
        )
        for name, shape in shapes.items()
        for state in range(states)
    }


def _shards(weights: dict[str, DTensor], ranks: int) -> list[list[WrittenShard]]:
    """What each process has written."""
    shards: list[list[WrittenShard]] = [[] for _ in range(ranks)]
    sizes = {name: value.numel() * value.element_size() for name, value in weights.items()}
    writers = dcp_plan.choose_writers(sizes, ranks // SHARDS)
    for turn, (name, replica) in enumerate(writers.items()):
        shape = tuple(weights[name].to_local().shape)
        for shard in range(SHARDS):
            process = replica * SHARDS + shard
            begin = (shape[0] * shard, *(0 for _ in shape[1:]))
            file = f"__{process}_0.distcp"
            shards[process].append(WrittenShard(name, begin, shape, file, turn << 20, 1 << 20))
    return shards
