"""Tensor parallelism: splitting the weights of layers over one axis of the mesh."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from accel.engines.fsdp_groups import aliases
from accel.engines.initial_weights import Names, WeightSource, materialize_group, put_parameter
from accel.engines.language_models import text_config
from accel.engines.torch_private import direct_parameters
from accel_state.devices.table import device_spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SummedGradients(ParallelStyle):
    """Sums the gradients of a module's own parameters over the group, for norms per head, say."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        module.forward = SummedForward(module, device_mesh)
        return module


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": SummedGradients,
}
"""Styles by their names in plans, including those of transformers."""

_STAYS_SPLIT = {"colwise": "out_features", "rowwise": "in_features"}
"""The features that stay split, by style, and so have to divide evenly."""


def tensor_plan(model: torch.nn.Module, size: int) -> dict[str, ParallelStyle]:
    """The plan that a model has in `tp_plan` or `_tp_plan`, by full module name; the model is not changed.

    Args:
        model: The model. Its plan has module names, where `*` is one component of a name, each with a style
            of `torch.distributed.tensor.parallel` or its name.
        size: Processes of one tensor-parallel group.

    Raises:
        ValueError: If there is no plan, a style is unknown, a name matches no module, features or heads do
            not divide, or a weight is shared with a module that is split differently.
    """
    kind = type(model).__name__
    requested = _plans_of(model)
    if not requested:
        raise ValueError(
            f"tp_size={size} splits the weights of {kind} by a plan, and it has none. Set model._tp_plan = "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', ...}, or leave tp_size at 1."
        )
    modules = dict(model.named_modules())
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in requested.items():
        # `*` stands for one component of a name, as in the plans of transformers' models.
        regex = re.escape(pattern).replace(r"\*", r"[^.]+")
        matching = [name for name in modules if re.fullmatch(regex, name)]
        if not matching:
            raise ValueError(f"the tp plan of {kind} names {pattern!r}, and no module has that name.")
        if not isinstance(style, ParallelStyle) and style not in _STYLES:
            raise ValueError(
                f"the tp plan of {kind} has the style {style!r} for {pattern!r}; known: {', '.join(_STYLES)} "
                "and objects of torch.distributed.tensor.parallel."
            )
        for name in matching:
            for layer in _split_layers(name, modules[name], style):
                plan[layer] = style if isinstance(style, ParallelStyle) else _STYLES[style]()
                _check_kind(layer, modules[layer], plan[layer])
                _check_features(layer, modules[layer], style, size)
    _check_heads(model, size)
    _check_shared(model, plan)
    return plan


def _plans_of(model: torch.nn.Module) -> dict[str, Any]:
    """The plan of a model, or of models inside it (in an adapter's wrapper, say), by full names."""
    plans: dict[str, Any] = {}
    owners: list[str] = []
    for name, module in model.named_modules():
        # Without __getattr__: wrappers return the attributes of the model inside.
        if any(name.startswith(owner) for owner in owners) or not any(
            inspect.getattr_static(module, attribute, None) for attribute in ("tp_plan", "_tp_plan")
        ):
            continue
        plan: Mapping[str, Any] | None = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if plan:
            owners.append(prefix := f"{name}." if name else "")
            plans.update({prefix + pattern: style for pattern, style in plan.items()})
    return plans


def _split_layers(name: str, module: torch.nn.Module, style: Any) -> list[str]:
    """The modules to split for one in the plan: itself, or the layers of an adapter.

    An adapter of low rank (peft's LoRA) adds B(A(x)) to the layer's output: B is split where the output is,
    and A where the input is. A copy that trains in place of the layer (peft's modules_to_save) is split as
    the layer is, and so is the layer, which may be used again.

    Raises:
        ValueError: If it is another kind of adapter.
    """
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, torch.nn.ModuleDict) and isinstance(
        getattr(module, "original_module", None), torch.nn.Module
    ):
        return [f"{name}.original_module", *(f"{name}.modules_to_save.{key}" for key in copies)]
    if not isinstance(base := getattr(module, "base_layer", None), torch.nn.Module):
        return [name]
    supported = {"base_layer", "lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B"}
    others = [
        child
        for child, item in module.named_children()
        if child not in supported and next(item.parameters(), None) is not None
    ]
    if others or not hasattr(module, "lora_A"):
        adapter = f" with {others[0]}" if others else ""
        raise ValueError(
            f"{name} is split by the tp plan, and has an adapter ({type(module).__name__}{adapter}) that "
            "tensor parallelism does not support: it splits LoRA of linear layers and embeddings. Train it "
            "under DDP or FSDP (version 2)."
        )
    if isinstance(base, torch.nn.Embedding):  # its adapter is not split
        return [f"{name}.base_layer"]
    kind = style if isinstance(style, ParallelStyle) else _STYLES[style]()
    split = "lora_B" if isinstance(kind, ColwiseParallel) else "lora_A"
    return [f"{name}.base_layer", *(f"{name}.{split}.{key}" for key in getattr(module, split))]


