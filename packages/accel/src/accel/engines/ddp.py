"""Data parallelism with replicated models: torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel.engines.common.check_on_all_ranks import check_on_all_ranks
from accel.engines.common.standalone import average_gradients
from accel.engines.context import EngineContext, EngineTraits, PrepareRequest
from accel.engines.distributed import DistributedEngine
from accel.precision.outside_dynamo import call_outside_dynamo
from accel_ops.trees.walk import flatten
from accel_optim.optimizer import AcceleratedOptimizer

# Fields of DistributedDataParallelKwargs that configure the communication hook and not the constructor.
_HOOK_FIELDS = frozenset({"comm_hook", "comm_wrapper", "comm_state_option"})


class JoinedInputs:
    """Torch's Join: a process without data participates in the collectives of DDP's backward passes."""

    def __init__(self) -> None:
        self.active = False

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context for models and torch's Joinable objects.

        Raises:
            TypeError: If an object does not participate in it.
        """
        members = [member for item in joinables if (member := _joinable(item)) is not None]
        return self._joined(members) if members else contextlib.nullcontext()

    @contextlib.contextmanager
    def _joined(self, members: list[Joinable]) -> Iterator[None]:
        self.active = True
        try:
            with Join(members):
                yield
        finally:
            self.active = False


class DDPEngine(DistributedEngine):
    """Every process has the full model; gradients are averaged in backward.

    DDP averages gradients in the first backward pass after each forward pass, of the parameters that were
    trainable when it was made. The rest is averaged at the end of the window; this costs nothing where there
    is no rest:

    - the gradients of a model that the window's last backward pass does not go through;
    - those of a second backward pass of one forward pass;
    - those of parameters that were unfrozen after `prepare`;
    - those of standalone tensors, which belong to no prepared model.

    All processes have to decide the same, and each may use different parameters. So the decision depends on
    which models ran and which parameters are trainable, never on which have a gradient. What DDP has averaged
    already does not change in a second mean.
    """

    name = "ddp"
    traits = EngineTraits(takes_gradient=True, reduces_in_backward=True)

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        # A separate object: loaders keep it, and must not keep the engine.
        self._uneven_inputs = JoinedInputs()
        self.data_parallel = replace(self.data_parallel, uneven_inputs=self._uneven_inputs)
        self._local = _LocalGradients()
        # The parameters that were frozen when DDP was made.
        self._frozen: weakref.WeakKeyDictionary[DistributedDataParallel, list[torch.Tensor]]
        self._frozen = weakref.WeakKeyDictionary()
        self._has_frozen = self._has_retained = False

    def check(self, request: PrepareRequest) -> None:
        """Reject on all processes what one rejects, and models without weights on any of them."""
        models = () if request.evaluation_mode else request.models
        # A frozen model may be prepared on some processes alone: there is nothing that they would share.
        fresh = [(model, True) for model in models if _ddp(model) is None and _is_trained(model)]
        with check_on_all_ranks(fresh, "all", self.context.process):
            super().check(request)
            if "torch.distributed.tensor" in sys.modules:  # without it nothing can be split
                from accel.engines.common.layouts import is_split

                for model in request.models:
                    is_split(model, 1, self.name)  # split weights are no replicas

    def setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap in DistributedDataParallel; a model without trainable parameters has nothing to average."""
        if _ddp(model) is not None:
            return model
        # DDP raises for a module without parameters that require gradients.
        if not _is_trained(model):
            return model
        options = self.context.ddp.to_kwargs() if self.context.ddp is not None else {}
        device = self.context.process.device
        # DDP takes no device_ids on the CPU, nor for a model whose parameters are on several devices.
        device_ids = None if device.type == "cpu" or not _is_on(model, device) else [device.index]
        with warnings.catch_warnings():
            # torch 2.13 advises another spelling of our documented option, which its older versions lack.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(
                model,
                device_ids=device_ids,
                output_device=device_ids[0] if device_ids else None,
                **{name: value for name, value in options.items() if name not in _HOOK_FIELDS},
            )
        if self.context.ddp is not None:
            self.context.ddp.register_comm_hook(wrapped)
        self.parameters.add_model(wrapped, in_place=False)
        self._models[wrapped] = None
        self._frozen[wrapped] = [item for item in wrapped.parameters() if not item.requires_grad]
        self._has_frozen = self._has_frozen or bool(self._frozen[wrapped])
        # The hook does not refer to this object: a model that kept it would never be freed.
        wrapped.register_forward_hook(self._local.after_forward)
        return wrapped

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, and record which models have local gradients afterwards.

        Raises:
            ValueError: If the graph is kept for a second pass, and DDP expects a static graph.
        """
        retains_graph = bool(kwargs.get("retain_graph"))
        if retains_graph and any(model.static_graph for model in self._models):
            raise ValueError(
                "backward(retain_graph=True) under DistributedDataParallelKwargs(static_graph=True): DDP "
                "expects one backward pass of each forward pass. Add the losses up, or leave static_graph "
                "out."
            )
        super().backward(loss, **kwargs)
        # In a second backward pass over a kept graph DDP does not reduce again.
        if (self.in_no_sync or self._has_retained) and len(self._local.models) < len(self._models):
            self._local.models.update(self._models)
        self._has_retained = retains_graph

    def reduce_accumulated(self) -> None:
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
        left += self.parameters.standalone()
        if left and self._uneven_inputs.active:
            raise RuntimeError(
                f"{len(left)} tensors have gradients that DDP does not average (the window had no last "
                "backward pass, or they were unfrozen after prepare(), or belong to no prepared model), and "
                "inside join_uneven_inputs processes may be out of data. Prepare one model that has all of "
                "them, as they are trained."
            )
        average_gradients(left, self.context.process)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """DDP's no_sync; a model that is not wrapped reduces nothing anyway."""
        ddp = _ddp(model)
        # A static graph is learned in the first backward, which has to synchronise. The gradients after the
        # window's last backward are the same.
        if ddp is None or _learns_graph(ddp):
            return contextlib.nullcontext()
        return self._no_sync(ddp.no_sync())


