"""Methods that `PartialState`, `AcceleratorState` and `Accelerator` share: ranks, barriers, decorators."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from accel_state.devices.table import device_spec
from accel_state.enums import DistributedType
from accel_state.process import hooks, rendezvous
from accel_state.process.split import split

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ProcessMethods:
    """Mixin of methods that need only the process's ranks and device.

    A subclass provides the property `process`.
    """

    @property
    def process(self) -> ProcessInfo:
        """The ranks, device and backend of this process."""
        raise NotImplementedError(f"{type(self).__name__} must provide the property `process`.")

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self.process.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all, from 0."""
        return self.process.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self.process.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.process.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed run; NO for one process."""
        return self.process.distributed_type

    @property
    def backend(self) -> str | None:
        """The communication backend; None for one process."""
        return self.process.backend

    @property
    def debug(self) -> bool:
        """Whether collectives are compared between processes before they run (ACCELERATE_DEBUG_MODE).

        It can be set, on all processes at the same point.
        """
        return self.process.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        from accel_state.process.state import PartialState  # which inherits from this class

        PartialState._set_debug(value)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.process.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of the run."""
        return self.process.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.process.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the run."""
        return self.process.is_last

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this call; a no-op for one process.

        Raises:
            RuntimeError: If the process group has been destroyed.
        """
        wait(self.process)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the `with` block on the main process first, then on the others.

        The other processes continue even if the block fails on the main process.
        """
        with self._run_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the `with` block on the first process of each machine first, then on the others.

        The other processes continue even if the block fails on the first one.
        """
        with self._run_first(self.is_local_main_process):
            yield

    @contextmanager
    def _run_first(self, first: bool) -> Iterator[None]:
        # The barrier that the first process enters after its block.
        if not first:
            self.wait_for_everyone()
        try:
            yield
        # Also after an exception: the other processes wait here for this one.
        finally:
            if first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its slice of the inputs, in order.

        Slices are contiguous and differ by at most one element; the first processes have the larger ones.
        With padding all have the size of the largest, and the last element of the inputs is repeated at the
        end: gathered outputs, cut to `len(inputs)`, are in the order of the inputs.

        Args:
            inputs: A list, tuple, range, tensor, array or `datasets.Dataset`, or a dictionary of such (also
                nested) of one length, which are split in the same way.
            apply_padding: Make all slices equally long, so that outputs can be gathered. Drop the padded
                elements afterwards.

        Yields:
            This process's slice, of the type of the inputs; the inputs themselves for one process.

        Raises:
            TypeError: If the inputs are of another type.
            ValueError: If the values of a dictionary differ in length.
        """
        # A context manager, as documented, although nothing must be undone.
        yield split(inputs, self.process_index, self.num_processes, apply_padding)

    @overload
    def on_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]: ...
    @overload
    def on_main_process(
        self, function: None = None
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it; elsewhere it returns None.

        Args:
            function: The function; without it a decorator is returned.

        Returns:
            The decorated function.
        """
        # Evaluated at each call: whether this is the main process may not be known at decoration.
        return self._run_only_if(lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]: ...
    @overload
    def on_local_main_process(
        self, function: None = None
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the first process of each machine runs it; elsewhere it returns
        None.

        Args:
            function: The function; without it a decorator is returned.

        Returns:
            The decorated function.
        """
        return self._run_only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorate a function so that only the last process runs it; elsewhere it returns None.

        Args:
            function: The function.

        Returns:
            The decorated function.
        """
        decorated: Callable[_P, _R | None] = self._run_only_if(lambda: self.is_last_process, function)
        return decorated

    @overload
    def on_process(self, function: Callable[_P, _R], process_index: int) -> Callable[_P, _R | None]: ...
    @overload
    def on_process(
        self, function: None = None, *, process_index: int
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only one process runs it; elsewhere it returns None.

        A run of one process runs it for any index, so that nothing is skipped there.

        Args:
            function: The function; without it a decorator is returned.
            process_index: Rank of the process.

        Returns:
            The decorated function.

        Raises:
            ValueError: If there is no process index.
        """
        # Checked when the function is decorated, not when it is first called.
        index = _require_index("on_process", "process_index", process_index)
        return self._run_only_if(lambda: not self.use_distributed or self.process_index == index, function)

    @overload
    def on_local_process(
        self, function: Callable[_P, _R], local_process_index: int
    ) -> Callable[_P, _R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, *, local_process_index: int
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]: ...
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function so that only one process of each machine runs it; elsewhere it returns None.

        A run of one process runs it for any index, so that nothing is skipped there.

        Args:
            function: The function; without it a decorator is returned.
            local_process_index: Rank of the process on its machine.

        Returns:
            The decorated function.

        Raises:
            ValueError: If there is no process index.
        """
        index = _require_index("on_local_process", "local_process_index", local_process_index)
        return self._run_only_if(
            lambda: not self.use_distributed or self.local_process_index == index, function
        )

    def _run_only_if(self, condition: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
        def decorate(inner: Callable[_P, _R]) -> Callable[_P, _R | None]:
            @wraps(inner)
            def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
                return inner(*args, **kwargs) if condition() else None

            return run

        return decorate if function is None else decorate(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine.

        Args:
            *args: As for `print`.
            **kwargs: As for `print`.
        """
        if self.is_local_main_process:
            # The method hides the builtin inside this class.
            builtins.print(*args, **kwargs)


def describe(state: ProcessMethods) -> str:
    """Return ranks, device and backend of a process, one per line.

    Args:
        state: Anything with the property `process`.
    """
    try:
        process = state.process
    # A repr must not fail, even on a handle after a reset.
    except AttributeError:
        return f"{type(state).__name__}(reset)"
    backend = f"  Backend: {process.backend}" if process.backend else ""
    return (
        f"Distributed environment: {state.distributed_type}{backend}\n"
        f"Num processes: {process.world_size}\n"
        f"Process index: {process.rank}\n"
        f"Local process index: {process.local_rank}\n"
        f"Device: {process.device}\n"
    )


def wait(process: ProcessInfo) -> None:
    """Wait until every process has reached this call; a no-op for one process.

    Args:
        process: This process.

    Raises:
        RuntimeError: If the process group has been destroyed.
    """
    if process.world_size == 1:
        return
    if not rendezvous.has_group():
        raise RuntimeError(
            f"Process {process.rank} of {process.world_size} cannot wait for the others: the process group "
            "has been destroyed. Do this before destroy_process_group() or end_training()."
        )
    # Before the barrier, which cannot be interrupted.
    hooks.waits(process)
    rendezvous.barrier(device_spec(process.device), process.device)


def _require_index(method: str, name: str, index: int | None) -> int:
    if index is None:
        raise ValueError(
            f"{method} needs {name}: which process should run the function, for example {name}=0."
        )
    return index
