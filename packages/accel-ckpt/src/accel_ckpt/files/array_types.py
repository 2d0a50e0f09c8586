"""Types that files may hold beside tensors, though torch.load by itself refuses them: numpy's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


@contextmanager
def arrays_allowed() -> Iterator[None]:
    """Let `torch.load` make arrays inside of the block; what was allowed before it stays so."""
    # torch's own context would also take away what was allowed before it.
    allowed = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([entry for entry in _array_types() if entry not in allowed]):
        yield


@cache
def _array_types() -> tuple[Any, ...]:
    """Names that pickles of numpy arrays and scalars refer to, in numpy 1 and 2; none of them runs code."""
    if find_spec("numpy") is None:
        return ()
    import numpy as np

    # Where the two functions live is read off the pickles that numpy makes.
    functions: tuple[Any, ...] = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
    named = [
        (function, f"{module}.multiarray.{function.__name__}")
        for function in functions
        for module in ("numpy._core", "numpy.core")
    ]
    # Not O (objects) and V (records, which may have objects in them): their elements are pickles of anything.
    dtypes = [type(np.dtype(kind)) for kind in np.typecodes["All"] if kind not in "OV"]
    return (np.ndarray, np.dtype, *named, *dict.fromkeys(dtypes))
