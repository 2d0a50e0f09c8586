"""`accel estimate-memory`: how much memory a model needs, per dtype, per engine and on a device mesh."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from accel.estimate.formulas import ENGINES, ModelSize, training_bytes
from accel.estimate.mesh import BYTES, OPTIMIZER_STATES, MeshSizes, mesh_bytes
from accel_launch.settings.parser import command_parser

_AXES = {
    "dp_replicate": "replicas",
    "dp_shard": "processes that shard a replica",
    "cp": "processes that split sequences",
    "tp": "processes that split weights, by the model's tensor-parallel plan",
}
_Rows = dict[str, dict[str, float | None]]


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel estimate-memory`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `estimate-memory` there; by
            default a separate parser.

    Returns:
        The parser. Its namespace is for `estimate_command`, which it has as `func`.
    """
    parser = command_parser(
        "estimate-memory",
        subparsers,
        func=estimate_command,
        description="Estimate the memory of a model on each device, without activations, for inference and "
        "for training. No weights are read or downloaded.",
        examples=(
            "accel estimate-memory models/llama",
            "accel estimate-memory bert-base-cased --dtypes float32 bfloat16 --num_processes 4",
        ),
    )
    parser.add_argument(
        "model_name",
        help="A folder with safetensors files or a config.json, module:callable, or a name on the hub.",
    )
    parser.add_argument("--library_name", "--library-name", choices=("timm", "transformers"))
    parser.add_argument(
        "--dtypes", nargs="+", choices=tuple(BYTES), default=["float32", "bfloat16", "int8", "int4"]
    )
    parser.add_argument(
        "--num_processes",
        "--num-processes",
        type=int,
        help="Processes of the engines; default: 8, or those of the mesh.",
    )
    for axis, meaning in _AXES.items():
        flags = (f"--{axis}_size", f"--{axis.replace('_', '-')}-size")
        parser.add_argument(*flags, type=int, help=f"Axis of a mesh: {meaning}; default: 1.")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZER_STATES), default="adam")
    parser.add_argument("--trust_remote_code", "--trust-remote-code", action="store_true")
    parser.add_argument("--json", action="store_true", help="Print bytes as JSON instead of a table.")
    return parser


register = estimate_command_parser  # what the entry point of `accel estimate-memory` names


def main() -> int:
    """Run `accel-estimate-memory`, which is `accel estimate-memory`.

    Returns:
        The exit code.
    """
    from accel_launch.cli import main as accel

    return accel(["estimate-memory", *sys.argv[1:]])


def estimate_command(args: argparse.Namespace) -> None:
    """Print the estimate.

    Args:
        args: The parsed flags.

    Raises:
        LaunchError: If there is no such model, or a library that it needs is not installed.
    """
    # Imported when the command runs: `--help` need not wait for them.
    from accel.estimate.sources import find_tensors
    from accel_launch.errors import LaunchError

    try:
        mesh = _mesh_of(args)
        processes = _processes_of(args, mesh)
        found = find_tensors(
            args.model_name,
            library=args.library_name,
            trust_remote_code=args.trust_remote_code,
            builds=mesh is not None and mesh.tp > 1,
        )
        size = found.size
        split = {} if mesh is None else found.split_dims(mesh.tp)
    except (ImportError, ValueError) as error:
        raise LaunchError(str(error)) from error
    rows = estimate_rows(size, args.dtypes, processes, args.optimizer)
    over = None if mesh is None else mesh_rows(size, split, mesh, args.dtypes, args.optimizer)
    if args.json:
        values = {"parameters": size.parameters, "buffers": size.buffers, "num_processes": processes}
        more = {} if mesh is None else {"mesh": asdict(mesh), "mesh_bytes": over}
        print(json.dumps({**values, "bytes": rows, **more}, indent=2))
        return
    unit, scale = _unit(rows, over or {})
    print(
        f"{args.model_name}: {size.parameters:,} parameters; the largest block is {size.block}\n"
        f"Memory on each device in {unit} ({scale:,} bytes)\n"
        f"Training with {args.optimizer}; DDP, FSDP and ZeRO on each of {processes} processes\n\n"
        f"{_table(rows, scale)}\n"
    )
    if mesh is not None and over is not None:
        axes = " x ".join(f"{axis} {count}" for axis, count in asdict(mesh).items())
        print(f"Training on a mesh of {axes}, on the process that needs the most\n\n{_table(over, scale)}\n")
    print(
        "Without activations, which grow with the batch, and the temporary memory of the optimizer's "
        "step. Mixed precision trains float32 parameters."
    )


def _mesh_of(args: argparse.Namespace) -> MeshSizes | None:
    sizes = {axis: size for axis in _AXES if (size := getattr(args, f"{axis}_size")) is not None}
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{axis}_size {size} is not allowed; allowed: 1 or more.")
    return MeshSizes(**sizes) if sizes else None


def _processes_of(args: argparse.Namespace, mesh: MeshSizes | None) -> int:
    if args.num_processes is None:
        # The accelerators of a common machine.
        return 8 if mesh is None else mesh.processes
    if args.num_processes < 1:
        raise ValueError(f"--num_processes {args.num_processes} is not allowed; allowed: 1 or more.")
    if mesh is not None and mesh.processes != args.num_processes:
        axes = " * ".join(f"{axis}({size})" for axis, size in asdict(mesh).items())
        raise ValueError(
            f"{axes} = {mesh.processes}, and --num_processes is {args.num_processes}. Leave --num_processes "
            "out, or change an axis."
        )
    return int(args.num_processes)


def estimate_rows(size: ModelSize, dtypes: list[str], processes: int, optimizer: str) -> _Rows:
    """Return bytes by dtype and use: the largest block, inference, and training by engine.

    Args:
        size: The model.
        dtypes: The dtypes of its parameters.
        processes: Number of processes of the engines.
        optimizer: adam, momentum or sgd.
    """
    return {
        dtype: {
            "largest block": BYTES[dtype] * size.largest_block,
            "inference": BYTES[dtype] * (size.parameters + size.buffers),
            **{engine: training_bytes(size, dtype, engine, processes, optimizer) for engine in ENGINES},
        }
        for dtype in dtypes
    }


def mesh_rows(
    size: ModelSize,
    split: Mapping[str, int],
    mesh: MeshSizes,
    dtypes: list[str],
    optimizer: str,
) -> _Rows:
    """Return bytes by dtype and use, on the process of a mesh that has the most; None: cannot be trained.

    Args:
        size: The model.
        split: The dimension in which a parameter is split, by its name.
        mesh: The sizes of the axes.
        dtypes: The dtypes of the parameters.
        optimizer: adam, momentum or sgd.
    """
    rows: _Rows = {}
    for dtype in dtypes:
        needed = mesh_bytes(size.shapes, split, mesh, dtype, optimizer, size.buffers)
        values = {item.name: getattr(needed, item.name) for item in fields(needed)} | {"all": needed.total}
        # Integers cannot be trained.
        rows[dtype] = values if BYTES[dtype] >= 2 else dict.fromkeys(values)
    return rows


def _unit(*tables: _Rows) -> tuple[str, int]:
    """Return the unit in which all numbers are shown, and its bytes: the largest one gives it."""
    numbers = [value or 0 for table in tables for values in table.values() for value in values.values()]
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    return next((unit for unit in units if max(numbers) >= unit[1]), units[-1])


def _table(rows: _Rows, scale: int) -> str:
    lines = [["dtype", *next(iter(rows.values()))]]
    for dtype, values in rows.items():
        cells = ("-" if value is None else f"{value / scale:,.2f}" for value in values.values())
        lines.append([dtype, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
