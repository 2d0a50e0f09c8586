"""`accel to-fsdp2`: a config file of FSDP version 1, rewritten for version 2."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accel_launch.config.file import LaunchConfig, load_config_from_file
from accel_launch.errors import ConfigError
from accel_launch.settings.parser import command_parser

# FSDP1's strategies that keep gathered parameters until backward (ZeRO 2) do not reshard after forward.
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_DROPPED = {
    "fsdp_backward_prefetch": "version 2 always gathers ahead",
    "fsdp_forward_prefetch": "version 2 has no such setting",
    "fsdp_sync_module_states": "version 2 always takes the weights of rank 0",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
}


def convert(config: LaunchConfig) -> tuple[LaunchConfig, list[str]]:
    """Rewrite a config of FSDP version 1 for version 2.

    Args:
        config: The config.

    Returns:
        The new config, and what changed, a line each.

    Raises:
        ConfigError: If it is not a config of FSDP version 1, or version 2 has nothing like what it requests.
    """
    values = config.to_dict()
    where = config.path or "the config"
    section = values.get("fsdp_config")
    if not section or config.distributed_type != "FSDP":
        raise ConfigError(
            f"{where} has no fsdp_config under distributed_type FSDP: there is nothing to convert."
        )
    if str(section.get("fsdp_version", 1)) == "2":
        raise ConfigError(f"{where} is for FSDP version 2 already.")
    changes = ["fsdp_version: 2"]
    section["fsdp_version"] = 2
    changes += _sharding(config, values, section)
    for key, reason in _DROPPED.items():
        if section.pop(key, None) is not None:
            changes.append(f"{key} is gone: {reason}")
    if str(config.settings.get("fsdp_state_dict_type")) == "LOCAL_STATE_DICT":
        section["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        changes.append("fsdp_state_dict_type: SHARDED_STATE_DICT, as version 2 has no LOCAL_STATE_DICT")
    elif "fsdp_state_dict_type" not in section:
        # Written out, as the default of version 2 is another.
        section["fsdp_state_dict_type"] = "FULL_STATE_DICT"
        changes.append("fsdp_state_dict_type: FULL_STATE_DICT, the default of version 1")
    return LaunchConfig.from_values(values), changes


def _sharding(config: LaunchConfig, values: dict[str, Any], section: dict[str, Any]) -> list[str]:
    """Say with version 2's settings what is sharded, in place."""
    # Its value is read below from the checked settings.
    section.pop("fsdp_sharding_strategy", None)
    # Version 1 took the strategy under the name of version 2's setting too.
    reshard = section.pop("fsdp_reshard_after_forward", None)
    name = reshard if str(reshard).upper().lstrip("_") in {*_RESHARDS, "NO_SHARD"} else None
    strategy = str(name or config.settings.get("fsdp_sharding_strategy") or "FULL_SHARD").upper().lstrip("_")
    if strategy not in _RESHARDS:
        raise ConfigError(
            f"fsdp_sharding_strategy {strategy} shards nothing. Use distributed data parallel instead: take "
            "fsdp_config out and set distributed_type to MULTI_GPU or MULTI_CPU."
        )
    section["fsdp_reshard_after_forward"] = _RESHARDS[strategy]
    changes = [f"fsdp_reshard_after_forward: {str(_RESHARDS[strategy]).lower()}, for {strategy}"]
    machines, processes = int(config.num_machines or 1), int(config.num_processes or 1)
    # Version 1 replicates over machines and shards inside each; version 2 takes that from a mesh.
    if strategy.startswith("HYBRID") and machines > 1:
        axes = {"dp_replicate_size": machines, "dp_shard_size": processes // machines}
        mesh = {f"parallelism_config_{axis}": size for axis, size in axes.items()}
        values["parallelism_config"] = {**(values.get("parallelism_config") or {}), **mesh}
        changes += [f"{key}: {size}" for key, size in mesh.items()]
    return changes


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel to-fsdp2`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers()` returned, to add `to-fsdp2` there; a parser of its
            own by default.

    Returns:
        The parser. Its namespace is for `to_fsdp2_command`, which it has as `func`.
    """
    parser = command_parser(
        "to-fsdp2",
        subparsers,
        func=to_fsdp2_command,
        description="Rewrite a config file of FSDP version 1 for version 2.",
        examples=(
            "accel to-fsdp2 --config_file old.yaml --output_file new.yaml",
            "accel to-fsdp2 --config_file old.yaml --overwrite",
        ),
    )
    parser.add_argument(
        "--config_file", "--config-file", help="the file; the default config file if left out"
    )
    parser.add_argument("--output_file", "--output-file", help="the new file")
    parser.add_argument("--overwrite", action="store_true", help="write over the file that is there")
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Rewrite a config file, and print what changed.

    Args:
        args: What the parser returned.

    Raises:
        ConfigError: If the file cannot be converted, or the new one is there already.
        FileNotFoundError: If there is no config file.
    """
    config = load_config_from_file(args.config_file)
    assert config.path is not None, "it was read from a file"
    if args.output_file is None and not args.overwrite:
        raise ConfigError("where to? Give --output_file, or --overwrite to change the file itself.")
    target = config.path if args.output_file is None else Path(args.output_file).expanduser()
    if target.exists() and not args.overwrite:
        raise ConfigError(f"{target} is there already. Give another --output_file, or --overwrite.")
    converted, changes = convert(config)
    converted.write(target)
    print("\n".join(changes))
    print(f"Written to {target}.")
