"""Engines by distributed type: a dotted name each, imported on first use.

Adding an engine adds one file to this folder and one row to `ENGINES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from accel.engines.base import Engine, EngineContext, Prepared
from accel_state.enums import DistributedType
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState

_logger = get_logger(__name__)

__all__ = ["ENGINES", "Engine", "EngineContext", "EngineRow", "Prepared", "choose_engine", "engine_class"]


@dataclass(frozen=True)
class EngineRow:
    """Where an engine lives, and what to install when its module does not import.

    Attributes:
        path: "module:class", or None for an engine that is documented and not built yet.
        hint: What to install, or what to use instead.
    """

    path: str | None
    hint: str


_SINGLE = EngineRow("accel.engines.single:SingleEngine", "pip install torch")
_DDP = EngineRow("accel.engines.ddp:DDPEngine", "pip install torch, built with torch.distributed")
_MESH = EngineRow("accel.engines.mesh:MeshEngine", "torch 2.6 or newer, built with torch.distributed")
_LATER = "this version trains with one process, DDP or FSDP2: leave the plugin and its flags out"

ENGINES: dict[DistributedType, EngineRow] = {
    DistributedType.NO: _SINGLE,
    DistributedType.MULTI_CPU: _DDP,
    DistributedType.MULTI_GPU: _DDP,
    DistributedType.MULTI_HPU: _DDP,
    DistributedType.MULTI_MLU: _DDP,
    DistributedType.MULTI_MUSA: _DDP,
    DistributedType.MULTI_NEURON: _DDP,
    DistributedType.MULTI_NPU: _DDP,
    DistributedType.MULTI_SDAA: _DDP,
    DistributedType.MULTI_XPU: _DDP,
    DistributedType.FSDP: _MESH,
    DistributedType.DEEPSPEED: EngineRow(None, _LATER),
    DistributedType.MEGATRON_LM: EngineRow(None, _LATER),
    DistributedType.XLA: EngineRow(None, _LATER),
}


def engine_class(distributed_type: DistributedType) -> type[Engine]:
    """The engine class for a distributed type.

    Raises:
        NotImplementedError: If the engine is documented but not built yet.
        ImportError: If its module does not import; the message says what to install.
    """
    row = ENGINES[distributed_type]
    if row.path is None:
        raise NotImplementedError(f"the {distributed_type.value} engine is not there yet; {row.hint}.")
    module, _, name = row.path.partition(":")
    try:
        found: type[Engine] = getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"the {distributed_type.value} engine needs: {row.hint}") from error
    return found


def choose_engine(state: AcceleratorState) -> type[Engine]:
    """The engine class that a state asks for; a log line says which and why.

    Raises:
        NotImplementedError: If the engine, mesh dimension, plugin or precision is documented but not built
            yet.
    """
    config = state.parallelism_config
    if config is not None:
        unbuilt = [dim for dim in config.active_mesh_dims if dim in ("cp", "sp")]
        if unbuilt:
            raise NotImplementedError(
                f"parallelism_config asks for {', '.join(unbuilt)}; this version has dp_replicate (DDP), "
                "dp_shard (FSDP2) and tp. Leave the other sizes at 1."
            )
    if state.torch_tp_plugin is not None:
        raise NotImplementedError(
            f"torch_tp_plugin={state.torch_tp_plugin!r}: tensor parallelism is not there yet; leave it out."
        )
    if state.distributed_type == DistributedType.FSDP and not state.is_fsdp2:
        raise NotImplementedError(
            "fsdp_version=1 is not there yet; set FullyShardedDataParallelPlugin(fsdp_version=2) "
            "(FSDP_VERSION=2, accel launch --fsdp_version 2)."
        )
    if state.mixed_precision == "fp8":
        raise NotImplementedError("mixed_precision='fp8' is not there yet; use 'bf16'.")
    is_split = config is not None and config.tp_enabled
    found = engine_class(DistributedType.FSDP if is_split else state.distributed_type)
    _logger.info(
        "engine %s on %s, precision %s: %d process(es), distributed type %s",
        found.name,
        state.device,
        state.mixed_precision,
        state.num_processes,
        state.distributed_type.value,
    )
    return found
