"""Which classes of a model's modules are sharded separately."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accel_state.logging.warning import warn

_CLASSES_KEY = "fsdp_transformer_layer_cls_to_wrap in the config file of accel launch, or its flag"


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """The class of a module, or of one inside of it, by its name.

    Args:
        module: The module.
        name: The class's name, without its module.

    Returns:
        The class; None if no module has it.
    """
    return next((type(item) for item in module.modules() if type(item).__name__ == name), None)


def find_classes(model: torch.nn.Module, names: Iterable[str] | None) -> set[type[torch.nn.Module]]:
    """Return the classes of the layers to wrap; none, with a warning, if no names are set.

    Args:
        model: The model.
        names: Their names; None for those in the model's `_no_split_modules`.

    Raises:
        ValueError: If the model has no module of a class that is named.
    """
    by_name = {type(module).__name__: type(module) for module in model.modules()}
    wanted = names or getattr(model, "_no_split_modules", None)
    if not wanted:
        warn(
            f"{type(model).__name__} is sharded, and gathered, in one piece: auto_wrap_policy is "
            "TRANSFORMER_BASED_WRAP, and neither the settings nor the model (_no_split_modules) name its "
            f"layer classes. Name them in transformer_cls_names_to_wrap=[...] ({_CLASSES_KEY}).",
        )
        return set()
    # A model's own list may name layers that this configuration of it does not have.
    missing = sorted(set(wanted) - set(by_name)) if names else []
    classes = {by_name[name] for name in wanted if name in by_name}
    if missing or not classes:
        raise ValueError(
            f"transformer_cls_names_to_wrap names {', '.join(missing or sorted(wanted))}, and "
            f"{type(model).__name__} has modules of these classes: {', '.join(sorted(by_name))}. Correct the "
            f"names ({_CLASSES_KEY})."
        )
    return classes
