"""How long this process waits in backward for the gradients of others, by the timers of
DistributedDataParallel.

`_get_ddp_logging_data` and `_set_ddp_runtime_logging_sample_rate` are private methods of that class, the same
from torch 2.10 to 2.13: no documented call tells a process's own backward from its wait. DDP takes the times
by itself, in its first ten passes and in every hundredth; here it takes them more often.
"""

from __future__ import annotations

from statistics import median
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from accel.engines.torch_private import uncompiled

_DEFAULT_RATE = 100  # torch's
_FIRST = 10  # passes that torch samples at any rate


class GradientWaits:
    """Samples the waits of prepared models.

    Args:
        rate: Backward passes between two samples.

    Attributes:
        is_active: Whether a model is sampled.
    """

    def __init__(self, rate: int) -> None:
        self.is_active = False
        self._rate = rate
        self._models: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()  # its last sample
        self._passes = self._counted = 0  # all, and those before the last `take`
        self._waits: list[float] = []  # sampled since `take`, in seconds
        self._median = 0.0  # their median

    def add(self, model: torch.nn.Module) -> torch.nn.Module:
        """Sample a prepared model, if it waits for gradients.

        Returns:
            The module whose forward pass is this process's own: that of DDP begins with a wait for buffers.
        """
        inner = uncompiled(model)
        if not isinstance(inner, DistributedDataParallel):
            return model
        inner._set_ddp_runtime_logging_sample_rate(self._rate)  # type: ignore[no-untyped-call]
        self._models[inner] = -1
        self.is_active = True
        has_buffers = next(inner.module.buffers(), None) is not None
        return inner.module if has_buffers and inner is model else model

    def count_pass(self) -> None:
        """Count a backward pass that waits."""
        self._passes += 1
        if self._passes <= _FIRST or self._passes % self._rate == 0:
            self._sample()

    def take(self) -> float:
        """Return the seconds of waits since the last call; a pass without a sample counts as their median."""
        self._sample()
        if self._waits:
            self._median = median(self._waits)
        others = max(0, self._passes - self._counted - len(self._waits))
        waited_s = sum(self._waits) + self._median * others
        self._waits, self._counted = [], self._passes
        return waited_s

    def stop(self) -> None:
        """Let DDP sample as it does by itself."""
        for model in self._models:
            model._set_ddp_runtime_logging_sample_rate(_DEFAULT_RATE)  # type: ignore[no-untyped-call]

    def _sample(self) -> None:
        for model, last in list(self._models.items()):
            # Of the pass that was sampled last, in nanoseconds.
            times = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            # There is none at first, and on devices that are neither CPUs nor GPUs.
            if times.get("iteration", last) != last and "backward_comm_time" in times:
                self._models[model] = times["iteration"]
                waited_ns = times["backward_comm_time"] - times["backward_compute_comm_overlap_time"]
                self._waits.append(max(0, waited_ns) / 1e9)
