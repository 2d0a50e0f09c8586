"""A model under Megatron-LM: one call runs a step's micro-batches, forward and, in training, backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel.engines.megatron.models.steps import AbstractTrainStep, StepOutput
from accel.engines.megatron.runtime import core, parallel_state
from accel_ops.trees.tensors import find_batch_size, slice_tensors

if TYPE_CHECKING:
    from accel.engines.megatron.optimizers import MegatronLMOptimizerWrapper


class MegatronEngine(torch.nn.Module):
    """This process's chunks of a model, called with a batch, as a model of transformers.

    In training mode a call runs forward and backward over all micro-batches and leaves the reduced gradients
    for `optimizer.step()`; in evaluation mode it runs only forward.

    Args:
        model_chunks: The wrapped chunks, several with virtual pipeline stages.
        step: The batch, forward pass and loss of this kind of model.
        num_micro_batches: Micro-batches per call.
    """

    def __init__(self, model_chunks: list[Any], step: AbstractTrainStep, num_micro_batches: int) -> None:
        super().__init__()
        self.module = torch.nn.ModuleList(model_chunks)
        self.train_step = step
        self.num_micro_batches = num_micro_batches
        self.optimizer: MegatronLMOptimizerWrapper | None = None
        self.last_loss: torch.Tensor | None = None

    @property
    def model_chunks(self) -> list[Any]:
        """This process's wrapped chunks."""
        return list(self.module)

    @property
    def config(self) -> Any:
        """megatron-core's configuration of the model."""
        return core("utils").get_model_config(self.module[0])

    def attach(self, optimizer: MegatronLMOptimizerWrapper) -> None:
        """Train with an optimizer: schedules get the loss scale from it, and finalise its gradients.

        Args:
            optimizer: The wrapped optimizer.
        """
        self.optimizer = optimizer
        config = self.config
        config.grad_scale_func = optimizer.optimizer.scale_loss
        config.finalize_model_grads_func = core("distributed").finalize_model_grads
        syncs = [chunk.no_sync for chunk in self.model_chunks]
        # megatron-core takes a list for virtual stages, otherwise one function.
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]

    def forward(self, **batch: Any) -> StepOutput:
        """Run a batch's micro-batches.

        Args:
            **batch: Tensors whose first dimension is the batch.

        Returns:
            The mean loss, on all processes; logits on the last pipeline stage, with `return_logits`.

        Raises:
            ValueError: If the samples cannot be divided into micro-batches, or the model is in training mode
                without an optimizer.
        """
        if self.training and self.optimizer is None:
            raise ValueError(
                "The model was prepared without an optimizer, so Megatron-LM cannot train it. Pass "
                "both to one call of prepare(), or call model.eval()."
            )
        samples = find_batch_size(batch)
        if samples is None or samples % self.num_micro_batches:
            raise ValueError(
                f"A batch of {samples} samples cannot be divided into num_micro_batches="
                f"{self.num_micro_batches}. Set drop_last=True in the DataLoader."
            )
        if self.training:
            # Gradients of the previous call are dropped, even if unused: one call is one step.
            self._clear()
        reported = self._run(batch, samples // self.num_micro_batches)
        if self.training:
            assert self.optimizer is not None, "rejected above"
            self.optimizer.has_gradients = True
        loss = self._shared_loss(reported)
        # `backward` takes the loss of the last call in training mode.
        self.last_loss = loss if self.training else self.last_loss
        logits = [report["logits"] for report in reported if report.get("logits") is not None]
        return StepOutput(loss, torch.cat(logits) if logits else None)

    def _clear(self) -> None:
        assert self.optimizer is not None, "it is training"
        for chunk in self.model_chunks:
            # megatron-core's DDP accumulates gradients in its own buffers, which `zero_grad` of the optimizer
            # leaves.
            chunk.zero_grad_buffer()
        self.optimizer.optimizer.zero_grad()

    def _run(self, batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
        """Run megatron-core's schedule; returns the reports of the last pipeline stage, per micro-batch."""
        schedule = core("pipeline_parallel").get_forward_backward_func()
        lengths = {value.shape[1] for value in batch.values() if getattr(value, "ndim", 0) > 1}
        model_chunks = self.model_chunks
        found = schedule(
            forward_step_func=self.train_step.forward_step,  # type: ignore[attr-defined]
            # One iterator per virtual stage, as each reads all micro-batches.
            data_iterator=[self._micro_batches(batch, size) for _ in model_chunks],
            model=model_chunks,
            num_microbatches=self.num_micro_batches,
            seq_length=max(lengths, default=1),
            micro_batch_size=size,
            forward_only=not self.training,
        )
        return list(found)

    def _micro_batches(self, batch: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, size * self.num_micro_batches, size):
            yield slice_tensors(batch, slice(start, start + size))

    def _shared_loss(self, reported: list[dict[str, Any]]) -> torch.Tensor:
        """Return the mean loss of the micro-batches, from the last pipeline stage, on all stages."""
        state = parallel_state()
        device = next(self.parameters()).device
        losses = [report["loss"].detach().reshape(()).float() for report in reported]
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        if state.get_pipeline_model_parallel_world_size() > 1:
            source = state.get_pipeline_model_parallel_last_rank()
            # Only the last stage computes losses, but loops print them on the first.
            dist.broadcast(mean, source, group=state.get_pipeline_model_parallel_group())
        return mean
