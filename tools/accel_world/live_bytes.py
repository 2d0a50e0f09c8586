"""The largest number of bytes that tensors have at the same time, counted tensor by tensor.

Unlike the memory of a process it does not depend on what else the machine does: pages of libraries that come
and go, what the allocator keeps, other programs.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of all tensors that operations return inside it.

    What only waits for Python's garbage collector does not count: when that runs depends on everything.

    Attributes:
        peak: The largest sum of their sizes after any operation, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __enter__(self) -> LiveBytes:
        gc.collect()
        gc.freeze()  # so that collecting takes no time
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        gc.unfreeze()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            self._add(item)
        if self._count() > self.peak:
            gc.collect()
            self.peak = max(self.peak, self._count())
        return result

    def _count(self) -> int:
        # Sizes are read again, as FSDP empties and refills storages.
        return sum(storage.nbytes() for storage in self._storages)

    def _add(self, item: Any) -> None:
        if not isinstance(item, torch.Tensor):
            return
        if is_traceable_wrapper_subclass(item):  # a DTensor: its local shard counts
            for name in item.__tensor_flatten__()[0]:
                self._add(getattr(item, name))
        elif item.device.type != "meta":
            self._storages.add(item.untyped_storage())
