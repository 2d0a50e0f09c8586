"""Base classes of the gradient synchronization of engines with several processes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.common.replica_check import ReplicaCheck
from accel.engines.common.standalone import StandaloneParameters, average_gradients
from accel_optim.gradient_sync import GradientSync

if TYPE_CHECKING:
    from types import TracebackType

    from accel_state.process.info import ProcessInfo


class DistributedGradientSync(GradientSync):
    """Parameters of prepared models, and standalone parameters, on several processes.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        self._process = process
        # Ordered: all processes iterate in the same order.
        self._models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._standalone = StandaloneParameters(process)
        self._check = ReplicaCheck(process)
        self._has_new = False
        self._no_sync_depth = 0

    @property
    def in_no_sync(self) -> bool:
        """Whether backward passes leave gradients unreduced now."""
        return self._no_sync_depth > 0

    @property
    def may_differ(self) -> bool:
        """Whether replicas may differ now, or processes do not step at the same time."""
        return self.in_no_sync

    def no_sync(
        self, no_sync: contextlib.AbstractContextManager[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """A context whose backward passes leave gradients unreduced.

        Args:
            no_sync: The context that makes backward do so.
        """
        return _NoSync(self, no_sync)

    def enter_no_sync(self) -> None:
        """Called where a `no_sync` context begins."""
        # A counter: contexts of several models are entered at once, and contexts are nested.
        self._no_sync_depth += 1

    def exit_no_sync(self) -> None:
        """Called where a `no_sync` context ends."""
        self._no_sync_depth -= 1

    def is_model_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for a parameter of a model that `parameters()` does not return now."""
        return False

    def register(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find the standalone parameters among those of optimizers; nothing while there is no model."""
        if self._models:
            # By identity: `==` of tensors compares their elements.
            in_models = {id(item) for model in self._models for item in model.parameters()}
            self._standalone.register(
                parameters, lambda item: id(item) in in_models or self.is_model_parameter(item)
            )

    def is_standalone(self, parameter: torch.Tensor) -> bool:
        """Whether a tensor belongs to no model, and a prepared optimizer steps it."""
        return any(item is parameter for item in self._standalone.trained())

    def after_backward(self, retains_graph: bool) -> None:
        """Record that there are new gradients."""
        self._has_new = True

    def finish_window(self) -> None:
        """Average the gradients of standalone parameters."""
        # Once per window: clipping, unscaling and the step all call this.
        if self._has_new:
            self._has_new = False
            average_gradients(self._standalone.trained(), self._process)

    def before_step(self, param_groups: list[dict[str, Any]]) -> None:
        """Reduce what is left, and reshard: no forward pass may use weights gathered before the step."""
        self.finish_window()
        self.reshard()
        if self._check.every and not self.may_differ:
            self._check.before_step(
                (item for group in param_groups for item in group["params"]), self._models
            )


class _NoSync:
    """The context of `no_sync`; a class, as a generator-based one takes twice the time."""

    __slots__ = ("context", "gradient_sync")

    def __init__(
        self, gradient_sync: DistributedGradientSync, context: contextlib.AbstractContextManager[Any]
    ) -> None:
        self.gradient_sync = gradient_sync
        self.context = context

    def __enter__(self) -> None:
        self.gradient_sync.enter_no_sync()
        try:
            self.context.__enter__()
        except BaseException:
            self.gradient_sync.exit_no_sync()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.context.__exit__(kind, error, traceback)
        finally:
            self.gradient_sync.exit_no_sync()


class ShardedGradientSync(DistributedGradientSync):
    """Sharded parameters, whose full gradients are kept outside of `.grad` until the window ends."""

    def enter_no_sync(self) -> None:
        """Called where a context begins whose backward passes keep full, unreduced gradients."""
        self.has_unreduced_grads = True
        super().enter_no_sync()

    def after_backward(self, retains_graph: bool) -> None:
        """Record that there are new gradients, and whether they are unreduced."""
        super().after_backward(retains_graph)
        # A backward pass outside of the context also keeps what was accumulated before.
        self.has_unreduced_grads |= self.in_no_sync

    def finish_window(self) -> None:
        """Reduce the gradients of a window whose last micro-batch had no backward pass."""
        if self.has_unreduced_grads:
            # Before reducing: after an error the next step must not reduce again.
            self.has_unreduced_grads = False
            self.reduce_pending()
        super().finish_window()

    def drop_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Drop full gradients that are not reduced."""
        if self.has_unreduced_grads:
            self.drop_pending(None if parameters is None else {id(item) for item in parameters})

    def reduce_pending(self) -> None:
        """Reduce the unreduced gradients."""
        raise NotImplementedError

    def drop_pending(self, wanted: set[int] | None) -> None:
        """Drop the unreduced gradients.

        Args:
            wanted: The `id` of each trained tensor whose gradient is dropped; None for all.
        """
        raise NotImplementedError
