"""Random programs over the documented interface: a model, an optimizer, and a list of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

__all__ = ["LOADS", "OPTIMIZERS", "SCHEDULES", "MicroBatch", "Program", "programs"]

OPTIMIZERS = ("SGD", "AdamW", "Adam", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")
"""Classes of torch.optim whose steps are computed element by element."""

SCHEDULES = ("none", "StepLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR")
"""Of torch.optim.lr_scheduler; the first two take groups that are added later."""

BEFORE = (
    "nothing",
    "evaluate",  # the loss of some samples, without gradients
    "forward",  # a forward pass with gradients, of which nothing is made
    "save",
    "load",  # the newest checkpoint
    "add group",  # a part of the model that no optimizer had
    "freeze",
    "unfreeze",
    "state",  # compare the weights
    "prepare again",  # free_memory, and prepare the unwrapped model
)
"""What happens before a micro-batch."""

LOADS = frozenset({"load", "prepare again"})
"""What makes the loop take a new iterator of its loader."""

KINDS = (
    "train",
    "no backward",  # the loss is computed, and dropped on all processes
    "give up",  # zero_grad and nothing else
    "zero first",  # zero_grad before backward instead of after the step
    "evaluate inside",  # an evaluation between the beginning of the micro-batch and its forward pass
    "two forwards",  # two forward and two backward passes
    "two backwards",  # two backward passes of one forward pass
    "clear",  # model.zero_grad after backward, in the middle of a window or at its end
)
"""What a micro-batch is."""

WEIGHTED_KINDS = ("train", "evaluate inside", "two forwards")
"""Those whose losses all have a backward pass: which weights count for others is the script's business."""

CLIPS = ("none", "norm", "value", "part")
"""How gradients are clipped at a window's end: all by their norm or value, or those of one block."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a program, and what comes before it."""

    before: str = "nothing"
    kind: str = "train"


@dataclass(frozen=True)
class Program:
    """A training, as a script describes it.

    Attributes:
        seed: Of weights, samples and the order of samples.
        blocks: Number of blocks of the model.
        tied: Whether the output layer has the embedding's weight.
        shared: Whether the first block runs twice.
        unused: Whether the model has a block that no forward pass uses.
        frozen: Whether the first block is frozen.
        late: Whether the optimizer gets the last block only by "add group".
        wrapped: Whether sharded engines shard block by block, or all in one piece.
        sharded: Whether checkpoints are sharded, where the engine has a choice.
        optimizer: A class of `OPTIMIZERS`.
        optimizers: 1, or 2: one for the blocks and one for the rest.
        groups: Whether each optimizer has two groups.
        schedule: One of `SCHEDULES`.
        weighted: Whether losses are sums with a weight.
        accumulation: Micro-batches of a window.
        length: Micro-batches of an epoch.
        clip: One of `CLIPS`.
        micro_batches: What happens.
    """

    seed: int = 0
    blocks: int = 2
    tied: bool = False
    shared: bool = False
    unused: bool = False
    frozen: bool = False
    late: bool = False
    wrapped: bool = True
    sharded: bool = True
    optimizer: str = "AdamW"
    optimizers: int = 1
    groups: bool = False
    schedule: str = "none"
    weighted: bool = False
    accumulation: int = 1
    length: int = 4
    clip: str = "none"
    micro_batches: tuple[MicroBatch, ...] = ()

    def __str__(self) -> str:
        changed = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.name != "micro_batches" and (value := getattr(self, field.name)) != field.default
        ]
        batches = ", ".join(f"MicroBatch({item.before!r}, {item.kind!r})" for item in self.micro_batches)
        return f"Program({', '.join([*changed, f'micro_batches=({batches},)'])})"


@st.composite
def programs(
    draw: Any,
    kinds: tuple[str, ...] = KINDS,
    before: tuple[str, ...] = BEFORE,
    takes_unused: bool = True,
    takes_two_optimizers: bool = True,
) -> Program:
    """Random programs.

    Args:
        draw: Given by hypothesis.
        kinds: Of micro-batches, to choose from.
        before: What may come before them.
        takes_unused: Whether models may have a block that no forward pass uses.
        takes_two_optimizers: Whether one model may have two.
    """
    weighted = draw(st.booleans())
    chosen_kinds = [kind for kind in kinds if not weighted or kind in WEIGHTED_KINDS]
    # Most micro-batches are plain ones, so that the effect of what comes between them shows in later steps.
    kind = st.sampled_from(["train"] * (2 * len(chosen_kinds)) + chosen_kinds)
    action = st.sampled_from(["nothing"] * len(before) + [item for item in before if item != "add group"])
    steps = draw(st.lists(st.builds(MicroBatch, action, kind), min_size=3, max_size=10))
    late = "add group" in before and draw(st.booleans())
    if late:
        at = draw(st.integers(0, len(steps) - 1))
        steps[at] = MicroBatch("add group", steps[at].kind)
    return Program(
        seed=draw(st.integers(0, 1000)),
        blocks=draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        shared=draw(st.booleans()),
        unused=takes_unused and draw(st.booleans()),
        frozen=draw(st.booleans()),
        late=late,
        wrapped=draw(st.booleans()),
        sharded=draw(st.booleans()),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        optimizers=draw(st.sampled_from([1, 1, 2])) if takes_two_optimizers else 1,
        groups=draw(st.booleans()),
        schedule=draw(st.sampled_from(SCHEDULES[:2] if late else SCHEDULES)),
        weighted=weighted,
        accumulation=draw(st.integers(1, 3)),
        length=draw(st.integers(2, 5)),
        clip=draw(st.sampled_from(CLIPS)),
        micro_batches=tuple(steps),
    )
