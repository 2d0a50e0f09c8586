"""How much memory a model needs: counted from its tensors, without their values.

All numbers are bytes on one device. One process, DDP and FSDP are meshes of one axis, and have the formula
of `accel.estimate.mesh`. With P parameters of b bytes each, s optimizer states per parameter, N processes,
and the largest block (a layer of the stack, or an embedding) of L parameters, DeepSpeed needs

    ZeRO 1        2 b P + K P / N
    ZeRO 2        b P + (b + K) P / N
    ZeRO 3        (2 b + K) P / N, and 2 b L: one block is gathered at a time, its parameters and gradients

where K = 4 (1 + s) bytes, as ZeRO keeps the states and a copy of the parameters in fp32 (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 3.1: K = 12 for Adam).
Inference needs b P. Each process has all buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from accel.estimate.mesh import BYTES, OPTIMIZER_STATES, MeshSizes, block_of, mesh_bytes

ENGINES = ("one process", "DDP", "FSDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")
"""Ways to train whose memory is estimated."""

_MESHES = {
    "one process": lambda processes: MeshSizes(),
    "DDP": lambda processes: MeshSizes(dp_replicate=processes),
    "FSDP": lambda processes: MeshSizes(dp_shard=processes),
}
"""Those that are a mesh of one axis."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that count for its memory.

    Args:
        shapes: The shape of each parameter by its name; shared ones once.
        buffers: Number of elements of its buffers.

    Raises:
        ValueError: If there are no parameters.
    """

    shapes: Mapping[str, tuple[int, ...]]
    buffers: int = 0

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ValueError("The model has no parameters; there is nothing to estimate.")

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(self._blocks.values())

    @property
    def block(self) -> str:
        """Name of the largest block."""
        return max(self._blocks, key=lambda block: self._blocks[block]) or "the model"

    @property
    def largest_block(self) -> int:
        """Number of parameters of the largest block."""
        return max(self._blocks.values())

    @cached_property
    def _blocks(self) -> dict[str, int]:
        blocks: dict[str, int] = {}
        for name, shape in self.shapes.items():
            blocks[block_of(name)] = blocks.get(block_of(name), 0) + math.prod(shape)
        return blocks


def training_bytes(
    size: ModelSize, dtype: str, engine: str, processes: int = 1, optimizer: str = "adam"
) -> float | None:
    """Estimate what training needs on each device.

    Args:
        size: The model.
        dtype: The dtype of its parameters; with mixed precision that is float32.
        engine: One of `ENGINES`.
        processes: Number of processes.
        optimizer: One of `OPTIMIZER_STATES`.

    Returns:
        Bytes, without activations; None for a dtype that cannot be trained.

    Raises:
        ValueError: If the dtype, the engine, the optimizer or the number is not one that is known.
    """
    for word, allowed in ((dtype, BYTES), (engine, ENGINES), (optimizer, OPTIMIZER_STATES)):
        if word not in allowed:
            raise ValueError(f"{word!r} is not known; known: {', '.join(allowed)}.")
    if processes < 1:
        raise ValueError(f"processes={processes} is not allowed; allowed: 1 or more.")
    # Integers are for inference alone.
    if BYTES[dtype] < 2:
        return None
    if engine in _MESHES:
        mesh = _MESHES[engine](processes)
        return mesh_bytes(size.shapes, {}, mesh, dtype, optimizer, size.buffers).total
    b, p = BYTES[dtype], size.parameters
    zero = 4 * (1 + OPTIMIZER_STATES[optimizer])  # bytes: the states and a copy of the parameters in fp32
    needed = {
        "ZeRO 1": 2 * b * p + zero * p / processes,
        "ZeRO 2": b * p + (b + zero) * p / processes,
        "ZeRO 3": (2 * b + zero) * p / processes + 2 * b * size.largest_block,
    }
    return needed[engine] + b * size.buffers


def convert_bytes(size: float) -> str:
    """Write a number of bytes in the largest unit that fits.

    Args:
        size: Bytes.

    Returns:
        The number with two digits and its unit, in steps of 1024: "1.5 KB".
    """
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{round(size, 2)} {units[0]}"
