"""A check that all processes use the same groups of parameters, in the same order."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.debug.store import default_store, prefixed
from accel_ops.trees.walk import flatten
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

FSDP_FIX = (
    "Run the same modules on all processes; or choose larger groups (auto_wrap_policy, "
    "transformer_cls_names_to_wrap), inside which processes may use different parameters."
)
ZERO3_FIX = (
    "Run the same modules on all processes; or name the class of the module that has the branches in "
    "DeepSpeedPlugin(transformer_moe_cls_names=...), inside which processes may use different parameters."
)


def check_same_order(
    root: torch.nn.Module, units: Mapping[str, torch.nn.Module], process: ProcessInfo, engine: str, fix: str
) -> None:
    """Compare the order of modules between processes, in the first forward and backward pass that train.

    All processes gather the parameters of such a module, and reduce its gradients, in one collective. A
    process that is at another module would mix both. Later forward passes are compared with the first one,
    without communication. A process at which one differs waits, before the engine communicates, until all
    others differ in the same way, and warns once; else it raises. Later backward passes and compiled code are
    not compared.

    Args:
        root: The model.
        units: The modules, by name; the model itself may be one, and is ignored.
        process: This process.
        engine: The name of the engine.
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


# How many models there are in a process group, by its store: all its processes prepare the same ones.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_PAUSE_S = 0.001  # between two polls of the store


class _Order:
    def __init__(self, names: list[str], process: ProcessInfo, engine: str, fix: str) -> None:
        self.names, self.process, self.engine, self.fix = names, process, engine, fix
        self.reference: list[int] | None = None  # the order of the first forward pass
        self.seen: list[int] = []
        self.is_training = self.has_warned = self.has_queued = False
        store = default_store()
        _counts[store] = _counts.get(store, 0) + 1
        self.prefix = f"accel/order/{_counts[store]}"
        self.agreements = 0

    def begin(self, *_: Any) -> None:
        self.is_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self.seen = []

    def enter(self, number: int, *_: Any) -> None:
        # The compiler drops what it knows never to run: the hook leaves nothing in a compiled graph.
        if torch.compiler.is_compiling():
            return
        if self.is_training:
            self.seen.append(number)
            if self.reference is None:
                self.compare(number, "forward")
            elif self.reference[len(self.seen) - 1 : len(self.seen)] != [number]:
                self.agree(number)

    def leave(self, number: int, module: Any, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.is_training and self.reference is None:
            reached: list[bool] = []
            for item in flatten(output)[0]:
                if isinstance(item, torch.Tensor) and item.requires_grad:
                    item.register_hook(partial(self.reach, number, reached))  # type: ignore[no-untyped-call]

    def reach(self, number: int, reached: list[bool], gradient: torch.Tensor) -> None:
        if not reached:
            reached.append(True)
            if not self.has_queued:
                self.has_queued = True
                # torch's way to run a function at the end of a backward pass.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.compare(number, "backward")

    def finish(self) -> None:
        self.compare(len(self.names) - 1, "backward")
        self.has_queued = False

    def end(self, *_: Any) -> None:
        if not self.is_training:
            return
        self.is_training = False
        if self.reference is None:
            self.compare(len(self.names) - 1, "forward")
            self.reference = self.seen
        elif len(self.seen) < len(self.reference):
            self.agree(len(self.names) - 1)

    def agree(self, number: int) -> None:
        """Raise unless all processes differ from the first pass here, and are at the same module.

        Through the store: a process that does not differ is in a collective of the engine.
        """
        base = default_store()
        if base is None:
            return
        rank = self.process.rank
        place = f"{self.engine}: a forward pass is at {self.names[number]} on process {rank}, where "
        if not self.has_warned:
            self.has_warned = True
            warn(
                f"{place}the first one was not. All processes gather parameters and reduce gradients in the "
                "same collectives, so this process waits for the others, here and wherever it happens again. "
                f"{self.fix}",
                about="process",
            )
        store: Any = prefixed(self.prefix, base)
        keys = [f"{self.agreements}/{rank}" for rank in range(self.process.world_size)]
        store.set(keys[rank], str(number))
        timeout_s = store.timeout.total_seconds()
        give_up_at = time.monotonic() + timeout_s
        while not store.check(keys):
            if time.monotonic() > give_up_at:
                raise RuntimeError(
                    f"{place}the first one was not, and not all other processes came there within "
                    f"{timeout_s:g} s (the process group's timeout). {self.fix}"
                )
            time.sleep(_PAUSE_S)
        self.raise_if_apart([int(store.get(key)) for key in keys], "forward", number)
        if self.agreements:  # all have read the previous ones
            store.delete_key(f"{self.agreements - 1}/{rank}")
        self.agreements += 1

    def compare(self, number: int, what: str) -> None:
        """Raise on all processes if they are at different modules."""
        extremes = torch.tensor([number, -number], device=self.process.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        self.raise_if_apart([int(extremes[0]), -int(extremes[1])], what, number)

    def raise_if_apart(self, numbers: list[int], what: str, number: int) -> None:
        first, last = min(numbers), max(numbers)
        if first != last:
            raise RuntimeError(
                f"{self.engine}: in {what}, some processes are at {self.names[first]} and others at "
                f"{self.names[last]} (process {self.process.rank} at {self.names[number]}). All processes "
                f"gather the parameters of such a module and reduce its gradients at once. {self.fix}"
            )
