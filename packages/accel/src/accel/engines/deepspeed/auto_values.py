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
    """The objects of one `prepare` call.

    Attributes:
        model: The model.
        optimizer: Its optimizer, a DummyOptim, or None for a model that is only evaluated.
        scheduler: The schedule that is prepared with it, if any.
        batch_sizes: Samples per process and micro-batch, of the loaders prepared in the same call.
        known_batch_size: The same of loaders that were prepared before; None without any.
        num_steps: Micro-batches of an accumulation window.
        num_processes: Processes with their own data.
        scheduler_steps_per_step: Scheduler steps per optimizer step.
        device_type: Type of the device.
        mixed_precision: "bf16", "fp16" or "no".
        sequence_parallel_size: Processes that work on each sequence together.
    """

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    batch_sizes: tuple[int, ...]
    known_batch_size: int | None
    num_steps: int
    num_processes: int
    scheduler_steps_per_step: int
    device_type: str
    mixed_precision: str
    sequence_parallel_size: int = 1


def complete(plugin: DeepSpeedPlugin, info: PrepareInfo) -> dict[str, Any]:
    """Fill a plugin's configuration in, and return what DeepSpeed is started with.

    Args:
        plugin: The plugin; what is "auto" in its configuration is filled in.
        info: What is prepared.

    Returns:
        A copy of the configuration, with what follows from the objects given; for a model that is only
        evaluated, without optimizer and schedule.

    Raises:
        ValueError: If the configuration does not fit the objects; it lists every difference.
    """
    # Each prepare fills "auto" in again: after free_memory() the next loader may have other batches.
    plugin.forget_filled()
    # After forget_filled, which makes a precision that was filled in "auto" again.
    plugin.set_mixed_precision(info.mixed_precision)
    if _ALL not in plugin.deepspeed_config:
        plugin.deepspeed_config.setdefault(_BATCH, AUTO)  # DeepSpeed needs one of them
    found = _unfit(plugin, info)
    filled, compared = _values(plugin, info)
    started, size = compared[_ALL], info.sequence_parallel_size
    if size > 1 and plugin.get_value(_ALL) == started * size:
        # Of every process, as transformers' Trainer counts; DeepSpeed counts groups.
        compared[_ALL] = started * size
    for name, value in {**filled, **compared}.items():
        if plugin.is_auto(name):
            plugin.fill_match(name, **{name: value})
    given = plugin.deepspeed_config
    if info.optimizer is None:  # what is evaluated needs neither
        given = {name: value for name, value in given.items() if name not in ("optimizer", "scheduler")}
    plugin.deepspeed_config_process("", found, given, **compared)
    if found:
        raise ValueError(
            f"DeepSpeed's configuration does not fit what is prepared ({type(info.model).__name__}):\n"
            + "\n".join(found)
            + "\nMake them the same, or set them to 'auto' in the configuration."
        )
    return _for_start({**given, _ALL: started} if _ALL in given else given, info)


def _unfit(plugin: DeepSpeedPlugin, info: PrepareInfo) -> list[str]:
    """List what is given twice, and what is missing, of optimizers and schedules."""
    found = []
    has_optimizer, has_scheduler = (bool(plugin.get_value(name)) for name in ("optimizer", "scheduler"))
    if info.optimizer is not None and isinstance(info.optimizer, DummyOptim) is not has_optimizer:
        found.append(
            f"- optimizer: the configuration has one, and so has prepare ({type(info.optimizer).__name__}): "
            "pass a DummyOptim"
            if has_optimizer
            else "- optimizer: DummyOptim stands for the configuration's, which has none: pass a real one"
        )
    if isinstance(info.scheduler, DummyScheduler):
        # One of the two has to be there, and not both.
        if has_scheduler is (info.scheduler.lr_scheduler_callable is not None):
            found.append(
                "- scheduler: the configuration has one, and DummyScheduler has lr_scheduler_callable"
                if has_scheduler
                else "- scheduler: DummyScheduler stands for the configuration's, which has none: give it "
                "lr_scheduler_callable, or pass a real one"
            )
    elif info.scheduler is not None and has_scheduler:
        found.append(
            f"- scheduler: the configuration has one, and so has prepare ({type(info.scheduler).__name__}): "
            "pass a DummyScheduler"
        )
    return found


