"""Whether the global random generators have been drawn from: cheap enough to be asked at every batch."""

from __future__ import annotations

import _random
import ctypes
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from accel_data.order import IsolatedRNG

__all__ = ["Watch", "tell_late_draw"]

_Words = ctypes.c_uint32 * 625
"""A Mersenne twister: 624 words and the place among them."""


class Watch:
    """Tells whether the global random generators moved since it was asked before.

    Those of Python and numpy are read where they lie in memory, as handing them out takes them tens of
    microseconds.
    """

    def __init__(self) -> None:
        self._python = _python_state()
        self._numpy = _numpy_state()
        self._before = self._now()

    def moved(self) -> bool:
        """Whether something was drawn since the last call, or since this was made."""
        now = self._now()
        before, self._before = self._before, now
        return now != before

    def _now(self) -> tuple[Any, ...]:
        torch_state = torch.default_generator.get_state().numpy().tobytes()
        return IsolatedRNG.entered, torch_state, self._python(), self._numpy()


def tell_late_draw() -> None:
    """Warn that reading began to draw only after batches had been read ahead."""
    warnings.warn(
        "Reading the data uses the global random generators (torch, random or numpy), but did not for the "
        "first batch, so that one that draws may have been read ahead: what the loop draws may then differ "
        "after a resume. From here on each batch is read in its turn. Draw from "
        "accel_data.sample_generator(index) instead, or in accel_data.sample_rng(index) for every sample.",
        stacklevel=2,
    )


def _python_state() -> Callable[[], Any]:
    twister: Any = random._inst
    *words, place = twister.getstate()[1]
    start = object.__basicsize__
    if _random.Random.__basicsize__ < start + ctypes.sizeof(_Words):
        return random.getstate
    memory = _Words.from_address(id(twister) + start)
    if list(memory) != [place, *words]:
        return random.getstate
    return lambda: (bytes(memory), twister.gauss_next)


def _numpy_state() -> Callable[[], Any]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return lambda: None
    name, words, place, *_ = numpy.random.get_state()
    bits = numpy.random.mtrand._rand._bit_generator
    if name == "MT19937":
        memory = _Words.from_address(bits.ctypes.state_address)
        if list(memory) == [*words, place]:
            return lambda: (bits, bytes(memory))[1]  # which keeps the memory alive
    return lambda: str(numpy.random.get_state())
