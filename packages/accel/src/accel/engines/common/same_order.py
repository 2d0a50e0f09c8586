"""A check that all processes use the same groups of parameters, in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.trees.walk import flatten
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

FSDP_FIX = (
    "Have all processes run the same modules; or choose larger groups (auto_wrap_policy, "
    "transformer_cls_names_to_wrap), inside of which processes may use different parameters."
)
ZERO3_FIX = (
    "Have all processes run the same modules; or name the class of the module that has the branches in "
    "DeepSpeedPlugin(transformer_moe_cls_names=...), inside of which processes may use different parameters."
)


def check_same_order(
    root: torch.nn.Module, units: Mapping[str, torch.nn.Module], process: ProcessInfo, engine: str, fix: str
) -> None:
    """Compare the order of modules between processes, in the first forward and backward pass that train.

    All processes gather the parameters of such a module together, and reduce its gradients. One that is at
    another module would mix both. Later forward passes are compared with the first one, without
    communication, and one that differs is told once. What torch.compile has compiled is not compared.

    Args:
        root: The model.
        units: The modules, by name; the model itself may be one, and does not count.
        process: This process.
        engine: What the engine is called.
        fix: What to do about a difference, for the messages.
    """
    units = {name: unit for name, unit in units.items() if unit is not root}
    if process.world_size == 1 or not units:
        return
    order = _Order([*units, "the end"], process, engine, fix)
    # Before the engine's own hooks, which communicate.
    root.register_forward_pre_hook(order.begin, prepend=True)
    root.register_forward_hook(order.end)
    for number, unit in enumerate(units.values()):
        unit.register_forward_pre_hook(partial(order.enter, number), prepend=True)
        unit.register_forward_hook(partial(order.leave, number), prepend=True)


class _Order:
    def __init__(self, names: list[str], process: ProcessInfo, engine: str, fix: str) -> None:
        self.names, self.process, self.engine, self.fix = names, process, engine, fix
        self.agreed: list[int] | None = None  # the order of the first pass
        self.seen: list[int] = []
        self.is_training = self.has_told = self.has_queued = False

    def begin(self, *_: Any) -> None:
        self.is_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self.seen = []

    def enter(self, number: int, *_: Any) -> None:
        # The compiler drops what it knows never to run: the hook leaves nothing in a compiled graph.
        if torch.compiler.is_compiling():
            return
        if self.is_training:
            self.seen.append(number)
            if self.agreed is None:
                self.compare(number, "forward")
            elif self.agreed[len(self.seen) - 1 : len(self.seen)] != [number]:
                self.warn(number)  # before the engine communicates

    def leave(self, number: int, module: Any, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.is_training and self.agreed is None:
            reached: list[bool] = []
            for item in flatten(output)[0]:
                if isinstance(item, torch.Tensor) and item.requires_grad:
                    item.register_hook(partial(self.reach, number, reached))  # type: ignore[no-untyped-call]

    def reach(self, number: int, reached: list[bool], gradient: torch.Tensor) -> None:
        if not reached:
            reached.append(True)
            if not self.has_queued:
                self.has_queued = True
                # torch's own way to do something at the end of a backward pass.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.compare(number, "backward")

    def finish(self) -> None:
        self.compare(len(self.names) - 1, "backward")
        self.has_queued = False

    def end(self, *_: Any) -> None:
        if not self.is_training:
            return
        self.is_training = False
        if self.agreed is None:
            self.compare(len(self.names) - 1, "forward")
            self.agreed = self.seen
        elif len(self.seen) < len(self.agreed):
            self.warn(self.agreed[len(self.seen)])

    def warn(self, number: int) -> None:
        if not self.has_told:
            self.has_told = True
            warn(
                f"{self.engine}: a forward pass runs {self.names[number]} on process {self.process.rank} "
                "otherwise than the first one did. All processes gather parameters and reduce gradients "
                f"together: if not all of them do the same, weights become wrong. {self.fix}",
                about="process",
            )

    def compare(self, number: int, what: str) -> None:
        """Raise on all processes if they are at different modules."""
        here = torch.tensor([number, -number], device=self.process.device)
        dist.all_reduce(here, dist.ReduceOp.MAX)
        last, first = int(here[0]), -int(here[1])
        if first != last:
            raise RuntimeError(
                f"{self.engine}: in {what}, some processes are at {self.names[first]} and others at "
                f"{self.names[last]} (process {self.process.rank} at {self.names[number]}). All processes "
                f"gather the parameters of such a module and reduce its gradients together. {self.fix}"
            )
