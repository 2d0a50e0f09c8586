"""The environment contract: every variable that launchers write and libraries read, with its default.

Read and write them through `accel_state.env`. Standard library only.
"""

from __future__ import annotations

from typing import Any

from accel_state.enums import DynamoBackend, PrecisionType, SageMakerDistributedType
from accel_state.env.variable import FALSE_WORDS, TRUE_WORDS, Variable


def _group(prefix: str, *rows: tuple[Any, ...]) -> list[Variable]:
    """Make one variable per row: (name without prefix, kind, default, help[, choices[, aliases]])."""
    return [Variable(prefix + row[0], *row[1:]) for row in rows]


def _numbered(*choices: str) -> dict[str, str]:
    """Old configurations number these choices from 1."""
    return {str(place): choice for place, choice in enumerate(choices, start=1)}


_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICT = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_DYNAMO_BACKENDS = tuple(backend.lower() for backend in DynamoBackend.list())  # as torch spells them
_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_OFFLOAD = ("none", "cpu", "nvme")
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")
# Aliases in lower case, as choices are looked up.
_FP8_BACKENDS = {"transformer_engine": "TE", "ms-amp": "MSAMP", "torchao": "AO"}
# FSDP_RESHARD_AFTER_FORWARD is a flag in version 2 and a strategy in version 1: flags are choices here.
_RESHARD_WORDS = dict.fromkeys(TRUE_WORDS, "true") | dict.fromkeys(FALSE_WORDS, "false")

_GENERAL = _group(
    "ACCELERATE_",
    ("USE_CPU", "flag", False, "Run on the CPU even where an accelerator is present."),
    ("MIXED_PRECISION", "str", "no", "Mixed precision mode.", tuple(PrecisionType.list())),
    ("TORCH_DEVICE", "str", None, "The device of this process, e.g. cuda:1; detected if unset."),
    ("GRADIENT_ACCUMULATION_STEPS", "int", 1, "Micro-batches per optimizer step."),
    ("DEBUG_MODE", "flag", False, "Compare shapes, types and call sites before each collective."),
    (
        "CHECK_REPLICAS_STEPS",
        "int",
        None,
        "Steps between comparisons of replicated state; 0 for none (in debug mode: each step).",
    ),
    (
        "GUARD",
        "str",
        None,
        "What to do about losses and gradients that are not finite; unset: do not check.",
        ("warn", "skip", "stop"),
    ),
    ("GUARD_BUNDLE", "str", None, "Folder for what recomputes a loss that is not finite."),
    ("REPLAY", "str", None, "File of a bundle whose losses are recomputed; `accel replay` sets it."),
    (
        "WATCHDOG",
        "float",
        None,
        "Seconds that a collective may wait before a report says where all processes are; off if unset.",
    ),
    ("WATCHDOG_ABORT", "flag", False, "End every process once the watchdog, which must be on, has reported."),
    ("LOG_LEVEL", "str", None, "Level of the loggers made by get_logger, e.g. INFO."),
    ("STRICT_TRACKERS", "flag", False, "Raise the errors of trackers instead of warning of the first one."),
    (
        "STATISTICS",
        "int",
        100,
        "Turn statistics on: steps between gathers of each process's times; 0 for none before the end.",
    ),
    (
        "VERIFY_FOLDER",
        "str",
        None,
        "Folder in which a run under `accel verify` records its first steps, and writes accel's files.",
    ),
    ("CPU_AFFINITY", "flag", False, "Bind each process to the CPU cores nearest to its device."),
    ("ENABLE_RICH", "flag", False, "Write tracebacks through rich, where it is installed."),
    ("DISABLE_RICH", "flag", False, "Never write tracebacks through rich (old; it is off by default)."),
    ("BYPASS_DEVICE_MAP", "flag", False, "Train models that a device map spreads out on several processes."),
    ("NUM_PROCESSES", "int", None, "Number of processes requested from the launcher."),
    ("DOWNCAST_BF16", "flag", False, "On TPUs, make both float and double bfloat16."),
    ("IN_TPU_POD", "flag", False, "This process was started inside a TPU pod."),
    ("USE_SAGEMAKER", "flag", False, "This process was started by a SageMaker training job."),
    (
        "SAGEMAKER_DISTRIBUTED_TYPE",
        "str",
        "NO",
        "SageMaker's distribution strategy.",
        tuple(SageMakerDistributedType.list()),
    ),
    ("INIT_INCLUDE_BUFFERS", "flag", False, "init_empty_weights puts buffers on the meta device too."),
    ("GRADIENT_CLIPPING", "float", None, "Largest gradient norm, for engines that clip by themselves."),
    ("DEBUG_RDV_FILE", "str", None, "File for the rendezvous of debug_launcher's workers."),
    ("USE_DEEPSPEED", "flag", False, "Train under DeepSpeed."),
    ("USE_FSDP", "flag", False, "Train under fully sharded data parallelism."),
    ("USE_MEGATRON_LM", "flag", False, "Train under Megatron-LM."),
    ("USE_PARALLELISM_CONFIG", "flag", False, "Read the PARALLELISM_CONFIG_* variables."),
    ("CONFIG_DS_FIELDS", "list", (), "DeepSpeed settings that the config file sets, for conflict errors."),
)

