"""Local SGD: every process trains alone for some steps, then the parameters are averaged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_ops.collectives.operations import reduce
from accel_ops.modules import is_compiled_module
from accel_state.enums import DistributedType

if TYPE_CHECKING:
    from types import TracebackType

    from accel_state.process.info import ProcessInfo

# Under these no process has a full model with its own gradients.
_SHARDED = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


class _Trainer(Protocol):
    """The interface of an Accelerator that local SGD needs."""

    @property
    def process(self) -> ProcessInfo: ...

    @property
    def distributed_type(self) -> DistributedType: ...

    @property
    def sync_gradients(self) -> bool: ...

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]: ...


class LocalSGD:
    """A context in which parameters are averaged over the processes periodically, instead of gradients.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    Parameters are averaged after every `local_sgd_steps` optimizer steps and when the block is left, so that
    all processes continue with the same model. Floating point buffers (the statistics of batch norm) are
    averaged with them, unless DistributedDataParallel has `broadcast_buffers=False`. Optimizer states
    stay local; so do skipped fp16 steps, since gradients are per process.

    Micro-batches inside an accumulation window are not steps: `step` counts where the window closes, as the
    optimizer does. All processes must make the same number of steps. An exception leaves the block without
    averaging, since the other processes may never come to it.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The prepared model.
        local_sgd_steps: Number of optimizer steps between averages.
        enabled: When False, or with one process, the context and `step` do nothing.

    Raises:
        ValueError: If `local_sgd_steps` is not a positive integer, or the model is not a full replica in
            DistributedDataParallel.

    References:
        S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    def __init__(
        self, accelerator: _Trainer, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        # bool is an int to isinstance, and True would pass for 1.
        if not isinstance(local_sgd_steps, int) or isinstance(local_sgd_steps, bool) or local_sgd_steps < 1:
            raise ValueError(
                "local_sgd_steps counts optimizer steps between averages: 1 or more, "
                f"not {local_sgd_steps!r}."
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        # One process has nothing to average.
        self.enabled = bool(enabled) and accelerator.process.world_size > 1
        self.num_steps = 0
        if self.enabled:
            _check_replicated(accelerator, model)
        # no_sync is entered in one method and left in another.
        self._no_sync = contextlib.ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync.enter_context(self.accelerator.no_sync(self.model))
            # DDP with a static graph ignores no_sync until one backward pass has shown it the graph.
            if _inner(self.model).require_backward_grad_sync:
                self._no_sync.close()
                raise ValueError(
                    "LocalSGD cannot keep the gradients local of a model with static_graph=True before its "
                    "first backward, which learns the graph. Leave static_graph out of "
                    "DistributedDataParallelKwargs, or make one ordinary step before the block."
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._no_sync.close()
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Count an optimizer step, and average the parameters after every `local_sgd_steps` of them.

        Call it after `optimizer.step()`, in every micro-batch or only at the window's end.
        """
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        averaged: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        if _inner(self.model).broadcast_buffers:
            averaged += [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        # One call for all, so that small tensors are packed.
        means = reduce([tensor.detach() for tensor in averaged], "mean", process=self.accelerator.process)
        for tensor, mean in zip(averaged, means, strict=True):
            # In place: optimizer and DDP refer to these tensors.
            tensor.copy_(mean)


def _inner(model: torch.nn.Module) -> Any:
    """The DistributedDataParallel module, below torch.compile's."""
    return model._orig_mod if is_compiled_module(model) else model


def _check_replicated(accelerator: _Trainer, model: torch.nn.Module) -> None:
    from torch.nn.parallel import DistributedDataParallel

    kind = accelerator.distributed_type
    if kind in _SHARDED:
        raise ValueError(
            f"LocalSGD averages full models, and under {kind.value} a process does not train one alone. "
            "Use it with DistributedDataParallel, or pass enabled=False."
        )
    if not isinstance(_inner(model), DistributedDataParallel):
        raise ValueError(
            f"LocalSGD needs the prepared model, in DistributedDataParallel, and got {type(model).__name__}. "
            "Pass what accelerator.prepare(model) returned (a model with parameters to train); under an "
            "engine without DistributedDataParallel (tensor parallelism, XLA) pass enabled=False."
        )
