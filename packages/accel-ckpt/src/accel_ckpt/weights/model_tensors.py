"""The weights of a model by name: reading one, and putting another tensor in its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


class ModelTensors:
    """Where the weights of a model are, also those that have several names.

    Args:
        model: The model.

    Attributes:
        expected: The names in the model's state dict.
        buffers: The names of its buffers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.expected = set(model.state_dict(keep_vars=True))
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        groups: dict[int, list[str]] = {}
        self._names: dict[str, list[str]] = {}
        for entries in (model.named_parameters, model.named_buffers):
            for name, value in entries(remove_duplicate=False):
                # One list object shared by all names of a weight, so that each of them finds the others.
                self._names[name] = groups.setdefault(id(value), [])
                self._names[name].append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self, name: str) -> list[str]:
        """Return all names of a weight."""
        return self._names[name]

    def get(self, name: str) -> torch.Tensor:
        """Return a weight as it is now."""
        module, leaf = self._find(name)
        value: Any = getattr(module, leaf)
        return value  # type: ignore[no-any-return]

    def put(self, name: str, value: torch.Tensor) -> None:
        """Make a tensor the weight, under all its names; a parameter stays one, of its class and attributes.

        Args:
            name: One of its names.
            value: The tensor.
        """
        own = self.get(name)
        if isinstance(own, torch.nn.Parameter):
            value = _as_parameter(value, own)
        self.restore(name, value)

    def restore(self, name: str, value: torch.Tensor) -> None:
        """Put a parameter or a buffer itself in its place, under all its names.

        Args:
            name: One of its names.
            value: The parameter or buffer.
        """
        for other in self._names[name]:
            module, leaf = self._find(other)
            # Past nn.Module.__setattr__, which rejects a plain tensor where a parameter is registered.
            held: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            held[leaf] = value

    def _find(self, name: str) -> tuple[torch.nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf


def _as_parameter(value: torch.Tensor, own: torch.nn.Parameter) -> torch.nn.Parameter:
    kind: Any = type(own)
    # A parameter whose type is no subclass of Parameter is of a tensor subclass.
    if kind is torch.nn.Parameter or not issubclass(kind, torch.nn.Parameter):
        made: torch.nn.Parameter = torch.nn.Parameter(value, requires_grad=own.requires_grad)
        if kind is torch.nn.Parameter:  # a tensor subclass keeps its values among its attributes
            vars(made).update(vars(own))
        return made
    # torch.nn.Parameter makes itself by this private of torch; a subclass may have a constructor
    # whose arguments are not known here.
    made = torch.Tensor._make_subclass(kind, value, own.requires_grad)
    made.__dict__.update(own.__dict__)
    return made


def is_extra_state(name: str, value: Any) -> bool:
    """Return whether an entry of a model's state is what a `get_extra_state` returned, and no tensor."""
    return name.rpartition(".")[2] == "_extra_state" and not isinstance(value, torch.Tensor)


def without_wrapper_names(state: dict[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Drop what wrappers (DistributedDataParallel, torch.compile) put before names, if all have it, and what
    compiled submodules put into names.

    Args:
        state: Anything by names.
        expected: The names without.
    """
    for prefix in ("module.", "_orig_mod."):
        # Only if all names have it: a model may have a submodule that is called "module".
        if state and all(name.startswith(prefix) for name in state) and state.keys().isdisjoint(expected):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return {_as_expected(name, expected): value for name, value in state.items()}


def _as_expected(name: str, expected: Collection[str]) -> str:
    if name in expected:
        return name
    short = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return short if short in expected else name
