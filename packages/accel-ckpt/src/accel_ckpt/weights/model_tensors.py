"""The weights of a model by name: reading and replacing them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


class ModelTensors:
    """The parameters and buffers of a model by name, with all names of tied ones.

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
                # One list for all names of a weight, so that each name leads to the others.
                self._names[name] = groups.setdefault(id(value), [])
                self._names[name].append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self, name: str) -> list[str]:
        """Return all names of a weight."""
        return self._names[name]

    def get(self, name: str) -> torch.Tensor:
        """Return the current tensor of a weight."""
        module, leaf = self._find(name)
        value: Any = getattr(module, leaf)
        return value  # type: ignore[no-any-return]

    def put(self, name: str, value: torch.Tensor) -> None:
        """Replace a weight under all its names; a parameter stays one, with its class and attributes.

        Args:
            name: One of its names.
            value: The tensor.
        """
        current = self.get(name)
        if isinstance(current, torch.nn.Parameter):
            value = _as_parameter(value, current)
        self.restore(name, value)

    def restore(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter or buffer object under all its names.

        Args:
            name: One of its names.
            value: The parameter or buffer.
        """
        for other in self._names[name]:
            module, leaf = self._find(other)
            # Past nn.Module.__setattr__, which rejects a plain tensor where a parameter is registered.
            registered: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            registered[leaf] = value

    def _find(self, name: str) -> tuple[torch.nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf


def _as_parameter(value: torch.Tensor, original: torch.nn.Parameter) -> torch.nn.Parameter:
    kind: Any = type(original)
    # A parameter whose type is not a subclass of Parameter is a tensor subclass.
    if kind is torch.nn.Parameter or not issubclass(kind, torch.nn.Parameter):
        made: torch.nn.Parameter = torch.nn.Parameter(value, requires_grad=original.requires_grad)
        if kind is torch.nn.Parameter:  # a tensor subclass keeps its values among its attributes
            vars(made).update(vars(original))
        return made
    # torch.nn.Parameter uses this private of torch; the constructor of a subclass may need unknown arguments.
    made = torch.Tensor._make_subclass(kind, value, original.requires_grad)
    made.__dict__.update(original.__dict__)
    return made


def is_extra_state(name: str, value: Any) -> bool:
    """Return whether an entry of a model's state is extra state (`get_extra_state`) that is not a tensor."""
    return name.rpartition(".")[2] == "_extra_state" and not isinstance(value, torch.Tensor)


def without_wrapper_names(state: dict[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Remove the prefix of wrappers (DistributedDataParallel, torch.compile), if all names have it, and the
    names of compiled submodules.

    Args:
        state: A dict by name.
        expected: The names without them.
    """
    for prefix in ("module.", "_orig_mod."):
        # Only if all names have it: a model may have a submodule named "module".
        if state and all(name.startswith(prefix) for name in state) and state.keys().isdisjoint(expected):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return {_as_expected(name, expected): value for name, value in state.items()}


def _as_expected(name: str, expected: Collection[str]) -> str:
    if name in expected:
        return name
    short = ".".join(item for item in name.split(".") if item != "_orig_mod")
    return short if short in expected else name
