"""Values of "auto" settings in DeepSpeed's configuration, and checks of the others."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.engines.deepspeed.config import AUTO
from accel.engines.deepspeed.stand_ins import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    import torch

    from accel.engines.deepspeed.plugin import DeepSpeedPlugin

_ALL = "train_batch_size"
_BATCH = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO = "zero_optimization"


@dataclass(frozen=True)
class Facts:
    """The objects of one `prepare` call.

    Attributes:
        model: The model.
        optimizer: Its optimizer, a DummyOptim, or None for a model that is only evaluated.
        scheduler: The schedule that is prepared with it, if any.
        batch_sizes: Samples per process and micro-batch, of the loaders prepared in the same call.
        known_batch_size: The same of loaders that were prepared before; None without any.
        num_steps: Micro-batches of an accumulation window.
        num_processes: Processes with data of their own.
        moves: How often each optimizer step moves a schedule.
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
    moves: int
    device_type: str
    mixed_precision: str
    sequence_parallel_size: int = 1


def complete(plugin: DeepSpeedPlugin, facts: Facts) -> dict[str, Any]:
    """Fill a plugin's configuration in, and return what DeepSpeed is started with.

    Args:
        plugin: The plugin; what is "auto" in its configuration is filled in.
        facts: What is prepared.

    Returns:
        A copy of the configuration, with what follows from the objects given; for a model that is only
        evaluated, without optimizer and schedule.

    Raises:
        ValueError: If the configuration does not fit the objects; it lists every difference.
    """
    # Each prepare fills "auto" in anew: after free_memory() the next loader may have other batches.
    plugin.forget_filled()
    # After forget_filled, which makes a precision that was filled in "auto" again.
    plugin.set_mixed_precision(facts.mixed_precision)
    if _ALL not in plugin.deepspeed_config:
        plugin.deepspeed_config.setdefault(_BATCH, AUTO)  # DeepSpeed needs one of them
    found = _unfit(plugin, facts)
    filled, compared = _values(plugin, facts)
    started, size = compared[_ALL], facts.sequence_parallel_size
    if size > 1 and plugin.get_value(_ALL) == started * size:
        # Of every process, as transformers' Trainer counts; DeepSpeed counts groups.
        compared[_ALL] = started * size
    for name, value in {**filled, **compared}.items():
        if plugin.is_auto(name):
            plugin.fill_match(name, **{name: value})
    given = plugin.deepspeed_config
    if facts.optimizer is None:  # what is evaluated needs neither
        given = {name: value for name, value in given.items() if name not in ("optimizer", "scheduler")}
    plugin.deepspeed_config_process("", found, given, **compared)
    if found:
        raise ValueError(
            f"DeepSpeed's configuration does not fit what is prepared ({type(facts.model).__name__}):\n"
            + "\n".join(found)
            + "\nMake them the same, or set them to 'auto' in the configuration."
        )
    return _for_start({**given, _ALL: started} if _ALL in given else given, facts)


def _unfit(plugin: DeepSpeedPlugin, facts: Facts) -> list[str]:
    """List what is given twice, and what is missing, of optimizers and schedules."""
    found = []
    has_optimizer, has_scheduler = (bool(plugin.get_value(name)) for name in ("optimizer", "scheduler"))
    if facts.optimizer is not None and isinstance(facts.optimizer, DummyOptim) is not has_optimizer:
        found.append(
            f"- optimizer: the configuration has one, and so has prepare ({type(facts.optimizer).__name__}): "
            "pass a DummyOptim"
            if has_optimizer
            else "- optimizer: DummyOptim stands for the configuration's, which has none: pass a real one"
        )
    if isinstance(facts.scheduler, DummyScheduler):
        # One of the two has to be there, and not both.
        if has_scheduler is (facts.scheduler.lr_scheduler_callable is not None):
            found.append(
                "- scheduler: the configuration has one, and DummyScheduler has lr_scheduler_callable"
                if has_scheduler
                else "- scheduler: DummyScheduler stands for the configuration's, which has none: give it "
                "lr_scheduler_callable, or pass a real one"
            )
    elif facts.scheduler is not None and has_scheduler:
        found.append(
            f"- scheduler: the configuration has one, and so has prepare ({type(facts.scheduler).__name__}): "
            "pass a DummyScheduler"
        )
    return found