def _check_kind(name: str, module: torch.nn.Module, style: ParallelStyle) -> None:
    # Torch's own styles: a subclass may split other layers.
    if type(style) in (ColwiseParallel, RowwiseParallel) and not isinstance(
        module, torch.nn.Linear | torch.nn.Embedding
    ):
        raise ValueError(
            f"the tp plan splits {name}, a {type(module).__name__}, with {type(style).__name__}, and tensor "
            "parallelism splits linear layers and embeddings in this way. If it wraps one, name the layer "
            "inside; or take it (and what follows it) out of the plan, or train under DDP or FSDP."
        )


def _check_features(name: str, module: torch.nn.Module, style: Any, size: int) -> None:
    features = _STAYS_SPLIT.get(style) if isinstance(style, str) else None
    count = getattr(module, features, None) if features else None
    if count is not None and count % size:
        raise ValueError(
            f"the tp plan splits {name} {style}, and its {features}={count} does not divide by "
            f"tp_size={size}. Change tp_size, or take it (and what follows it) out of the plan."
        )


def _check_heads(model: torch.nn.Module, size: int) -> None:
    config = text_config(model)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % size:
            raise ValueError(
                f"{type(model).__name__} has {name}={heads}, which does not divide by tp_size={size}: each "
                "process takes whole heads. Change tp_size."
            )


