"""One process's stage of a pipeline: a traced model, cut before layers, and its inputs by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from accel_ops.signatures import signature
from accel_ops.trees.walk import children, flatten, keys, rebuild


class Inputs:
    """The inputs of a model as a list of tensors, in one order however they are passed.

    Non-tensors are fixed when the model is traced, and must be the same in every call.

    Args:
        forward: The model's forward.
        args: Positional inputs, as an example.
        kwargs: Keyword inputs, as an example.

    Raises:
        TypeError: If forward does not accept these inputs.
        ValueError: If there is no tensor, or their first dimensions differ.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._signature = signature(forward)
        self._example = self._bind(args, kwargs)
        self._leaves = dict(_walk(self._example, ""))
        self.tensors(args, kwargs)

    def tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call, each with the batch as its first dimension.

        Args:
            args: Positional inputs.
            kwargs: Keyword inputs.

        Raises:
            TypeError: If forward does not accept these inputs.
            ValueError: If inputs or the values of non-tensors differ from the example, or first dimensions
                differ.
        """
        leaves = dict(_walk(self._bind(args, kwargs), ""))
        self._check(leaves)
        named = {name: leaves[name] for name, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor)}
        sizes = {name: tensor.shape[0] if tensor.dim() else None for name, tensor in named.items()}
        if not sizes or None in sizes.values() or len(set(sizes.values())) > 1:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
            raise ValueError(
                "a pipeline cuts the batch of every input along dimension 0, which must be the same for all, "
                f"but the inputs are: {shapes or 'no tensors'}."
            )
        return list(named.values())

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the example with other tensors.

        Args:
            tensors: As many as `tensors` returns, in that order.

        Returns:
            Positional and keyword arguments.
        """
        names = (name for name, leaf in self._leaves.items() if isinstance(leaf, torch.Tensor))
        filled = _with_tensors(self._example, "", dict(zip(names, tensors, strict=True)))
        bound = inspect.BoundArguments(self._signature, filled)
        return bound.args, bound.kwargs

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return dict(self._signature.bind(*args, **kwargs).arguments)

    def _check(self, leaves: dict[str, Any]) -> None:
        if leaves.keys() != self._leaves.keys():
            raise ValueError(
                f"the pipeline was traced with the inputs {', '.join(self._leaves)}, but called with "
                f"{', '.join(leaves) or 'none'}. Call it with those of its example."
            )
        for name, expected in self._leaves.items():
            value = leaves[name]
            tensor = isinstance(expected, torch.Tensor)
            if tensor != isinstance(value, torch.Tensor) or not (tensor or value == expected):
                shown = "a tensor" if tensor else repr(expected)
                raise ValueError(
                    f"the pipeline was traced with {name}={shown}, but called with {value!r}. Non-tensors "
                    "are fixed when it is traced: prepare it again."
                )


class Stage(nn.Module):
    """One stage of a pipeline; it takes and returns tensors only, and passes on what later stages need.

    Args:
        graph_module: The traced module of this stage.
        input_names: Names of the values that it gets.
        call: The node of the full graph that calls the module.
        after: The nodes that unpack its results.
        output_names: Names of the values that it returns, in order.
    """

    def __init__(
        self,
        graph_module: nn.Module,
        input_names: list[str],
        call: fx.Node,
        after: list[fx.Node],
        output_names: list[str],
    ) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.input_names, self.output_names = input_names, output_names
        # Names instead of nodes, which would keep the full graph of the model alive.
        self._arguments: Any = fx.node.map_arg(call.args, lambda node: _Name(node.name))
        self._call = call.name
        self._items: list[Any] = [(node.name, node.all_input_nodes[0].name, node.args[1]) for node in after]

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage.

        Args:
            *values: The values of `input_names`, each `(batch, *)`.

        Returns:
            The values of `output_names`, each `(batch, *)`.
        """
        values_by_name: dict[str, Any] = dict(zip(self.input_names, values, strict=True))
        values_by_name[self._call] = self.graph_module(
            *(values_by_name[value] if isinstance(value, _Name) else value for value in self._arguments)
        )
        for name, source, key in self._items:
            values_by_name[name] = values_by_name[source][key]
        # Tensors are sent to the next process, which takes their memory as it is.
        return tuple(values_by_name[name].contiguous() for name in self.output_names)


class _Name(str):
    """The name of a value, where an argument may also be a constant."""


class _Flat(nn.Module):
    """A model that takes and returns only tensors."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.inputs.unflatten(tensors)
        return tuple(flatten(self.model(*args, **kwargs))[0])


