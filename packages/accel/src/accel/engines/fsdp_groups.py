"""The modules that FSDP shards separately, and those whose activations are computed again."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin


Policy = Callable[..., bool]


@dataclass(frozen=True)
class Groups:
    """The modules and parameters of a model that are treated separately.

    Attributes:
        modules: The modules that are sharded separately, inner ones first.
        ignored: The parameters that are not sharded.
        checkpointed: The modules that recompute their activations in backward.
    """

    modules: tuple[torch.nn.Module, ...]
    ignored: set[torch.nn.Parameter]
    checkpointed: tuple[torch.nn.Module, ...]


def choose_groups(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> Groups:
    """The groups of a model according to the plugin.

    Raises:
        ValueError: If the policy, ignored modules or activation checkpointing match nothing in this model.
    """
    policy = copy.copy(plugin)  # a copy: the policy is completed for this model
    policy.set_auto_wrap_policy(model)
    ignored = ignored_parameters(model, plugin.ignored_modules)
    modules = tuple(modules_to_shard(model, policy.auto_wrap_policy, ignored))
    if plugin.activation_checkpointing and not modules:
        raise ValueError(
            f"activation_checkpointing recomputes the modules that auto_wrap_policy chooses, and it chooses "
            f"none of {type(model).__name__}. Set auto_wrap_policy='size_based_wrap' with min_num_params, or "
            "'transformer_based_wrap' with transformer_cls_names_to_wrap (fsdp_auto_wrap_policy, "
            "fsdp_min_num_params and fsdp_transformer_layer_cls_to_wrap in the config file of accel launch)."
        )
    return Groups(modules, ignored, modules if plugin.activation_checkpointing else ())


def aliases(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """All names of each parameter: tied ones have several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def ignored_parameters(
    model: torch.nn.Module, ignored: Iterable[torch.nn.Module] | str | None
) -> set[torch.nn.Parameter]:
    """The parameters that are not sharded.

    Args:
        model: The model.
        ignored: Modules, or a regular expression that has to match a module's full name.

    Raises:
        ValueError: If nothing in the model matches.
    """
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        # A full match: "blocks.1" as a prefix would match blocks.10 too.
        modules = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
    else:
        existing = set(model.modules())
        modules = [module for module in ignored if module in existing]
    if not modules:
        raise ValueError(
            f"ignored_modules={ignored!r} matches no module of {type(model).__name__}. A string is a regular "
            "expression for full names, such as 'blocks\\\\.0\\\\..*'; modules have to be the model's own."
        )
    return {parameter for module in modules for parameter in module.parameters()}


def modules_to_shard(
    model: torch.nn.Module, policy: Policy | None, ignored: set[torch.nn.Parameter]
) -> list[torch.nn.Module]:
    """The modules inside the model that become separate groups, inner ones first.

    A module that shares a parameter with modules outside of it belongs to a larger group that has both: tied
    weights stay tied.

    Args:
        model: The model.
        policy: `policy(module=, recurse=, nonwrapped_numel=)`, as those of `torch.distributed.fsdp.wrap`.
        ignored: Parameters to leave out.
    """
    # No policy: the model is one group.
    if policy is None:
        return []
    # torch's own walk (`_recursive_wrap`) is private, wraps at once, and ignores tied weights.
    choice = _Choice(policy, ignored, aliases(model))
    choice.visit("", model)
    return list(choice.modules)


@dataclass
class _Choice:
    """The modules that a policy chooses; a recursive closure would keep the model alive."""

    policy: Policy
    ignored: set[torch.nn.Parameter]
    names: dict[torch.nn.Parameter, list[str]]
    modules: dict[torch.nn.Module, None] = field(default_factory=dict)

    def visit(self, name: str, module: torch.nn.Module) -> int:
        """Choose inside the module, then itself; returns how many of its parameters are in chosen modules."""
        total = sum(item.numel() for item in module.parameters() if item not in self.ignored)
        # torch's policies are called twice: whether to look inside, and then, with inner modules chosen,
        # whether this module is a group of the rest.
        if not self.policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        in_groups = sum(
            self.visit(f"{name}.{child_name}" if name else child_name, child)
            for child_name, child in module.named_children()
        )
        rest = total - in_groups
        is_separable = bool(name) and _is_separable(name, module, self.names)
        if is_separable and self.policy(module=module, recurse=False, nonwrapped_numel=rest):
            self.modules.setdefault(module)
            return total
        return in_groups


def _is_separable(name: str, module: torch.nn.Module, names: dict[torch.nn.Parameter, list[str]]) -> bool:
    if type(module).forward is torch.nn.Module.forward or isinstance(module, torch.nn.ModuleList):
        return False  # never called: nothing would gather its parameters
    return all(alias.startswith(f"{name}.") for alias in _aliases_of(module, names))


def _aliases_of(module: torch.nn.Module, names: dict[torch.nn.Parameter, list[str]]) -> Iterator[str]:
    for parameter in module.parameters():
        yield from names[parameter]


class CheckpointedForward:
    """A module's forward that saves only its inputs; a class, so that the module still pickles.

    The module is not wrapped: names of parameters and classes stay.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool) -> None:
        self.forward = forward
        self.offload = offload
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, and again in backward."""
        if not self.offload:
            # The reentrant variant takes no keyword arguments, and needs an input that requires a gradient.
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        # Only the inputs are still saved for backward.
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def apply_activation_checkpointing(modules: Iterable[torch.nn.Module], offload: bool) -> None:
    """Checkpoint the activations of modules; idempotent.

    Args:
        modules: The modules.
        offload: Keep the saved inputs on the CPU.
    """
    for module in modules:
        # An instance attribute: the module is not wrapped, and names of parameters stay.
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            module.forward = CheckpointedForward(module.forward, offload)