class _LocalGradients:
    """The models whose gradients DDP has not averaged; its hook keeps nothing else alive."""

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
        return _LocalGradients, ()  # a model loaded from a pickle is registered nowhere


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


def _ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a prepared model, below torch.compile's."""
    if isinstance(model, DistributedDataParallel):  # the usual case: torch looks long for what is not there
        return model
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _is_trained(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _joinable(item: Any) -> Joinable | None:
    """The object that joins a Join; None for a model without collectives (frozen or evaluated)."""
    member = item.optimizer if isinstance(item, AcceleratedOptimizer) else item
    if isinstance(member, torch.nn.Module):
        return _ddp(member)
    if not isinstance(member, Joinable):
        raise TypeError(
            f"join_uneven_inputs got a {type(member).__name__}; it takes prepared models and torch's "
            "Joinable objects (such as a ZeroRedundancyOptimizer). Leave it out."
        )
    return member


def _learns_graph(ddp: DistributedDataParallel) -> bool:
    """Whether a static graph is still to be learned: torch 2.13 fails by an internal assertion without it."""
    return ddp.static_graph and not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)


def _is_on(model: torch.nn.Module, device: torch.device) -> bool:
    return all(parameter.device == device for parameter in model.parameters())


def sync_in_backward(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A context whose backward synchronises gradients although its forward ran under `no_sync`.

    Raises:
        ValueError: If DDP searches for unused parameters, which it does in forward and so cannot do here.
    """
    ddp = _ddp(model)
    return contextlib.nullcontext() if ddp is None else _arm_reducer(ddp)


@contextlib.contextmanager
def _arm_reducer(ddp: DistributedDataParallel) -> Iterator[None]:
    if ddp.find_unused_parameters:
        raise ValueError(
            "trigger_sync_in_backward cannot work with find_unused_parameters=True: DDP looks for unused "
            "parameters in forward, and that forward ran under no_sync. Run the last forward outside of "
            "no_sync instead."
        )
    # Private in torch, as is the reducer: DDP has no documented way to reduce in a backward pass whose
    # forward pass ran under no_sync.
    before = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = True
    # forward under no_sync did not arm the reducer; an empty list means: every parameter participates.
    ddp.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = before
