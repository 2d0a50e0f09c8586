"""Which modules are sharded by themselves, and which parameters not at all."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin

Policy = Callable[..., bool]


@dataclass(frozen=True)
class Groups:
    """Which parts of a model are treated by themselves.

    Attributes:
        modules: Those that are sharded by themselves, inner ones first.
        ignored: The parameters that are left whole.
        checkpointed: The modules that compute their activations again in backward.
    """

    modules: tuple[torch.nn.Module, ...]
    ignored: set[torch.nn.Parameter]
    checkpointed: tuple[torch.nn.Module, ...]


def choose_groups(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> Groups:
    """The groups of a model that the plugin asks for.

    Raises:
        ValueError: If the policy, ignored modules or activation checkpointing mean nothing in this model.
    """
    policy = copy.copy(plugin)  # its own, as the policy is completed for this model
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
    found: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def ignored_parameters(
    model: torch.nn.Module, ignored: Iterable[torch.nn.Module] | str | None
) -> set[torch.nn.Parameter]:
    """The parameters that are left whole.

    Args:
        model: The model.
        ignored: Modules, or a regular expression that the whole of a module's name has to match.

    Raises:
        ValueError: If nothing of the model is meant.
    """
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        # The whole name: "blocks.1" as a beginning would mean blocks.10 too.
        modules = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
    else:
        own = set(model.modules())
        modules = [module for module in ignored if module in own]
    if not modules:
        raise ValueError(
            f"ignored_modules={ignored!r} means no module of {type(model).__name__}. A text is a regular "
            "expression for whole names, such as 'blocks\\\\.0\\\\..*'; modules have to be the model's own."
        )
    return {parameter for module in modules for parameter in module.parameters()}


def modules_to_shard(
    model: torch.nn.Module, policy: Policy | None, ignored: set[torch.nn.Parameter]
) -> list[torch.nn.Module]:
    """The modules below the model that become groups of their own, inner ones first.

    A module that shares a parameter with modules outside of it is left to a larger group that has both:
    tied weights stay tied.

    Args:
        model: The model.
        policy: `policy(module=, recurse=, nonwrapped_numel=)`, as those of `torch.distributed.fsdp.wrap`.
        ignored: Parameters that do not count.
    """
    # No policy: the model is one group.
    if policy is None:
        return []
    # Torch's own walk (`_recursive_wrap`) is private, wraps as it goes, and knows nothing of tied weights.
    choice = _Choice(policy, ignored, aliases(model))
    choice.visit("", model)
    return list(choice.modules)


@dataclass
class _Choice:
    """The modules that a policy chooses; no closure, which would keep the model by calling itself."""

    policy: Policy
    ignored: set[torch.nn.Parameter]
    names: dict[torch.nn.Parameter, list[str]]
    modules: dict[torch.nn.Module, None] = field(default_factory=dict)

    def visit(self, name: str, module: torch.nn.Module) -> int:
        """Choose below and here; returns how many of the module's parameters are in chosen modules."""
        total = sum(item.numel() for item in module.parameters() if item not in self.ignored)
        # The two questions of torch's policies: whether to look inside, and, inner modules being chosen,
        # whether this one is a group of the rest.
        if not self.policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        taken = sum(
            self.visit(f"{name}.{child_name}" if name else child_name, child)
            for child_name, child in module.named_children()
        )
        rest = total - taken
        stands = bool(name) and _stands_alone(name, module, self.names)
        if stands and self.policy(module=module, recurse=False, nonwrapped_numel=rest):
            self.modules.setdefault(module)
            return total
        return taken


def _stands_alone(name: str, module: torch.nn.Module, names: dict[torch.nn.Parameter, list[str]]) -> bool:
    if type(module).forward is torch.nn.Module.forward or isinstance(module, torch.nn.ModuleList):
        return False  # it is never called, so that nothing would gather its parameters
    return all(alias.startswith(f"{name}.") for alias in _aliases_of(module, names))


def _aliases_of(module: torch.nn.Module, names: dict[torch.nn.Parameter, list[str]]) -> Iterator[str]:
    for parameter in module.parameters():
        yield from names[parameter]
