"""Inference with a model whose layers are split over processes, which work on chunks of a batch in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accel.big_models.pipeline.cut import first_modules, generate_device_map
from accel.big_models.pipeline.stage import Inputs, trace_stages
from accel_ops.collectives.objects import broadcast_object_list
from accel_ops.collectives.operations import broadcast
from accel_ops.collectives.padding import pad_input_tensors
from accel_ops.trees.send import send_to_device
from accel_ops.trees.tensors import (
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    slice_tensors,
)
from accel_ops.trees.walk import children, find_path, flatten, recursively_apply
from accel_state.process.info import ProcessInfo
from accel_state.process.state import PartialState, current_process


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Split the layers of a model over the processes, for inference on batches that are split into chunks.

    Every process makes the full model on the CPU, calls this, and then calls the model with the full batch.
    Each moves only the layers of its stage to its device. While one process works on a chunk, the one before
    it works on the next. The model is traced by `torch.export` with one chunk of the example: calls need its
    inputs, with the shapes of the example except for the batch size; a batch is padded with
    its last sample as needed, and outputs are cut to its size.

    Args:
        model: The model, on the CPU; it is set to evaluation mode, and its forward is replaced.
        split_points: Names of modules, each of which begins a stage, one less than processes; or "auto" for
            stages of about equal size.
        no_split_module_classes: Names of classes whose modules are not cut by "auto".
        example_args: Example inputs by position.
        example_kwargs: Example inputs by name.
        num_chunks: Chunks of a batch, at least the number of processes to keep all busy; by default that
            number.
        gather_output: Return the output on every process. By default only the last one has it, the others
            return None.

    Returns:
        The model.

    Raises:
        TypeError: If forward does not accept the example.
        ValueError: If a split point is not a module of the model, or their number does not match the
            processes; or inputs or outputs have no common batch size.
        RuntimeError: If torch cannot trace the model.
    """
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    process = _process()
    chunks = process.world_size if num_chunks is None else num_chunks
    if chunks < 1:
        raise ValueError(f"num_chunks={chunks}: a batch is cut in at least 1 chunk.")
    if split_points is None or split_points == "auto":
        split_points = first_modules(generate_device_map(model, process.world_size, no_split_module_classes))
    forward = build_pipeline(model, split_points, args, kwargs, chunks)
    model.forward = functools.partial(pippy_forward, forward, chunks, bool(gather_output))
    return model


