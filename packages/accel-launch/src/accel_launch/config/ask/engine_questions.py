"""The questions about how a model is distributed over processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from accel_launch.config.ask.question import (
    Answers,
    Question,
    Test,
    answered,
    ask,
    ask_if,
    is_multi_machine,
    needed,
)
from accel_launch.settings.schema import SETTINGS

_ENGINES = (
    ("ddp", "each process has the full model (DDP)"),
    ("fsdp", "the model is sharded over the processes (FSDP)"),
    ("mesh", "a mesh of data, tensor, context or sequence parallelism"),
    ("deepspeed", "DeepSpeed"),
    ("megatron", "Megatron-LM"),
)


_MESH = ("dp_replicate", "tp", "cp", "sp", "dp_shard")  # the last one takes the remaining processes


def _mesh_sizes(answers: Answers) -> dict[str, int]:
    return {axis: answers.get(f"parallelism_config_{axis}_size", 1) for axis in _MESH}


def _default_axis(axis: str) -> Callable[[Answers], int]:
    def default(answers: Answers) -> int:
        # dp_shard is asked last, so that its default is what makes the product fit.
        rest = int(answers["processes"]) // math.prod(_mesh_sizes(answers).values())
        return rest if axis == _MESH[-1] else 1

    return default


def _check_mesh(axis: str) -> Callable[[Any, Answers], None]:
    def check(value: Any, answers: Answers) -> None:
        sizes = _mesh_sizes(answers) | {axis: value}
        product = math.prod(sizes.values())
        total = answers["processes"]
        # Axes before the last need only divide the number of processes; the last one must take the rest.
        fits = product == total if axis == _MESH[-1] else value >= 1 and total % product == 0
        if not fits:
            arithmetic = " * ".join(
                f"{name}({size})" for name, size in sizes.items() if size != 1 or name == axis
            )
            raise ValueError(
                f"{arithmetic} = {product}, but there are {total} processes; the product must fit."
            )

    return check


def engine_questions() -> list[Question]:
    """Return the questions in order; none applies to one process."""
    spread = Question(
        "engine",
        "How is the model distributed?",
        _ENGINES,
        lambda answers: "ddp",
        # Nothing to ask for one process.
        when=lambda answers: answers["processes"] > 1,
    )
    details = {"fsdp": _fsdp(), "mesh": _mesh(), "deepspeed": _deepspeed(), "megatron": _megatron()}
    return [
        spread,
        *(
            question
            for name, questions in details.items()
            for question in ask_if(answered("engine", name), questions)
        ),
    ]


def _fsdp() -> list[Question]:
    version_1 = answered("fsdp_version", 1)
    return [
        ask(
            "fsdp_version",
            "Which FSDP?",
            2,
            choices=((2, "2: fully_shard"), (1, "1: FullyShardedDataParallel")),
        ),
        ask("fsdp_sharding_strategy", "What is sharded?", when=version_1),
        ask(
            "fsdp_reshard_after_forward",
            "Free gathered parameters after the forward pass (less memory, more communication)?",
            "true",
            when=answered("fsdp_version", 2),
            choices=(("false", "no"), ("true", "yes")),
        ),
        ask("fsdp_auto_wrap_policy", "Which modules are wrapped?", "TRANSFORMER_BASED_WRAP"),
        ask(
            "fsdp_transformer_layer_cls_to_wrap",
            "Layer classes to wrap, comma separated (empty: those that the model names)?",
            "",
            when=answered("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        ),
        ask(
            "fsdp_min_num_params",
            "Smallest module to wrap, in parameters?",
            100_000_000,
            when=answered("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        ),
        ask("fsdp_backward_prefetch", "Gather ahead in backward?", "BACKWARD_PRE", when=version_1),
        ask("fsdp_use_orig_params", "Keep the original parameters visible?", True, when=version_1),
        ask("fsdp_cpu_ram_efficient_loading", "Let only the first process read the weights?"),
        ask(
            "fsdp_sync_module_states",
            "Broadcast the weights from the first process?",
            lambda answers: answers["fsdp_cpu_ram_efficient_loading"],
            when=version_1,
        ),
        ask("fsdp_offload_params", "Keep parameters and gradients on the CPU?"),
        ask(
            "fsdp_state_dict_type",
            "How are checkpoints laid out?",
            "SHARDED_STATE_DICT",
            choices=(("SHARDED_STATE_DICT", "a shard per process"), ("FULL_STATE_DICT", "one full file")),
        ),
        ask("fsdp_activation_checkpointing", "Recompute activations in backward (less memory, more work)?"),
    ]


def _mesh() -> list[Question]:
    return [
        *(_mesh_axis(axis) for axis in _MESH),
        ask(
            "parallelism_config_cp_comm_strategy",
            "How does context parallelism exchange keys and values?",
            when=lambda answers: bool(answers["parallelism_config_cp_size"] > 1),
        ),
    ]


def _mesh_axis(axis: str) -> Question:
    name = f"parallelism_config_{axis}_size"
    title = f"{SETTINGS[name].help.removesuffix('.')} ({axis})?"
    return ask(name, title, default=_default_axis(axis), check=_check_mesh(axis))


def _zero(stage: int) -> Test:
    """Return a test of whether the answers select this ZeRO stage or a higher one."""
    # -1: the question was not asked, because DeepSpeed's own file has it.
    return lambda answers: bool(answers.get("zero_stage", -1) >= stage)


def _deepspeed() -> list[Question]:
    hostfile = [
        ask(
            "deepspeed_hostfile",
            "Hostfile, with a line NAME slots=4 per machine?",
            "",
            check=needed("The hostfile"),
        ),
        ask(
            "deepspeed_inclusion_filter",
            "Machines and slots to use, NAME:SLOT,SLOT@NAME (empty: all)?",
            "",
        ),
        ask(
            "deepspeed_exclusion_filter",
            "Machines and slots to leave out, NAME:SLOT,SLOT@NAME (empty: none)?",
            "",
            when=lambda answers: not answers["deepspeed_inclusion_filter"],
        ),
    ]
    return [
        ask(
            "deepspeed_config_file",
            "DeepSpeed's own JSON configuration (empty: answer questions instead)?",
            "",
        ),
        ask(
            "zero_stage",
            "What is sharded (ZeRO)?",
            2,
            when=lambda answers: not answers["deepspeed_config_file"],
            choices=(
                (0, "0: nothing"),
                (1, "1: optimizer states"),
                (2, "2: gradients too"),
                (3, "3: parameters too"),
            ),
        ),
        *ask_if(_zero(2), _offload("optimizer", "optimizer states")),
        *ask_if(_zero(3), _offload("param", "parameters")),
        ask("gradient_accumulation_steps", "Steps over which gradients are accumulated?", 1, when=_zero(0)),
        ask("gradient_clipping", "Largest gradient norm (empty: no clipping)?", "", when=_zero(0)),
        ask("zero3_init_flag", "Shard parameters while the model is built?", True, when=_zero(3)),
        ask("zero3_save_16bit_model", "Gather 16-bit weights when saving?", when=_zero(3)),
        ask(
            "deepspeed_moe_layer_cls_names",
            "Mixture-of-experts layer classes, comma separated (empty: none)?",
            "",
            when=_zero(3),
        ),
        ask(
            "deepspeed_multinode_launcher", "How are the machines reached?", "standard", when=is_multi_machine
        ),
        *ask_if(
            lambda answers: answers.get("deepspeed_multinode_launcher", "standard") != "standard", hostfile
        ),
    ]


def _offload(what: str, called: str) -> list[Question]:
    return [
        ask(f"offload_{what}_device", f"Where are {called} kept?"),
        ask(
            f"offload_{what}_nvme_path",
            f"Folder on NVMe for {called}?",
            "",
            when=answered(f"offload_{what}_device", "nvme"),
            check=needed("The folder"),
        ),
    ]


def _megatron_size(answers: Answers, *names: str) -> int:
    return math.prod(answers.get(f"megatron_lm_{name}_degree", 1) for name in names)


def _check_degree(value: Any, answers: Answers) -> None:
    rest = answers["processes"] // _megatron_size(answers, "tp")
    if not isinstance(value, int) or value < 1 or rest % value:
        raise ValueError(f"{value} is not allowed; allowed: a divisor of {rest}, the processes for it.")


def _megatron() -> list[Question]:
    return [
        ask("megatron_lm_tp_degree", "Tensor-parallel size?", 1, check=_check_degree),
        ask(
            "megatron_lm_sequence_parallelism",
            "Shard activations along the sequence?",
            when=lambda answers: _megatron_size(answers, "tp") > 1,
        ),
        ask("megatron_lm_pp_degree", "Pipeline-parallel size?", 1, check=_check_degree),
        ask(
            "megatron_lm_num_micro_batches",
            "Micro-batches per pipeline step?",
            1,
            when=lambda answers: _megatron_size(answers, "pp") > 1,
        ),
        ask(
            "megatron_lm_use_distributed_optimizer",
            "Shard optimizer states over the data-parallel processes?",
            when=lambda answers: _megatron_size(answers, "tp", "pp") < answers["processes"],
        ),
        ask("megatron_lm_recompute_activations", "Recompute activations in backward?"),
        ask("megatron_lm_gradient_clipping", "Largest gradient norm (0: no clipping)?"),
    ]
