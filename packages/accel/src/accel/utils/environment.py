"""Environment helpers, under their documented path: re-exports of the packages below."""

from __future__ import annotations

from accel_state.devices.affinity import override_numa_affinity, set_numa_affinity
from accel_state.env import (
    CPUInformation,
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)
from accel_state.env.purge import purge_accelerate_environment

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]
