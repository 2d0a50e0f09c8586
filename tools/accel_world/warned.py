"""Warnings of a run, seen from a function that runs as every rank: only process 0 gives them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["warns_once"]


@contextmanager
def warns_once(kind: type[Warning], match: str) -> Iterator[list[str]]:
    """Expect a warning on process 0, and on no other; as `pytest.warns` where there is one process.

    Args:
        kind: The kind of warning.
        match: A regular expression that is found in its message.

    Yields:
        A list that has the matching messages afterwards.
    """
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    for warning in caught:
        if issubclass(warning.category, kind) and re.search(match, str(warning.message)):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    rank = _rank()
    assert bool(messages) == (rank == 0), f"process {rank} warned {len(messages)} times of {match!r}"


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0
