"""A check that all processes use the same groups of parameters, in the same order."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from accel.engines.torch_private import call_after_backward
from accel_ops.collectives.store_barrier import polls
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
    without communication. Where one differs, a process warns once and waits, before the engine communicates,
    until all others have come to the same place; else it raises. Later backward passes and compiled code are
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


# By the store of a process group: how many models its processes have prepared, the same on all; and its
# number among the groups that used the same server, where an earlier one has left keys.
_models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _Order:
    def __init__(self, names: list[str], process: ProcessInfo, engine: str, fix: str) -> None:
        self.names, self.process, self.engine, self.fix = names, process, engine, fix
        self.seen: list[int] = []  # in the first forward pass
        self.reference: list[int] | None = None  # all of it
        self.passes = self.position = 0  # forward passes, and where in the reference this one is
        self.is_training = self.has_warned = self.has_queued = False
        store = default_store()
        _models[store] = self.model = _models.get(store, 0) + 1
        self.changes = 0

    def begin(self, *_: Any) -> None:
        self.is_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self.passes, self.position, self.seen = self.passes + self.is_training, 0, []

    def enter(self, number: int, *_: Any) -> None:
        # The compiler drops what it knows never to run: the hook leaves nothing in a compiled graph.
        if torch.compiler.is_compiling():
            return
        if self.is_training:
            if self.reference is None:
                self.seen.append(number)
                self.compare(number, "forward")
            elif self.reference[self.position : self.position + 1] == [number]:
                self.position += 1
            else:
                self.compare_change(number)

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
                call_after_backward(self.finish)
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
        elif self.position < len(self.reference):
            self.compare_change(len(self.names) - 1)

    def compare_change(self, number: int) -> None:
        """Raise unless all processes differ from the first pass here: in one place, at the same module.

        Through the store, as a process that does not differ is in a collective of the engine. From here the
        pass is expected to continue as the first one did after this module.
        """
        assert self.reference is not None
        rank, name = self.process.rank, self.names[number]
        place = f"{self.engine}: a forward pass is at {name} on process {rank}, where the first one was not"
        if not self.has_warned:
            self.has_warned = True
            warn(
                f"{place}. All processes gather parameters and reduce gradients in the same collectives, so "
                f"this process waits for the others, here and wherever it happens again. {self.fix}",
                about="process",
            )
        base: Any = default_store()
        if base not in _groups:
            _groups[base] = prefixed("accel/order", base).add(f"groups/{rank}", 1)
        store: Any = prefixed(f"accel/order/{_groups[base]}/{self.model}", base)
        keys = [f"{self.changes}/{each}" for each in range(self.process.world_size)]
        store.set(keys[rank], f"{number} {self.position} {self.passes}")
        limit_s = store.timeout.total_seconds()
        if not any(store.check(keys) for _ in polls(limit_s)):
            raise RuntimeError(
                f"{place}, and not all other processes came there within {limit_s:g} s (the process group's "
                f"timeout). {self.fix}"
            )
        found = [tuple(map(int, text.split())) for text in store.multi_get(keys)]
        if len(set(found)) > 1:
            self.reject([each[0] for each in found], f"forward pass {self.passes}", number)
        if self.changes:  # all have read the previous ones
            store.delete_key(f"{self.changes - 1}/{rank}")
        self.changes += 1
        following = self.reference[self.position :]
        if number in following:
            self.position += following.index(number) + 1
        elif number in self.reference:
            self.position = self.reference.index(number) + 1

    def compare(self, number: int, what: str) -> None:
        """Raise on all processes if they are at different modules."""
        extremes = torch.tensor([number, -number], device=self.process.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        first, last = -int(extremes[1]), int(extremes[0])
        if first != last:
            self.reject([first, last], what, number)

    def reject(self, numbers: list[int], what: str, number: int) -> NoReturn:
        first, last = self.names[min(numbers)], self.names[max(numbers)]
        where = f"some processes are at {first} and others at {last}"
        if first == last:
            where = f"processes come to {first} in different places"
        raise RuntimeError(
            f"{self.engine}: in {what}, {where} (process {self.process.rank} at {self.names[number]}). All "
            f"processes gather the parameters of such a module and reduce its gradients at once. {self.fix}"
        )
