"""Checks for models, optimizers and checkpoints that no engine supports; each error says what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from accel.engines.torch_private import accumulation_hooks, gradient_hooks
from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_state import env
from accel_state.logging.warning import warn

TrainedParameter = Callable[[torch.Tensor], torch.Tensor]

_FP16 = (
    "is float16, and fp16 training scales the loss: gradients in float16 cannot be unscaled. Keep the "
    "parameters in float32 (mixed precision casts per operation), or train in bf16 with "
    "mixed_precision='bf16'."
)

_FOREIGN = {
    "deepspeed": (
        "The checkpoint was written under DeepSpeed, and the engine here is {engine}. Load it under "
        "DeepSpeed, with as many processes and the same stage; or convert it to full weights with its "
        "zero_to_fp32.py, and load those before prepare()."
    ),
    "megatron": (
        "The checkpoint was written under Megatron-LM, and the engine here is {engine}. Load it under "
        "Megatron-LM, with any tp_degree and pp_degree."
    ),
    "local": (
        "The checkpoint was written with state_dict_type='LOCAL_STATE_DICT', where each process has its "
        "own file, and the engine here is {engine}. Load it as it was saved, with fsdp_version=1 and as many "
        "processes, and save it with 'SHARDED_STATE_DICT' for other engines."
    ),
}
"""By the role of files that only one engine reads."""


def check_foreign(names: Collection[str], engine: str) -> None:
    """Reject a checkpoint that only another engine can read.

    Args:
        names: Its files.
        engine: The name of the current engine.

    Raises:
        CheckpointError: If it is one.
    """
    # By file names only: a foreign checkpoint may contain code (pickles), so nothing of it is read.
    roles = {file_names.role_of(name) for name in names}
    for role, message in _FOREIGN.items():
        if role in roles:
            raise CheckpointError(message.format(engine=engine))


def warn_of_options(engine: str, options: Mapping[str, Any]) -> None:
    """Warn of arguments of `save_state` that an engine ignores: one script may save under several engines.

    Args:
        engine: The name of the engine.
        options: The additional arguments.
    """
    if options:
        warn(f"save_state ignores {', '.join(options)}: the {engine} engine saves without options.")


def check_offloaded_training(model: torch.nn.Module, evaluation_mode: bool) -> None:
    """Reject training of a dispatched model with modules on the CPU or the disk.

    Args:
        model: The model.
        evaluation_mode: Whether it is only evaluated.

    Raises:
        ValueError: If it is such a model.
    """
    devices = mapped_devices(model)
    # A model on the CPU only is not offloaded, and trains there.
    offloaded = {"cpu", "disk"} & devices
    if len(devices) > 1 and offloaded and not evaluation_mode:
        raise ValueError(
            f"{type(model).__name__} is dispatched with modules on {sorted(offloaded)} (hf_device_map), "
            "which cannot be trained. Load it on the process's device, or pass evaluation_mode=True to "
            "prepare_model."
        )


def check_multi_device_training(model: torch.nn.Module, evaluation_mode: bool, num_processes: int) -> None:
    """Reject training of a model with several devices on several processes.

    Processes that load it with the same device map would use the same devices. ACCELERATE_BYPASS_DEVICE_MAP
    declares that each process has its own devices.

    Args:
        model: The model.
        evaluation_mode: Whether it is only evaluated.
        num_processes: Number of processes.

    Raises:
        ValueError: If it is one.
    """
    devices = mapped_devices(model)
    if len(devices) < 2 or num_processes == 1 or evaluation_mode or env.get("ACCELERATE_BYPASS_DEVICE_MAP"):
        return
    raise ValueError(
        f"{type(model).__name__} is spread over {sorted(devices)} (hf_device_map), and {num_processes} "
        "processes are to train it, each with a copy on its own device. Load it without device_map, or train "
        "on one process; where each process has several devices that no other uses, set "
        "ACCELERATE_BYPASS_DEVICE_MAP=true."
    )


def mapped_devices(model: torch.nn.Module) -> set[str]:
    """Return the devices in the device maps of a model's modules; none without a map.

    Args:
        model: The model.
    """
    # Of all modules: a dispatched model may be inside another one.
    maps = (getattr(module, "hf_device_map", {}) for module in model.modules())
    return {str(device) for devices in maps for device in devices.values()}


def check_fp16(named: Iterable[tuple[str, torch.Tensor]], trained_parameter: TrainedParameter) -> None:
    """Check that no trainable parameter is in float16.

    Args:
        named: Parameters, with names for the message.
        trained_parameter: Returns the tensor that is trained for a parameter.

    Raises:
        ValueError: If one is.
    """
    for name, parameter in named:
        # The trained tensor: under FSDP it may have another dtype than the original parameter.
        if parameter.requires_grad and trained_parameter(parameter).dtype is torch.float16:
            raise ValueError(f"{name} {_FP16}")


def named_parameters(item: torch.nn.Module | torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model or an optimizer, by the names under which a user finds them."""
    kind = type(item).__name__
    if isinstance(item, torch.nn.Module):
        yield from ((f"{kind}.{name}", parameter) for name, parameter in item.named_parameters())
        return
    for group, options in enumerate(item.param_groups):
        for place, parameter in enumerate(options["params"]):
            yield f"{kind}.param_groups[{group}]['params'][{place}]", parameter


