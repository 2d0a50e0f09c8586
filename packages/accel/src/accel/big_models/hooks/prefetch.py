"""Reading the weights of the modules that run next while the current one runs."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from accel.big_models.hooks.base import Arguments, ModelHook
from accel.precision.outside_dynamo import call_outside_dynamo
from accel_ckpt.weights.mapped import read_pages

_Weights = dict[str, torch.Tensor]

# Bytes of modules to read ahead, as starting a thread for each takes 0.1 ms.
_BYTES_AHEAD = 8 << 20

# Reading this much takes less time than waiting for a thread that reads it.
_SMALL_BYTES = 64 << 10

# How many small modules are skipped when looking for one to read ahead.
_PASSED_OVER = 8


class _Loading(Protocol):
    """A hook that loads the weights of its module, as AlignDevicesHook does."""

    @property
    def is_loaded(self) -> bool: ...

    @property
    def offloaded_bytes(self) -> int: ...

    def fetch(self) -> _Weights: ...


class Prefetcher:
    """Reads the weights of the modules that run next, in the order of the previous forward pass.

    The first forward records the order; from the second on, a thread fetches the next modules, up to 8 MiB in
    total, or a single larger one. Modules of 64 KiB or less read their weights themselves. If the order
    changes, unused weights are dropped, and the module reads its own. Calling a module outside of a forward
    with an `EndOfForward` does not read ahead, as nothing would end it.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        # A fork copies this object without its threads.
        self._process = os.getpid()
        self._next: dict[int, ref[_Loading]] = {}  # weak: hooks hold this
        self._reads: dict[int, _Read] = {}
        self._ahead = 0  # bytes of these
        self._end: ref[_Loading] | None = None  # the last of these
        self._threads: list[threading.Thread] = []
        # Per thread, as each may run its own forward: the last module that began, and the number of nested
        # forwards with an EndOfForward.
        self._last = threading.local()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy records its own order

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()

    def take(self, hook: _Loading) -> _Weights:
        """Return the prefetched weights of a module; wait for them if they are being read.

        Args:
            hook: The module's hook.

        Returns:
            Weights by name; empty if they were not fetched, or fetching failed.
        """
        if self._process != os.getpid():  # the reading thread is in the parent
            self._forget()
        with self._lock:
            read = self._reads.pop(id(hook), None)
            if read is not None:
                self._ahead -= read.size
            elif hook.offloaded_bytes > _SMALL_BYTES:  # another module was expected
                self._drop()
        if read is None or read.weights.exception() is not None:
            return {}  # the module reads its weights itself, and raises the error
        return read.weights.result()

    def start_next(self, hook: _Loading) -> None:
        """Prefetch the modules that ran after this one the last time.

        Args:
            hook: The hook of the module that begins to run.
        """
        before = getattr(self._last, "hook", None)
        if before is not None and before is not hook:
            self._next[id(before)] = ref(hook)
        if not getattr(self._last, "depth", 0):
            return
        self._last.hook = hook
        with self._lock:
            if self._ahead > _BYTES_AHEAD // 2:  # one thread for several small modules, not one for each
                return
            end = self._end() if self._end is not None else None
            reads = self._following(hook if end is None else end)
            if not reads:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=_read, args=(reads,), name="accel-prefetch")
            try:
                thread.start()
            except RuntimeError:  # no thread can be started any more: the interpreter ends
                return
            self._reads.update((id(hook), read) for hook, read in reads)
            self._ahead += sum(read.size for _, read in reads)
            self._end = ref(reads[-1][0])
            self._threads.append(thread)

    def _following(self, hook: _Loading) -> list[tuple[_Loading, _Read]]:
        """Return what to read after a module."""
        reads: list[tuple[_Loading, _Read]] = []
        ahead, seen, passed_over = self._ahead, {id(hook)}, 0
        while ahead < _BYTES_AHEAD and passed_over < _PASSED_OVER:
            weak = self._next.get(id(hook))
            following = weak() if weak is not None else None
            if following is None or id(following) in seen or id(following) in self._reads:
                break
            if following.is_loaded:  # by a module that contains it
                break
            hook = following
            seen.add(id(hook))
            if hook.offloaded_bytes <= _SMALL_BYTES:
                passed_over += 1
                continue
            reads.append((hook, _Read(hook.offloaded_bytes)))
            ahead += hook.offloaded_bytes
            passed_over = 0
        return reads

    def _drop(self) -> None:
        for read in self._reads.values():
            read.wanted = False
        self._reads.clear()
        self._ahead, self._end = 0, None

    def begin(self) -> None:
        """Start a forward of the model or of a module in it."""
        if self._process != os.getpid():
            self._forget()
        self._last.depth = getattr(self._last, "depth", 0) + 1

    def finish(self) -> None:
        """End a forward; at the end of the outermost, drop unused weights and wait for reading threads."""
        self._last.depth = getattr(self._last, "depth", 1) - 1
        if self._last.depth:
            return
        self._last.hook = None
        if self._process != os.getpid():
            return
        with self._lock:
            self._drop()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()


class _Read:
    """The weights of one module that are being fetched: their bytes, and a future of the weights."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.weights: Future[_Weights] = Future()
        self.wanted = True


class EndOfForward(ModelHook):
    """Ends prefetching at the end of the forward of a model, or of a module that is called directly.

    Args:
        prefetcher: The prefetcher.
    """

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Start a forward."""
        call_outside_dynamo(Prefetcher.begin, self.prefetcher)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """End the forward."""
        call_outside_dynamo(Prefetcher.finish, self.prefetcher)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """End the forward."""
        call_outside_dynamo(Prefetcher.finish, self.prefetcher)


def _read(reads: list[tuple[_Loading, _Read]]) -> None:
    for hook, read in reads:
        _fetch(hook, read)


def _fetch(hook: _Loading, read: _Read) -> None:
    try:  # even if it is no longer needed, a thread may wait for it
        read.weights.set_result(hook.fetch() if read.wanted else {})
    except BaseException as error:  # raised where the result is used
        read.weights.set_exception(error)


def read_into_memory(value: torch.Tensor) -> torch.Tensor:
    """Read a weight that may be mapped from a file."""
    if value.device.type == "cpu" and type(value) is torch.Tensor and value.is_contiguous() and value.numel():
        read_pages(value)
    return value
