"""Megatron-LM: tensor, pipeline, sequence, context and expert parallelism of megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.base import Engine
from accel.engines.common.checks import warn_of_options
from accel.engines.context import DataParallel, EngineCheckpoint, EngineContext, EngineTraits, PrepareRequest
from accel.engines.megatron import checkpoint, runtime
from accel.engines.megatron.data import IndexedLoader, MegatronLMDummyDataLoader, with_micro_batches
from accel.engines.megatron.models.bert import BertTrainStep
from accel.engines.megatron.models.build import build, check_other_arguments, wrap
from accel.engines.megatron.models.gpt import GPTTrainStep
from accel.engines.megatron.models.t5 import T5TrainStep
from accel.engines.megatron.optimizers import (
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    build_optimizer,
    build_schedule,
)
from accel.engines.megatron.options import check_transformer_engine
from accel.engines.megatron.schedule import MegatronEngine
from accel_ops.collectives.objects import gather_object
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from accel.engines.megatron.models.steps import AbstractTrainStep
    from accel.engines.megatron.plugin import MegatronLMPlugin

_STEPS: dict[str, Callable[[Any, Any], AbstractTrainStep]] = {
    "gpt": GPTTrainStep,
    "bert": BertTrainStep,
    "t5": T5TrainStep,
}


class MegatronLMCheckpoint:
    """megatron-core's checkpoint of the model and its optimizer.

    Args:
        model: The model.
        optimizer: Its optimizer; None for a model that is only evaluated.
        plugin: The settings.
    """

    def __init__(self, model: MegatronEngine, optimizer: Any, plugin: MegatronLMPlugin) -> None:
        self._model = model
        self._optimizer = optimizer
        self._plugin = plugin

    def has(self, item: Any) -> bool:
        """Whether it is the model or its optimizer."""
        return item is self._model or item is self._optimizer

    def save(self, folder: Path, **options: Any) -> None:
        """Write megatron-core's checkpoint; there are no options."""
        warn_of_options("megatron_lm", options)
        checkpoint.save(self._model, folder, self._plugin)

    def check(self, names: Collection[str]) -> None:
        """Reject a checkpoint that Megatron-LM cannot load, before anything is changed."""
        checkpoint.check(names)

    def load(self, folder: Path, **options: Any) -> None:
        """Load megatron-core's checkpoint."""
        checkpoint.load(self._model, folder, self._plugin)


