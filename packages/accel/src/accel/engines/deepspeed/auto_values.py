"""Values of "auto" settings in DeepSpeed's configuration, and checks of the others."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.engines.deepspeed.config import AUTO
from accel.engines.deepspeed.placeholders import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    import torch

    from accel.engines.deepspeed.plugin import DeepSpeedPlugin

_ALL = "train_batch_size"
_BATCH = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO = "zero_optimization"


@dataclass(frozen=True)
class PrepareInfo:
    """The objects of one `prepare` call, and their sizes.

    Attributes:
        model: The model.
        optimizer: Its optimizer, a DummyOptim, or None for a model that is only evaluated.
        scheduler: The scheduler prepared with it, if any.
        batch_sizes: Samples per process and micro-batch, of the loaders prepared in the same call.
        previous_batch_size: The same for loaders that were prepared before; None without any.
        num_steps: Micro-batches of an accumulation window.
        num_processes: Data-parallel processes.
        scheduler_steps_per_step: Scheduler steps per optimizer step.
        device_type: Type of the device.
        mixed_precision: "bf16", "fp16" or "no".
        sequence_parallel_size: Processes that share each sequence.
    """

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    batch_sizes: tuple[int, ...]
    previous_batch_size: int | None
    num_steps: int
    num_processes: int
    scheduler_steps_per_step: int
    device_type: str
    mixed_precision: str
    sequence_parallel_size: int = 1


def complete(plugin: DeepSpeedPlugin, info: PrepareInfo) -> dict[str, Any]:
    """Fill in a plugin's configuration, and return the one that DeepSpeed is started with.

    Args:
        plugin: The plugin; "auto" values in its configuration are filled in.
        info: The prepared objects.

    Returns:
        A copy of the configuration, with values that follow from the objects; for a model that is only
        evaluated, without optimizer and scheduler.

    Raises:
        ValueError: If the configuration does not fit the objects; the message lists every difference.
    """
    # Each prepare fills "auto" in again: after free_memory() the next loader may have other batches.
    plugin.forget_filled()
    # After forget_filled, which resets a filled-in precision to "auto".
    plugin.set_mixed_precision(info.mixed_precision)
    if _ALL not in plugin.deepspeed_config:
        plugin.deepspeed_config.setdefault(_BATCH, AUTO)  # DeepSpeed requires one of them
    problems = _find_conflicts(plugin, info)
    filled, compared = _values(plugin, info)
    started, size = compared[_ALL], info.sequence_parallel_size
    if size > 1 and plugin.get_value(_ALL) == started * size:
        # transformers' Trainer counts every process; DeepSpeed counts groups.
        compared[_ALL] = started * size
    for name, value in {**filled, **compared}.items():
        if plugin.is_auto(name):
            plugin.fill_match(name, **{name: value})
    config = plugin.deepspeed_config
    if info.optimizer is None:  # an evaluated model needs neither
        config = {name: value for name, value in config.items() if name not in ("optimizer", "scheduler")}
    plugin.deepspeed_config_process("", problems, config, **compared)
    if problems:
        raise ValueError(
            f"DeepSpeed's configuration does not fit the prepared objects ({type(info.model).__name__}):\n"
            + "\n".join(problems)
            + "\nMake them the same, or set them to 'auto' in the configuration."
        )
    return _for_start({**config, _ALL: started} if _ALL in config else config, info)


def _find_conflicts(plugin: DeepSpeedPlugin, info: PrepareInfo) -> list[str]:
    """List optimizers and schedulers that are set twice, or missing."""
    problems = []
    has_optimizer, has_scheduler = (bool(plugin.get_value(name)) for name in ("optimizer", "scheduler"))
    if info.optimizer is not None and isinstance(info.optimizer, DummyOptim) is not has_optimizer:
        problems.append(
            f"- optimizer: the configuration has one, and so has prepare ({type(info.optimizer).__name__}): "
            "pass a DummyOptim"
            if has_optimizer
            else "- optimizer: DummyOptim stands for the configuration's, which has none: pass a real one"
        )
    if isinstance(info.scheduler, DummyScheduler):
        # Exactly one of the two has to exist.
        if has_scheduler is (info.scheduler.lr_scheduler_callable is not None):
            problems.append(
                "- scheduler: the configuration has one, and DummyScheduler has lr_scheduler_callable"
                if has_scheduler
                else "- scheduler: DummyScheduler stands for the configuration's, which has none: give it "
                "lr_scheduler_callable, or pass a real one"
            )
    elif info.scheduler is not None and has_scheduler:
        problems.append(
            f"- scheduler: the configuration has one, and so has prepare ({type(info.scheduler).__name__}): "
            "pass a DummyScheduler"
        )
    return problems


def _values(plugin: DeepSpeedPlugin, info: PrepareInfo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by dotted names: those that only fill in "auto", and those that are compared too."""
    filled: dict[str, Any] = {
        "gradient_clipping": 0.0,
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": False,
        f"{_ZERO}.offload_optimizer.device": "none",
        f"{_ZERO}.offload_param.device": "none",
        **_hidden_size_values(info.model),
        **_optimizer_values(info.optimizer),
        **_scheduler_values(info),
    }
    compared: dict[str, Any] = {}
    (compared if info.batch_sizes else filled)[_BATCH] = size = _batch_size(plugin, info)
    # 1 if the loop marks the windows itself, as transformers' Trainer does.
    (compared if info.num_steps > 1 else filled)[_STEPS] = info.num_steps
    values = [(plugin.get_value(_BATCH), size), (plugin.get_value(_STEPS), info.num_steps)]
    # DeepSpeed requires that the batch of all processes is the product of these.
    sizes = [configured if isinstance(configured, int) else value for configured, value in values]
    compared[_ALL] = math.prod(sizes) * info.num_processes
    for name in [name for name in filled if name.startswith(("optimizer.", "scheduler."))]:
        if name in _user_settings(info):
            compared[name] = filled.pop(name)
    return filled, compared


