"""Types that files may contain besides tensors, although torch.load rejects them: numpy's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


@contextmanager
def arrays_allowed() -> Iterator[None]:
    """Allow `torch.load` to load arrays inside the block, in addition to the types allowed before."""
    # torch's context would also remove the types that were allowed before it.
    allowed = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([entry for entry in _array_types() if entry not in allowed]):
        yield


@cache
def _array_types() -> tuple[Any, ...]:
    """Return the names in pickles of numpy arrays and scalars, of numpy 1 and 2; none of them runs code."""
    if find_spec("numpy") is None:
        return ()
    import numpy as np

    # The modules of the two functions are read from the pickles that numpy makes.
    functions: tuple[Any, ...] = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
    named = [
        (function, f"{module}.multiarray.{function.__name__}")
        for function in functions
        for module in ("numpy._core", "numpy.core")
    ]
    # Not O (objects) and V (records, which may contain objects): their elements may be any pickle.
    dtypes = [type(np.dtype(kind)) for kind in np.typecodes["All"] if kind not in "OV"]
    return (np.ndarray, np.dtype, *named, *dict.fromkeys(dtypes))
