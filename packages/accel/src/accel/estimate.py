"""How much memory a model needs: counted from its tensors, without their values.

All numbers are bytes on one device. With P parameters of b bytes each, s optimizer states per parameter
(Adam: 2, momentum: 1, plain SGD: 0), N processes, and the largest block (a layer of the stack, or an
embedding) of L parameters, training needs

    one process   b P (params) + b P (gradients) + s b P (states)
    DDP           the same, and b P for the buckets in which gradients are reduced
    FSDP          (2 + s) b P / N, and 2 b L: one block is whole at a time, its parameters and gradients
    ZeRO 1        2 b P + K P / N
    ZeRO 2        b P + (b + K) P / N
    ZeRO 3        (2 b + K) P / N, and 2 b L

where K = 4 (1 + s) bytes, as ZeRO keeps the states and a copy of the parameters in fp32 (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 3.1: K = 12 for Adam).
Inference needs b P. Buffers are counted with the parameters of inference and once per process in training.
Activations, which depend on the batch, and the context of the device are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "BYTES",
    "ENGINES",
    "OPTIMIZER_STATES",
    "ModelSize",
    "block_of",
    "convert_bytes",
    "training_bytes",
]

BYTES: dict[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
"""Bytes of one parameter by the dtype in which it is stored."""

OPTIMIZER_STATES = {"adam": 2, "momentum": 1, "sgd": 0}
"""States per parameter by optimizer."""

ENGINES = ("one process", "DDP", "FSDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")
"""Ways to train whose memory is estimated."""


@dataclass(frozen=True)
class ModelSize:
    """What counts of a model.

    Args:
        parameters: Number of parameters, shared ones once.
        buffers: Number of elements of its buffers.
        largest_block: Number of parameters of its largest block.
        block: That block's name.
    """

    parameters: int
    buffers: int
    largest_block: int
    block: str

    @classmethod
    def from_counts(
        cls, parameters: Mapping[str, int], buffers: Mapping[str, int] | None = None
    ) -> ModelSize:
        """Add up tensors.

        Args:
            parameters: Number of elements by parameter name.
            buffers: Number of elements by buffer name.

        Raises:
            ValueError: If there are no parameters.
        """
        if not parameters:
            raise ValueError("The model has no parameters; there is nothing to estimate.")
        blocks: dict[str, int] = {}
        for name, count in parameters.items():
            blocks[block_of(name)] = blocks.get(block_of(name), 0) + count
        largest = max(blocks, key=lambda block: blocks[block])
        return cls(
            sum(parameters.values()), sum((buffers or {}).values()), blocks[largest], largest or "the model"
        )


def block_of(name: str) -> str:
    """The block of a parameter: up to its number in the stack of layers, else the module that has it.

    Args:
        name: The parameter's full name.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1])


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
    for word, known in ((dtype, BYTES), (engine, ENGINES), (optimizer, OPTIMIZER_STATES)):
        if word not in known:
            raise ValueError(f"{word!r} is not known; known: {', '.join(known)}.")
    if processes < 1:
        raise ValueError(f"processes={processes} is not allowed; allowed: 1 or more.")
    if BYTES[dtype] < 2:
        return None
    b, states = BYTES[dtype], OPTIMIZER_STATES[optimizer]
    zero = 4 * (1 + states)
    p, gathered = size.parameters, 2 * b * size.largest_block
    needed = {
        "one process": (2 + states) * b * p,
        "DDP": (3 + states) * b * p,
        "FSDP": (2 + states) * b * p / processes + gathered,
        "ZeRO 1": 2 * b * p + zero * p / processes,
        "ZeRO 2": b * p + (b + zero) * p / processes,
        "ZeRO 3": (2 * b + zero) * p / processes + gathered,
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
