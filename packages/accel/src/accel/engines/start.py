"""Making the engine of a plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accel.engines import Engine, find_engine
from accel.engines.context import EngineContext, EngineTraits
from accel.precision.autocast import Precision
from accel_optim.scaler import get_grad_scaler
from accel_state.enums import DistributedType
from accel_state.logging.loggers import get_logger

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from accel.precision.fp8.choice import Fp8
    from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.gradient import GradientState
    from accel_state.train_plan import TrainPlan

_logger = get_logger("accel.engines")


def start_engine(
    plan: TrainPlan,
    state: AcceleratorState,
    gradient_state: GradientState,
    *,
    autocast: AutocastKwargs | None = None,
    ddp: DistributedDataParallelKwargs | None = None,
    scaler: GradScalerKwargs | None = None,
    fp8: Any = None,
) -> Engine:
    """Make the engine of a plan; a log line says which one, where, and why.

    Args:
        plan: The plan for this process.
        state: Precision, mesh and the facts of the process.
        gradient_state: The accumulation window's state.
        autocast: Options of autocast.
        ddp: Options of DistributedDataParallel.
        scaler: Options of the loss scaler of fp16 training.
        fp8: The recipe of the library that computes in fp8.

    Raises:
        ImportError: If something that the engine needs is missing.
        ValueError: If the engine cannot work with the settings.
    """
    assert plan.engine is not None, "a plan for a process has one"
    kind = find_engine(plan.engine)
    # Of several DeepSpeed plugins the Accelerator's own state knows which is active now.
    settings = (
        partial(getattr, state, "deepspeed_plugin") if plan.engine == "deepspeed" else plan.engine_settings
    )
    precision, device = state.mixed_precision, state.device.type
    # to_kwargs leaves out defaults, which torch_xla's scaler need not share.
    options = {} if scaler is None else scaler.to_kwargs()
    engine = kind(
        EngineContext(
            process=state.process,
            precision=Precision(precision, autocast),
            gradient_state=gradient_state,
            name=plan.engine,
            # Made before the engine, whose context is frozen.
            scaler=make_scaler(kind.traits, state, **options) if precision == "fp16" else None,
            mesh=state.device_mesh,
            mesh_axes=plan.mesh,
            parallelism=plan.parallelism,
            settings=settings,
            ddp=ddp,
            dynamo=plan.dynamo,
            fp8=_make_fp8(plan, fp8),
        )
    )
    _logger.info(
        "engine %s, because of %s; %d process(es) on %s, mesh %s; precision %s, because of %s",
        engine.name,
        " and ".join(plan.reasons["engine"]),
        state.num_processes,
        device,
        _sizes(engine.data_parallel.mesh),
        precision,
        " and ".join(plan.reasons["mixed_precision"]) or "the default",
    )
    return engine


def make_scaler(traits: EngineTraits, state: AcceleratorState, **options: Any) -> torch.amp.GradScaler | None:
    """The loss scaler of fp16 training, or None if the engine scales losses itself.

    Args:
        traits: Those of the engine.
        state: The facts of the process.
        **options: Those of torch.amp.GradScaler.
    """
    if traits.scales_losses:
        return None
    # Where gradients are sharded each process would decide from its own shards which steps to skip.
    kind = DistributedType.FSDP if traits.shards_gradients else state.distributed_type
    return get_grad_scaler(kind, device_type=state.device.type, **options)


def _make_fp8(plan: TrainPlan, recipe: Any) -> Fp8 | None:
    if plan.fp8_backend is None and recipe is None:
        return None
    from accel.precision.fp8.choice import make_fp8  # most programs have no use for its recipes

    return make_fp8(plan, recipe)


def _sizes(mesh: DeviceMesh | None) -> str:
    names = None if mesh is None else mesh.mesh_dim_names
    return " x ".join(f"{name}={mesh[name].size()}" for name in names) if mesh and names else "none"