_DROP_IN = _group(
    "ACCEL_",
    ("DROP_IN", "flag", False, "Run programs that import accelerate on accel (accel.drop_in)."),
    ("DROP_IN_PYTHON", "str", None, "The Python that runs the command accelerate then."),
)

# torchrun's names and meanings: launchers write these, and torch reads some itself.
_RENDEZVOUS = _group(
    "",
    ("RANK", "int", None, "Rank of this process among all."),
    ("LOCAL_RANK", "int", None, "Rank of this process on its machine."),
    ("WORLD_SIZE", "int", None, "Number of processes."),
    ("LOCAL_WORLD_SIZE", "int", None, "Number of processes on this machine."),
    ("GROUP_RANK", "int", None, "Rank of this machine."),
    ("GROUP_WORLD_SIZE", "int", None, "Number of machines."),
    ("MASTER_ADDR", "str", None, "Host name or address of rank 0."),
    ("MASTER_PORT", "int", None, "Port of rank 0."),
    ("OMP_NUM_THREADS", "int", None, "Threads per process of OpenMP and torch."),
    ("TORCHELASTIC_RUN_ID", "str", None, "Name of the elastic run."),
    ("TORCHELASTIC_RESTART_COUNT", "int", 0, "Restarts of the worker group so far."),
    ("TORCHELASTIC_MAX_RESTARTS", "int", 0, "Restarts allowed."),
    ("TORCHELASTIC_USE_AGENT_STORE", "flag", False, "The elastic agent hosts the rendezvous store."),
    ("TORCHELASTIC_ERROR_FILE", "str", None, "Where a failing worker writes its error."),
)

