"""megatron-core's distributed checkpoints inside those of save_state.

megatron_lm/    weights, optimizer states and random generators, one shard per process

As in megatron-core, a checkpoint can be loaded with other parallel sizes, except for its random generators.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.engines.megatron.runtime import core, parallel_state
from accel_ckpt.errors import CheckpointError
from accel_state.imports.packages import require
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines.megatron.plugin import MegatronLMPlugin
    from accel.engines.megatron.schedule import MegatronEngine

FOLDER = "megatron_lm"


def save(model: MegatronEngine, folder: Path, plugin: MegatronLMPlugin) -> None:
    """Write a model and its optimizer; every process calls it.

    Args:
        model: The model.
        folder: The checkpoint's folder.
        plugin: The plugin, which may omit optimizer states.
    """
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    # Without it one of megatron-core's writers crashes, and this hangs.
    require("psutil", "megatron")
    state = _sharded(model, with_optimizer=not plugin.no_save_optim)
    core("dist_checkpointing").save(state | {"arrangement": _arrangement()}, str(target))


def check(names: Collection[str]) -> None:
    """Reject a checkpoint that Megatron-LM cannot load.

    Args:
        names: Its files.

    Raises:
        CheckpointError: If another engine wrote it.
    """
    if not any(name.startswith(f"{FOLDER}/") for name in names):
        raise CheckpointError(
            "The checkpoint was not written under Megatron-LM, whose weights have other names and "
            "shapes. Load it under the engine that wrote it."
        )


def load(model: MegatronEngine, folder: Path, plugin: MegatronLMPlugin) -> None:
    """Restore a model and its optimizer; every process calls it.

    Args:
        model: The model.
        folder: The checkpoint's folder.
        plugin: The plugin, which may omit optimizer states.
    """
    with_optimizer = not plugin.no_load_optim
    wanted = _sharded(model, with_optimizer, is_loading=True)
    checkpoints, source = core("dist_checkpointing"), str(folder / FOLDER)
    # First and separately: the state requested below depends on it.
    saved = checkpoints.load_common_state_dict(source).get("arrangement")
    if saved != _arrangement():
        # Each process has its own generators, which cannot be used for another stage of the model.
        del wanted["random"]
        warn(
            f"The checkpoint was saved with (pp_degree, tp_degree) = {saved}, but they are {_arrangement()} "
            "here: weights and optimizer states are restored, but dropout starts with new random numbers.",
        )
    found = checkpoints.load(wanted, source)
    for index, chunk in enumerate(model.model_chunks):
        chunk.load_state_dict(found[f"model{index}"], strict=True)
    if "optimizer" in found and model.optimizer is not None:
        model.optimizer.optimizer.load_state_dict(found["optimizer"])
    if "random" in wanted:
        core("tensor_parallel").get_cuda_rng_tracker().set_states(found["random"])


def _arrangement() -> tuple[int, int]:
    places = parallel_state()
    return (
        places.get_pipeline_model_parallel_world_size(),
        places.get_tensor_model_parallel_world_size(),
    )


def _sharded(model: MegatronEngine, with_optimizer: bool, is_loading: bool = False) -> dict[str, Any]:
    """This process's shard of the model, in the form of megatron-core's checkpoints."""
    # Of the unwrapped models: their wrappers load the same names.
    models = core("utils").unwrap_model(model.model_chunks)
    state: dict[str, Any] = {f"model{index}": each.sharded_state_dict() for index, each in enumerate(models)}
    if with_optimizer and model.optimizer is not None:
        weights = state["model0"] if len(model.model_chunks) == 1 else dict(state)
        state["optimizer"] = model.optimizer.optimizer.sharded_state_dict(weights, is_loading=is_loading)
    places = parallel_state()
    state["random"] = core("dist_checkpointing").ShardedObject(
        "random",
        core("tensor_parallel").get_cuda_rng_tracker().get_states(),
        _arrangement(),
        (places.get_pipeline_model_parallel_rank(), places.get_tensor_model_parallel_rank()),
        # Data-parallel replicas are equal; megatron-core writes the first.
        replica_id=places.get_data_parallel_rank(with_context_parallel=True),
    )
    return state
