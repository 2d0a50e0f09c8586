"""Engines by distributed type: a dotted name each, imported on first use.

Adding an engine adds one file to this folder and one row to `ENGINES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from accel.engines.base import Engine
from accel.engines.context import EngineContext, Prepared
from accel_state.enums import DistributedType
from accel_state.imports.packages import install_hint, is_package_available
from accel_state.logging.loggers import get_logger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.training.choice import Choice
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
    """Where an engine lives, and what it needs.

    Attributes:
        path: "module:class".
        hint: What to install where something is missing.
        needs: Modules that it works with, which accel does not depend on.
    """

    path: str
    hint: str
    needs: tuple[str, ...] = ()


_TORCH = "torch 2.6 or newer, built with torch.distributed"
_SINGLE = EngineRow("accel.engines.single:SingleEngine", "pip install torch")
_DDP = EngineRow("accel.engines.ddp.engine:DDPEngine", _TORCH)
_MESH = EngineRow("accel.engines.mesh.engine:MeshEngine", _TORCH)
_FSDP1 = EngineRow("accel.engines.fsdp1.engine:FSDP1Engine", _TORCH)
_DEEPSPEED = EngineRow(
    "accel.engines.deepspeed.engine:DeepSpeedEngine", install_hint("deepspeed"), ("deepspeed",)
)
_MEGATRON = EngineRow(
    "accel.engines.megatron.engine:MegatronLMEngine", install_hint("megatron"), ("megatron.core",)
)
_XLA = EngineRow(
    "accel.engines.xla:XLAEngine",
    f"{install_hint('xla')}, in the version that belongs to the installed torch",
    ("torch_xla",),
)

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
    DistributedType.MEGATRON_LM: _MEGATRON,
    DistributedType.XLA: _XLA,
}


def engine_class(distributed_type: DistributedType) -> type[Engine]:
    """The engine class for a distributed type; that of FSDP is version 2's.

    Raises:
        ImportError: If something that it needs is missing; the message names it, and what to install.
    """
    return _load(ENGINES[distributed_type], distributed_type)


def _load(row: EngineRow, distributed_type: DistributedType) -> type[Engine]:
    missing = [module for module in row.needs if not is_package_available(module)]
    if missing:
        raise ImportError(
            f"the {distributed_type.value} engine was asked for, and needs {', '.join(missing)}, which is "
            f"not installed. Install it with: {row.hint}"
        )
    module, _, name = row.path.partition(":")
    try:
        found: type[Engine] = getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(
            f"the {distributed_type.value} engine cannot be imported ({error}). It needs: {row.hint}"
        ) from error
    return found


def choose_engine(state: AcceleratorState) -> type[Engine]:
    """The engine class that a state asks for.

    Raises:
        ImportError: As `engine_class`.
        ValueError: If the engine and the axes of the mesh do not go together.
    """
    config = state.parallelism_config
    if state.distributed_type == DistributedType.DEEPSPEED:
        return engine_class(DistributedType.DEEPSPEED)
    own = state.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA)
    if config is not None and config.active_mesh_dims and own:
        raise ValueError(
            f"parallelism_config asks for {', '.join(config.active_mesh_dims)}, and the "
            f"{state.distributed_type.value} engine arranges processes by itself. Leave it out; under "
            "Megatron-LM MegatronLMPlugin has tp_degree, pp_degree and context_parallel_size."
        )
    if config is not None and config.sp_enabled:
        raise ValueError(
            f"sp_size={config.sp_size}: sequence parallelism is DeepSpeed's (Ulysses). Pass a "
            "DeepSpeedPlugin too (accel launch --use_deepspeed), or set cp_size."
        )
    if state.distributed_type == DistributedType.FSDP and not state.is_fsdp2:
        return _load(_FSDP1, DistributedType.FSDP)
    is_split = config is not None and config.tp_enabled
    return engine_class(DistributedType.FSDP if is_split else state.distributed_type)


def start_engine(state: AcceleratorState, context: EngineContext, choice: Choice) -> Engine:
    """Make the engine that a state asks for; a log line says which one, where, and what asked for it.

    Args:
        state: The settings.
        context: What the engine may know.
        choice: What asked for the engine and the precision.

    Raises:
        ImportError: As `choose_engine`.
        ValueError: As `choose_engine`, or if the engine cannot work with the settings.
    """
    engine = choose_engine(state)(context)
    _logger.info(
        "engine %s, because of %s; %d process(es) on %s, mesh %s; precision %s, because of %s",
        engine.name,
        " and ".join(choice.engine_reasons) or "the number of processes",
        state.num_processes,
        state.device.type,
        _sizes(engine.mesh),
        state.mixed_precision,
        choice.precision_reason,
    )
    return engine


def _sizes(mesh: DeviceMesh | None) -> str:
    names = None if mesh is None else mesh.mesh_dim_names
    return " x ".join(f"{name}={mesh[name].size()}" for name in names) if mesh and names else "none"
