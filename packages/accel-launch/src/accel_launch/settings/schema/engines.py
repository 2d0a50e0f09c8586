"""Settings of the engines: torch.compile, FSDP, device meshes, fp8, DeepSpeed and Megatron-LM.

Each has a variable in accel_state's environment table; names, kinds, choices and help are taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_launch.settings.schema.setting import Group, Setting
from accel_state.env import VARIABLES, Variable

ENGINE_GROUPS = {
    "engines": Group("Engines"),
    "dynamo": Group(
        "torch.compile", "dynamo_backend", lambda backend: backend != "no", "--dynamo_backend inductor"
    ),
    "fsdp": Group("FSDP", "use_fsdp", bool, "--use_fsdp"),
    "parallelism": Group(
        "Parallelism over a device mesh", "use_parallelism_config", bool, "--use_parallelism_config"
    ),
    "fp8": Group("fp8", "mixed_precision", lambda precision: precision == "fp8", "--mixed_precision fp8"),
    "deepspeed": Group("DeepSpeed", "use_deepspeed", bool, "--use_deepspeed"),
    "megatron": Group("Megatron-LM", "use_megatron_lm", bool, "--use_megatron_lm"),
}


def _family(
    group: str,
    variables: str,
    flags: str,
    section: str,
    *,
    switches: tuple[str, ...] = (),
    renamed: Mapping[str, str] | None = None,
    always: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> list[Setting]:
    """Make one setting per variable with a prefix; the rest of its name, in lower case, follows `flags`."""
    settings = []
    # A new row of the environment table becomes a flag and a config key by itself.
    for variable in VARIABLES.values():
        if variable.name.startswith(variables):
            suffix = variable.name.removeprefix(variables).lower()
            name = flags + (renamed or {}).get(suffix, suffix)
            settings.append(
                Setting(
                    variable,
                    name,
                    group,
                    switch=suffix in switches,
                    section=section,
                    key=name,
                    from_environment=True,
                    always=always,
                    launch_default=(defaults or {}).get(suffix),
                )
            )
    return settings


def _engine(name: str, variable: str, group: str) -> Setting:
    return Setting(VARIABLES[variable], name, group, switch=True, from_environment=True)


_SWITCHES = [
    _engine("use_fsdp", "ACCELERATE_USE_FSDP", "engines"),
    _engine("use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "engines"),
    _engine("use_deepspeed", "ACCELERATE_USE_DEEPSPEED", "deepspeed"),
    _engine("use_megatron_lm", "ACCELERATE_USE_MEGATRON_LM", "megatron"),
]

_DYNAMO = _family(
    "dynamo",
    "ACCELERATE_DYNAMO_",
    "dynamo_",
    "dynamo_config",
    switches=("use_fullgraph", "use_dynamic", "use_regional_compilation"),
    always=True,
)
_FSDP = _family(
    "fsdp",
    "FSDP_",
    "fsdp_",
    "fsdp_config",
    renamed={"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"},
    always=True,
    # Those of accelerate's launcher, as seen in the environment of what accelerate 1.15 starts.
    defaults={
        "min_num_params": 100_000_000,
        "use_orig_params": True,
        "sync_module_states": True,
        "cpu_ram_efficient_loading": True,
        "reshard_after_forward": "true",
    },
)
# No `always`: the library has the same defaults, and unset variables keep environments short.
_PARALLELISM = _family("parallelism", "PARALLELISM_CONFIG_", "parallelism_config_", "parallelism_config")
_FP8 = _family("fp8", "ACCELERATE_FP8_", "fp8_", "fp8_config", switches=("use_autocast_during_eval",))
_MEGATRON = _family("megatron", "MEGATRON_LM_", "megatron_lm_", "megatron_lm_config")


def _deepspeed(name: str, variable: str) -> Setting:
    return Setting(
        VARIABLES[variable],
        name,
        "deepspeed",
        section="deepspeed_config",
        key=name,
        from_environment=True,
    )


def _deepspeed_launch(name: str, help: str, choices: tuple[str, ...] = ()) -> Setting:
    # Not in the environment's table: no worker reads it.
    spec = Variable(name, "str", None, help, choices)
    return Setting(spec, name, "deepspeed", section="deepspeed_config", key=name)


_DEEPSPEED = [
    _deepspeed("deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE"),
    _deepspeed("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
    _deepspeed("offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
    _deepspeed("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
    _deepspeed("offload_optimizer_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
    _deepspeed("offload_param_nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
    _deepspeed("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"),
    _deepspeed("zero3_init_flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT"),
    _deepspeed("zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
    _deepspeed("deepspeed_moe_layer_cls_names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    _deepspeed_launch("deepspeed_hostfile", "File with a line per machine: NAME slots=4."),
    _deepspeed_launch("deepspeed_exclusion_filter", "Machines and slots to leave out: NAME:SLOT,SLOT@NAME."),
    _deepspeed_launch("deepspeed_inclusion_filter", "Machines and slots to use: NAME:SLOT,SLOT@NAME."),
    _deepspeed_launch(
        "deepspeed_multinode_launcher",
        "How DeepSpeed reaches other machines; by default pdsh with a hostfile. standard: this launcher, the "
        "same command on each machine.",
        ("pdsh", "standard", "openmpi", "mvapich", "mpich", "impi", "slurm", "nossh"),
    ),
]

ENGINES: list[Setting] = _SWITCHES + _DYNAMO + _FSDP + _PARALLELISM + _FP8 + _DEEPSPEED + _MEGATRON
"""Every engine's settings."""