def trace_stages(
    model: nn.Module, inputs: Inputs, tensors: Sequence[torch.Tensor], split_points: list[str]
) -> list[Stage]:
    """Trace a model, and cut it before the named modules.

    Args:
        model: The model, with its weights.
        inputs: How it is called.
        tensors: Example inputs: one micro-batch, in the order of `inputs`.
        split_points: Names of modules; each begins a stage.

    Returns:
        The stages, one more than split points.

    Raises:
        RuntimeError: If torch cannot trace the model.
        ValueError: If the trace has another number of stages.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    # "model" is the attribute of _Flat, which is traced.
    spec = {f"model.{name}": SplitPoint.BEGINNING for name in split_points}
    try:
        with _forwards_kept(model, split_points), warnings.catch_warnings():
            # torch 2.13's exporter uses what torch 2.13 deprecates.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)", FutureWarning)
            pipe = pipeline(_Flat(model, inputs), tuple(tensors), split_spec=spec)
    except Exception as error:
        # Only the first line: errors of torch's exporter continue with code and advice.
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise RuntimeError(
            f"{type(model).__name__} cannot be cut into the stages of a pipeline: torch.export cannot trace "
            f"it: {reason} Branches on the values of tensors are the usual reason. dispatch_model, with a "
            "device_map, needs no trace."
        ) from error
    stages = _stages(pipe.split_gm)
    if len(stages) != len(split_points) + 1:
        raise ValueError(
            f"{len(split_points)} split points ({', '.join(split_points)}) give {len(stages)} stages, not "
            f"{len(split_points) + 1}: each must be a module that the forward calls once, and not the first."
        )
    return stages


def _stages(graph_module: fx.GraphModule) -> list[Stage]:
    nodes = list(graph_module.graph.nodes)
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if node.op == "call_module"]
    output = nodes[-1]
    outputs = [node.name for node in output.args[0]]
    order = {node: place for place, node in enumerate(calls)}
    made_by: dict[fx.Node, int] = {}  # the stage that computes a value
    for node in nodes[:-1]:
        sources = [made_by[source] for source in node.all_input_nodes]
        made_by[node] = order[node] if node in order else max(sources, default=0)
    stages = []
    input_names = inputs
    for place, call in enumerate(calls):
        after = [node for node in nodes if node.op == "call_function" and made_by[node] == place]
        output_names = outputs
        if place < len(calls) - 1:
            output_names = [node.name for node in nodes[:-1] if _crosses(node, place, made_by, order, output)]
        module = graph_module.get_submodule(str(call.target))
        stages.append(Stage(module, input_names, call, after, output_names))
        input_names = output_names
    return stages


def _crosses(
    node: fx.Node, place: int, made_by: dict[fx.Node, int], order: dict[fx.Node, int], output: fx.Node
) -> bool:
    """Return whether a value exists after a stage and is needed by a later one."""
    return made_by[node] <= place and any(
        user is output or order.get(user, -1) > place for user in node.users
    )


@contextmanager
def _forwards_kept(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Restore the forwards that torch replaces to mark where stages begin."""
    kept = {name: vars(model.get_submodule(name)).get("forward") for name in names}
    try:
        yield
    finally:
        for name, forward in kept.items():
            attributes = vars(model.get_submodule(name))
            # Private in torch 2.13, whose tracer leaves it behind, together with the wrapped forward.
            attributes.pop("_orig_forward", None)
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the leaves of a tree by name, those of a dict in the order of their keys."""
    inside = children(tree)
    if inside is None:
        yield path, tree
        return
    # Sorted, as two calls may give the same keywords in different orders.
    for key, child in sorted(zip(map(str, keys(tree)), inside, strict=True), key=lambda pair: pair[0]):
        yield from _walk(child, f"{path}.{key}" if path else key)


def _with_tensors(tree: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    inside = children(tree)
    if inside is None:
        return tensors.get(path, tree)
    names = [f"{path}.{key}" if path else str(key) for key in keys(tree)]
    return rebuild(
        tree, [_with_tensors(child, name, tensors) for name, child in zip(names, inside, strict=True)]
    )