_OTHER_LIBRARIES = {"Adafactor"}
"""Recognized by name in any library: transformers' Adafactor factors its state as torch's does."""


def check_hooks(
    model: torch.nn.Module,
    engine: str,
    fix: str,
    modules: Collection[str] | None = None,
    gradients: bool = True,
) -> None:
    """Reject hooks on parameters that will be replaced: they would not be called.

    Args:
        model: The model.
        engine: The name of the engine.
        fix: The alternative, for the message.
        modules: The names of modules whose direct parameters are checked; None for all.
        gradients: Whether hooks of `register_hook` are rejected too.

    Raises:
        ValueError: If there are any.
    """
    for name, parameter in model.named_parameters():
        is_checked = modules is None or name.rpartition(".")[0] in modules
        if is_checked and (accumulation_hooks(parameter) or (gradients and gradient_hooks(parameter))):
            raise ValueError(
                f"{type(model).__name__}.{name} has a hook (register_hook or "
                f"register_post_accumulate_grad_hook), and {engine} replaces the parameter, so that the hook "
                f"would not be called. {fix}"
            )


def check_elementwise_optimizer(optimizer: object, names: Collection[str], engine: str) -> None:
    """Reject an optimizer whose step is not elementwise, if parameters are sharded.

    Args:
        optimizer: The optimizer.
        names: Classes of torch.optim, and of `_OTHER_LIBRARIES`; those that the installed torch lacks are
            skipped.
        engine: The name of the engine.

    Raises:
        ValueError: If it is of one of the classes.
    """
    # By name along the method resolution order: subclasses count, and no other library is imported.
    foreign = _OTHER_LIBRARIES & {item.__name__ for item in type(optimizer).__mro__}
    kind = next(
        (name for name in names if name in foreign or isinstance(optimizer, getattr(torch.optim, name, ()))),
        None,
    )
    if kind is not None:
        raise ValueError(
            f"{type(optimizer).__name__}: a step of {kind} needs full matrices, or all parameters at "
            f"once, and {engine} shards them, so its steps would differ from unsharded training, or fail "
            "inside torch. Use an elementwise optimizer (AdamW, SGD), or train unsharded (DDP, one process)."
        )


def warn_of_ignored(plugin: Any, reasons: Mapping[str, str]) -> None:
    """Warn of each ignored setting, at the line that creates the plugin.

    Args:
        plugin: The plugin, a dataclass; this is called inside its `__post_init__`.
        reasons: The reasons, by the setting's name.
    """
    for name, reason in reasons.items():
        warn(f"{type(plugin).__name__} ignores {name}={getattr(plugin, name)!r}: {reason}.")
