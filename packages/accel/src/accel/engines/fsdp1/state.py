"""Full states of models in FullyShardedDataParallel (version 1), and of their optimizers.

torch gathers, shards and saves optimizer states by parameter names; checkpoints of one process number the
parameters in their original order. The names from before wrapping map one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from accel.engines.common.full_state import empty_like_state, gather_full_state
from accel.engines.fsdp1.flat import owners_by_name
from accel.engines.fsdp_groups import aliases
from accel_ckpt.sharded.optimizer import set_state, state_to_save, suppress_torch_warnings


@dataclass(frozen=True)
class FlatRecord:
    """Names and shapes of a model before it was wrapped.

    Attributes:
        state: Names and shapes of its state dict, in order; tied weights are one tensor, and values are
            undefined.
        names: Each parameter's first name, in order.
    """

    state: dict[str, Any]
    names: list[str]

    @classmethod
    def of(cls, model: torch.nn.Module) -> FlatRecord:
        """The record of a model that is not wrapped yet."""
        return cls(
            empty_like_state(model.state_dict(keep_vars=True)),
            [names[0] for names in aliases(model).values()],
        )


def full_weights(root: torch.nn.Module, record: FlatRecord, keep: bool) -> dict[str, Any]:
    """Gather a model's full state, under its original names; every process calls it.

    Args:
        root: The wrapped model.
        record: Its record from before wrapping.
        keep: Whether this process gets the tensors; others get None instead.
    """
    with suppress_torch_warnings():
        state = get_model_state_dict(root)
    # Tied weights are one tensor in the record, and torch's state has each under its first name.
    first: dict[int, str] = {}
    named = {name: state[first.setdefault(id(value), name)] for name, value in record.state.items()}
    full: dict[str, Any] = gather_full_state(named, keep)
    return full


def names_in_groups(optimizer: Any, root: torch.nn.Module, record: FlatRecord) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer.

    Those in a flat parameter are in the order of the original model: the user's order is not known.

    Raises:
        ValueError: If a parameter is not the model's.
    """
    owners = owners_by_name(root)
    found: dict[torch.nn.Parameter, list[str]] = {}
    for name in record.names:
        found.setdefault(owners[name], []).append(name)
    order = {name: number for number, name in enumerate(record.names)}
    groups = []
    for group in optimizer.param_groups:
        lists = [found.get(parameter, []) for parameter in group["params"]]
        if not all(lists):
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of several models, or of none that is prepared. "
                "fsdp_version=1 saves the state only of optimizers of one model: make one for each, or set "
                "fsdp_version=2."
            )
        names = [name for names in lists for name in names]
        groups.append(sorted(names, key=order.__getitem__) if any(len(item) > 1 for item in lists) else names)
    return groups


def _copied_scalar(value: Any) -> Any:
    """Copy a step count, which all parameters in a flat one share, so that each has its own."""
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


class FlatFullStateModel:
    """A wrapped model that saves and loads full weights under its original names.

    Args:
        root: The wrapped model.
        record: Its record from before wrapping.
    """

    def __init__(self, root: torch.nn.Module, record: FlatRecord) -> None:
        self.root = root
        self.record = record

    def state_dict(self) -> dict[str, Any]:
        """Return names and shapes of the full weights; values are undefined."""
        return dict(self.record.state)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """Load full weights, of which each process keeps its shard.

        Args:
            state: Full tensors by name.
            strict: Whether missing and unexpected names are an error.
        """
        options = StateDictOptions(full_state_dict=True, strict=strict)
        # A copy: torch's function removes entries from it.
        return set_model_state_dict(self.root, dict(state), options=options)


class FlatFullStateOptimizer:
    """An optimizer of a wrapped model that saves and loads its full state, as one process would have it;
    saved by names and loaded by numbers.

    Args:
        optimizer: The optimizer.
        root: The wrapped model.
        names: The names of the parameters in each group, in the order in which one process numbers them.
        state: The state by names, with full tensors.
    """

    def __init__(
        self,
        optimizer: Any,
        root: torch.nn.Module,
        names: list[list[str]],
        state: dict[str, Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.root = root
        self.names = names
        self.state = state

    @classmethod
    def gathered(
        cls, optimizer: Any, root: torch.nn.Module, names: list[list[str]], keep: bool
    ) -> FlatFullStateOptimizer:
        """Create it with the full state, which all processes gather now; without `keep`, without tensors."""
        return cls(optimizer, root, names, gather_full_state(state_to_save(root, optimizer), keep))

    def state_dict(self) -> dict[str, Any]:
        """Return the gathered state, with names in the original order of parameters."""
        assert self.state is not None, "it was gathered for saving"
        order = {name: number for number, name in enumerate(name for names in self.names for name in names)}
        state = {
            name: {key: _copied_scalar(value) for key, value in values.items()}
            for name, values in sorted(self.state["state"].items(), key=lambda item: order[item[0]])
            # A parameter without a state has an empty entry in torch's, and none in that of one process.
            if values
        }
        groups = [
            {**group, "params": list(names)}
            for group, names in zip(self.state["param_groups"], self.names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a full state, of which each process keeps its shard.

        Args:
            state: As an optimizer over full parameters has it, numbered in the order of the groups.

        Raises:
            ValueError: If its groups are others than the optimizer's, or some of the parameters in a flat
                parameter have no state.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(names) for names in self.names]:
            raise ValueError(
                f"the state has parameter groups of {sizes} parameters, and {type(self.optimizer).__name__} "
                f"has {[len(names) for names in self.names]}. Make the groups as they were when it was saved."
            )
        names = {
            number: name
            for group, group_names in zip(state["param_groups"], self.names, strict=True)
            for number, name in zip(group["params"], group_names, strict=True)
        }
        named: dict[str, Any] = {
            # torch's functions for the states of sharded models take names.
            "state": {names[number]: values for number, values in state["state"].items()},
            "param_groups": [
                {**group, "params": group_names}
                for group, group_names in zip(state["param_groups"], self.names, strict=True)
            ],
        }
        set_state(self.root, self.optimizer, named, full=True)
