"""`accel estimate-memory`: how much memory a model needs, per dtype and per engine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from accel.estimate import BYTES, ENGINES, OPTIMIZER_STATES, ModelSize, convert_bytes, training_bytes

__all__ = ["estimate_command", "estimate_rows", "main", "register"]


def register(subparsers: Any) -> argparse.ArgumentParser:
    """Add `estimate-memory` to the commands of `accel`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned.

    Returns:
        The parser.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "estimate-memory",
        description="Estimate the memory of a model on each device, without activations, for inference and "
        "for training. No weights are read or downloaded.",
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
        default=8,
        help="Processes of the engines; default: 8.",
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZER_STATES), default="adam")
    parser.add_argument("--trust_remote_code", "--trust-remote-code", action="store_true")
    parser.add_argument("--json", action="store_true", help="Print bytes as JSON instead of a table.")
    parser.set_defaults(func=estimate_command)
    return parser


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
    from accel.commands.estimate_sources import size_of
    from accel_launch.errors import LaunchError

    if args.num_processes < 1:
        raise LaunchError(f"--num_processes {args.num_processes} is not allowed; allowed: 1 or more.")
    try:
        size = size_of(args.model_name, library=args.library_name, trust_remote_code=args.trust_remote_code)
    except (ImportError, ValueError) as error:
        raise LaunchError(str(error)) from error
    rows = estimate_rows(size, args.dtypes, args.num_processes, args.optimizer)
    if args.json:
        found = {"parameters": size.parameters, "buffers": size.buffers, "num_processes": args.num_processes}
        print(json.dumps({**found, "bytes": rows}, indent=2))
    else:
        print(_table(args, size, rows))


def estimate_rows(
    size: ModelSize, dtypes: list[str], processes: int, optimizer: str
) -> dict[str, dict[str, float | None]]:
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


def _table(args: argparse.Namespace, size: ModelSize, rows: dict[str, dict[str, float | None]]) -> str:
    header = ["dtype", *next(iter(rows.values()))]
    lines = [header]
    for dtype, values in rows.items():
        lines.append([dtype, *("-" if value is None else convert_bytes(value) for value in values.values())])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(
        [
            f"{args.model_name}: {size.parameters:,} parameters; the largest block is {size.block}",
            f"Training with {args.optimizer}; DDP, FSDP and ZeRO on each of {args.num_processes} processes",
            "",
            *text,
            "",
            "Without activations, which grow with the batch. Mixed precision trains float32 parameters.",
        ]
    )
