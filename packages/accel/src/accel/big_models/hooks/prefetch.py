"""Reading the weights of the module that runs next while the current one runs."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from accel.big_models.hooks.base import ModelHook
from accel.big_models.hooks.untraced import run_untraced
from accel_ckpt.weights.mapped import read_pages

__all__ = ["EndOfForward", "Prefetcher", "bring_in"]

_Weights = dict[str, torch.Tensor]


class _Loading(Protocol):
    """A hook that loads the weights of its module, as AlignDevicesHook does."""

    @property
    def is_loaded(self) -> bool: ...

    def fetch(self) -> _Weights: ...


class Prefetcher:
    """The order in which the modules of a model ran, and the weights of the next one.

    The first forward learns the order; from the second on, a thread fetches what comes next, and ends with
    that. Where the order changes, what was fetched in vain is dropped, and the module reads for itself.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        # A fork copies this object without its threads.
        self._process = os.getpid()
        self._next: dict[int, ref[_Loading]] = {}  # weak: hooks hold this
        self._reads: dict[int, Future[_Weights]] = {}
        self._threads: list[threading.Thread] = []
        # Each thread may run a forward of its own, in an order of its own.
        self._last = threading.local()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy learns for itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()

    def take(self, hook: _Loading) -> _Weights:
        """Return the weights of a module that were fetched ahead; wait for them if they are being read.

        Args:
            hook: The module's hook.

        Returns:
            Weights by name; none if they were not fetched, or could not be.
        """
        if self._process != os.getpid():  # the thread that was reading is in the parent
            self._forget()
        with self._lock:
            read = self._reads.pop(id(hook), None)
        if read is None or read.exception() is not None:
            return {}  # the module reads for itself, and raises what there is to raise
        return read.result()

    def start_next(self, hook: _Loading) -> None:
        """Fetch what ran after a module the last time.

        Args:
            hook: The hook of the module that begins to run.
        """
        before = getattr(self._last, "hook", None)
        if before is not None:
            self._next[id(before)] = ref(hook)
        self._last.hook = hook
        weak = self._next.get(id(hook))
        following = weak() if weak is not None else None
        if following is None or following is hook:
            return
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if id(following) in self._reads or following.is_loaded:
                return
            read: Future[_Weights] = Future()
            thread = threading.Thread(target=_read, args=(following, read), name="accel-prefetch")
            try:
                thread.start()
            except RuntimeError:  # no thread can be started any more: the interpreter ends
                return
            self._reads[id(following)] = read
            self._threads.append(thread)

    def finish(self) -> None:
        """End a forward of the model: what was fetched in vain is dropped, and no thread reads any more."""
        self._last.hook = None
        if self._process != os.getpid():
            return
        with self._lock:
            self._reads.clear()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()


class EndOfForward(ModelHook):
    """Ends what a prefetcher does where the forward of the whole model ends.

    Args:
        prefetcher: The prefetcher.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """End it."""
        run_untraced(Prefetcher.finish, self.prefetcher)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """End it."""
        run_untraced(Prefetcher.finish, self.prefetcher)


def _read(hook: _Loading, read: Future[_Weights]) -> None:
    try:
        read.set_result(hook.fetch())
    except BaseException as error:  # whoever takes it sees it
        read.set_exception(error)


def bring_in(value: torch.Tensor) -> torch.Tensor:
    """Read a weight that may be mapped from a file."""
    if value.device.type == "cpu" and type(value) is torch.Tensor and value.is_contiguous() and value.numel():
        read_pages(value)
    return value
