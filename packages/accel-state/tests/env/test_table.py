"""The table of environment variables: it is complete, consistent, and round-trips."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state import env
from accel_state.enums import DynamoBackend, PrecisionType, SageMakerDistributedType
from accel_state.env import table
from accel_state.env.table import VARIABLES

ALL = pytest.mark.parametrize("variable", VARIABLES.values(), ids=lambda variable: variable.name)

# The documented names: {A, B} stands for one name each, as in the reference.
DOCUMENTED = """
ACCELERATE_{USE_CPU, MIXED_PRECISION, TORCH_DEVICE, GRADIENT_ACCUMULATION_STEPS, DEBUG_MODE, LOG_LEVEL,
CPU_AFFINITY, ENABLE_RICH, BYPASS_DEVICE_MAP, DISABLE_RICH, NUM_PROCESSES, DOWNCAST_BF16, IN_TPU_POD,
USE_SAGEMAKER, SAGEMAKER_DISTRIBUTED_TYPE, INIT_INCLUDE_BUFFERS, GRADIENT_CLIPPING, DEBUG_RDV_FILE,
USE_DEEPSPEED, USE_FSDP, USE_MEGATRON_LM, USE_PARALLELISM_CONFIG, CONFIG_DS_FIELDS}
{RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS}
TORCHELASTIC_{RUN_ID, RESTART_COUNT, MAX_RESTARTS, USE_AGENT_STORE, ERROR_FILE}
PMI_{RANK, SIZE}
OMPI_COMM_WORLD_{RANK, SIZE, LOCAL_RANK, LOCAL_SIZE}
MV2_COMM_WORLD_{RANK, SIZE, LOCAL_RANK, LOCAL_SIZE}
SLURM_{JOB_ID, PROCID, LOCALID, NODEID, NTASKS, NNODES, JOB_NODELIST}
ACCELERATE_DYNAMO_{BACKEND, MODE, USE_FULLGRAPH, USE_DYNAMIC, USE_REGIONAL_COMPILATION}
ACCELERATE_DEEPSPEED_{ZERO_STAGE, CONFIG_FILE, OFFLOAD_OPTIMIZER_DEVICE, OFFLOAD_PARAM_DEVICE,
OFFLOAD_OPTIMIZER_NVME_PATH, OFFLOAD_PARAM_NVME_PATH, ZERO3_INIT, ZERO3_SAVE_16BIT_MODEL,
MOE_LAYER_CLS_NAMES}
FSDP_{VERSION, SHARDING_STRATEGY, RESHARD_AFTER_FORWARD, OFFLOAD_PARAMS, MIN_NUM_PARAMS, AUTO_WRAP_POLICY,
TRANSFORMER_CLS_TO_WRAP, BACKWARD_PREFETCH, FORWARD_PREFETCH, STATE_DICT_TYPE, USE_ORIG_PARAMS,
CPU_RAM_EFFICIENT_LOADING, SYNC_MODULE_STATES, ACTIVATION_CHECKPOINTING, IGNORED_MODULES}
PARALLELISM_CONFIG_{DP_REPLICATE_SIZE, DP_SHARD_SIZE, TP_SIZE, CP_SIZE, CP_BACKEND, CP_COMM_STRATEGY,
SP_SIZE, SP_BACKEND, SP_SEQ_LENGTH, SP_SEQ_LENGTH_IS_VARIABLE, SP_ATTN_IMPLEMENTATION}
ACCELERATE_FP8_{BACKEND, MARGIN, INTERVAL, FORMAT, AMAX_HISTORY_LEN, AMAX_COMPUTE_ALGO,
USE_AUTOCAST_DURING_EVAL, OVERRIDE_LINEAR_PRECISION, OPT_LEVEL, ENABLE_FSDP_FLOAT8_ALL_GATHER,
PAD_INNER_DIM}
FP8_OVERRIDE_{FPROP, DGRAD, WGRAD}
MEGATRON_LM_{TP_DEGREE, PP_DEGREE, NUM_MICRO_BATCHES, SEQUENCE_PARALLELISM, RECOMPUTE_ACTIVATIONS,
RECOMPUTE_GRANULARITY, RECOMPUTE_METHOD, RECOMPUTE_NUM_LAYERS, USE_DISTRIBUTED_OPTIMIZER,
GRADIENT_CLIPPING, ATTENTION_BACKEND, EXPERT_MODEL_PARALLEL_SIZE, CONTEXT_PARALLEL_SIZE,
ATTENTION_DROPOUT, HIDDEN_DROPOUT, USE_CUSTOM_FSDP, NO_LOAD_OPTIM, NO_SAVE_OPTIM, EOD_MASK_LOSS,
OPTIMIZER_CPU_OFFLOAD, USE_PRECISION_AWARE_OPTIMIZER, DECODER_LAST_PIPELINE_NUM_LAYERS}
"""


def documented_names():
    for group in DOCUMENTED.replace(",\n", ", ").split("\n"):
        prefix, _, names = group.strip(" }").partition("{")
        yield from (prefix + name.strip() for name in names.split(",") if name.strip())


def values_of(variable):
    """Return a strategy of the values that a variable may hold."""
    names = st.text(st.characters(exclude_characters=",", exclude_categories=("Z", "C")), min_size=1)
    if variable.choices:
        return st.sampled_from(variable.choices)
    return {
        "flag": st.booleans(),
        "flags": st.tuples(st.booleans(), st.booleans(), st.booleans()),
        "int": st.integers(),
        "float": st.floats(allow_nan=False),
        "str": st.text(min_size=1),
        "list": st.lists(names, min_size=1),
    }[variable.kind]


def test_every_documented_name_is_in_the_table():
    names = list(documented_names())
    assert len(names) == len(set(names)) > 120
    assert [name for name in names if name not in VARIABLES] == []


def test_no_name_stands_twice():

    groups = [value for name, value in vars(table).items() if name.isupper() and isinstance(value, list)]
    assert sum(map(len, groups)) == len(VARIABLES)
    assert all(name == variable.name for name, variable in VARIABLES.items())


@ALL
def test_values_come_back_from_a_childs_environment(variable):
    @settings(max_examples=20)
    @given(values_of(variable))
    def check(value):
        child = {}
        env.put(child, variable.name, value)
        assert env.get(variable.name, child) == value

    check()


@ALL
def test_defaults_are_values_of_the_variable(variable):
    if variable.default is None:
        return
    if variable.kind == "list":
        assert variable.default == ()
        return
    assert variable.parse(variable.format(variable.default)) == variable.default


@ALL
def test_aliases_stand_for_choices(variable):
    for alias, choice in variable.aliases.items():
        assert alias == alias.lower()
        assert choice in variable.choices
        assert variable.parse(alias) == choice


@ALL
def test_help_is_one_sentence_in_one_line(variable):
    assert variable.help.endswith(".")
    assert "\n" not in variable.help
    assert len(variable.help) < 100
    assert variable.help.isascii()


def test_choices_are_those_of_the_enumerations():
    assert list(VARIABLES["ACCELERATE_MIXED_PRECISION"].choices) == PrecisionType.list()
    backends = VARIABLES["ACCELERATE_DYNAMO_BACKEND"].choices
    assert [backend.upper() for backend in backends] == DynamoBackend.list()
    assert list(VARIABLES["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"].choices) == SageMakerDistributedType.list()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("FSDP_SHARDING_STRATEGY", "1", "FULL_SHARD"),
        ("FSDP_SHARDING_STRATEGY", "hybrid_shard", "HYBRID_SHARD"),
        ("FSDP_STATE_DICT_TYPE", "3", "SHARDED_STATE_DICT"),
        ("FSDP_RESHARD_AFTER_FORWARD", "True", "true"),
        ("FSDP_RESHARD_AFTER_FORWARD", "0", "false"),
        ("FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP"),
        ("FSDP_AUTO_WRAP_POLICY", "transformer_based_wrap", "TRANSFORMER_BASED_WRAP"),
        ("FSDP_MIN_NUM_PARAMS", "1e8", 100_000_000),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "inductor"),
        ("ACCELERATE_FP8_BACKEND", "te", "TE"),
        ("ACCELERATE_FP8_BACKEND", "torchao", "AO"),
        ("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", "(true, false, false)", (True, False, False)),
        ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "A,B", ["A", "B"]),
    ],
)
def test_spellings_in_use(name, text, value):
    assert env.get(name, {name: text}) == value
