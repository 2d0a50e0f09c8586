"""The settings of Megatron-LM, some of them from a script's model, optimizer and scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel.engines.megatron.options import check_conflicts, warn_of_unused
from accel.engines.megatron.parsers import parse_model_config
from accel_state.env.fields import from_env, read_environment

if TYPE_CHECKING:
    import torch

# Megatron-LM's own names, where they differ from the field's.
_RENAMED = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "gradient_clipping": "clip_grad",
    "sequence_parallelism": "sequence_parallel",
}
# Fields that are not arguments of Megatron-LM.
_ACCEL_FIELDS = frozenset(
    {
        "is_train_batch_min",
        "return_logits",
        "set_all_logging_options",
        "recompute_activations",
        "other_megatron_args",
    }
)
_COUNTS = ("tp_degree", "pp_degree", "num_micro_batches")


@dataclasses.dataclass
class MegatronLMPlugin:
    """Train under Megatron-LM: tensor, pipeline, sequence, context and expert parallelism.

    Arguments that are None are read from their MEGATRON_LM_* variables, which the launcher's flags set.

    Args:
        tp_degree: Processes that split each layer's weights; default 1.
        pp_degree: Pipeline stages; default 1.
        use_custom_fsdp: Use Megatron's own FSDP.
        overlap_cpu_optimizer_d2h_h2d: Overlap the offloaded optimizer's copies with its step.
        no_load_optim: Do not load optimizer states in `load_state`.
        eod_mask_loss: Mask the loss of end-of-document tokens (Megatron's datasets).
        no_save_optim: Do not save optimizer states in `save_state`.
        optimizer_cpu_offload: Keep optimizer states on the CPU.
        use_precision_aware_optimizer: Keep optimizer states in lower precision.
        decoder_last_pipeline_num_layers: Decoder layers on the last pipeline stage.
        recompute_granularity: What is recomputed in backward: "selective" or "full".
        recompute_method: Which layers are, with "full": "uniform" or "block".
        recompute_num_layers: Layers of each recomputed piece.
        attention_backend: Attention kernel: "flash", "fused", "unfused", "local" or "auto"; True is "auto".
        expert_model_parallel_size: Processes over which experts are split.
        context_parallel_size: Processes over which sequences are split.
        attention_dropout: Dropout of attention weights; default: the model's.
        hidden_dropout: Dropout of hidden states; default: the model's.
        attention_softmax_in_fp32: Compute the attention's softmax in fp32.
        expert_tensor_parallel_size: Processes that split each expert's weights.
        calculate_per_token_loss: Average the loss over the tokens of all micro-batches, rather than over the
            micro-batches.
        use_rotary_position_embeddings: Use rotary position embeddings in place of learned ones.
        num_micro_batches: Micro-batches of one step; default 1. A loader's batch size is that of one
            micro-batch, and one batch of the prepared loader has all of them.
        gradient_clipping: Largest norm of the gradients; 0 disables clipping; default 1.0.
        sequence_parallelism: Shard activations along the sequence over the processes of `tp_degree`.
        recompute_activations: Short for recompute_granularity="selective".
        use_distributed_optimizer: Shard optimizer states over the data-parallel processes.
        pipeline_model_parallel_split_rank: First pipeline stage of the decoder; megatron-core has no such
            setting.
        num_layers_per_virtual_pipeline_stage: Layers of each piece when a process has several.
        is_train_batch_min: Take the smallest batch size of the loaders, rather than the largest.
        train_iters: Steps to train; default: the schedule's.
        train_samples: Samples to train; the schedule is counted in samples then.
        weight_decay_incr_style: How the weight decay grows: "constant", "linear" or "cosine".
        start_weight_decay: Weight decay at the start; default: the optimizer's.
        end_weight_decay: Weight decay at the end; default: the optimizer's.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        lr_decay_iters: Steps over which the learning rate decays; default: train_iters.
        lr_decay_samples: The same in samples.
        lr_warmup_iters: Steps over which the learning rate grows; default: the schedule's.
        lr_warmup_samples: The same in samples.
        lr_warmup_fraction: The same as a fraction of the decay.
        min_lr: Smallest learning rate.
        consumed_samples: Samples of training, validation and test sets that earlier runs have used.
        no_wd_decay_cond: Called with a parameter's name and the parameter; True: no weight decay. By default
            biases and vectors have none.
        scale_lr_cond: Called with the same; True: its learning rate is multiplied by `lr_mult`.
        lr_mult: See `scale_lr_cond`.
        megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        seq_length: Tokens per sequence of Megatron's datasets; default: the model's longest.
        encoder_seq_length: The same for an encoder.
        decoder_seq_length: The same for a decoder.
        tensorboard_dir: Where Megatron-LM's own training loop would log; ignored with a warning, see
            `log_with`.
        set_all_logging_options: The same.
        eval_iters: Batches of each evaluation of Megatron's datasets.
        eval_interval: Steps between evaluations of Megatron's datasets.
        return_logits: Return logits in addition to losses.
        custom_train_step_class: A subclass of `AbstractTrainStep`, instantiated as
            `custom_train_step_class(accelerator, args, **custom_train_step_kwargs)`.
        custom_train_step_kwargs: See `custom_train_step_class`.
        custom_model_provider_function: Called as `(pre_process, post_process)`; returns this process's layers
            of a megatron-core model, with its own configuration.
        custom_prepare_model_function: Called with the list of this process's model chunks before they are
            wrapped; returns such a list.
        custom_megatron_datasets_provider_function: Called with the numbers of training, validation and test
            samples; returns the datasets.
        custom_get_batch_function: Replaces the train step's `get_batch`.
        custom_loss_function: Replaces the train step's loss function.
        other_megatron_args: Further settings, by the names of megatron-core's configuration classes; they
            take precedence over those of the model and the optimizer.

    Raises:
        ValueError: If a value is not allowed, or two settings mean the same.
    """

    tp_degree: int | None = from_env("MEGATRON_LM_TP_DEGREE")
    pp_degree: int | None = from_env("MEGATRON_LM_PP_DEGREE")
    use_custom_fsdp: bool | None = from_env("MEGATRON_LM_USE_CUSTOM_FSDP")
    overlap_cpu_optimizer_d2h_h2d: bool | None = from_env("MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D")
    no_load_optim: bool | None = from_env("MEGATRON_LM_NO_LOAD_OPTIM")
    eod_mask_loss: bool | None = from_env("MEGATRON_LM_EOD_MASK_LOSS")
    no_save_optim: bool | None = from_env("MEGATRON_LM_NO_SAVE_OPTIM")
    optimizer_cpu_offload: bool | None = from_env("MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD")
    use_precision_aware_optimizer: bool | None = from_env("MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER")
    decoder_last_pipeline_num_layers: int | None = from_env("MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS")
    recompute_granularity: str | None = from_env("MEGATRON_LM_RECOMPUTE_GRANULARITY")
    recompute_method: str | None = from_env("MEGATRON_LM_RECOMPUTE_METHOD")
    recompute_num_layers: int | None = from_env("MEGATRON_LM_RECOMPUTE_NUM_LAYERS")
    attention_backend: bool | str | None = from_env("MEGATRON_LM_ATTENTION_BACKEND")
    expert_model_parallel_size: int | None = from_env("MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE")
    context_parallel_size: int | None = from_env("MEGATRON_LM_CONTEXT_PARALLEL_SIZE")
    attention_dropout: float | None = from_env("MEGATRON_LM_ATTENTION_DROPOUT")
    hidden_dropout: float | None = from_env("MEGATRON_LM_HIDDEN_DROPOUT")
    attention_softmax_in_fp32: bool | None = from_env("MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32")
    expert_tensor_parallel_size: int | None = from_env("MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE")
    calculate_per_token_loss: bool | None = from_env("MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS")
    use_rotary_position_embeddings: bool | None = from_env("MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS")
    num_micro_batches: int | None = from_env("MEGATRON_LM_NUM_MICRO_BATCHES")
    gradient_clipping: float | None = from_env("MEGATRON_LM_GRADIENT_CLIPPING")
    sequence_parallelism: bool | None = from_env("MEGATRON_LM_SEQUENCE_PARALLELISM")
    recompute_activations: bool | None = from_env("MEGATRON_LM_RECOMPUTE_ACTIVATIONS")
    use_distributed_optimizer: bool | None = from_env("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER")
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[[str, torch.nn.Parameter], bool] | None = None
    scale_lr_cond: Callable[[str, torch.nn.Parameter], bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[[bool, bool], torch.nn.Module] | None = None
    custom_prepare_model_function: Callable[[list[Any]], list[Any]] | None = None
    custom_megatron_datasets_provider_function: Callable[[list[int]], Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    micro_batch_size: int = dataclasses.field(default=1, init=False)
    data_parallel_size: int = dataclasses.field(default=1, init=False)
    global_batch_size: int = dataclasses.field(default=1, init=False)
    scheduler_steps_per_step: int = dataclasses.field(default=1, init=False)

    def __post_init__(self) -> None:
        read_environment(self)
        for name in _COUNTS:
            value = getattr(self, name)
            # bool is an int to isinstance.
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1.")
        # A flag of the launcher, and a name in scripts; `in (True, False)` would take 1 and 0 too.
        if self.attention_backend is True or self.attention_backend is False:
            self.attention_backend = "auto" if self.attention_backend else None
        if self.recompute_activations and self.recompute_granularity is None:
            self.recompute_granularity = "selective"
        check_conflicts(self)
        warn_of_unused(self)
        # Of the training, validation and test sets.
        self.consumed_samples = self.consumed_samples or [0, 0, 0]
        # Settings filled in from a scheduler, to be reset with it.
        self._of_schedule: set[str] = set()
        self.megatron_lm_default_args: dict[str, Any] = {
            _RENAMED.get(field.name, field.name): getattr(self, field.name)
            for field in dataclasses.fields(self)
            # The other fields are computed from the prepared objects.
            if field.init
            and field.name not in _ACCEL_FIELDS
            and not field.name.startswith(("custom_", "tensorboard"))
        } | (self.other_megatron_args or {})

    def _note(self, found: dict[str, Any]) -> None:
        """Record settings of an object; the user's settings take precedence."""
        self.megatron_lm_default_args.update(found | (self.other_megatron_args or {}))

    def set_network_size_args(self, model: torch.nn.Module, batch_data: Any = None) -> None:
        """Set the model's settings, from its `config`.

        Args:
            model: A model with a configuration as in transformers.
            batch_data: A batch; `seq_length` is that of its "input_ids" if it is not set.

        Raises:
            ValueError: If its kind is unknown; the message lists the supported ones.
        """
        self._note(parse_model_config(self, model, batch_data))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Record the precision.

        Args:
            mixed_precision: "no", "fp16" or "bf16".

        Raises:
            ValueError: If it is another one.
        """
        if mixed_precision not in ("no", "fp16", "bf16"):
            raise ValueError(
                f"mixed_precision={mixed_precision!r} is not supported under Megatron-LM; allowed: no, fp16, "
                "bf16."
            )
        self.megatron_lm_default_args.update(fp16=mixed_precision == "fp16", bf16=mixed_precision == "bf16")

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Record the batch sizes.

        Args:
            micro_batch_size: Samples of one micro-batch.
            dp_degree: Data-parallel processes.
        """
        assert self.num_micro_batches is not None, "filled when the plugin was made"
        self.data_parallel_size = self.scheduler_steps_per_step = dp_degree
        self.micro_batch_size = micro_batch_size
        # Samples of one step, over all processes.
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        self.megatron_lm_default_args.update(
            data_parallel_size=dp_degree,
            micro_batch_size=micro_batch_size,
            global_batch_size=self.global_batch_size,
        )

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Set the settings of an optimizer; Megatron-LM creates its own.

        Args:
            optimizer: One of the Adam family or SGD, or a `DummyOptim`.

        Raises:
            ValueError: If it is of another kind, or its parameter groups differ in more than weight decay.
        """
        self._note(_describe_optimizer(optimizer))
        decay = self.megatron_lm_default_args["weight_decay"]
        for end, value in (("start", self.start_weight_decay), ("end", self.end_weight_decay)):
            self.megatron_lm_default_args[f"{end}_weight_decay"] = decay if value is None else value

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Set the settings of a scheduler; Megatron-LM creates its own.

        Args:
            scheduler: A `MegatronLMDummyScheduler`. Like the schedules of other engines, it counts the steps
                that one process would need.

        Raises:
            ValueError: If its length differs from `train_iters` or `train_samples`.
        """
        args = self.megatron_lm_default_args
        if scheduler.total_num_steps is not None:
            steps = max(1, scheduler.total_num_steps // self.scheduler_steps_per_step)
            self._check_length(scheduler, steps)
            if args["train_iters"] is None and args["train_samples"] is None:
                args["train_iters"] = steps
                self._of_schedule.add("train_iters")
        unset = all(args[f"lr_warmup_{unit}"] is None for unit in ("iters", "samples", "fraction"))
        # Divided, as schedulers count the steps of one process, several of which make one of the run.
        if unset and scheduler.warmup_num_steps:
            args["lr_warmup_iters"] = scheduler.warmup_num_steps // self.scheduler_steps_per_step
            self._of_schedule.add("lr_warmup_iters")

    def forget_schedule(self) -> None:
        """Reset the settings of a scheduler: the next one may have another length."""
        self.megatron_lm_default_args.update(dict.fromkeys(self._of_schedule))
        self._of_schedule.clear()

    def _check_length(self, scheduler: Any, steps: int) -> None:
        """Reject a schedule whose length differs from the user's; `steps` are those of the run."""
        lengths = {name: getattr(self, name) for name in ("train_iters", "train_samples")}
        lengths |= {
            name: (self.other_megatron_args or {}).get(name, value) for name, value in lengths.items()
        }
        iters, samples = lengths["train_iters"], lengths["train_samples"]
        batch = self.megatron_lm_default_args.get("global_batch_size")  # not known before set_training_args
        if iters is not None and iters != steps:
            plugin, schedule = f"train_iters={iters}", f"{steps} of these"
        # Rounded either way, as the last batch may be incomplete.
        elif samples is not None and batch and steps not in (samples // batch, -(-samples // batch)):
            plugin = f"train_samples={samples}"
            schedule = f"{steps} steps of {batch} samples, {steps * batch}"
        else:
            return
        raise ValueError(
            f"MegatronLMPlugin({plugin}) and {type(scheduler).__name__}(total_num_steps="
            f"{scheduler.total_num_steps}) disagree about the length of training: total_num_steps counts "
            f"the steps of one process, {self.scheduler_steps_per_step} of which make one of the run, so it "
            f"is {schedule}. Leave one of them out, or set the same."
        )

    def set_tensorboard_logging_options(self) -> None:
        """Do nothing: these are options of Megatron-LM's training loop; log with `log_with`."""


def _describe_optimizer(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    kind = type(optimizer).__name__.lower()
    if "adam" not in kind and "sgd" not in kind and "dummy" not in kind:
        raise ValueError(
            f"{type(optimizer).__name__} has no counterpart in Megatron-LM; allowed: Adam, AdamW, SGD and "
            "their variants, or DummyOptim."
        )
    rates = {group["lr"] for group in groups}
    if len(rates) > 1:
        raise ValueError(
            f"{type(optimizer).__name__} has groups with different learning rates ({sorted(rates)}), but "
            "Megatron-LM makes its own groups. Set scale_lr_cond and lr_mult of MegatronLMPlugin."
        )
    first = groups[0]
    # The largest decay: megatron-core itself makes the groups without weight decay.
    found = {"lr": first["lr"], "weight_decay": max(group.get("weight_decay", 0.0) for group in groups)}
    if "sgd" in kind:
        return found | {"optimizer": "sgd", "sgd_momentum": first.get("momentum", 0.0)}
    beta1, beta2 = first.get("betas", (0.9, 0.999))
    # Adam's decay is L2 regularisation; AdamW's is decoupled from the gradient.
    decoupled = first.get("decoupled_weight_decay", kind != "adam")
    found |= {"optimizer": "adam", "decoupled_weight_decay": decoupled}
    return found | {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": first.get("eps", 1e-8)}