def _values(plugin: DeepSpeedPlugin, facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by dotted names: those that only fill in, and those that are compared too."""
    filled: dict[str, Any] = {
        "gradient_clipping": 0.0,
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": False,
        f"{_ZERO}.offload_optimizer.device": "none",
        f"{_ZERO}.offload_param.device": "none",
        **_hidden_size_values(facts.model),
        **_optimizer_values(facts.optimizer),
        **_scheduler_values(facts),
    }
    compared: dict[str, Any] = {}
    (compared if facts.batch_sizes else filled)[_BATCH] = size = _batch_size(plugin, facts)
    # A loop that marks the windows itself, as transformers' Trainer does, says 1 here.
    (compared if facts.num_steps > 1 else filled)[_STEPS] = facts.num_steps
    present = [(plugin.get_value(_BATCH), size), (plugin.get_value(_STEPS), facts.num_steps)]
    # DeepSpeed requires that the batch of all processes is the product of these.
    sizes = [given if isinstance(given, int) else here for given, here in present]
    compared[_ALL] = math.prod(sizes) * facts.num_processes
    for name in [name for name in filled if name.startswith(("optimizer.", "scheduler."))]:
        if name in _given(facts):
            compared[name] = filled.pop(name)
    return filled, compared


def _batch_size(plugin: DeepSpeedPlugin, facts: Facts) -> int:
    if not facts.batch_sizes:
        return facts.known_batch_size or 1
    present = plugin.get_value(_BATCH)
    # Of loaders with different batches, the one that the configuration means.
    if present in facts.batch_sizes:
        return int(present)
    return (min if plugin.is_train_batch_min else max)(facts.batch_sizes)


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


def _scheduler_values(facts: Facts) -> dict[str, Any]:
    scheduler = facts.scheduler
    if not isinstance(scheduler, DummyScheduler):
        return {}
    rates = [group["lr"] for group in getattr(facts.optimizer, "param_groups", ()) if "lr" in group]
    named = {
        "warmup_min_lr": 0,
        # DeepSpeed takes one rate, or one for each group.
        **({"warmup_max_lr": rates if len(set(rates)) > 1 else rates[0]} if rates else {}),
        # DeepSpeed moves its schedule once per step.
        "warmup_num_steps": max(1, math.ceil(scheduler.warmup_num_steps / facts.moves)),
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        named["total_num_steps"] = math.ceil(scheduler.total_num_steps / facts.moves)
    return {f"scheduler.params.{name}": value for name, value in named.items()}


def _given(facts: Facts) -> set[str]:
    """The settings of stand-ins that the user has given: those that are not their defaults."""
    names = set()
    if isinstance(facts.optimizer, DummyOptim):
        # The default of DummyOptim.
        own = {"lr"} if facts.optimizer.lr != 0.001 else set()
        own |= {"weight_decay"} if facts.optimizer.weight_decay else set()
        names |= {f"optimizer.params.{name}" for name in (*own, *facts.optimizer.kwargs)}
    if isinstance(facts.scheduler, DummyScheduler):
        own = {"total_num_steps"} if facts.scheduler.total_num_steps is not None else set()
        own |= {"warmup_num_steps"} if facts.scheduler.warmup_num_steps else set()
        names |= {f"scheduler.params.{name}" for name in (*own, *facts.scheduler.kwargs)}
    return names


def _for_start(config: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """The configuration with what follows from the objects, unless the user says otherwise."""
    # A copy, as DeepSpeed changes the one that it is given.
    config = copy.deepcopy(config)
    config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is to clip, which nobody asked for
    if facts.optimizer is not None and not isinstance(facts.optimizer, DummyOptim):
        # The user's optimizer is meant, whichever DeepSpeed has tried.
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    chosen = config.get("optimizer")
    if facts.device_type == "cpu" and chosen and chosen["type"].lower() in ("adam", "adamw"):
        # DeepSpeed's own Adam would be compiled for this machine first, which takes minutes.
        chosen.setdefault("params", {}).setdefault("torch_adam", True)
    return config
