"""The owner of replicated parameters: what DDP does not average by itself is averaged before a step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.engines.base import Joining
from accel.engines.common.loose import average_gradients
from accel.engines.common.owner import TrainingOwner
from accel.precision.outside_dynamo import call_outside_dynamo
from accel_ops.trees.walk import flatten

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class ReplicaOwner(TrainingOwner):
    """Parameters that every process has whole, in DDP wrappers or beside them.

    DDP averages gradients in the first backward pass after each forward pass, of the parameters that were
    trainable when it was made. What it leaves out is averaged here, at the window's end, where it costs
    nothing unless there is some:

    - the gradients of a model that the window's last backward pass does not go through;
    - those of a second backward pass of one forward pass;
    - those of parameters that were unfrozen after `prepare`;
    - those of tensors that belong to no prepared model.

    Every process has to decide alike what is averaged, and may use other parameters than the next. So what
    counts is which models ran and which parameters are trainable, never which have a gradient. What DDP has
    averaged already stays as it is in a second mean.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        super().__init__(process)
        # An object of its own: loaders keep it, and must not keep the engine.
        self.joining = Joining()
        # In order, with the parameters that were frozen when DDP was made.
        self._frozen: weakref.WeakKeyDictionary[DistributedDataParallel, list[torch.Tensor]]
        self._frozen = weakref.WeakKeyDictionary()
        self._has_frozen = False
        self._local = _Local()
        self._has_retained = False

    def add(self, model: DistributedDataParallel) -> None:
        """Note a wrapped model."""
        self._models[model] = None
        self._frozen[model] = [item for item in model.parameters() if not item.requires_grad]
        self._has_frozen = self._has_frozen or bool(self._frozen[model])
        # The hook's object knows no owner: a model that kept it would never be freed.
        model.register_forward_hook(self._local.after_forward)

    def after_backward(self, retains_graph: bool) -> None:
        """Note whose gradients are this process's own now.

        Raises:
            ValueError: If the graph is kept for a second pass, and DDP takes graphs for static.
        """
        super().after_backward(retains_graph)
        if retains_graph and any(model.static_graph for model in self._models):
            raise ValueError(
                "backward(retain_graph=True) under DistributedDataParallelKwargs(static_graph=True): DDP "
                "expects one backward pass of each forward pass. Add the losses up, or leave static_graph "
                "out."
            )
        # A second backward pass over a graph that was kept: DDP has reduced in the first one, and does not
        # again.
        if (self.is_holding or self._has_retained) and len(self._local.models) < len(self._models):
            self._local.models.update(self._models)
        self._has_retained = retains_graph

    def finish_window(self) -> None:
        """Average the gradients that DDP has not averaged.

        Raises:
            RuntimeError: If there are some in `join_uneven_inputs`, where processes may be out of data.
        """
        if not self._has_new or self.is_holding:
            return  # a step inside no_sync is meant to be this process's own
        self._has_new = False
        left: list[torch.Tensor] = []
        if self._has_frozen or self._local.models:
            for model, frozen in self._frozen.items():
                every = model.parameters() if model in self._local.models else frozen
                left += [item for item in every if item.requires_grad]
            self._local.models.clear()
        left += self._loose.trained()
        if left and self.joining.active:
            raise RuntimeError(
                f"{len(left)} tensors have gradients that DDP does not average (the window had no last "
                "backward pass, or they were unfrozen after prepare(), or belong to no prepared model), and "
                "inside join_uneven_inputs processes may be out of data. Prepare one model that has all of "
                "them, as they are trained."
            )
        average_gradients(left, self._process)

    @property
    def may_differ(self) -> bool:
        """Whether replicas are apart for now, or processes do not step together."""
        return self.joining.active or self.is_holding


class _Local:
    """Which models have gradients that are not averaged; a hook that keeps no owner alive."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def after_forward(self, model: Any, inputs: Any, output: Any) -> None:
        """After a forward pass, follow it where the model may be among those."""
        # What torch.compile sees has to call a function that it leaves alone, whose wrapper costs more than
        # all else in a step of other programs.
        if torch.compiler.is_compiling():
            call_outside_dynamo(_follow, self.models, model, output)
        elif self.models and model.require_forward_param_sync:
            _follow(self.models, model, output)

    def __reduce__(self) -> Any:
        return _Local, ()  # of a model that is loaded from a pickle, which no owner knows


def _follow(models: weakref.WeakSet[torch.nn.Module], model: Any, output: Any) -> None:
    """After a forward pass that DDP follows, learn whether a backward pass comes through it."""
    # Its last backward pass is the one that DDP reduces; `require_forward_param_sync` (private in torch)
    # says that DDP armed its reducer for it.
    if model in models and model.require_forward_param_sync and torch.is_grad_enabled():
        discard = _Discard(models, model)
        for item in flatten(output)[0]:
            if item.requires_grad:
                # A hook on an output runs before the gradients behind it arrive, and only if backward
                # comes this way.
                item.register_hook(discard)  # type: ignore[no-untyped-call]


class _Discard:
    """A tensor's hook: a gradient has come here, so that DDP averages what is behind it."""

    def __init__(self, models: weakref.WeakSet[torch.nn.Module], model: torch.nn.Module) -> None:
        self._models, self._model = models, weakref.ref(model)

    def __call__(self, gradient: torch.Tensor) -> None:
        model = self._model()
        if model is not None:
            self._models.discard(model)