def _values(plugin: DeepSpeedPlugin, info: PrepareInfo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by dotted names: those that only fill in, and those that are compared too."""
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
    # A loop that marks the windows itself, as transformers' Trainer does, says 1 here.
    (compared if info.num_steps > 1 else filled)[_STEPS] = info.num_steps
    present = [(plugin.get_value(_BATCH), size), (plugin.get_value(_STEPS), info.num_steps)]
    # DeepSpeed requires that the batch of all processes is the product of these.
    sizes = [given if isinstance(given, int) else here for given, here in present]
    compared[_ALL] = math.prod(sizes) * info.num_processes
    for name in [name for name in filled if name.startswith(("optimizer.", "scheduler."))]:
        if name in _given(info):
            compared[name] = filled.pop(name)
    return filled, compared


def _batch_size(plugin: DeepSpeedPlugin, info: PrepareInfo) -> int:
    if not info.batch_sizes:
        return info.known_batch_size or 1
    present = plugin.get_value(_BATCH)
    # Of loaders with different batches, the one that the configuration means.
    if present in info.batch_sizes:
        return int(present)
    return (min if plugin.is_train_batch_min else max)(info.batch_sizes)


def _hidden_size_values(model: torch.nn.Module) -> dict[str, int]:
    """Sizes of buffers after the model's own size, where it has a transformers configuration."""
    config = getattr(model, "config", None)
    found: list[int] = []
    # Models of images and text keep the sizes of the language model in a configuration inside.
    for part in (config, getattr(config, "text_config", None)):
        found += [size for size in [getattr(part, "hidden_size", None)] if isinstance(size, int)]
        found += [max(sizes) for sizes in [getattr(part, "hidden_sizes", None)] if sizes]
    if not found:
        return {}
    size = found[0]
    return {
        # As transformers' documents advise for a hidden size.
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
        # DeepSpeed takes one rate, or one for each group.
        **({"warmup_max_lr": rates if len(set(rates)) > 1 else rates[0]} if rates else {}),
        # DeepSpeed moves its schedule once per step.
        "warmup_num_steps": max(1, math.ceil(scheduler.warmup_num_steps / info.scheduler_steps_per_step)),
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        named["total_num_steps"] = math.ceil(scheduler.total_num_steps / info.scheduler_steps_per_step)
    return {f"scheduler.params.{name}": value for name, value in named.items()}


def _given(info: PrepareInfo) -> set[str]:
    """The settings of stand-ins that the user has given: those that are not their defaults."""
    names = set()
    if isinstance(info.optimizer, DummyOptim):
        # The default of DummyOptim.
        own = {"lr"} if info.optimizer.lr != 0.001 else set()
        own |= {"weight_decay"} if info.optimizer.weight_decay else set()
        names |= {f"optimizer.params.{name}" for name in (*own, *info.optimizer.kwargs)}
    if isinstance(info.scheduler, DummyScheduler):
        own = {"total_num_steps"} if info.scheduler.total_num_steps is not None else set()
        own |= {"warmup_num_steps"} if info.scheduler.warmup_num_steps else set()
        names |= {f"scheduler.params.{name}" for name in (*own, *info.scheduler.kwargs)}
    return names


def _for_start(config: dict[str, Any], info: PrepareInfo) -> dict[str, Any]:
    """The configuration with what follows from the objects, unless the user says otherwise."""
    # A copy, as DeepSpeed changes the one that it is given.
    config = copy.deepcopy(config)
    config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is to clip, which nobody asked for
    if info.optimizer is not None and not isinstance(info.optimizer, DummyOptim):
        # The user's optimizer is meant, whichever DeepSpeed has tried.
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    chosen = config.get("optimizer")
    if info.device_type == "cpu" and chosen and chosen["type"].lower() in ("adam", "adamw"):
        # DeepSpeed's own Adam would be compiled for this machine first, which takes minutes.
        chosen.setdefault("params", {}).setdefault("torch_adam", True)
    return config
