"""`accel env`: what a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from accel_launch.config import config_path, load_config_from_file
from accel_launch.errors import LaunchError
from accel_launch.plan.machine import Machine
from accel_launch.settings.parser import command_parser
from accel_launch.settings.redact import redact_values
from accel_state import env

_PACKAGES = (
    "accel",
    "accel-ckpt",
    "accel-data",
    "accel-launch",
    "accel-ops",
    "accel-optim",
    "accel-state",
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "deepspeed",
    "ray",
)
# The variables that decide how processes connect and compute; values of secrets among them are masked.
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MASTER_")


def environment_report(config_file: str | None = None) -> dict[str, Any]:
    """Collect versions, hardware, variables and the config.

    Args:
        config_file: The config file; the default one, if there is one, when None.

    Returns:
        Plain values by heading. torch is imported if it is installed, to ask it about devices.
    """
    machine = Machine.detect()
    report: dict[str, Any] = {
        "Platform": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "Packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "CPU cores": machine.cores,
        "Memory": _memory(),
        "GPUs": f"{machine.gpus} ({len(machine.visible_gpus(env.raw('CUDA_VISIBLE_DEVICES')))} visible)",
        "torch": _torch(),
        "Variables": redact_values(
            {name: text for name, text in sorted(env.snapshot().items()) if name.startswith(_PREFIXES)}
        ),
    }
    path = config_file or (config_path() if config_path().is_file() else None)
    # Said as well as shown: which file counts is often the question.
    report["Config file"] = str(path) if path is not None else "none"
    if path is not None:
        report["Config"] = _config(path)
    return report


def _config(path: str | Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = redact_values(load_config_from_file(path).to_dict())
        return found
    except LaunchError as error:  # a bug report may be about just this
        return {"error": str(error)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    if sys.platform == "win32":  # no sysconf there
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"import": f"failed: {error}"}
    found: dict[str, Any] = {
        "CUDA": torch.version.cuda or "not built in",
        "CUDA available": torch.cuda.is_available(),
        "Backends": [
            name
            # Built in, which says more than available: NCCL is built in also where there is no GPU.
            for name in ("gloo", "nccl", "mpi", "xccl")
            if torch.distributed.is_available() and torch.distributed.is_backend_available(name)
        ],
    }
    # torch.cuda.nccl imports on every build, and its version() fails on those without NCCL.
    if "nccl" in found["Backends"]:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        found["Devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found


def _lines(report: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [f"{indent}- {name}:", *_lines(value, indent + "  ")]
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{indent}- {name}: {text}")
    return lines


def env_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel env`."""
    parser = command_parser(
        "env",
        description="Print versions, hardware and config for a bug report.",
        func=_print_report,
        examples=("accel env", "accel env --json"),
    )
    parser.add_argument("--config_file", "--config-file", help="The config file to show.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def _print_report(args: argparse.Namespace) -> None:
    report = environment_report(args.config_file)
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