def _batch_size(plugin: DeepSpeedPlugin, info: PrepareInfo) -> int:
    if not info.batch_sizes:
        return info.previous_batch_size or 1
    configured = plugin.get_value(_BATCH)
    # If loaders have different batch sizes, the one in the configuration.
    if configured in info.batch_sizes:
        return int(configured)
    return (min if plugin.is_train_batch_min else max)(info.batch_sizes)


def _hidden_size_values(model: torch.nn.Module) -> dict[str, int]:
    """Buffer sizes from the model's hidden size, if it has a transformers configuration."""
    config = getattr(model, "config", None)
    hidden: list[int] = []
    # Multimodal models have the sizes of the language model in a nested configuration.
    for section in (config, getattr(config, "text_config", None)):
        hidden += [size for size in [getattr(section, "hidden_size", None)] if isinstance(size, int)]
        hidden += [max(sizes) for sizes in [getattr(section, "hidden_sizes", None)] if sizes]
    if not hidden:
        return {}
    size = hidden[0]
    return {
        # As transformers' documentation recommends for a hidden size.
        f"{_ZERO}.reduce_bucket_size": size * size,
        f"{_ZERO}.stage3_prefetch_bucket_size": int(0.9 * size * size),
        f"{_ZERO}.stage3_param_persistence_threshold": 10 * size,
    }


def _optimizer_values(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    named = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    return {f"optimizer.params.{name}": value for name, value in named.items()}


def _scheduler_values(info: PrepareInfo) -> dict[str, Any]:
    scheduler = info.scheduler
    if not isinstance(scheduler, DummyScheduler):
        return {}
    rates = [group["lr"] for group in getattr(info.optimizer, "param_groups", ()) if "lr" in group]
    named = {
        "warmup_min_lr": 0,
        # DeepSpeed takes one rate, or one per group.
        **({"warmup_max_lr": rates if len(set(rates)) > 1 else rates[0]} if rates else {}),
        # DeepSpeed steps its scheduler once per step.
        "warmup_num_steps": max(1, math.ceil(scheduler.warmup_num_steps / info.scheduler_steps_per_step)),
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        named["total_num_steps"] = math.ceil(scheduler.total_num_steps / info.scheduler_steps_per_step)
    return {f"scheduler.params.{name}": value for name, value in named.items()}


def _user_settings(info: PrepareInfo) -> set[str]:
    """The settings of placeholders that the user has set: those that differ from their defaults."""
    names = set()
    if isinstance(info.optimizer, DummyOptim):
        # The default of DummyOptim.
        changed = {"lr"} if info.optimizer.lr != 0.001 else set()
        changed |= {"weight_decay"} if info.optimizer.weight_decay else set()
        names |= {f"optimizer.params.{name}" for name in (*changed, *info.optimizer.kwargs)}
    if isinstance(info.scheduler, DummyScheduler):
        changed = {"total_num_steps"} if info.scheduler.total_num_steps is not None else set()
        changed |= {"warmup_num_steps"} if info.scheduler.warmup_num_steps else set()
        names |= {f"scheduler.params.{name}" for name in (*changed, *info.scheduler.kwargs)}
    return names


def _for_start(config: dict[str, Any], info: PrepareInfo) -> dict[str, Any]:
    """The configuration with values that follow from the objects, unless the user has set them."""
    # A copy: DeepSpeed changes it.
    config = copy.deepcopy(config)
    config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default is to clip
    if info.optimizer is not None and not isinstance(info.optimizer, DummyOptim):
        # The user chose this optimizer, whether or not DeepSpeed has tested it.
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    chosen = config.get("optimizer")
    if info.device_type == "cpu" and chosen and chosen["type"].lower() in ("adam", "adamw"):
        # DeepSpeed's Adam would be compiled for this machine first, which takes minutes.
        chosen.setdefault("params", {}).setdefault("torch_adam", True)
    return config
