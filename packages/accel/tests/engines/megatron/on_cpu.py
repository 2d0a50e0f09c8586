"""megatron-core on CPU, for tests alone: the CUDA calls on its way are answered by the CPU."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_calls_answered_by_the_cpu"]


class _OnCPU(TorchFunctionMode):
    """Tensors that are requested on CUDA are made on the CPU, and CPU tensors say that they are on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def cuda_calls_answered_by_the_cpu() -> Iterator[None]:
    """Let accel's Megatron-LM engine and megatron-core run on CPU processes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random

    from accel.engines.megatron import runtime

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    answers = [
        (runtime, "check_device", lambda device: None),
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "empty_cache", lambda: None),
        # A save hands its result over in its own process, which would outlive the test.
        (filesystem_async, "_results_queue", queue.Queue()),
        (random, "_get_cuda_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in answers]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    try:
        with _OnCPU():
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
