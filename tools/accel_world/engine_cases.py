"""The engines that every contract is tested on: how a script requests each, and on how many processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from accel.engines import entry_point_engines, find_engine
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.parallelism.config import ParallelismConfig, TorchContextParallelConfig

__all__ = ["CASES", "FEW", "HYBRID", "SHARDED_CASES", "Case", "marked", "over_engines"]


@dataclass(frozen=True)
class Case:
    """An engine as a script requests it.

    Attributes:
        size: Number of processes.
        options: Makes the arguments of Accelerator, in the worker.
        engine: What `accelerator.engine.name` has to be.
        replicas: Processes that work on the same samples.
        separable: Whether the model and its optimizer may be prepared in separate calls.
    """

    size: int
    engine: str
    options: Callable[[], dict[str, Any]] = dict
    replicas: int = 1
    separable: bool = True


def fsdp2(**options: Any) -> dict[str, Any]:
    """FSDP2 over all processes, one group for each block."""
    defaults: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "state_dict_type": "FULL_STATE_DICT",
    }
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **(defaults | options))}


def hsdp() -> dict[str, Any]:
    """Two replicas of two shards each."""
    return fsdp2() | {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}


def fsdp1(**options: Any) -> dict[str, Any]:
    """FSDP1 over all processes, one wrapper for each block."""
    defaults: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "sync_module_states": True,
        "use_orig_params": True,
    }
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, **(defaults | options))}


def fsdp2_tp() -> dict[str, Any]:
    """Two groups of two processes that split weights, each with half of the shards."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    return {"fsdp_plugin": plugin, "parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)}


def hsdp_tp(shards: int = 2) -> dict[str, Any]:
    """Two replicas of `shards` shards each, of weights that two processes split."""
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=shards, tp_size=2)
    return fsdp2() | {"parallelism_config": sizes}


def hsdp_cp() -> dict[str, Any]:
    """Two replicas, in shards over the two processes of each that split sequences."""
    return fsdp2() | {"parallelism_config": ParallelismConfig(dp_replicate_size=2, cp_size=2)}


def ddp_tp() -> dict[str, Any]:
    """Two replicas, each of two processes that split weights."""
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=2, tp_size=2)}


def deepspeed(stage: int) -> dict[str, Any]:
    """A stage of DeepSpeed's ZeRO; at 3 small parameters are sharded too."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
    return {"deepspeed_plugin": DeepSpeedPlugin(config, zero3_save_16bit_model=True)}


def cp() -> dict[str, Any]:
    """Two processes that split sequences; they share the parameters too."""
    handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    return fsdp2() | {"parallelism_config": ParallelismConfig(cp_size=2, cp_handler=handler)}


def fsdp2_cp() -> dict[str, Any]:
    """Two groups of two processes that split sequences; all four share the parameters."""
    return fsdp2() | {"parallelism_config": ParallelismConfig(dp_shard_size=2, cp_size=2)}


def cp_tp() -> dict[str, Any]:
    """Two groups of two processes that split weights; the two that have the same part split sequences."""
    return fsdp2() | {"parallelism_config": ParallelismConfig(cp_size=2, tp_size=2)}


def sharded_checkpoint(make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The same, with sharded checkpoints, the default of version 2."""
    options = make()
    options["fsdp_plugin"].set_state_dict_type("SHARDED_STATE_DICT")
    return options


CASES: dict[str, Case] = {
    "single": Case(1, "single"),
    "ddp": Case(2, "ddp"),
    "fsdp1": Case(2, "fsdp1", fsdp1),
    "fsdp2 alone": Case(1, "fsdp2", fsdp2),
    "fsdp2": Case(2, "fsdp2", fsdp2),
    "hsdp": Case(4, "fsdp2", hsdp),
    "tp": Case(2, "tp", lambda: {"parallelism_config": ParallelismConfig(tp_size=2)}, replicas=2),
    "fsdp2 x tp": Case(4, "fsdp2 x tp", fsdp2_tp, replicas=2),
    **{
        f"deepspeed {stage}": Case(
            2, f"deepspeed zero {stage}", functools.partial(deepspeed, stage), separable=False
        )
        for stage in range(4)
    },
    "cp": Case(2, "fsdp2 x cp", cp, replicas=2),
}

for _name in entry_point_engines():
    _kind = find_engine(_name)
    assert _kind.traits.settings_type is not None, f"{_name} has no settings_type that requests it"
    _ask = functools.partial(lambda kind: {"kwargs_handlers": [kind()]}, _kind.traits.settings_type)
    CASES |= {f"{_name} alone": Case(1, _kind.name, _ask), _name: Case(2, _kind.name, _ask)}

FEW = {
    "fsdp2 x cp": Case(4, "fsdp2 x cp", fsdp2_cp, replicas=2),
    "ddp x tp": Case(4, "ddp x tp", ddp_tp, replicas=2),
    "cp x tp": Case(4, "fsdp2 x cp x tp", cp_tp, replicas=4),
}
"""Combinations of the others, which are tested where they could differ."""

HYBRID = {
    "hsdp x cp": Case(4, "fsdp2 x cp", hsdp_cp, replicas=2),
    "hsdp of one shard x tp": Case(4, "fsdp2 x tp", functools.partial(hsdp_tp, 1), replicas=2),
    "hsdp x tp": Case(8, "fsdp2 x tp", functools.partial(sharded_checkpoint, hsdp_tp), replicas=2),
}
"""Replicas of combinations, which take many processes: one short run of each shows all of it."""

SHARDED_CASES = {
    "fsdp1 sharded": Case(2, "fsdp1", functools.partial(sharded_checkpoint, fsdp1)),
    "fsdp1 local files": Case(2, "fsdp1", lambda: fsdp1(state_dict_type="LOCAL_STATE_DICT")),
    "fsdp2 sharded": Case(2, "fsdp2", functools.partial(sharded_checkpoint, fsdp2)),
    "hsdp sharded": Case(4, "fsdp2", functools.partial(sharded_checkpoint, hsdp)),
}

_DEEPSPEED_WARNS = pytest.mark.filterwarnings(  # of torch's newer names, in every collective
    "ignore:`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated:FutureWarning"
)


def marked(names: Iterable[str]) -> list[Any]:
    """Names of cases as pytest's parameters."""
    return [
        pytest.param(name, marks=_DEEPSPEED_WARNS) if name.startswith("deepspeed") else name for name in names
    ]


over_engines = pytest.mark.parametrize("case", marked(CASES))