def build_pipeline(
    model: nn.Module,
    split_points: str | list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    num_chunks: int | None,
) -> Callable[..., Any]:
    """Cut a model before the named modules, and build the stage of this process.

    Args:
        model: The model, on the CPU.
        split_points: A list of names of modules, each of which begins a stage.
        args: Example inputs by position.
        kwargs: Example inputs by name.
        num_chunks: Chunks of a batch; by default the number of processes.

    Returns:
        A function that takes the inputs of the model on every process, and returns the output on the last
        one and None on the others.

    Raises:
        TypeError: If forward does not accept the example.
        ValueError: If a split point is not a module of the model, or their number does not match the
            processes; or inputs or outputs have no common batch size.
        RuntimeError: If torch cannot trace the model.
    """
    process = _process()
    points = _checked_split_points(model, split_points, process.world_size)
    # Before tracing, which would make dropout a part of the graph.
    model.eval()
    if process.world_size == 1:
        return torch.no_grad()(model.to(process.device).forward)
    return _Pipeline(model, points, args, kwargs or {}, num_chunks or process.world_size, process)


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a batch through a pipeline.

    Args:
        forward: What `build_pipeline` returned.
        num_chunks: Chunks of the batch, which is padded with its last sample to a multiple.
        gather_output: Return the output on every process.
        *args: Inputs of the model.
        **kwargs: Inputs of the model by name.

    Returns:
        The output for the batch: on the last process, or on all if `gather_output` is set; else None.

    Raises:
        ValueError: If no input has a batch size.
    """
    size = find_pippy_batch_size(args, kwargs)
    if size is None:
        raise ValueError("a pipeline cuts a batch, but no input is a tensor with a dimension.")
    args, kwargs = pad_input_tensors((args, kwargs), size, num_chunks)
    output = forward(*args, **kwargs)
    if output is not None:
        output = slice_tensors(output, slice(size))
    process = current_process()
    if not gather_output or process.world_size == 1:
        return output
    # The other processes have no output: they receive its structure first, and then its values.
    last = process.world_size - 1
    (structure,) = broadcast_object_list([get_data_structure(output)], last, process=process)
    if process.rank != last:
        output = send_to_device(initialize_tensors(structure), process.device)
    tensors, rebuild = flatten(output)
    return rebuild(broadcast(tensors, last, process=process))


def find_pippy_batch_size(args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> int | None:
    """Find the batch size of a model's inputs.

    Args:
        args: Inputs by position.
        kwargs: Inputs by name.

    Returns:
        The first dimension of the first tensor that has one; None if there is none.
    """
    return ignorant_find_batch_size([*(args or ()), *(kwargs or {}).values()])


class _Pipeline:
    """A model whose stages run on one process each.

    A trace is for one shape: every chunk has the size of the example's, and a batch with more samples than
    `num_chunks` such chunks runs in several rounds.
    """

    def __init__(
        self,
        model: nn.Module,
        split_points: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_chunks: int,
        process: ProcessInfo,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        self._inputs = Inputs(model.forward, args, kwargs)
        tensors = self._inputs.tensors(args, kwargs)
        self._process = process
        # Rounded up and padded: all chunks have the traced shape.
        chunk = -(-len(tensors[0]) // num_chunks)
        self._round = chunk * num_chunks
        example = [tensor[:chunk] for tensor in pad_input_tensors(tensors, len(tensors[0]), self._round)]
        self._rebuild = _output_structure(model, self._inputs, example)
        # Every process traces the full model, and keeps one stage.
        stages = trace_stages(model, self._inputs, example, split_points)
        self._stage = stages[process.rank].to(process.device)
        stage = PipelineStage(self._stage, process.rank, process.world_size, process.device)
        # The simplest schedule: without a backward pass there is nothing to reorder.
        self._schedule = ScheduleGPipe(stage, num_chunks)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; returns the output on the last process, and None on the others."""
        tensors = self._inputs.tensors(args, kwargs)
        size = len(tensors[0])
        tensors = pad_input_tensors(tensors, size, self._round)
        results = [
            self._run([tensor[start : start + self._round] for tensor in tensors])
            # A batch larger than the example's runs in rounds, as the shapes are fixed.
            for start in range(0, len(tensors[0]), self._round)
        ]
        if not self._process.is_last:
            return None
        return self._rebuild([torch.cat(column)[:size] for column in zip(*results, strict=True)])

    def _run(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._process.rank > 0:
            output = self._schedule.step()
        else:
            output = self._schedule.step(*(tensor.to(self._process.device) for tensor in tensors))
        return (output,) if isinstance(output, torch.Tensor) else output


def _checked_split_points(model: nn.Module, split_points: Any, stages: int) -> list[str]:
    if not isinstance(split_points, (list, tuple)):
        raise ValueError(f"split_points must be 'auto' or a list of names of modules, not {split_points!r}.")
    if len(set(split_points)) != stages - 1 or len(split_points) != stages - 1:
        raise ValueError(
            f"{stages} processes need {stages - 1} different split points, one for each stage after the "
            f"first, but split_points has {len(split_points)}: {list(split_points)}."
        )
    modules = dict(model.named_modules())
    for name in split_points:
        if name not in modules or not name:
            raise ValueError(
                f"split_points has {name!r}, which is not a module of {type(model).__name__}. It has: "
                f"{', '.join(list(modules)[1:12])}{' ...' if len(modules) > 12 else ''}."
            )
    return list(split_points)


def _output_structure(
    model: nn.Module, inputs: Inputs, tensors: list[torch.Tensor]
) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Run one chunk of the example, and return a function that rebuilds an output from its tensors."""
    args, kwargs = inputs.unflatten(tensors)
    with torch.no_grad():
        output = model(*args, **kwargs)
    size = len(tensors[0])
    uncut = find_path(output, lambda leaf: _is_uncut(leaf, size), "output")
    if uncut:
        path, leaf = uncut
        shown = f"has the shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else "cannot be cut"
        raise ValueError(
            f"{path} ({type(leaf).__name__}) {shown} for a chunk of {size} samples: a pipeline joins outputs "
            "along dimension 0. Make the model omit it (for example with use_cache=False)."
        )
    # Only its structure: the tensors of the example are not kept.
    return flatten(recursively_apply(lambda tensor: tensor.new_empty(0), output))[1]


def _is_uncut(leaf: Any, size: int) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() == 0 or leaf.shape[0] != size
    return children(leaf) is None and not isinstance(leaf, (type(None), bool, int, float, str))


def _process() -> ProcessInfo:
    # Joins the process group, if nothing has done so yet.
    PartialState()
    return current_process()