# What MPI's and Slurm's launchers set; torch's variables above take precedence.
_SCHEDULERS = _group(
    "",
    ("PMI_RANK", "int", None, "Rank, from MPICH, Intel MPI and PMI launchers."),
    ("PMI_SIZE", "int", None, "Number of processes, from PMI launchers."),
    ("MPI_LOCALRANKID", "int", None, "Rank on this machine, from MPICH and Intel MPI."),
    ("MPI_LOCALNRANKS", "int", None, "Processes on this machine, from MPICH and Intel MPI."),
    ("OMPI_COMM_WORLD_RANK", "int", None, "Rank, from Open MPI."),
    ("OMPI_COMM_WORLD_SIZE", "int", None, "Number of processes, from Open MPI."),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "int", None, "Rank on this machine, from Open MPI."),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "int", None, "Processes on this machine, from Open MPI."),
    ("MV2_COMM_WORLD_RANK", "int", None, "Rank, from MVAPICH2."),
    ("MV2_COMM_WORLD_SIZE", "int", None, "Number of processes, from MVAPICH2."),
    ("MV2_COMM_WORLD_LOCAL_RANK", "int", None, "Rank on this machine, from MVAPICH2."),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "int", None, "Processes on this machine, from MVAPICH2."),
    ("SLURM_JOB_ID", "str", None, "The Slurm job."),
    ("SLURM_PROCID", "int", None, "Rank, from srun."),
    ("SLURM_LOCALID", "int", None, "Rank on this machine, from srun."),
    ("SLURM_NODEID", "int", None, "Rank of this machine, from srun."),
    ("SLURM_NTASKS", "int", None, "Number of tasks of the job."),
    ("SLURM_NNODES", "int", None, "Number of machines of the job."),
    ("SLURM_JOB_NUM_NODES", "int", None, "Number of machines of the job."),
    ("SLURM_TASKS_PER_NODE", "str", None, "Tasks on each machine, e.g. 8(x2),4."),
    ("SLURM_STEP_TASKS_PER_NODE", "str", None, "The step's tasks on each machine, e.g. 8(x2),4."),
    ("SLURM_CPUS_PER_TASK", "int", None, "CPU cores per task, as requested."),
    ("SLURM_JOB_NODELIST", "str", None, "The job's machines, e.g. node[1-4]."),
    ("SLURM_STEP_NODELIST", "str", None, "The step's machines, e.g. node[1-4]."),
)

_DYNAMO = _group(
    "ACCELERATE_DYNAMO_",
    ("BACKEND", "str", "no", "Backend of torch.compile.", _DYNAMO_BACKENDS),
    ("MODE", "str", "default", "Mode of torch.compile.", _DYNAMO_MODES),
    ("USE_FULLGRAPH", "flag", False, "Raise on graph breaks."),
    ("USE_DYNAMIC", "flag", None, "Trace with dynamic shapes; unset lets torch decide."),
    ("USE_REGIONAL_COMPILATION", "flag", False, "Compile each repeated block once."),
)

_DEEPSPEED = _group(
    "ACCELERATE_DEEPSPEED_",
    ("ZERO_STAGE", "int", 2, "ZeRO stage.", (0, 1, 2, 3)),
    ("CONFIG_FILE", "str", None, "DeepSpeed's own JSON configuration."),
    ("OFFLOAD_OPTIMIZER_DEVICE", "str", "none", "Where optimizer states rest.", _OFFLOAD),
    ("OFFLOAD_PARAM_DEVICE", "str", "none", "Where parameters rest (ZeRO 3).", _OFFLOAD),
    ("OFFLOAD_OPTIMIZER_NVME_PATH", "str", None, "Folder on NVMe for optimizer states."),
    ("OFFLOAD_PARAM_NVME_PATH", "str", None, "Folder on NVMe for parameters."),
    ("ZERO3_INIT", "flag", None, "Shard parameters while the model is built (ZeRO 3)."),
    ("ZERO3_SAVE_16BIT_MODEL", "flag", False, "Gather 16-bit weights when saving (ZeRO 3)."),
    ("MOE_LAYER_CLS_NAMES", "list", (), "Mixture-of-experts layer classes that ZeRO 3 does not shard."),
)

