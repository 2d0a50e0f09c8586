"""megatron-core's optimizer and scheduler, wrapped for a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel.engines.common.placeholders import PlaceholderScheduler
from accel.engines.megatron.models.build import optimizer_config
from accel.engines.megatron.runtime import core
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler
from accel_state.step_events import StepSkipped

if TYPE_CHECKING:
    import torch

    from accel.engines.megatron.plugin import MegatronLMPlugin


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Megatron's optimizer: it steps with the gradients that the model's last call gathered.

    Args:
        optimizer: The optimizer of megatron-core.
        **options: Options of AcceleratedOptimizer.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, **options: Any) -> None:
        super().__init__(optimizer, device_placement=False, **options)
        self.has_gradients = False
        self.grad_norm: float | None = None
        self._was_skipped = False
        self._clip_by_default = optimizer.config.clip_grad

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, and step with the gathered gradients, if there are any.

        Raises:
            ValueError: If a closure is passed.
        """
        if closure is not None:
            raise ValueError("step(closure): Megatron-LM's optimizer steps once per call of the model.")
        if not self.has_gradients:
            return
        events = self.gradient_state.events
        try:
            if events is not None:
                events.begin_step(self)
            succeeded, self.grad_norm, _ = self.optimizer.step()
            self._was_skipped = not succeeded
            self.has_gradients = False
            # clip_grad_norm_ applies to one step.
            self.clip_by(self._clip_by_default)
        except StepSkipped:
            self.skip_step()
        if events is not None:
            events.end_step(self)

    def skip_step(self) -> None:
        """Skip the next step: the model's next call starts with empty gradients."""
        self.has_gradients, self._was_skipped = False, True

    def clip_by(self, max_norm: float) -> None:
        """Make the next step clip gradients by their norm."""
        self.optimizer.config.clip_grad = max_norm
        # With experts or virtual stages it is a chain of optimizers with their own configurations.
        for optimizer in getattr(self.optimizer, "chained_optimizers", ()):
            optimizer.config.clip_grad = max_norm

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: each call of the model starts with empty gradients."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        return self._was_skipped


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Megatron's scheduler of learning rate and weight decay, stepped once per optimizer step.

    Args:
        scheduler: The scheduler of megatron-core.
        optimizers: The wrapped optimizer.
        increment: Samples per step.
        **options: Options of AcceleratedScheduler.
    """

    def __init__(self, scheduler: Any, optimizers: Any, increment: int, **options: Any) -> None:
        super().__init__(scheduler, optimizers, **options)
        self._optimizer = optimizers
        self._increment = increment

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one step, unless the optimizer skipped its step."""
        if not self._optimizer.step_was_skipped:
            self.scheduler.step(increment=self._increment)

    def get_last_lr(self) -> list[Any]:
        """Return the current learning rate of each parameter group."""
        return [group["lr"] for group in self._optimizer.param_groups]


class MegatronLMDummyScheduler(PlaceholderScheduler):
    """Placeholder for the scheduler that Megatron-LM creates.

    Args:
        optimizer: The optimizer that is scheduled.
        total_num_steps: Length of the schedule, in the steps that one process would need.
        warmup_num_steps: Steps over which the learning rate grows, counted in the same way.
        **kwargs: Set as attributes, for code that reads them.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.__dict__.update(kwargs)


def build_optimizer(model_chunks: list[Any], plugin: MegatronLMPlugin) -> Any:
    """Create megatron-core's optimizer for a model's wrapped chunks.

    Args:
        model_chunks: The chunks.
        plugin: The plugin, after it has been set up for the optimizer.
    """
    args = plugin.megatron_lm_default_args
    config = optimizer_config(args)
    module = core("optimizer")
    overrides = module.get_standard_config_overrides(config)
    if plugin.no_wd_decay_cond is not None:
        overrides = {_key("no_wd_decay_cond", plugin.no_wd_decay_cond): {"wd_mult": 0.0}}
    if plugin.scale_lr_cond is not None:
        scaled = {"max_lr": args["lr"] * plugin.lr_mult, "min_lr": plugin.min_lr * plugin.lr_mult}
        overrides[_key("scale_lr_cond", plugin.scale_lr_cond)] = scaled
    return module.get_megatron_optimizer(config, model_chunks, config_overrides=overrides)


def _key(name: str, condition: Callable[[str, torch.nn.Parameter], bool]) -> Any:
    kinds = core("optimizer.optimizer_config")
    # megatron-core passes (parameter, name), but the plugin's conditions take (name, parameter).
    matches = kinds.ParamWithNamePredicate(name=name, fn=lambda parameter, full: condition(full, parameter))
    return kinds.ParamKey(with_name_predicate=matches)


def build_schedule(optimizer: Any, args: Mapping[str, Any]) -> Any:
    """Create megatron-core's scheduler for an optimizer.

    Args:
        optimizer: The optimizer of megatron-core.
        args: Settings by Megatron-LM's names.

    Raises:
        ValueError: If the schedule has no length.
    """
    kind = core("optimizer_param_scheduler").OptimizerParamScheduler
    return kind(optimizer, **schedule_arguments(args))


def schedule_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of OptimizerParamScheduler, which counts samples.

    Args:
        args: Settings by Megatron-LM's names.

    Raises:
        ValueError: If the schedule has no length.
    """
    batch = args["global_batch_size"]

    def samples(iters_name: str, samples_name: str) -> int | None:
        if args.get(samples_name) is not None:
            return int(args[samples_name])
        # An iteration is a step over the global batch.
        return None if args.get(iters_name) is None else args[iters_name] * batch

    train = samples("train_iters", "train_samples")
    # As in Megatron-LM: without a length the schedule is as long as training.
    decay = samples("lr_decay_iters", "lr_decay_samples") or train
    if decay is None:
        raise ValueError(
            "Megatron-LM's schedule has no length: pass MegatronLMDummyScheduler(total_num_steps=...), or "
            "MegatronLMPlugin(train_iters=...)."
        )
    warmup = samples("lr_warmup_iters", "lr_warmup_samples") or 0
    if args.get("lr_warmup_fraction") is not None:
        warmup = int(args["lr_warmup_fraction"] * decay)
    ending = samples("lr_wsd_decay_iters", "lr_wsd_decay_samples")
    if args["lr_decay_style"] == "WSD" and ending is None:
        raise ValueError(
            "lr_decay_style='WSD' decays only at the end: set the number of steps with "
            "other_megatron_args={'lr_wsd_decay_iters': ...} (or lr_wsd_decay_samples)."
        )
    return {
        "wsd_decay_steps": ending,
        "lr_wsd_decay_style": args.get("lr_wsd_decay_style", "exponential"),
        # Where warmup begins.
        "init_lr": 0.0,
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": args["lr_decay_style"],
        "start_wd": args["start_weight_decay"],
        "end_wd": args["end_weight_decay"],
        # Over the full training, even if the learning rate stops decaying earlier.
        "wd_incr_steps": train if train is not None else decay,
        "wd_incr_style": args["weight_decay_incr_style"],
    }
