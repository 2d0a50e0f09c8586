"""Data parallelism with replicated models: torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel.engines.base import Engine, Gradients, JoinState, Loaders
from accel.engines.base.context import EngineContext, PrepareRequest
from accel.engines.common.check_on_all_ranks import check_on_all_ranks
from accel.engines.common.standalone import parameters_of
from accel.engines.ddp.gradient_sync import DDPGradientSync
from accel_optim.optimizer import AcceleratedOptimizer

# Fields of DistributedDataParallelKwargs that configure the communication hook and not the constructor.
_HOOK_FIELDS = frozenset({"comm_hook", "comm_wrapper", "comm_state_option"})


class DDPLoaders(Loaders):
    """Every process has its own data, and may have less of it than others."""

    engine: DDPEngine

    @property
    def join_state(self) -> JoinState:
        """Whether torch's Join is at work."""
        return self.engine.gradient_sync.join_state

    def join(self, joinables: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Torch's Join: a process out of data shadows the collectives of the others.

        Raises:
            TypeError: If an object can does not participate in it.
        """
        members = [member for item in joinables if (member := _joinable(item)) is not None]
        return self._joined(members) if members else contextlib.nullcontext()

    @contextlib.contextmanager
    def _joined(self, members: list[Joinable]) -> Iterator[None]:
        self.join_state.active = True
        try:
            with Join(members):
                yield
        finally:
            self.join_state.active = False


class DDPGradients(Gradients):
    """Replicas whose gradients are averaged."""

    engine: DDPEngine

    reduces_in_backward = True

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """DDP's own no_sync; a model that is not wrapped has nothing to hold back."""
        ddp = _ddp(model)
        # A static graph is learned in the first backward, which has to synchronise. The gradients after the
        # window's last backward are the same.
        if ddp is None or _learns_graph(ddp):
            return contextlib.nullcontext()
        return self.engine.gradient_sync.no_sync(ddp.no_sync())

    def total_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """As the base class.

        Raises:
            RuntimeError: If processes may be out of data, inside `join_uneven_inputs`.
        """
        if self.engine.gradient_sync.join_state.active:
            raise RuntimeError(
                "backward(loss, weight=...) inside join_uneven_inputs: a process that is out of data takes "
                "no part in adding up the weights. Leave join_uneven_inputs out, and keep even_batches=True "
                "(the default) or give each process as many batches, the missing ones with a loss and a "
                "weight of 0."
            )
        return super().total_weight(weight, dtype)


class DDPEngine(Engine):
    """Every process has the full model; gradients are averaged in backward."""

    loaders_type = DDPLoaders
    gradients_type = DDPGradients

    name = "ddp"
    takes_gradient = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.gradient_sync: DDPGradientSync = DDPGradientSync(context.process)
        self._optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in order

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Wrap models and optimizers, and find what the ones step and the others do not have."""
        done = super().prepare(request)
        # Of all calls: an optimizer that was prepared first may step what a later model has.
        self._optimizers.update(dict.fromkeys(done.optimizers))
        self.gradient_sync.register(parameters_of(self._optimizers))
        return done

    def check(self, request: PrepareRequest) -> None:
        """Reject also models whose weights are split: they are not replicas."""
        super().check(request)
        if "torch.distributed.tensor" in sys.modules:  # without it nothing can be split
            from accel.engines.mesh.tensor.split import is_split

            for model in request.models:
                is_split(model, 1, self.name)

    def check_collectively(self, request: PrepareRequest) -> None:
        """Reject on all processes what one rejects, and models without weights on any of them."""
        models = () if request.evaluation_mode else request.models
        # A frozen model may be prepared on some processes alone: there is nothing that they would share.
        fresh = [(model, True) for model in models if _ddp(model) is None and _is_trained(model)]
        with check_on_all_ranks(fresh, "all", self.context.process):
            self.check(request)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
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
        self.gradient_sync.add(wrapped)
        return wrapped


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
