"""Collective methods of the Accelerator: gathering, reducing, triggers and comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_ops.collectives import operations, padding

if TYPE_CHECKING:
    from accel.training.agreement import Agreement
    from accel.training.run import Run


class CollectiveControl:
    """Mixin with the collectives; all processes call each of them.

    A subclass has the attributes that are declared here.
    """

    run: Run
    flag_tensor: torch.Tensor | None  # documented, and read by clients
    _triggers: Agreement

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along their first dimension, leaf by leaf."""
        return operations.gather(tensor, process=self.run.process)

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, loader: Any = None
    ) -> Any:
        """Gather, and drop the rows that only padded the last batch: every sample counts once.

        After the loop it drops the padding of what has one row per sample of the whole epoch, of the loader
        that ended last.

        Args:
            input_data: A tree of tensors (rows, *), or any objects.
            use_gather_object: Gather by pickling although all leaves are tensors.
            loader: The prepared loader that the data was made from, where several give batches side by side.
                By default the one that gave the last batch, unless the number of rows is that of another.

        Raises:
            TypeError: If `loader` is no prepared loader.
            ValueError: If it was not iterated, or the data differs between processes that share sequences.
            RuntimeError: If some processes have no batch in this step.
        """
        from accel.training import metrics

        parallelism = self.run.state.parallelism_config
        return metrics.gather_for_metrics(
            input_data,
            passes=metrics.current_passes(self.run.gradient_state, loader),
            process=self.run.process,
            shard=self.run.engine.loaders.dp_rank_and_size,
            use_gather_object=use_gather_object,
            shares_sequences=parallelism is not None and parallelism.cp_enabled,
            is_training=any(model.training for model in self.run.models),
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce the tensors of all processes ("sum", "mean", "max", "none"); all get the result."""
        run = self.run
        # In training, samples that fill up the last batch are trained on like others.
        if run.process.world_size > 1 and not any(model.training for model in run.models):
            from accel.training import metrics

            metrics.warn_of_reduced_padding(
                run.gradient_state, run.engine.loaders.dp_rank_and_size[1], reduction
            )
        return operations.reduce(tensor, reduction, scale, process=run.process)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors along `dim` to the largest size over the processes."""
        return padding.pad_across_processes(tensor, dim, pad_index, pad_first, process=self.run.process)

    def set_trigger(self) -> None:
        """Raise this process's flag; `check_trigger` sees it on every process."""
        self.flag_tensor = torch.ones((), device=self.run.process.device)

    def check_trigger(self) -> bool:
        """Whether any process raised its flag since the last check, which all of them make together."""
        # Each process lowers its flag at the check, which all of them make.
        raised, self.flag_tensor = self.flag_tensor is not None, None
        return self._triggers.ask("check_trigger", raised)

    def verify_sync(self, *models: torch.nn.Module, buffers: bool = True, rng: bool = True) -> list[str]:
        """Make sure that models and random generators are the same on all processes, to the last bit.

        Args:
            *models: The models; by default all that are prepared.
            buffers: Whether to compare buffers too (running statistics of batch norm may differ).
            rng: Whether to compare random generators (they differ after `set_seed(device_specific=True)`).

        Returns:
            The names of what was not compared: tensors of which each process has a part of its own, and
            sparse or quantized ones.

        Raises:
            DistributedOperationException: On every process, if something differs: which parameter, buffer or
                generator is the first, on which processes, and how far they are apart.
        """
        from accel.observe import sync

        return sync.verify_sync(self.run, models, buffers=buffers, rng=rng)
