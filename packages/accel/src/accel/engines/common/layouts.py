"""How the parameters of a model are laid out: split or sharded already, and what cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a tensor; the tensor itself if it is not sharded."""
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner: torch.Tensor = getattr(shard, "_tensor", shard)  # for torchao's weights that are gathered in fp8
    return inner


def is_split(model: torch.nn.Module, size: int, engine: str) -> bool:
    """Whether the weights of a model are split already, by the script or by loading with a `tp_plan`.

    Args:
        model: The model.
        size: Processes of one tensor-parallel group.
        engine: The name of the engine.

    Raises:
        ValueError: If they are split over another number of processes.
    """
    # Meshes without names count, too.
    sizes = (item.device_mesh.size() for item in model.parameters() if isinstance(item, DTensor))
    current = get_model_tp_size(model) or next(sizes, 1)
    if current not in (1, size):
        raise ValueError(
            f"the weights of {type(model).__name__} are split over {current} processes already, and {engine} "
            f"has tp_size={size}. Pass ParallelismConfig(tp_size={current}, ...), or leave the splitting to "
            "prepare(): load the model without a tp_plan, and give it a _tp_plan."
        )
    return current > 1


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """How many processes split the weights of a model.

    Args:
        model: A model that was prepared, or loaded with a `tp_plan`.

    Returns:
        The size of the tensor-parallel group; None if no weight is split.
    """
    # Models of transformers have the attribute.
    tp_size: int | None = getattr(model, "tp_size", None)
    if tp_size is not None:
        return tp_size
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh["tp"].size()
    return None


def check_layout(
    model: torch.nn.Module, engine: str, ignored: Collection[torch.nn.Parameter] = (), strided: bool = False
) -> None:
    """Reject parameters that cannot be sharded, or sent as bytes (DeepSpeed does that at stage 0 too).

    torch and DeepSpeed would fail half-way.

    Args:
        model: The model.
        engine: The name of the engine.
        ignored: Parameters that are not sharded.
        strided: Whether any strides are accepted.

    Raises:
        ValueError: If there are any; the message names one, and the fix.
    """
    left = {id(item) for item in ignored}
    for name, parameter in model.named_parameters():
        is_sharded = isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")  # by deepspeed.zero.Init
        if id(parameter) in left or is_sharded:
            continue
        fix = ""
        if parameter.dim() == 0:
            fix = "has no dimension. Make it a vector of one element"
        elif not strided and not parameter.numel():
            fix = "has no elements. Make it a buffer"
        elif not strided and not parameter.is_contiguous():
            fix = f"has strides {parameter.stride()}. Make it contiguous: parameter.data.contiguous()"
        if fix:
            raise ValueError(f"{type(model).__name__}.{name} cannot be prepared under {engine}: it {fix}.")


def check_unshared(
    models: Iterable[torch.nn.Module], engine: str, is_sharded: Callable[[torch.Tensor], bool]
) -> None:
    """Reject models that share parameters with each other, or with one that is sharded already.

    Args:
        models: The models to shard.
        engine: The name of the engine.
        is_sharded: Whether a parameter is sharded already.

    Raises:
        ValueError: If there are any; the message names a parameter, and the fix.
    """
    owners: dict[torch.nn.Parameter, torch.nn.Module] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                raise ValueError(
                    f"{type(model).__name__}.{name} is sharded already: it belongs to a model that was "
                    f"prepared before, and {engine} shards each parameter for one model. Use the model that "
                    "prepare() returned instead of its unwrapped one; or put models that share modules into "
                    "one torch.nn.Module, and prepare that."
                )
            if owners.setdefault(parameter, model) is not model:
                raise ValueError(
                    f"{type(owners[parameter]).__name__} and {type(model).__name__} share {name}, and "
                    f"{engine} shards each parameter for one model. Put both into one torch.nn.Module, and "
                    "prepare that."
                )


def check_sparse(model: torch.nn.Module, engine: str, ignored: Collection[torch.nn.Parameter] = ()) -> None:
    """Reject sparse gradients, which cannot be sharded; torch and DeepSpeed would fail in backward.

    Args:
        model: The model.
        engine: The name of the engine.
        ignored: Parameters that are not sharded.

    Raises:
        ValueError: If a trainable embedding has sparse gradients; the message names it, and the fix.
    """
    left = {id(item) for item in ignored}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not module.sparse:
            continue
        if module.weight.requires_grad and id(module.weight) not in left:
            raise ValueError(
                f"{name} of {type(model).__name__} has sparse=True, and {engine} cannot shard sparse "
                "gradients. Set sparse=False, or freeze it."
            )


def check_ignored(model: torch.nn.Module, ignored: set[torch.nn.Parameter], size: int) -> None:
    """Reject trainable parameters whose gradients would not be reduced.

    Raises:
        ValueError: If there are any, and several data-parallel processes.
    """
    named = [name for name, item in model.named_parameters() if item in ignored and item.requires_grad]
    if named and size > 1:
        raise ValueError(
            f"ignored_modules leaves {', '.join(named)} unsharded, and their gradients would not be averaged "
            "between processes. Freeze them with requires_grad_(False), or do not ignore them."
        )