class MegatronLMEngine(Engine):
    """One megatron-core model, built from the configuration of the script's model, and its optimizer.

    Calling the model runs forward and backward for all micro-batches of a step; `backward` does nothing, and
    `optimizer.step()` clips and steps.
    """

    name = "megatron_lm"
    traits = EngineTraits(
        scales_losses=True,
        rejects_weights=(
            "backward(loss, weight=...) under Megatron-LM: set "
            "MegatronLMPlugin(calculate_per_token_loss=True)."
        ),
        ignored_handlers={
            "ddp": "gradients are reduced without DistributedDataParallel. Set options of MegatronLMPlugin",
            "scaler": "Megatron-LM scales losses itself. Set other_megatron_args of MegatronLMPlugin",
            "autocast": "Megatron-LM's layers compute in their own precision. Set mixed_precision",
        },
        loader_types=(MegatronLMDummyDataLoader, IndexedLoader),
        saves_collectively=True,
        saves_on_all_processes=True,
        splits_layers=True,
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.plugin: MegatronLMPlugin = context.settings
        if context.dynamo is not None and context.dynamo.backend != "NO":
            raise ValueError(
                f"dynamo_backend={context.dynamo.backend} under Megatron-LM: its layers are not compiled "
                "here. Leave it out."
            )
        # Before anything of megatron-core is imported, which takes seconds.
        runtime.check_device(context.process.device)
        # Megatron-LM accumulates over num_micro_batches inside one call of the model.
        if context.gradient_state.num_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={context.gradient_state.num_steps} under Megatron-LM: it "
                "splits a step itself. Set MegatronLMPlugin(num_micro_batches=...)."
            )
        self.plugin.set_mixed_precision(context.precision.name)
        # Before any process group is created, so that an error leaves nothing behind.
        check_other_arguments(self.plugin.other_megatron_args or {})
        check_transformer_engine(self.plugin)
        runtime.start(self.plugin.megatron_lm_default_args, context.process)
        # Model-parallel processes get the same batches.
        state = runtime.parallel_state()
        rank, size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
        # Gathered once: loaders need the rank of every process, and megatron-core only knows the local one.
        ranks: list[int] = gather_object([rank], process=context.process)
        self.data_parallel = DataParallel(rank, size, context.mesh, ranks)
        self._model: MegatronEngine | None = None
        self._optimizer: MegatronLMOptimizerWrapper | None = None
        self._loaders: list[Any] | None = None

    # Preparing

    def check(self, request: PrepareRequest) -> None:
        """Reject what Megatron-LM cannot train, before anything is built."""
        super().check(request)
        if not request.models and not request.optimizers:
            return
        if len(request.models) != 1 or len(request.optimizers) > 1 or self._model is not None:
            raise ValueError(
                f"Megatron-LM trains one model with one optimizer; prepare got {len(request.models)} "
                f"model(s) and {len(request.optimizers)} optimizer(s)"
                f"{' more' if self._model is not None else ''}. Pass one of each to a single call."
            )
        for scheduler in request.schedulers:
            _check_placeholder(scheduler)
        if not _sizes(request) and "micro_batch_size" not in self.plugin.megatron_lm_default_args:
            raise ValueError(
                "Megatron-LM needs the batch size of a micro-batch: pass a DataLoader to the same call of "
                "prepare(), or call MegatronLMPlugin.set_training_args(micro_batch_size, dp_degree) before."
            )

    def release(self) -> None:
        """Forget the model, its optimizer and schedule, and the loaders that were built for it."""
        self._model = self._optimizer = self._loaders = None
        self.plugin.forget_schedule()

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Build the model, its optimizer and its schedule."""
        if not request.models:
            return request
        plugin = self.plugin
        if sizes := _sizes(request):
            # Megatron-LM has one batch size, but training and evaluation loaders may differ.
            size = min(sizes) if plugin.is_train_batch_min else max(sizes)
            plugin.set_training_args(size, self.data_parallel.size)
        if plugin.custom_model_provider_function is None:
            plugin.set_network_size_args(request.models[0])
        warn(
            "Megatron-LM builds its own model from the configuration of "
            f"{type(request.models[0]).__name__}, "
            "whose weights are not used. load_state restores what save_state wrote under Megatron-LM.",
        )
        for optimizer in request.optimizers:
            plugin.set_optimizer_type(optimizer)
        # After set_training_args, which assumes that schedulers count the steps of one process.
        plugin.scheduler_steps_per_step = request.scheduler_steps_per_step
        for scheduler in request.schedulers:
            plugin.set_scheduler_args(scheduler)
        args = plugin.megatron_lm_default_args
        chunks = wrap(build(plugin), args, self.context.process.device)
        assert plugin.num_micro_batches is not None, "set when the plugin was created"
        self._model = MegatronEngine(chunks, self._make_step(request.accelerator), plugin.num_micro_batches)
        if not request.optimizers:
            # Without an optimizer the model can only be evaluated.
            return replace(request, models=(self._model.eval(),))
        optimizer = build_optimizer(self._model.model_chunks, plugin)
        self._optimizer = MegatronLMOptimizerWrapper(optimizer, gradient_state=self.context.gradient_state)
        self._model.attach(self._optimizer)
        return replace(request, models=(self._model,), optimizers=(self._optimizer,))

    def _make_step(self, accelerator: Any) -> AbstractTrainStep:
        args = SimpleNamespace(**self.plugin.megatron_lm_default_args)
        if self.plugin.custom_train_step_class is not None:
            options = self.plugin.custom_train_step_kwargs or {}
            made: AbstractTrainStep = self.plugin.custom_train_step_class(accelerator, args, **options)
            return made
        kind = getattr(args, "model_type_name", None)
        if kind not in _STEPS:
            raise ValueError(
                f"The batch format is unknown for model_type_name={kind!r} (known: "
                f"{', '.join(_STEPS)}). Set MegatronLMPlugin(custom_train_step_class=...)."
            )
        plugin = self.plugin
        if plugin.return_logits and kind != "gpt":
            raise ValueError(
                f"return_logits=True with a {kind} model: its train step returns only losses. Leave it out, "
                "or set MegatronLMPlugin(custom_train_step_class=...)."
            )
        is_built_in = not plugin.megatron_dataset_flag and plugin.custom_get_batch_function is None
        if (plugin.context_parallel_size or 1) > 1 and is_built_in:
            raise ValueError(
                f"context_parallel_size={plugin.context_parallel_size}: labels, positions and masks are "
                "made from a full batch, but each process has a shard of it. Set custom_get_batch_function "
                "to make them for the shard, or use Megatron's datasets (megatron_dataset_flag=True)."
            )
        return _STEPS[kind](accelerator, args)

    def setup_scheduler(self, scheduler: Any) -> Any | None:
        """Megatron-LM's scheduler, which replaces the placeholder.

        Raises:
            ValueError: If it is another kind of scheduler, or there is no optimizer to schedule.
        """
        _check_placeholder(scheduler)
        if self._optimizer is None:
            raise ValueError("Pass MegatronLMDummyScheduler to the same call of prepare() as its optimizer.")
        self.plugin.set_scheduler_args(scheduler)  # again, or first if prepared in a separate call
        args = self.plugin.megatron_lm_default_args
        schedule = build_schedule(self._optimizer.optimizer, args)
        return MegatronLMSchedulerWrapper(
            schedule,
            self._optimizer,
            args["global_batch_size"],
            gradient_state=self.context.gradient_state,
        )

    def setup_loader(self, loader: Any, accelerator: Any) -> Any:
        """A loader whose batches have all micro-batches of a step, or one of Megatron's own datasets.

        Of these the placeholder stands for the training set, then the validation set, then the test set.
        """
        if isinstance(loader, IndexedLoader):
            return loader
        if isinstance(loader, MegatronLMDummyDataLoader):
            # It is prepared three times; the first time builds all loaders.
            if not self._loaders:
                self._loaders = list(loader.build_train_valid_test_data_iterators(accelerator))
            return self._loaders.pop(0)
        assert self.plugin.num_micro_batches is not None, "set when the plugin was created"
        return with_micro_batches(loader, self.plugin.num_micro_batches)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """This process's stage of the model, unwrapped; the prepared model if it has several chunks."""
        if not isinstance(model, MegatronEngine) or len(model.model_chunks) > 1:
            return model
        chunk: Any = runtime.core("utils").unwrap_model(model.model_chunks[0])
        return chunk  # type: ignore[no-any-return]

    # In a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing: the call of the model ran the backward pass.

        Raises:
            ValueError: If the loss is not the one that the model returned.
        """
        if self._model is None or loss is not self._model.last_loss:
            raise ValueError(
                "Megatron-LM runs backward inside model(**batch), for the loss that its train step "
                "computes, and backward only takes the `loss` of that call's output. For another loss, set "
                "MegatronLMPlugin(custom_loss_function=...)."
            )

    def clip_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
    ) -> None:
        """Make the next step clip by this norm instead of the plugin's; `optimizer.grad_norm` is it then.

        Raises:
            ValueError: If it is not the 2-norm.
        """
        if clip_value is not None:
            raise ValueError("clip_grad_value_ is not supported under Megatron-LM: use clip_grad_norm_.")
        if max_norm is None:
            return
        if norm_type != 2:
            raise ValueError(f"clip_grad_norm_(norm_type={norm_type}): Megatron-LM clips by the 2-norm.")
        if self._optimizer is not None:
            self._optimizer.clip_by(float(max_norm))

    # Saving and loading

    @property
    def checkpoint(self) -> EngineCheckpoint:
        """megatron-core's checkpoint, once there is a model."""
        if self._model is None:
            return EngineCheckpoint()
        return EngineCheckpoint(native=MegatronLMCheckpoint(self._model, self._optimizer, self.plugin))

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Not supported: each process has a shard with Megatron's shapes.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "get_state_dict and save_model under Megatron-LM: the weights are sharded, in Megatron's "
            "shapes. save_state writes them, and megatron-core's tools convert them."
        )


def _check_placeholder(scheduler: Any) -> None:
    if not isinstance(scheduler, MegatronLMDummyScheduler):
        raise ValueError(
            f"{type(scheduler).__name__} cannot schedule Megatron-LM's optimizer, which has its own "
            "groups. Pass MegatronLMDummyScheduler(optimizer, total_num_steps, warmup_num_steps)."
        )


def _sizes(request: PrepareRequest) -> tuple[int, ...]:
    """Samples of a micro-batch, from loaders and their placeholders."""
    placeholder_sizes = (item.dataset_args.get("micro_batch_size") for item in request.extra)
    return request.batch_sizes + tuple(size for size in placeholder_sizes if size is not None)