def _check_shared(model: torch.nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    for tied in aliases(model).values():
        dims = {name: _split_dim(model, name.rpartition(".")[0], plan) for name in tied}
        if len(set(dims.values())) > 1:
            raise ValueError(
                f"{' and '.join(tied)} are one weight, and the tp plan splits them differently "
                f"({', '.join(f'{name}: {dim}' for name, dim in dims.items())}). Let the plan split all "
                "along one dimension (an embedding rowwise, a linear layer colwise), or none of them."
            )


def _split_dim(model: torch.nn.Module, name: str, plan: Mapping[str, ParallelStyle]) -> int | str | None:
    """The dimension along which a module's weight is split; None: not split."""
    style = plan.get(name)
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        is_embedding = isinstance(model.get_submodule(name), torch.nn.Embedding)
        # Weights of linear layers are (out, in), so columns are split along 0; those of
        # embeddings are (tokens, features).
        return int(is_embedding == isinstance(style, ColwiseParallel))
    return None if style is None else type(style).__name__


def split_dims(model: torch.nn.Module, size: int) -> dict[str, int]:
    """The split dimension of each parameter that a model's plan splits, by name.

    Args:
        model: The model, which may be on the meta device; it is not changed.
        size: Processes of one tensor-parallel group.

    Raises:
        ValueError: As `tensor_plan`.
    """
    plan = tensor_plan(model, size)
    dims = {}
    for name, parameter in model.named_parameters():
        dim = _split_dim(model, name.rpartition(".")[0], plan)
        if isinstance(dim, int) and dim < parameter.dim():  # the bias of a rowwise layer is not split
            dims[name] = dim
    return dims


def split_weights(
    model: torch.nn.Module,
    group: torch.nn.Module,
    pending: dict[torch.nn.Module, tuple[str, ParallelStyle]],
    names: Names,
    mesh: DeviceMesh,
    source: WeightSource,
) -> None:
    """Split the weights of the planned modules of a group in place, each as soon as it is filled.

    No process needs memory for more full weights than those of one module, and its copy of the model.

    Args:
        model: The model.
        group: The model, or a module of it.
        pending: What `tensor_plan` returned, by module; split modules are removed.
        names: The names of all parameters.
        mesh: The axis of tensor parallelism.
        source: Where weights come from and go to.
    """
    shared = [tied for tied in names.values() if len(tied) > 1]
    for module in [module for module in group.modules() if module in pending]:
        # Removed from the plan: each module is split once, with its innermost group.
        name, style = pending.pop(module)
        done: set[torch.nn.Parameter] = {item for item in module.parameters() if isinstance(item, DTensor)}
        materialize_group(model, module, done, names, source)
        _parallelize(module, mesh, style)
        for tied in shared:
            # `parallelize_module` creates new parameters, which unties those of other modules.
            in_module = [other for other in tied if other.rpartition(".")[0] == name]
            for other in tied if in_module else ():
                put_parameter(model, other, model.get_parameter(in_module[0]))


def _parallelize(module: torch.nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    frozen = [name for name, item in module.named_parameters(recurse=False) if not item.requires_grad]
    # None: each process has the full weights, and takes its part without asking.
    parallelize_module(module, mesh, style, src_data_rank=None)
    for name in frozen:  # torch 2.10 makes them trainable
        module.get_parameter(name).requires_grad_(False)


class SummedForward:
    """A module's forward whose parameters pass their gradients through a sum over a group.

    Args:
        module: The module.
        mesh: The group, one axis.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.forward, self.mesh = module, module.forward, mesh
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        # Restored after the call: optimizers and state dicts need the leaves.
        parameters = direct_parameters(self.module)
        original = dict(parameters)
        for name, parameter in original.items():
            if parameter is not None and parameter.requires_grad:
                parameters[name] = _summed(parameter, self.mesh.get_group())
        try:
            return self.forward(*args, **kwargs)
        finally:
            parameters.update(original)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        # A view: the parameter itself stays a leaf.
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: the sum is in place, and other nodes may use this gradient.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _summed(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.nn.Parameter:
    apply: Callable[..., Any] = _Summed.apply
    return cast("torch.nn.Parameter", apply(parameter, group))


class SharedRandomState:
    """Forward hooks that broadcast the random state of the first process of a group, in training.

    Nothing is sent while forward passes use no random numbers.

    Args:
        group: The processes that split the weights.
        device: This process's device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._uses_random = True  # until a forward pass does not
        self._before: torch.Tensor | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Register the hooks."""
        model.register_forward_pre_hook(self.before_forward, prepend=True)
        model.register_forward_hook(self.after_forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        """Use the random state of the first rank, if the last forward pass used random numbers."""
        self._before = None
        if model.training:
            self._before = self._state()
            if self._uses_random:
                first = self._before.to(self._device, copy=True)
                dist.broadcast(first, dist.get_global_rank(self._group, 0), group=self._group)
                first = first.cpu()
                if not torch.equal(first, self._before):
                    self._set_state(first)
                    self._before = first

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Record whether the forward pass used random numbers.

        Raises:
            RuntimeError: If it did for the first time, with different states on the processes.
        """
        if self._before is None:
            return
        uses_random = not torch.equal(self._state(), self._before)
        if uses_random and not self._uses_random:
            states = [torch.empty_like(self._before, device=self._device) for _ in range(self._group.size())]
            dist.all_gather(states, self._before.to(self._device), group=self._group)
            if any(not torch.equal(state, states[0]) for state in states):
                raise RuntimeError(
                    f"{type(model).__name__} drew random numbers in forward for the first time (dropout was "
                    "switched on), and the processes that split its weights (tp) drew different ones: their "
                    "copies of the weights that are not split would drift apart. Call set_seed() on all of "
                    "them before, with the same seed."
                )
        self._uses_random = uses_random

    def _state(self) -> torch.Tensor:
        """The states of torch's generators, as one tensor on the CPU."""
        state = torch.get_rng_state()
        if self._device.type == "cpu":
            return state
        return torch.cat([state, torch.as_tensor(device_spec(self._device).get_rng_state())])

    def _set_state(self, state: torch.Tensor) -> None:
        size = torch.get_rng_state().numel()
        torch.set_rng_state(state[:size])
        if self._device.type != "cpu":
            device_spec(self._device).set_rng_state(state[size:])