_FSDP = _group(
    "FSDP_",
    ("VERSION", "int", 1, "1 for FullyShardedDataParallel, 2 for fully_shard.", (1, 2)),
    (
        "SHARDING_STRATEGY",
        "str",
        "FULL_SHARD",
        "What is sharded (version 1).",
        _SHARDING,
        _numbered(*_SHARDING),
    ),
    (
        "RESHARD_AFTER_FORWARD",
        "str",
        None,
        "Free gathered parameters after the forward pass: a flag in version 2, a strategy in version 1.",
        ("true", "false", *_SHARDING),
        _RESHARD_WORDS,
    ),
    ("OFFLOAD_PARAMS", "flag", False, "Keep parameters and gradients on the CPU."),
    ("MIN_NUM_PARAMS", "int", 0, "Smallest module that SIZE_BASED_WRAP wraps, in parameters."),
    ("AUTO_WRAP_POLICY", "str", "NO_WRAP", "Which modules are wrapped.", _WRAPPING, _numbered(*_WRAPPING)),
    ("TRANSFORMER_CLS_TO_WRAP", "list", (), "Layer classes that TRANSFORMER_BASED_WRAP wraps."),
    ("BACKWARD_PREFETCH", "str", "NO_PREFETCH", "Prefetching in backward.", _PREFETCH, _numbered(*_PREFETCH)),
    ("FORWARD_PREFETCH", "flag", False, "Prefetch the next parameters in forward."),
    ("STATE_DICT_TYPE", "str", None, "How state dicts are laid out.", _STATE_DICT, _numbered(*_STATE_DICT)),
    ("USE_ORIG_PARAMS", "flag", False, "Keep the original parameters visible (version 1)."),
    ("CPU_RAM_EFFICIENT_LOADING", "flag", False, "Only the first process reads the weights."),
    ("SYNC_MODULE_STATES", "flag", False, "Broadcast parameters and buffers from rank 0 at wrapping."),
    ("ACTIVATION_CHECKPOINTING", "flag", False, "Recompute activations in backward."),
    ("IGNORED_MODULES", "str", None, "Regular expression of the modules left unsharded."),
)

_PARALLELISM = _group(
    "PARALLELISM_CONFIG_",
    ("DP_REPLICATE_SIZE", "int", 1, "Replicas of the model (data parallel)."),
    ("DP_SHARD_SIZE", "int", 1, "Processes that shard one replica."),
    ("TP_SIZE", "int", 1, "Processes of one tensor-parallel group."),
    ("CP_SIZE", "int", 1, "Processes of one context-parallel group."),
    ("CP_BACKEND", "str", "torch", "Implementation of context parallelism.", ("torch",)),
    ("CP_COMM_STRATEGY", "str", "allgather", "How context parallelism rotates.", ("allgather", "alltoall")),
    ("SP_SIZE", "int", 1, "Processes of one sequence-parallel group."),
    ("SP_BACKEND", "str", "deepspeed", "Implementation of sequence parallelism.", ("deepspeed",)),
    ("SP_SEQ_LENGTH", "int", None, "Sequence length, in tokens, of every batch."),
    ("SP_SEQ_LENGTH_IS_VARIABLE", "flag", True, "The sequence length may change between batches."),
    ("SP_ATTN_IMPLEMENTATION", "str", "sdpa", "Attention kernel under sequence parallelism.", _ATTENTION),
)

_FP8 = _group(
    "ACCELERATE_FP8_",
    ("BACKEND", "str", None, "fp8 library.", ("TE", "MSAMP", "AO"), _FP8_BACKENDS),
    ("MARGIN", "int", 0, "Margin of the scaling factor, in powers of two."),
    ("INTERVAL", "int", 1, "Steps between recomputations of the scaling factor."),
    ("FORMAT", "str", "HYBRID", "fp8 number format.", ("HYBRID", "E4M3", "E5M2")),
    ("AMAX_HISTORY_LEN", "int", 1024, "Steps of the maximum's history."),
    ("AMAX_COMPUTE_ALGO", "str", "most_recent", "How the maximum is chosen.", ("most_recent", "max")),
    ("USE_AUTOCAST_DURING_EVAL", "flag", False, "Use fp8 in evaluation too."),
    ("OVERRIDE_LINEAR_PRECISION", "flags", (False, False, False), "fprop, dgrad, wgrad in higher precision."),
    ("OPT_LEVEL", "str", "O2", "MS-AMP optimization level.", ("O1", "O2")),
    ("ENABLE_FSDP_FLOAT8_ALL_GATHER", "flag", True, "torchao: gather sharded parameters in fp8."),
    ("PAD_INNER_DIM", "flag", True, "torchao: pad inner dimensions to a multiple of 16."),
    ("USE_MXFP8_BLOCK_SCALING", "flag", False, "Transformer Engine: scale by blocks (MXFP8)."),
) + _group(
    "FP8_OVERRIDE_",
    ("FPROP", "flag", False, "Run the forward product in higher precision."),
    ("DGRAD", "flag", False, "Run the data-gradient product in higher precision."),
    ("WGRAD", "flag", False, "Run the weight-gradient product in higher precision."),
)

