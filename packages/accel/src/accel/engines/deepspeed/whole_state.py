"""Whole states of models whose parameters ZeRO-3 shares out over processes."""

from __future__ import annotations

from typing import Any

import torch

from accel.engines.deepspeed.runtime import part
from accel_ops.modules import extract_model_from_parallel

__all__ = ["SharedOutModel", "gather_whole", "is_shared_out"]


def is_shared_out(model: torch.nn.Module) -> bool:
    """Whether an engine of DeepSpeed shares the model's parameters out."""
    partitions = getattr(model, "zero_optimization_partition_weights", None)
    return partitions is not None and bool(partitions())


def gather_whole(engine: Any) -> dict[str, Any]:
    """The whole weights on the main process; others take part and get an empty dict.

    Args:
        engine: An engine of stage 3.

    Raises:
        ValueError: If gathering them is not asked for.
    """
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise ValueError(
            "ZeRO-3 shares the weights out, and gathering them is switched off. Set "
            "DeepSpeedPlugin(zero3_save_16bit_model=True) (accel launch --zero3_save_16bit_model true; "
            "stage3_gather_16bit_weights_on_model_save in DeepSpeed's configuration), or take them out of a "
            "checkpoint with the zero_to_fp32.py that save_state puts there."
        )
    return engine._zero3_consolidated_16bit_state_dict() or {}


class SharedOutModel:
    """A model of ZeRO-3 as checkpoints see it: with whole weights.

    Args:
        engine: Its engine.
    """

    def __init__(self, engine: torch.nn.Module) -> None:
        self.model = extract_model_from_parallel(engine, keep_torch_compile=False)

    def state_dict(self) -> dict[str, Any]:
        """Return names and shapes of the whole weights; tied ones are one tensor, and values mean nothing."""
        stand_ins: dict[int, torch.Tensor] = {}
        state = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            if hasattr(value, "ds_shape"):
                empty = torch.empty(1, dtype=value.dtype).expand(value.ds_shape)
                state[name] = stand_ins.setdefault(id(value), empty)
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load whole weights, of which each process keeps its part; one is whole at a time.

        Args:
            state: Whole tensors by name; every process has them.
            strict: Whether names that are missing or unknown are an error.

        Raises:
            ValueError: If `strict` and there are such names.
        """
        present = self.model.state_dict(keep_vars=True)
        if strict and present.keys() ^ state.keys():
            raise ValueError(f"These names do not fit the model: {sorted(present.keys() ^ state.keys())}.")
        with torch.no_grad():
            for name, value in present.items():  # in the order of all processes, which gather together
                if name in state:
                    with part("runtime.zero").GatheredParameters([value], modifier_rank=0):
                        value.copy_(state[name])
