"""How much memory a process of a device mesh needs: counted tensor by tensor, as the mesh engine cuts them.

With a mesh of r replicas x s shards x c context-parallel x t tensor-parallel processes, a tensor of shape
(d, ...) first becomes t parts along the dimension in which the tensor-parallel plan splits it, and each of
them N = s c parts of rows. The first process has the most: of n rows over N processes it has ceil(n / N).
With e elements on a process, b bytes each, and k optimizer states per parameter, training needs

    b e (parameters) + b e (gradients) + k b e (states) + 2 b (R + L) + b B (buffers)

where the largest layer of the stack has L elements, and all that is in no layer has R, as one process has
them in full (a t-th of what is split). One layer at a time is gathered, with its gradients; the rest stays
from the beginning of forward to the end of backward. Where N = 1, nothing is gathered; replicas
without shards (DDP) have b e for the buckets in which gradients are reduced instead. Other replicas are not
sharded, and the context-parallel axis shards parameters like further shards. All B elements of buffers are
complete. Not included are activations, what is copied in between, what the optimizer's step holds
while it computes, and the context of the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

BYTES: dict[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
"""Bytes of one parameter by the dtype in which it is stored."""

OPTIMIZER_STATES = {"adam": 2, "momentum": 1, "sgd": 0}
"""States per parameter by optimizer."""


@dataclass(frozen=True)
class MeshSizes:
    """The sizes of a mesh's axes, as `ParallelismConfig` has them.

    Args:
        dp_replicate: Replicas.
        dp_shard: Processes that shard a replica.
        cp: Processes that split sequences.
        tp: Processes that split weights.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def shards(self) -> int:
        """Processes that share out the rows of a parameter."""
        return self.dp_shard * self.cp

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.dp_replicate * self.shards * self.tp


@dataclass(frozen=True)
class MeshBytes:
    """The memory that one process needs, in bytes.

    Args:
        parameters: Its parts of the parameters.
        gradients: The same of the gradients.
        states: The same of the optimizer's states.
        gathered: What is gathered at once, with its gradients: the largest layer and all that is in none.
        buckets: What replicas reduce gradients in (DDP).
        buffers: The model's buffers.
    """

    parameters: float
    gradients: float
    states: float
    gathered: float
    buckets: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, item.name) for item in fields(self)))


def block_of(name: str) -> str:
    """The block of a parameter: up to its number in the stack of layers, else the module that has it.

    Args:
        name: The parameter's full name.
    """
    segments = name.split(".")
    for index, piece in enumerate(segments):
        if piece.isdecimal():
            return ".".join(segments[: index + 1])
    return ".".join(segments[:-1])


def mesh_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    split: Mapping[str, int],
    mesh: MeshSizes,
    dtype: str = "float32",
    optimizer: str = "adam",
    buffers: int = 0,
) -> MeshBytes:
    """Estimate what training over a mesh needs on the process that has the most.

    Args:
        shapes: The shape of each parameter by its name; shared ones once.
        split: The dimension in which the tensor-parallel plan splits a parameter, by its name; those that it
            leaves whole are left out.
        mesh: The sizes of the axes.
        dtype: The dtype of the parameters; with mixed precision that is float32.
        optimizer: One of `OPTIMIZER_STATES`.
        buffers: Number of elements of the model's buffers.

    Returns:
        Bytes, without activations.
    """
    # One empty entry, for models without a stack of layers.
    local, rest, layers = 0, 0, {"": 0}
    for name, shape in shapes.items():
        # A parameter without dimensions has one element.
        local_shape = list(shape) or [1]
        if name in split:
            local_shape[split[name]] = math.ceil(local_shape[split[name]] / mesh.tp)
        block = block_of(name)
        if block.rpartition(".")[2].isdecimal():
            layers[block] = layers.get(block, 0) + math.prod(local_shape)
        else:
            rest += math.prod(local_shape)
        # FSDP2 cuts dimension 0, and the first process has the remainder.
        local_shape[0] = math.ceil(local_shape[0] / mesh.shards)
        local += math.prod(local_shape)
    b = BYTES[dtype]
    is_ddp = mesh.processes == mesh.dp_replicate > 1  # with shards, FSDP2 reduces without buckets
    return MeshBytes(
        parameters=b * local,
        gradients=b * local,
        states=OPTIMIZER_STATES[optimizer] * b * local,
        gathered=2 * b * (rest + max(layers.values())) if mesh.shards > 1 else 0.0,
        buckets=b * local if is_ddp else 0.0,
        buffers=b * buffers,
    )
