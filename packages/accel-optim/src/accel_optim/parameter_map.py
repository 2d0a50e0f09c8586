"""What trains in the place of each parameter of a model, and which tensors belong to no model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class ParameterMap:
    """Maps each parameter to the tensor that trains in its place: the same, a shard, or a flat vector.

    Whoever replaces a parameter records it. Models and tensors are referenced weakly; a copy is empty.

    Args:
        send: Gives standalone tensors the values of the first process; every process calls it with the same
            ones. None where there is one process.
        gathered: Returns the tensors that stand for shards for now, each with its shard. It is called for
            tensors that are not known.
        reshard: Puts the trained tensors back into the modules that have gathered them.
    """

    def __init__(
        self,
        send: Callable[[Sequence[torch.Tensor]], None] | None = None,
        gathered: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]] = tuple,
        reshard: Callable[[], None] | None = None,
    ) -> None:
        self._send = send
        self._gathered = gathered
        self._reshard = reshard
        # By identity, as `==` of tensors compares elements. Untyped in torch.
        self._trained: Any = WeakIdKeyDictionary()
        self._of_models: Any = WeakIdKeyDictionary()
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        # A list and not a set: processes average in this order, which has to be the same on all.
        self._standalone: list[weakref.ref[torch.Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def record(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Record that one tensor trains in the place of another."""
        if new is not old:
            self._trained[old] = new

    def record_model(
        self, before: dict[torch.nn.Parameter, list[str]], current: dict[str, torch.nn.Parameter]
    ) -> None:
        """Record the parameters of a model that was changed.

        Args:
            before: The names of each parameter that the model had before.
            current: The parameter of each name now.
        """
        for old, names in before.items():
            self.record(old, current[names[0]])

    def add_model(self, model: torch.nn.Module, *, in_place: bool = True) -> None:
        """Add a prepared model, with the parameters that it trains now.

        Args:
            model: The model.
            in_place: Whether its modules themselves were changed: then their parameters belong to a prepared
                model also without `model`, which would be a wrapper otherwise.
        """
        self._models[model] = None
        if in_place:
            for parameter in model.parameters():
                self._of_models[parameter] = None

    def reshard(self) -> None:
        """Put the trained tensors back into the modules, before a step or anything else changes them."""
        if self._reshard is not None:
            self._reshard()

    def trained(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that trains in the place of a parameter, or the parameter itself."""
        if parameter not in self._of_models and parameter not in self._trained:
            # Recorded here and not in each forward pass: few programs keep unsharded parameters.
            for full, shard in self._gathered():
                self.record(full, shard)
        return self._current(parameter)

    def _current(self, parameter: torch.Tensor) -> torch.Tensor:
        # A chain: fp8 conversion replaces a parameter that sharding replaces again.
        while parameter in self._trained:
            parameter = self._trained[parameter]
        return parameter

    def trained_group(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that an optimizer steps for a group of parameters; there may be fewer.

        Raises:
            ValueError: If a tensor that is stepped as a whole has other parameters too.
        """
        return list(dict.fromkeys(map(self.trained, parameters)))

    def in_model(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to a prepared model, or stands for a parameter of one."""
        return self._current(tensor) in self._of_models

    def is_shard(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a shard without a mesh that describes it."""
        return False

    # Tensors of prepared optimizers that belong to no prepared model: a learned temperature, say

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find the standalone ones among the parameters of optimizers; nothing while there is no model.

        They start with the first process's values, as the parameters of models do. Every process calls it
        with the same tensors.
        """
        if self._send is None or not self._models:
            return
        current = {id(item) for model in self._models for item in model.parameters()}

        def in_model(tensor: torch.Tensor) -> bool:
            return id(tensor) in current or self.in_model(tensor)

        # The model of a tensor may have been prepared since, and reduces it then.
        kept = [item for item in self._alive() if not in_model(item)]
        registered = {id(item) for item in kept}
        new = [item for item in dict.fromkeys(tensors) if id(item) not in registered and not in_model(item)]
        self._standalone = [weakref.ref(item) for item in (*kept, *new)]
        if new:
            self._send(new)

    def standalone(self) -> list[torch.Tensor]:
        """The standalone tensors that require gradients now."""
        # Called in each step, and most runs have none.
        return [item for item in self._alive() if item.requires_grad] if self._standalone else []

    def _alive(self) -> list[torch.Tensor]:
        tensors = (reference() for reference in self._standalone)
        return [item for item in tensors if item is not None]
