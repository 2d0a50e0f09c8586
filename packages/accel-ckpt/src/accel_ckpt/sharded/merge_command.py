"""`accel merge-weights`: one file of weights from a sharded checkpoint. torch is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def register(subparsers: Any) -> None:
    """Add the subcommand.

    Args:
        subparsers: What `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser("merge-weights", help=_HELP, description=_HELP)
    _add_arguments(parser)


def main() -> int:
    """Run `accel-merge-weights`; return its exit code."""
    parser = argparse.ArgumentParser(_PROG, description=_HELP)
    _add_arguments(parser)
    args = parser.parse_args()
    code: int = args.func(args)
    return code


_PROG = "accel merge-weights"  # also when it was called as accel-merge-weights
_HELP = "Merge sharded weights into one file."


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the lines of the examples stay
    parser.epilog = f"examples:\n  {_PROG} checkpoints/checkpoint_3 merged"
    parser.add_argument(
        "checkpoint_directory", help="folder of sharded weights (pytorch_model_fsdp_0), or its checkpoint"
    )
    parser.add_argument("output_path", help="folder to write model.safetensors into")
    parser.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write pytorch_model.bin instead",
    )
    parser.add_argument(
        "--remove_checkpoint_dir",
        "--remove-checkpoint-dir",
        action="store_true",
        help="delete the sharded weights afterwards",
    )
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from accel_ckpt.errors import CheckpointError
    from accel_ckpt.sharded.merge import merge_fsdp_weights

    try:
        written = merge_fsdp_weights(
            args.checkpoint_directory,
            args.output_path,
            not args.unsafe_serialization,
            args.remove_checkpoint_dir,
        )
    except (CheckpointError, OSError) as error:
        # As argparse prints its own errors, and with its exit code.
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return 2
    print(f"Wrote {written} ({written.stat().st_size:,} bytes).")
    return 0
