"""DeepSpeed's own checkpoints inside those of `save_state`, and full states of what ZeRO-3 shards.

pytorch_model/     weights, optimizer states and counters, each process its part
latest             the name of that folder
zero_to_fp32.py    DeepSpeed's script that makes whole fp32 weights of the parts
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
    compile_children_in_place(engine.module)  # one that was compiled after prepare
    engine.save_checkpoint(str(folder), tag=_TAG, **options)


def check(engine: Any, names: Collection[str]) -> None:
    """Reject a checkpoint that DeepSpeed cannot go on from with this engine.

    Args:
        engine: The engine.
        names: The checkpoint's files.

    Raises:
        CheckpointError: If another engine wrote it, or it is that of another stage or number of processes.
    """
    own = {name.removeprefix(f"{_TAG}/") for name in names if name.startswith(f"{_TAG}/")}
    if not own:
        raise CheckpointError(
            "The checkpoint was not written under DeepSpeed, which cannot go on from another engine's "
            "optimizer states. Load its weights with load_checkpoint_in_model before prepare()."
        )
    stage, here = engine.zero_optimization_stage(), engine.seq_dp_world_size
    # What there is of each stage is known by DeepSpeed's file names alone (0.19); its files are pickles,
    # which are read after this check.
    saved = sum(bool(re.fullmatch(r".*zero_pp_rank_\d+_.*optim_states\.pt", name)) for name in own)
    had_parts = any(re.fullmatch(r"zero_pp_rank_\d+_.*model_states\.pt", name) for name in own)
    kind = "3" if had_parts else "1 or 2" if saved else "0"
    if kind != ("3" if stage == 3 else "1 or 2" if stage else "0"):
        raise CheckpointError(
            f"The checkpoint is of ZeRO stage {kind}, and zero_stage={stage} here: DeepSpeed keeps other "
            "parts at each. Set the stage it was saved with, or take the weights out of it with its "
            "zero_to_fp32.py."
        )
    if saved and saved != here:
        raise CheckpointError(
            f"The checkpoint is of {saved} processes, and there are {here}: DeepSpeed does not share ZeRO's "
            "optimizer states out again. Start as many processes, or take the weights out of it with its "
            "zero_to_fp32.py."
        )


def load(engine: Any, folder: Path, options: dict[str, Any]) -> None:
    """Restore an engine's state; every process calls it.

    Args:
        engine: The engine.
        folder: The checkpoint's folder.
        options: Those of DeepSpeed's `load_checkpoint`.

    Raises:
        CheckpointError: If a file holds anything else than tensors and plain values.
    """
    compile_children_in_place(engine.module)
    with _no_code_runs(engine.checkpoint_engine):
        engine.load_checkpoint(str(folder), tag=_TAG, **options)


@contextlib.contextmanager
def _no_code_runs(reader: Any) -> Iterator[None]:
    """Have DeepSpeed read its files without running what they name; its own reader does."""
    # On the object, over the class's method; DeepSpeed (0.19) has no option for it.
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
        raise CheckpointError(f"{path} holds more than tensors and plain values, or is damaged.") from error


def _allowed() -> list[Any]:
    """The classes of DeepSpeed's that its files name; they hold values alone."""
    scalers = import_deepspeed("runtime.fp16.loss_scaler")
    stages, fragments = import_deepspeed("runtime.zero.config"), import_deepspeed("utils.tensor_fragment")
    return [
        scalers.DynamicLossScaler,
        scalers.LossScaler,
        stages.ZeroStageEnum,
        fragments.fragment_address,
    ]


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether an engine of DeepSpeed shards the model's parameters."""
    # A method of DeepSpeed's engines, by which they are known without importing DeepSpeed.
    partitions = getattr(model, "zero_optimization_partition_weights", None)
    return partitions is not None and bool(partitions())


def gather_full_state(engine: Any) -> dict[str, Any]:
    """The full weights on the main process; the others participate and get an empty dict.

    Args:
        engine: An engine of stage 3.

    Raises:
        ValueError: If gathering them is not asked for.
    """
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise ValueError(
            "ZeRO-3 shards the weights, and gathering them is switched off. Set "
            "DeepSpeedPlugin(zero3_save_16bit_model=True) (accel launch --zero3_save_16bit_model true; "
            "stage3_gather_16bit_weights_on_model_save in DeepSpeed's configuration), or take them out of a "
            "checkpoint with the zero_to_fp32.py that save_state puts there."
        )
    compile_children_in_place(engine.module)
    # Private, and what its documented save_16bit_model writes to a file; None on all but the first process.
    return engine._zero3_consolidated_16bit_state_dict() or {}


class ShardedModel:
    """A model of ZeRO-3 as checkpoints see it: with full weights.

    Args:
        engine: Its engine.
    """

    def __init__(self, engine: torch.nn.Module) -> None:
        self.model = extract_model_from_parallel(engine, keep_torch_compile=False)

    def state_dict(self) -> dict[str, Any]:
        """Return names and shapes of the full weights; tied ones are one tensor, and values mean nothing."""
        tied: dict[int, torch.Tensor] = {}
        state = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            if hasattr(value, "ds_shape"):
                # `ds_shape` is the shape before sharding; between steps the parameter itself is empty.
                empty = torch.empty(1, dtype=value.dtype).expand(value.ds_shape)
                state[name] = tied.setdefault(id(value), empty)
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load full weights, of which each process keeps its part; one is whole at a time.

        Args:
            state: Full tensors by name; every process has them.
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
                    # The first process's values are sent when the context ends, whatever the others have
                    # copied.
                    with import_deepspeed("runtime.zero").GatheredParameters([value], modifier_rank=0):
                        value.copy_(state[name])
