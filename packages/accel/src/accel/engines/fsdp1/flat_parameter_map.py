"""The parameters that FSDP version 1 flattens: which replaced which, and which cannot be flattened."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from accel.engines.fsdp1 import flat
from accel_optim.parameter_map import ParameterMap

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class FlatParameterMap(ParameterMap):
    """Also the original names of parameters, several of which may have become one flat parameter."""

    def __init__(
        self,
        send: Callable[[Sequence[torch.Tensor]], None] | None = None,
        reshard: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(send, reshard=reshard)
        self._names: Any = WeakIdKeyDictionary()
        self._sizes: Any = WeakIdKeyDictionary()
        self._original: weakref.WeakKeyDictionary[Any, list[list[str]]] = weakref.WeakKeyDictionary()

    def record_model(
        self, before: dict[torch.nn.Parameter, list[str]], current: dict[str, torch.nn.Parameter]
    ) -> None:
        """Record the parameters of a model that was wrapped."""
        super().record_model(before, current)
        for old, names in before.items():
            if (new := current[names[0]]) is not old:
                self._names[old] = names[0]
                self._sizes[new] = self._sizes.get(new, 0) + old.requires_grad

    def is_shard(self, tensor: torch.Tensor) -> bool:
        """Whether it is a flat parameter, or a view of one."""
        return flat.is_flattened(tensor)

    def in_model(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to a prepared model; a flat parameter also after its wrapper is gone."""
        return flat.is_flattened(tensor) or super().in_model(tensor)

    def trained_group(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that are trained, a flat one once.

        Raises:
            ValueError: If some, but not all, of the parameters in a flat one are given.
        """
        # A flat parameter is stepped as one tensor: a group cannot have a piece of it.
        self.check_group("The optimizer", parameters)
        return super().trained_group(parameters)

    def check(self, optimizer: Any) -> None:
        """Reject an optimizer with only some of the parameters in a flat one, which is stepped as one tensor.

        Raises:
            ValueError: If it has some in a group.
        """
        for group in optimizer.param_groups:
            self.check_group(type(optimizer).__name__, group["params"])

    def check_group(self, optimizer_name: str, parameters: Iterable[torch.Tensor]) -> None:
        """Reject a group with only some of the parameters in a flat one.

        Args:
            optimizer_name: Name of the optimizer, for the message.
            parameters: The group's.

        Raises:
            ValueError: If it has some.
        """
        trained = [item for item in parameters if item.requires_grad and item in self._trained]
        for flat_parameter in {self._trained[item] for item in trained}:
            count = sum(self._trained[item] is flat_parameter for item in trained)
            _check_all_or_none(optimizer_name, count, self._sizes[flat_parameter])

    def swap_parameters(self, optimizer: Any) -> None:
        """Replace the parameters of an optimizer in place: groups, options and schedules stay."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        if not any(parameter in self._trained for group in groups for parameter in group):
            return
        # Checkpoints number parameters in their original order, which a flat parameter does not have.
        if all(parameter in self._names for group in groups for parameter in group):
            self._original[optimizer] = [[self._names[parameter] for parameter in group] for group in groups]
        for group in optimizer.param_groups:
            group["params"][:] = dict.fromkeys(self._trained.get(item, item) for item in group["params"])

    def in_original_order(self, optimizer: Any, names: list[list[str]]) -> list[list[str]]:
        """The names of each group in the user's original order, if it is known."""
        original = self._original.get(optimizer)
        if original is not None and [*map(sorted, original)] == [*map(sorted, names)]:
            return original
        return names


def check_no_shared_modules(model: torch.nn.Module, taken: Collection[torch.nn.Module]) -> None:
    """Reject a model with modules that another prepared model has flattened.

    Args:
        model: The model.
        taken: The flattened modules.

    Raises:
        ValueError: If it has any.
    """
    for name, module in model.named_modules():
        if module in taken:
            raise ValueError(
                f"{type(model).__name__}.{name} belongs to a model that was prepared before, and fsdp1 "
                "shards each parameter for one model. Use the model that prepare() returned instead of its "
                "unwrapped one; or put models that share modules into one torch.nn.Module, and prepare that."
            )


def check_saveable(optimizer: Any, models: Iterable[torch.nn.Module], process: ProcessInfo) -> None:
    """Reject a state of only some trained parameters of a flat one: torch saves that of all or none.

    Every process must call it.

    Args:
        optimizer: The optimizer.
        models: Wrapped models.
        process: This process.

    Raises:
        ValueError: If it steps only some of them, or has a state for only some.
    """
    ids = {id(item) for group in optimizer.param_groups for item in group["params"]}
    for _, handle in flat.fsdp_units(models):
        # Only with use_orig_params; without it the flat parameter itself is stepped.
        members = [item for item in handle.flat_param._params or () if item.requires_grad]
        count = sum(id(item) in ids for item in members)
        if count not in (0, len(members)):
            raise ValueError(
                f"save_state: {type(optimizer).__name__} has {count} of {len(members)} trained parameters "
                "that fsdp_version=1 flattens into one vector, and torch saves the state of all or none. "
                "Wrap them separately (auto_wrap_policy), give them to one optimizer, or set fsdp_version=2."
            )
        if not count:
            continue
        # A process has no state of parameters that are not in its shard.
        has_state = torch.tensor([item in optimizer.state for item in members], dtype=torch.uint8)
        has_state = has_state.to(process.device)
        # All processes have to raise, or none.
        dist.all_reduce(has_state, dist.ReduceOp.MAX)
        num_stepped = int(has_state.sum())
        if num_stepped not in (0, len(members)):
            raise ValueError(
                f"save_state: {type(optimizer).__name__} has stepped {num_stepped} of {len(members)} trained "
                "parameters that fsdp_version=1 flattens into one vector, and torch saves the state of all "
                "or none. Save after the first step with the unfrozen ones, or set fsdp_version=2."
            )


def check_stateless(optimizer: Any, fresh: list[torch.nn.Module]) -> None:
    """Reject an optimizer state that would have to be flattened and sharded like the parameters."""
    new = {parameter for model in fresh for parameter in model.parameters()}
    if any(parameter in optimizer.state for parameter in new):
        raise ValueError(
            f"{type(optimizer).__name__} has a state for parameters that fsdp_version=1 is going to flatten. "
            "Set use_orig_params=True, or fsdp_version=2; or prepare first, and then load its state "
            "(load_state, load_state_dict)."
        )


def check_group_units(optimizer: Any, units: list[set[torch.nn.Parameter]]) -> None:
    """Reject optimizer groups with only some of the parameters of one wrapped module."""
    for unit in units:
        trained = {parameter for parameter in unit if parameter.requires_grad}
        for group in optimizer.param_groups:
            count = len(trained & set(group["params"]))
            _check_all_or_none(type(optimizer).__name__, count, len(trained))


def _check_all_or_none(optimizer_name: str, count: int, size: int) -> None:
    if count not in (0, size):
        raise ValueError(
            f"{optimizer_name} has a group with {count} of {size} parameters that fsdp_version=1 flattens "
            "into one vector, which is stepped as one tensor. Set use_orig_params=True, or fsdp_version=2."
        )
