"""The engines that programs run under, as a script requests them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from accel import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accel.utils import DeepSpeedPlugin, ParallelismConfig, TorchContextParallelConfig

from .program import BEFORE, KINDS, Program, programs

__all__ = ["ENGINES", "EngineCase"]


@dataclass(frozen=True)
class EngineCase:
    """An engine.

    Attributes:
        size: Number of processes.
        options: Makes the Accelerator's arguments for a program.
        dtype: Of weights: float64 where the engine takes it.
        tolerance: Largest relative error.
        kinds: The kinds of micro-batches that it is tried with.
        before: What may come before them.
        takes_unused: Whether a parameter that no forward pass uses has no gradient, as on one process.
        takes_two_optimizers: Whether one model may have two.
    """

    size: int
    options: Callable[[Program], dict[str, Any]]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    kinds: tuple[str, ...] = KINDS
    before: tuple[str, ...] = BEFORE
    takes_unused: bool = True
    takes_two_optimizers: bool = True

    def programs(self) -> st.SearchStrategy[Program]:
        """The random programs that it is tried with."""
        return programs(self.kinds, self.before, self.takes_unused, self.takes_two_optimizers)


def _without(values: tuple[str, ...], *left_out: str) -> tuple[str, ...]:
    assert set(left_out) <= set(values)
    return tuple(value for value in values if value not in left_out)


def _fsdp(version: int) -> Callable[[Program], dict[str, Any]]:
    def options(program: Program) -> dict[str, Any]:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap" if program.wrapped else "no_wrap",
            state_dict_type="SHARDED_STATE_DICT" if program.sharded else "FULL_STATE_DICT",
            sync_module_states=True,
            use_orig_params=True if version == 1 else None,
        )
        return {"fsdp_plugin": plugin}

    return options


def _mesh(**sizes: Any) -> Callable[[Program], dict[str, Any]]:
    def options(program: Program) -> dict[str, Any]:
        config = ParallelismConfig(**sizes)
        shards = sizes.get("dp_shard_size", 1) * sizes.get("cp_size", 1)
        return (_fsdp(2)(program) if shards > 1 else {}) | {"parallelism_config": config}

    return options


def _ddp(program: Program) -> dict[str, Any]:
    return {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}


def _deepspeed(stage: int) -> Callable[[Program], dict[str, Any]]:
    def options(program: Program) -> dict[str, Any]:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
        return {"deepspeed_plugin": DeepSpeedPlugin(config, zero3_save_16bit_model=True)}

    return options


ENGINES: dict[str, EngineCase] = {
    "single": EngineCase(1, lambda program: {}),
    "ddp": EngineCase(2, _ddp),
    "fsdp1": EngineCase(
        2,
        _fsdp(1),
        kinds=_without(KINDS, "two backwards"),  # torch has freed the weights
        takes_unused=False,  # zeros: they lie in a flat parameter
    ),
    "fsdp2": EngineCase(2, _fsdp(2)),
    "hsdp": EngineCase(4, _mesh(dp_replicate_size=2, dp_shard_size=2)),
    "tp": EngineCase(2, _mesh(tp_size=2)),
    "fsdp2 x tp": EngineCase(4, _mesh(dp_shard_size=2, tp_size=2)),
    "cp": EngineCase(
        4,
        _mesh(dp_shard_size=2, cp_size=2, cp_handler=TorchContextParallelConfig(cp_comm_strategy="alltoall")),
        torch.float32,
        1e-3,
        kinds=_without(KINDS, "no backward"),
        before=_without(BEFORE, "forward"),
    ),
    **{
        f"deepspeed {stage}": EngineCase(
            2,
            _deepspeed(stage),
            torch.float32,
            1e-3,
            kinds=("train", "evaluate inside"),
            before=("nothing", "evaluate", "save", "load", "state"),
            takes_unused=False,  # zeros, as in any flat parameter
            takes_two_optimizers=False,
        )
        for stage in range(4)
    },
}
"""By name."""
