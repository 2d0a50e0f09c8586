"""The base of engines with several processes whose gradients torch reduces in backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.base import Engine
from accel.engines.common.standalone import average_gradients, parameters_of, send_values
from accel.engines.context import EngineContext, PrepareRequest
from accel_optim.parameter_map import ParameterMap

if TYPE_CHECKING:
    from types import TracebackType


class DistributedEngine(Engine):
    """Prepared models, and standalone tensors whose gradients are averaged at the end of each window."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        process = context.process
        # Ordered: collectives over them need the same order on all processes. Weak, so that optimizers, which
        # refer to the engine, are in no cycle.
        self._models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.parameters = self._make_parameters(
            None if process.world_size == 1 else partial(send_values, process)
        )
        self._has_new = False  # gradients since the last call of `reduce_accumulated`
        self._no_sync_depth = 0

    def _make_parameters(self, send: Callable[[Sequence[torch.Tensor]], None] | None) -> ParameterMap:
        return ParameterMap(send)

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Set up models and optimizers, and find what optimizers step and no model has."""
        done = super().prepare(request)
        # Of all calls: an optimizer that was prepared first may step what a later model has.
        self._optimizers.update(dict.fromkeys(done.optimizers))
        self._register_optimizers()
        return done

    def _register_optimizers(self) -> None:
        self.parameters.register(parameters_of(self._optimizers))

    @property
    def in_no_sync(self) -> bool:
        """Whether backward passes leave gradients unreduced now."""
        return self._no_sync_depth > 0

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass on a loss that is already scaled for the window."""
        super().backward(loss, **kwargs)
        self._has_new = True

    def reduce_accumulated(self) -> None:
        """Average the gradients of standalone tensors."""
        # Once per window: clipping, unscaling and the step all call this.
        if self._has_new:
            self._has_new = False
            average_gradients(self.parameters.standalone(), self.context.process)

    def _no_sync(
        self, context: contextlib.AbstractContextManager[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """A context that is known to leave gradients unreduced."""
        return _NoSync(self, context)


class _NoSync:
    """The context of `no_sync`; a class, as a generator-based one takes twice the time."""

    __slots__ = ("context", "engine")

    def __init__(self, engine: DistributedEngine, context: contextlib.AbstractContextManager[Any]) -> None:
        self.engine = engine
        self.context = context

    def __enter__(self) -> None:
        # A counter: contexts of several models are entered at once, and contexts are nested.
        self.engine._no_sync_depth += 1
        try:
            self.context.__enter__()
        except BaseException:
            self.engine._no_sync_depth -= 1
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.context.__exit__(kind, error, traceback)
        finally:
            self.engine._no_sync_depth -= 1
