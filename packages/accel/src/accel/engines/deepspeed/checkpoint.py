"""DeepSpeed's own checkpoints inside those of `save_state`, and full states of models that ZeRO-3 shards.

pytorch_model/     weights, optimizer states and counters, one shard per process
latest             the name of that folder
zero_to_fp32.py    DeepSpeed's script that merges the shards into full fp32 weights
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from accel.engines.deepspeed.runtime import import_deepspeed
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files.tensors import torch_load
from accel_ops.modules import compile_children_in_place, extract_model_from_parallel

# DeepSpeed writes a folder of this name.
_TAG = "pytorch_model"


def save(engine: Any, folder: Path, options: dict[str, Any]) -> None:
    """Write an engine's state; every process calls it.

    Args:
        engine: The engine.
        folder: The checkpoint's folder.
        options: Those of DeepSpeed's `save_checkpoint`.
    """
    compile_children_in_place(engine.module)  # compiled after prepare
    engine.save_checkpoint(str(folder), tag=_TAG, **options)


def check(engine: Any, names: Collection[str]) -> None:
    """Reject a checkpoint that DeepSpeed cannot load into this engine.

    Args:
        engine: The engine.
        names: The checkpoint's files.

    Raises:
        CheckpointError: If another engine wrote it, or at another stage, or with another number of processes.
    """
    files = {name.removeprefix(f"{_TAG}/") for name in names if name.startswith(f"{_TAG}/")}
    if not files:
        raise CheckpointError(
            "The checkpoint was not written under DeepSpeed, which cannot load another engine's "
            "optimizer states. Load its weights with load_checkpoint_in_model before prepare()."
        )
    stage, size = engine.zero_optimization_stage(), engine.seq_dp_world_size
    # The stage can be recognized only by DeepSpeed's file names (0.19): its files are pickles, which are read
    # after this check.
    saved = sum(bool(re.fullmatch(r".*zero_pp_rank_\d+_.*optim_states\.pt", name)) for name in files)
    had_shards = any(re.fullmatch(r"zero_pp_rank_\d+_.*model_states\.pt", name) for name in files)
    kind = "3" if had_shards else "1 or 2" if saved else "0"
    if kind != ("3" if stage == 3 else "1 or 2" if stage else "0"):
        raise CheckpointError(
            f"The checkpoint is of ZeRO stage {kind}, but zero_stage={stage} here: DeepSpeed saves different "
            "shards at each. Set the stage it was saved with, or extract the weights with its "
            "zero_to_fp32.py."
        )
    if saved and saved != size:
        raise CheckpointError(
            f"The checkpoint is of {saved} processes, but there are {size}: DeepSpeed does not reshard "
            "ZeRO's optimizer states. Start as many processes, or extract the weights with its "
            "zero_to_fp32.py."
        )


def load(engine: Any, folder: Path, options: dict[str, Any]) -> None:
    """Restore an engine's state; every process calls it.

    Args:
        engine: The engine.
        folder: The checkpoint's folder.
        options: Those of DeepSpeed's `load_checkpoint`.

    Raises:
        CheckpointError: If a file contains anything but tensors and plain values.
    """
    compile_children_in_place(engine.module)
    with _no_code_runs(engine.checkpoint_engine):
        engine.load_checkpoint(str(folder), tag=_TAG, **options)


@contextlib.contextmanager
def _no_code_runs(reader: Any) -> Iterator[None]:
    """Make DeepSpeed read its files without running code from them, unlike its own reader."""
    # Set on the instance, which hides the class's method; DeepSpeed (0.19) has no option for it.
    reader.load = functools.partial(_read, _allowed())
    try:
        yield
    finally:
        del reader.load


def _read(allowed: list[Any], path: str, map_location: Any = None) -> Any:
    try:
        with torch.serialization.safe_globals(allowed):
            return torch_load(path, map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} has more than tensors and plain values, or is damaged.") from error


def _allowed() -> list[Any]:
    """The classes of DeepSpeed in its files; they are plain values."""
    scalers = import_deepspeed("runtime.fp16.loss_scaler")
    stages, fragments = import_deepspeed("runtime.zero.config"), import_deepspeed("utils.tensor_fragment")
    return [
        scalers.DynamicLossScaler,
        scalers.LossScaler,
        stages.ZeroStageEnum,
        fragments.fragment_address,
    ]


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether a DeepSpeed engine shards the model's parameters."""
    # A method of DeepSpeed's engines, which identifies them without importing DeepSpeed.
    partitions = getattr(model, "zero_optimization_partition_weights", None)
    return partitions is not None and bool(partitions())


def gather_full_state(engine: Any) -> dict[str, Any]:
    """The full weights on the main process; the other ranks participate and get an empty dict.

    Args:
        engine: An engine of stage 3.

    Raises:
        ValueError: If gathering them is not enabled.
    """
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise ValueError(
            "ZeRO-3 shards the weights, and gathering them is disabled. Set "
            "DeepSpeedPlugin(zero3_save_16bit_model=True) (accel launch --zero3_save_16bit_model true; "
            "stage3_gather_16bit_weights_on_model_save in DeepSpeed's configuration), or extract them from a "
            "checkpoint with the zero_to_fp32.py that save_state puts there."
        )
    compile_children_in_place(engine.module)
    # Private; the documented save_16bit_model writes this to a file. None on all ranks but the first.
    return engine._zero3_consolidated_16bit_state_dict() or {}


class ShardedModel:
    """A ZeRO-3 model that saves and loads full weights.

    Args:
        engine: Its engine.
    """

    def __init__(self, engine: torch.nn.Module) -> None:
        self.model = extract_model_from_parallel(engine, keep_torch_compile=False)

    def state_dict(self) -> dict[str, Any]:
        """Return names and shapes of the full weights; tied ones are one tensor; values are undefined."""
        tied: dict[int, torch.Tensor] = {}
        state = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            if hasattr(value, "ds_shape"):
                # `ds_shape` is the shape before sharding; between steps the parameter itself is empty.
                empty = torch.empty(1, dtype=value.dtype).expand(value.ds_shape)
                state[name] = tied.setdefault(id(value), empty)
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load full weights, one at a time; each process keeps its shard.

        Args:
            state: Full tensors by name; every process has them.
            strict: Whether missing or unknown names are an error.

        Raises:
            ValueError: If `strict` and there are such names.
        """
        current = self.model.state_dict(keep_vars=True)
        if strict and current.keys() ^ state.keys():
            raise ValueError(f"These names do not fit the model: {sorted(current.keys() ^ state.keys())}.")
        with torch.no_grad():
            for name, value in current.items():  # the same order on all processes, which gather at once
                if name in state:
                    # The first process's values are broadcast when the context ends.
                    with import_deepspeed("runtime.zero").GatheredParameters([value], modifier_rank=0):
                        value.copy_(state[name])
