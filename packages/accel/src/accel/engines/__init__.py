"""Engines by distributed type: a dotted name each, imported on first use.

Adding an engine adds one file to this folder and one row to `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel.engines.base import Engine, EngineContext, Prepared
from accel_state import env
from accel_state.enums import DistributedType
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.accelerator_state import AcceleratorState

_logger = get_logger(__name__)

__all__ = [
    "ENGINES",
    "Engine",
    "EngineContext",
    "EngineRow",
    "Prepared",
    "choose_engine",
    "engine_class",
    "start_engine",
]


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
_FSDP1 = EngineRow("accel.engines.fsdp1:FSDP1Engine", "torch 2.6 or newer, built with torch.distributed")
_DEEPSPEED = EngineRow("accel.engines.deepspeed:DeepSpeedEngine", "pip install 'accel[deepspeed]'")
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
    DistributedType.DEEPSPEED: _DEEPSPEED,
    DistributedType.MEGATRON_LM: EngineRow(None, _LATER),
    DistributedType.XLA: EngineRow(None, _LATER),
}


def engine_class(distributed_type: DistributedType) -> type[Engine]:
    """The engine class for a distributed type; that of FSDP is version 2's.

    Raises:
        NotImplementedError: If the engine is documented but not built yet.
        ImportError: If its module does not import; the message says what to install.
    """
    return _load(ENGINES[distributed_type], distributed_type)


def _load(row: EngineRow, distributed_type: DistributedType) -> type[Engine]:
    if row.path is None:
        raise NotImplementedError(f"the {distributed_type.value} engine is not there yet; {row.hint}.")
    module, _, name = row.path.partition(":")
    try:
        found: type[Engine] = getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"the {distributed_type.value} engine needs: {row.hint}") from error
    return found


def choose_engine(state: AcceleratorState) -> type[Engine]:
    """The engine class that a state asks for.

    Raises:
        NotImplementedError: If the engine, mesh dimension, plugin or precision is documented but not built
            yet.
    """
    config = state.parallelism_config
    if state.distributed_type == DistributedType.DEEPSPEED:
        return engine_class(DistributedType.DEEPSPEED)
    if config is not None and config.sp_enabled:
        raise ValueError(
            f"sp_size={config.sp_size}: sequence parallelism is DeepSpeed's (Ulysses). Pass a "
            "DeepSpeedPlugin too (accel launch --use_deepspeed), or set cp_size."
        )
    if state.distributed_type == DistributedType.FSDP and not state.is_fsdp2:
        return _load(_FSDP1, DistributedType.FSDP)
    is_split = config is not None and config.tp_enabled
    return engine_class(DistributedType.FSDP if is_split else state.distributed_type)


def start_engine(state: AcceleratorState, context: EngineContext, asked: Mapping[str, Any]) -> Engine:
    """Make the engine that a state asks for; a log line says which one, where, and what asked for it.

    Args:
        state: The settings.
        context: What the engine may know.
        asked: The arguments that choose an engine or a precision, as they were given; None: not given.

    Raises:
        NotImplementedError: As `choose_engine`.
    """
    engine = choose_engine(state)(context)
    _logger.info(
        "engine %s, because of %s; %d process(es) on %s, mesh %s; precision %s, because of %s",
        engine.name,
        " and ".join(_reasons(asked, _CHOOSE_ENGINE)) or "the number of processes",
        state.num_processes,
        state.device.type,
        _sizes(engine.mesh),
        state.mixed_precision,
        " and ".join(_reasons(asked, _CHOOSE_PRECISION)) or "the default",
    )
    return engine


_CHOOSE_ENGINE = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": None,
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
_CHOOSE_PRECISION = {"mixed_precision": "ACCELERATE_MIXED_PRECISION"}


def _reasons(asked: Mapping[str, Any], variables: Mapping[str, str | None]) -> list[str]:
    """The arguments and variables that chose; an argument comes before its variable."""
    found = []
    for name, variable in variables.items():
        if asked.get(name) is not None:
            found.append(name)
        elif variable is not None and env.is_set(variable) and env.get(variable):
            found.append(variable)
    return found


def _sizes(mesh: DeviceMesh | None) -> str:
    names = None if mesh is None else mesh.mesh_dim_names
    return " x ".join(f"{name}={mesh[name].size()}" for name in names) if mesh and names else "none"