_MEGATRON = _group(
    "MEGATRON_LM_",
    ("TP_DEGREE", "int", 1, "Tensor-parallel size."),
    ("PP_DEGREE", "int", 1, "Pipeline-parallel size."),
    ("NUM_MICRO_BATCHES", "int", 1, "Micro-batches per pipeline step."),
    ("GRADIENT_CLIPPING", "float", 1.0, "Largest gradient norm; 0 clips nothing."),
    ("SEQUENCE_PARALLELISM", "flag", None, "Shard activations along the sequence."),
    ("RECOMPUTE_ACTIVATIONS", "flag", None, "Recompute activations selectively."),
    ("USE_DISTRIBUTED_OPTIMIZER", "flag", None, "Shard optimizer states over data-parallel ranks."),
    ("RECOMPUTE_GRANULARITY", "str", None, "What is recomputed.", ("full", "selective")),
    ("RECOMPUTE_METHOD", "str", None, "Which layers are recomputed.", ("uniform", "block")),
    ("RECOMPUTE_NUM_LAYERS", "int", None, "Layers per recomputed chunk."),
    ("ATTENTION_BACKEND", "str", None, "Attention kernel: flash, fused, unfused, local or auto."),
    ("EXPERT_MODEL_PARALLEL_SIZE", "int", None, "Expert-parallel size."),
    ("EXPERT_TENSOR_PARALLEL_SIZE", "int", None, "Tensor-parallel size inside experts."),
    ("CONTEXT_PARALLEL_SIZE", "int", None, "Context-parallel size."),
    ("ATTENTION_DROPOUT", "float", None, "Dropout of attention weights."),
    ("HIDDEN_DROPOUT", "float", None, "Dropout of hidden states."),
    ("ATTENTION_SOFTMAX_IN_FP32", "flag", None, "Compute the attention softmax in fp32."),
    ("CALCULATE_PER_TOKEN_LOSS", "flag", None, "Average the loss over tokens, not over micro-batches."),
    ("USE_ROTARY_POSITION_EMBEDDINGS", "flag", None, "Use rotary position embeddings."),
    ("USE_CUSTOM_FSDP", "flag", None, "Use Megatron's own FSDP."),
    ("NO_LOAD_OPTIM", "flag", None, "Do not load optimizer states."),
    ("NO_SAVE_OPTIM", "flag", None, "Do not save optimizer states."),
    ("EOD_MASK_LOSS", "flag", None, "Mask the loss of end-of-document tokens."),
    ("OPTIMIZER_CPU_OFFLOAD", "flag", None, "Keep optimizer states on the CPU."),
    ("OVERLAP_CPU_OPTIMIZER_D2H_H2D", "flag", None, "Overlap the optimizer's copies with its step."),
    ("USE_PRECISION_AWARE_OPTIMIZER", "flag", None, "Keep optimizer states in lower precision."),
    ("DECODER_LAST_PIPELINE_NUM_LAYERS", "int", None, "Decoder layers on the last pipeline stage."),
)

# Variables of other programs, and two that belong to no group above.
_OTHERS = _group(
    "",
    ("FORK_LAUNCHED", "flag", False, "This process was forked by a launch function, not started by the CLI."),
    ("CUDA_VISIBLE_DEVICES", "str", None, "CUDA devices that the process sees."),
    ("HF_HOME", "str", None, "Folder of the Hugging Face caches and configuration."),
    ("XDG_CACHE_HOME", "str", None, "The user's cache folder."),
)

VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for group in (
        _GENERAL,
        _DROP_IN,
        _RENDEZVOUS,
        _SCHEDULERS,
        _DYNAMO,
        _DEEPSPEED,
        _FSDP,
        _PARALLELISM,
        _FP8,
        _MEGATRON,
        _OTHERS,
    )
    for variable in group
}
"""Every variable by name."""
