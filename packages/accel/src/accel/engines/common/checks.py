"""Checks for models, optimizers and checkpoints that no engine supports; each error says what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_state import env
from accel_state.logging.warning import warn

Present = Callable[[torch.Tensor], torch.Tensor]

_FP16 = (
    "is float16, and fp16 training scales the loss: gradients in float16 cannot be unscaled. Keep the "
    "parameters in float32 (mixed precision casts per operation), or train in bf16 with "
    "mixed_precision='bf16'."
)

_FOREIGN = {
    "deepspeed": (
        "The checkpoint was written under DeepSpeed, and the engine here is {engine}. Load it under "
        "DeepSpeed, with as many processes and the same stage; or make whole weights of it with its "
        "zero_to_fp32.py, and load those before prepare()."
    ),
    "megatron": (
        "The checkpoint was written under Megatron-LM, and the engine here is {engine}. Load it under "
        "Megatron-LM, with any tp_degree and pp_degree."
    ),
    "local": (
        "The checkpoint was written with state_dict_type='LOCAL_STATE_DICT', of which each process reads its "
        "own file, and the engine here is {engine}. Load it as it was saved, with fsdp_version=1 and as many "
        "processes, and save it with 'SHARDED_STATE_DICT' for others."
    ),
}
"""By the role of files that one engine alone reads."""


def check_foreign(names: Collection[str], engine: str) -> None:
    """Reject a checkpoint that only another engine can read.

    Args:
        names: Its files.
        engine: What the engine here is called.

    Raises:
        CheckpointError: If it is one.
    """
    # By file names alone: nothing of a foreign checkpoint is read, which may hold code (pickles).
    roles = {file_names.role_of(name) for name in names}
    for role, message in _FOREIGN.items():
        if role in roles:
            raise CheckpointError(message.format(engine=engine))


def check_offloaded_training(model: torch.nn.Module, evaluation_mode: bool) -> None:
    """Reject training of a model that is spread over devices with parts on the CPU or the disk.

    Args:
        model: The model.
        evaluation_mode: Whether it is only evaluated.

    Raises:
        ValueError: If it is one.
    """
    devices = mapped_devices(model)
    # A model on the CPU alone is not offloaded, and trains there.
    offloaded = {"cpu", "disk"} & devices
    if len(devices) > 1 and offloaded and not evaluation_mode:
        raise ValueError(
            f"{type(model).__name__} is dispatched with parts on {sorted(offloaded)} (hf_device_map), which "
            "cannot be trained. Load it on the process's device, or pass evaluation_mode=True to "
            "prepare_model."
        )


def check_spread_training(model: torch.nn.Module, evaluation_mode: bool, num_processes: int) -> None:
    """Reject training of a model that is spread over devices on several processes.

    Processes that load it with the same device map put their copies on the same devices. With
    ACCELERATE_BYPASS_DEVICE_MAP the user says that each process has devices of its own.

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
    """Return the devices over which device maps spread the modules of a model; none without a map.

    Args:
        model: The model.
    """
    # Of every module: a dispatched model may be inside of another one.
    maps = (getattr(module, "hf_device_map", {}) for module in model.modules())
    return {str(device) for devices in maps for device in devices.values()}


def check_fp16(named: Iterable[tuple[str, torch.Tensor]], present: Present) -> None:
    """Check that no trainable parameter is in float16.

    Args:
        named: Parameters, with names for the message.
        present: Gives the tensor that is stepped for a parameter.

    Raises:
        ValueError: If one is.
    """
    for name, parameter in named:
        # The tensor that is stepped: under FSDP it may have another dtype than the one the user holds.
        if parameter.requires_grad and present(parameter).dtype is torch.float16:
            raise ValueError(f"{name} {_FP16}")


def named_parameters(item: torch.nn.Module | torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model or an optimizer, by names that a user finds them under."""
    kind = type(item).__name__
    if isinstance(item, torch.nn.Module):
        yield from ((f"{kind}.{name}", parameter) for name, parameter in item.named_parameters())
        return
    for group, options in enumerate(item.param_groups):
        for place, parameter in enumerate(options["params"]):
            yield f"{kind}.param_groups[{group}]['params'][{place}]", parameter


_ELSEWHERE = {"Adafactor"}
"""Known by their names in any library: transformers' Adafactor factors its state as torch's does."""


def check_hooks(
    model: torch.nn.Module,
    engine: str,
    fix: str,
    modules: Collection[str] | None = None,
    kinds: Collection[str] = ("_backward_hooks", "_post_accumulate_grad_hooks"),
) -> None:
    """Reject hooks on parameters that are going to be replaced: nothing would call them.

    Args:
        model: The model.
        engine: What the engine is called.
        fix: The way out, for the message.
        modules: The names of modules whose own parameters are meant; None for all.
        kinds: The attributes of torch that have hooks.

    Raises:
        ValueError: If there are any.
    """
    for name, parameter in model.named_parameters():
        is_meant = modules is None or name.rpartition(".")[0] in modules
        if is_meant and any(getattr(parameter, kind, None) for kind in kinds):
            raise ValueError(
                f"{type(model).__name__}.{name} has a hook (register_hook or "
                f"register_post_accumulate_grad_hook), and {engine} replaces the parameter, so that the hook "
                f"would not be called. {fix}"
            )


def check_whole_tensor_steps(optimizer: object, names: Collection[str], engine: str) -> None:
    """Reject an optimizer whose step is not element by element, where parameters are in parts.

    Args:
        optimizer: The optimizer.
        names: Classes of torch.optim, and of `_ELSEWHERE`; those that the installed torch lacks are passed
            over.
        engine: What the engine is called.

    Raises:
        ValueError: If it is of one of the classes.
    """
    # By names along the method resolution order, so that subclasses count and no other library is imported.
    elsewhere = _ELSEWHERE & {known.__name__ for known in type(optimizer).__mro__}
    kind = next(
        (
            name
            for name in names
            if name in elsewhere or isinstance(optimizer, getattr(torch.optim, name, ()))
        ),
        None,
    )
    if kind is not None:
        raise ValueError(
            f"{type(optimizer).__name__}: a step of {kind} needs whole matrices, or all parameters at "
            f"once, and under {engine} they are in parts: it would make other steps of them, or fail inside "
            "torch. Use one that steps element by element (AdamW, SGD), or train on whole parameters (DDP, "
            "one process)."
        )


def warn_of_ignored(plugin: Any, reasons: Mapping[str, str]) -> None:
    """Warn of each setting that is ignored, at the line that makes the plugin.

    Args:
        plugin: The plugin, a dataclass whose `__post_init__` calls the caller of this.
        reasons: Why, by the setting's name.
    """
    for name, reason in reasons.items():
        warn(f"{type(plugin).__name__} ignores {name}={getattr(plugin, name)!r}: {reason}.")
