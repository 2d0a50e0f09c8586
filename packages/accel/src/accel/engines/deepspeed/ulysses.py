"""Sequence parallelism (Ulysses): a group of processes works on one batch, each on its shard of the sequence.

The implementation is DeepSpeed's: its attention exchanges heads for positions, and its loader adapter cuts
batches. Every process reads its own batches; a group works on those of its members one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel.engines.common.loader import EngineLoader
from accel.engines.deepspeed.runtime import import_deepspeed
from accel_data.checks import check_skip
from accel_data.skip import skip_first_batches
from accel_ops.trees.send import send_to_device
from accel_ops.trees.walk import recursively_apply
from accel_state.process import rendezvous

if TYPE_CHECKING:
    import torch

    from accel_state.parallelism.config import ParallelismConfig

_replaced: dict[str, Any] = {}
"""Attention functions of transformers, by the names under which DeepSpeed's are registered now."""


def register(model: torch.nn.Module, config: ParallelismConfig, batch_size: int) -> Any:
    """Make a model of transformers exchange heads for positions in its attention.

    Args:
        model: The model.
        config: The sizes of the mesh's axes, and the settings of sequence parallelism.
        batch_size: Samples per micro-batch.

    Returns:
        The object from which DeepSpeed's engine gets its groups.

    Raises:
        ValueError: If it is not a model of transformers, or its attention or its heads do not fit.
    """
    if not hasattr(model, "config"):
        raise ValueError(
            f"sp_size={config.sp_size}: DeepSpeed's sequence parallelism is for models of transformers, and "
            f"{type(model).__name__} has no config."
        )
    # It uses the existing process group; without this call its collectives have none.
    import_deepspeed("comm").init_distributed(dist_backend=None)
    # Those of a previous model, which it does not replace.
    import_deepspeed("runtime.sequence_parallel.parallel_state_sp")._release_sequence_parallel_groups()
    handler = config.sp_handler
    assert handler is not None, "it is made with sp_size"
    _restore_attention()
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    name = handler.sp_attn_implementation
    if name is not None and name in functions:
        _replaced[name] = functions[name]
        # Models of a later Accelerator in this process would use destroyed groups.
        rendezvous.before_destroy(_restore_attention)
    attention = import_deepspeed("runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
    return attention.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=handler.sp_attn_implementation,
        sequence_parallel_size=config.sp_size,
        micro_batch_size=batch_size,
        seq_length=handler.sp_seq_length,
        seq_length_is_variable=handler.sp_seq_length_is_variable,
    )


def _restore_attention() -> None:
    """Restore the attention of transformers, before DeepSpeed's process groups are destroyed."""
    while _replaced:
        name, function = _replaced.popitem()
        import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS[name] = function


class SequenceParallelLoader(EngineLoader):
    """A prepared loader whose batches the processes of a group share: each gets its shard of the sequence.

    Batches are dicts with "input_ids", "position_ids" and "labels", of shape (batch, sequence, ...). The
    labels are returned shifted, as "shift_labels".

    Args:
        loader: A prepared loader; each process reads its own batches.
        groups: What `register` returned.
        device: Where batches go.
    """

    def __init__(self, loader: Any, groups: Any, device: torch.device) -> None:
        super().__init__(loader)
        self.groups = groups
        self.device = device
        self.skips = 0  # counted in the batches that it yields

    @property
    def _group_size(self) -> int:
        return int(self.groups.get_sequence_parallel_world_size())

    def __len__(self) -> int:
        return max(len(self.loader) * self._group_size - self.skips, 0)

    def skip_first_batches(self, num_batches: int) -> SequenceParallelLoader:
        """Return a copy without its first batches, which need not be complete rounds of a group."""
        # A round is one batch of each member of a group, which the group works on one after the other.
        rounds, skips = divmod(self.skips + check_skip(num_batches), self._group_size)
        other = self.with_loader(skip_first_batches(self.loader, rounds))
        other.skips = skips
        return other

    def __iter__(self) -> Iterator[Any]:
        shared = import_deepspeed("runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter(
            self.loader,
            sp_rank=self.groups.get_sequence_parallel_rank(),
            sp_group=self.groups.get_sequence_parallel_group(),
            sp_world_size=self._group_size,
            device=self.device,
        )
        has_ended = False
        for number, batch in enumerate(shared):
            # The loader has ended once it has been read, but the window may end only with its last batch.
            has_ended = has_ended or self.loader.end_of_dataloader
            self.loader.end_of_dataloader = has_ended and not shared.micro_batches
            if number >= self.skips:
                # Shards are views of full sequences, which models of transformers cannot flatten.
                contiguous = recursively_apply(lambda tensor: tensor.contiguous(), batch)
                yield send_to_device(contiguous, self.device)
