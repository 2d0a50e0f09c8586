"""The estimate over meshes next to what prepare leaves on one process of a simulated world."""

from __future__ import annotations

import contextlib
import runpy
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.tensor_parallel import split_dims
from accel.estimate.mesh import MeshSizes, mesh_bytes
from accel_state.accelerator_state import AcceleratorState
from accel_state.parallelism.config import ParallelismConfig

pytestmark = pytest.mark.usefixtures("fresh_state")

LLAMA_2_70B = {"width": 8192, "inner": 28672, "heads": 64, "groups": 8, "words": 32000}
LEFT_BYTES = 2_000_000  # of few lists of 8192 ranks, 40 bytes each; one for each parameter would be 14 MB


@contextlib.contextmanager
def fake_world(mesh: MeshSizes, rank: int, **options: Any) -> Iterator[Accelerator]:
    """An Accelerator on one process of a world in which collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=mesh.processes, store=FakeStore())
    try:
        yield Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(**{f"{axis}_size": n for axis, n in asdict(mesh).items()}),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **options),
        )
    finally:
        AcceleratorState._reset_state(True)
        if dist.is_initialized():
            dist.destroy_process_group()


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors if isinstance(tensor, DTensor))


@dataclass(frozen=True)
class Found:
    """What one process of a world measured."""

    seconds: float
    python_bytes: int


def large_model() -> torch.nn.Module:
    """Two layers of Llama 2 70B without memory."""
    transformers = pytest.importorskip("transformers", reason="the alone environment has no transformers")
    config = transformers.LlamaConfig(
        hidden_size=LLAMA_2_70B["width"],
        intermediate_size=LLAMA_2_70B["inner"],
        num_attention_heads=LLAMA_2_70B["heads"],
        num_key_value_heads=LLAMA_2_70B["groups"],
        num_hidden_layers=2,
        vocab_size=LLAMA_2_70B["words"],
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return model


def step(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
    words, places = torch.arange(4)[None], torch.arange(4)[None]
    buffers = [words, places]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
    ):
        accelerator.backward(model(input_ids=words, position_ids=places).logits.sum())
    optimizer.step()


def prepare(mesh: MeshSizes, *, traces: bool, trains: bool = False) -> Found:
    """Prepare the large model on process 1, which gets its weights from process 0; compare all bytes."""
    # The sizes of the manual's table are those of a real model.
    language_model = runpy.run_path(str(Path(__file__).parents[4] / "docs/scale_table.py"))["language_model"]
    shapes, split = language_model(layers=2, **LLAMA_2_70B)
    needed = mesh_bytes(shapes, split, mesh)
    assert split_dims(large_model(), mesh.tp) == split
    options = {"cpu_ram_efficient_loading": True, "auto_wrap_policy": "transformer_based_wrap"}
    with fake_world(mesh, 1, **options) as accelerator:
        model: Any = large_model()
        assert {name: tuple(item.shape) for name, item in model.named_parameters()} == shapes
        optimizer: Any = torch.optim.AdamW(model.parameters())
        with traced() if traces else contextlib.nullcontext(lambda: 0) as memory:
            before = time.process_time()
            model, optimizer = accelerator.prepare(model, optimizer)
            found = Found(time.process_time() - before, memory())

        parameters = list(model.parameters())
        assert all(isinstance(item, DTensor) for item in parameters)
        assert local_bytes(parameters) == needed.parameters
        if trains:
            step(accelerator, model, optimizer)
            assert local_bytes(item.grad for item in parameters) == needed.gradients
            states = [value for state in optimizer.state.values() for value in state.values()]
            assert local_bytes(states) == needed.states
        return found


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Trace Python's memory; yields what tells the bytes that are in use now."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # the sum is taken of a view
def test_prepare_needs_the_formula_and_neither_time_nor_memory_grow_with_the_world() -> None:
    # The same share of the model on each process, and many more replicas of it.
    small, large = (MeshSizes(count, dp_shard=4, cp=2, tp=8) for count in (1, 128))
    assert [mesh.processes for mesh in (small, large)] == [64, 8192]

    prepare(small, traces=False)  # what is imported and made once
    memory = {mesh: prepare(mesh, traces=True, trains=mesh is large).python_bytes for mesh in (small, large)}
    seconds = {mesh: prepare(mesh, traces=False).seconds for mesh in (small, large)}

    assert memory[large] < memory[small] + LEFT_BYTES
    assert seconds[large] < 2 * seconds[small]


class Uneven(torch.nn.Module):
    """Rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)])


def own_bytes(mesh: MeshSizes, rank: int) -> tuple[dict[str, tuple[int, ...]], int]:
    with fake_world(mesh, rank) as accelerator:
        model = Uneven()
        shapes = {name: tuple(item.shape) for name, item in model.named_parameters()}
        return shapes, local_bytes(accelerator.prepare(model).parameters())


def test_the_first_process_has_the_most() -> None:
    mesh = MeshSizes(dp_replicate=2, dp_shard=4)
    found = [own_bytes(mesh, rank) for rank in range(mesh.processes)]

    needed = mesh_bytes(found[0][0], {}, mesh, optimizer="momentum")
    assert needed.parameters == needed.gradients == needed.states == max(count for _, count in found)
    assert found[0][1] == needed.parameters > found[3][1]


def test_parts_that_do_not_divide_are_rounded_up() -> None:
    needed = mesh_bytes({"embed.weight": (7, 5)}, {"embed.weight": 0}, MeshSizes(dp_shard=3, tp=2))
    assert needed.parameters == 4 * 2 * 5  # two of the four rows of seven


def test_what_is_gathered_is_the_largest_layer_and_all_that_is_in_none() -> None:
    shapes = {"embed.weight": (8, 4), "layers.0.weight": (6, 4), "layers.1.weight": (4, 4), "head": (2, 4)}
    split = {"embed.weight": 0, "layers.0.weight": 1}

    assert mesh_bytes(shapes, split, MeshSizes(dp_shard=2)).gathered == 2 * 4 * (32 + 8 + 24)
    assert mesh_bytes(shapes, split, MeshSizes(cp=2, tp=2), "bfloat16").gathered == 2 * 2 * (16 + 8 + 16)
    assert mesh_bytes(shapes, split, MeshSizes(dp_replicate=2, tp=2)).gathered == 0
    assert mesh_bytes(shapes, split, MeshSizes(), optimizer="sgd").total == 2 * 4 * (32 + 24 + 16 + 8)
