"""Gradients of replicas: what DDP does not average by itself is averaged before a step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.engines.base import JoinState
from accel.engines.common.gradient_sync import DistributedGradientSync
from accel.engines.common.standalone import average_gradients
from accel.precision.outside_dynamo import call_outside_dynamo
from accel_ops.trees.walk import flatten

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class DDPGradientSync(DistributedGradientSync):
    """Replicated parameters, in DDP wrappers or standalone.

    DDP averages gradients in the first backward pass after each forward pass, of the parameters that were
    trainable when it was created. What it leaves out is averaged here, at the end of the window; this costs
    nothing where nothing was left out:

    - the gradients of a model that the window's last backward pass does not go through;
    - those of a second backward pass of one forward pass;
    - those of parameters that were unfrozen after `prepare`;
    - those of standalone parameters, which belong to no prepared model.

    All processes have to decide the same, and each may use different parameters. So the decision depends on
    which models ran and which parameters are trainable, never on which have a gradient. What DDP has averaged
    already does not change in a second mean.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        super().__init__(process)
        # A separate object: loaders keep it, and must not keep the engine.
        self.join_state = JoinState()
        # Ordered, with the parameters that were frozen when DDP was created.
        self._frozen: weakref.WeakKeyDictionary[DistributedDataParallel, list[torch.Tensor]]
        self._frozen = weakref.WeakKeyDictionary()
        self._has_frozen = False
        self._local = _Local()
        self._has_retained = False

    def add(self, model: DistributedDataParallel) -> None:
        """Register a wrapped model."""
        self._models[model] = None
        self._frozen[model] = [item for item in model.parameters() if not item.requires_grad]
        self._has_frozen = self._has_frozen or bool(self._frozen[model])
        # The hook does not refer to this object: a model that kept it would never be freed.
        model.register_forward_hook(self._local.after_forward)

    def after_backward(self, retains_graph: bool) -> None:
        """Record which models have local gradients now.

        Raises:
            ValueError: If the graph is kept for a second pass, and DDP expects a static graph.
        """
        super().after_backward(retains_graph)
        if retains_graph and any(model.static_graph for model in self._models):
            raise ValueError(
                "backward(retain_graph=True) under DistributedDataParallelKwargs(static_graph=True): DDP "
                "expects one backward pass of each forward pass. Add the losses up, or leave static_graph "
                "out."
            )
        # In a second backward pass over a kept graph DDP does not reduce again.
        if (self.in_no_sync or self._has_retained) and len(self._local.models) < len(self._models):
            self._local.models.update(self._models)
        self._has_retained = retains_graph

    def finish_window(self) -> None:
        """Average the gradients that DDP has not averaged.

        Raises:
            RuntimeError: If there are any inside `join_uneven_inputs`, where processes may be out of data.
        """
        if not self._has_new or self.in_no_sync:
            return  # a step inside no_sync is meant to be local
        self._has_new = False
        left: list[torch.Tensor] = []
        if self._has_frozen or self._local.models:
            for model, frozen in self._frozen.items():
                every = model.parameters() if model in self._local.models else frozen
                left += [item for item in every if item.requires_grad]
            self._local.models.clear()
        left += self._standalone.trained()
        if left and self.join_state.active:
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
        return self.join_state.active or self.in_no_sync


class _Local:
    """The models with local gradients; a hook that keeps nothing else alive."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def after_forward(self, model: Any, inputs: Any, output: Any) -> None:
        """After a forward pass, watch whether DDP reduces in its backward pass."""
        # In a compiled graph the function has to be hidden from the compiler; elsewhere that wrapper would
        # cost more than the function.
        if torch.compiler.is_compiling():
            call_outside_dynamo(_watch_backward, self.models, model, output)
        elif self.models and model.require_forward_param_sync:
            _watch_backward(self.models, model, output)

    def __reduce__(self) -> Any:
        return _Local, ()  # a model loaded from a pickle is registered nowhere


def _watch_backward(models: weakref.WeakSet[torch.nn.Module], model: Any, output: Any) -> None:
    """After a forward pass for which DDP reduces, find out whether backward reaches its outputs."""
    # DDP reduces in the backward pass of its last forward pass; `require_forward_param_sync` (private in
    # torch) says that it armed its reducer for this one.
    if model in models and model.require_forward_param_sync and torch.is_grad_enabled():
        discard = _Discard(models, model)
        for item in flatten(output)[0]:
            if item.requires_grad:
                # A hook on an output runs before the gradients of the model arrive, and only if backward
                # reaches it.
                item.register_hook(discard)  # type: ignore[no-untyped-call]


class _Discard:
    """A tensor hook: backward has reached this output, so DDP averages the model's gradients."""

    def __init__(self, models: weakref.WeakSet[torch.nn.Module], model: torch.nn.Module) -> None:
        self._models, self._model = models, weakref.ref(model)

    def __call__(self, gradient: torch.Tensor) -> None:
        model = self._model()
        if model is not None:
            self._models.discard(model)
