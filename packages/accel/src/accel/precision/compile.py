"""Regional compilation: the blocks that a model repeats are compiled, each kind of block once.

Regions are compiled in place (`torch.nn.Module.compile`): the model stays the same object, names of
parameters and checkpoints do not change, and copies and pickles of it are not compiled. Code outside the
blocks is not compiled. torch looks up compiled code by the code of a block's forward, so all blocks of one
class share it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from accel_ops.modules import has_compiled_regions, is_compiled_module


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a model in place; without any, the model itself. Idempotent.

    Args:
        module: The model, plain or inside a container of parallel training.
        **compile_kwargs: Arguments of `torch.compile` (backend, mode, fullgraph, dynamic, options).

    Returns:
        `module`.
    """
    if not has_compiled_regions(module):
        for block in repeated_blocks(module) or [module]:
            block.compile(**compile_kwargs)
    return module


def compile_regions_fsdp2(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """`compile_regions` for a model that is sharded with FSDP2, before or after this call.

    Args:
        module: The model.
        **compile_kwargs: Arguments of `torch.compile`.

    Returns:
        `module`.
    """
    return compile_regions(module, **compile_kwargs)


def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """`compile_regions` for a model that DeepSpeed trains, whose engine keeps its own reference to it.

    Args:
        module: The model.
        **compile_kwargs: Arguments of `torch.compile`.
    """
    compile_regions(module, **compile_kwargs)


def repeated_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules in a `ModuleList` with another one of their class; only the outermost ones.

    A list without such a pair has no blocks, nor do lists of modules without modules inside (single
    operations, which compilation does not make faster).

    Args:
        module: The model.

    Returns:
        The blocks, in the order of the model.
    """
    blocks: list[torch.nn.Module] = []
    for child in module.children():
        # Nothing to fuse in a single operation.
        layers = [layer for layer in child.children() if any(layer.children())]
        repeats = Counter(type(layer) for layer in layers)
        if isinstance(child, torch.nn.ModuleList) and any(count > 1 for count in repeats.values()):
            blocks += [layer for layer in layers if not is_compiled_module(layer)]
        else:
            blocks += repeated_blocks(child)
    return blocks
