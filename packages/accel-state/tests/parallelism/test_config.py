"""The parallelism configuration: sizes, names, validation, and the meshes that it builds."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state import env
from accel_state.parallelism.config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_state.process.state import PartialState
from accel_world.fake import fake_world

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in env.VARIABLES:
        if name.startswith("PARALLELISM_CONFIG_"):
            monkeypatch.delenv(name, raising=False)


def config_of(**sizes):
    return ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})


def coordinates(rank, shape):
    """Place of a rank in a row-major grid."""
    places = []
    for size in reversed(shape):
        rank, place = divmod(rank, size)
        places.insert(0, place)
    return places


def expected_ranks(sizes, rank, axes):
    """Ranks that differ from this one along the given axes only, the last axis fastest."""
    names = list(sizes)
    own = coordinates(rank, list(sizes.values()))
    choices = [range(sizes[name]) if name in axes else [own[i]] for i, name in enumerate(names)]
    strides = [math.prod(list(sizes.values())[i + 1 :]) for i in range(len(names))]
    return [sum(p * s for p, s in zip(place, strides, strict=True)) for place in itertools.product(*choices)]


# Fields


def test_documented_signature():
    parameters = inspect.signature(ParallelismConfig).parameters
    assert list(parameters) == [
        "dp_replicate_size",
        "dp_shard_size",
        "tp_size",
        "cp_size",
        "cp_backend",
        "sp_size",
        "sp_backend",
        "tp_handler",
        "cp_handler",
        "sp_handler",
    ]
    assert {parameter.default for parameter in parameters.values()} == {None}


def test_defaults():
    config = ParallelismConfig()
    assert [getattr(config, f"{axis}_size") for axis in AXES] == [1] * 5
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert (config.tp_handler, config.cp_handler, config.sp_handler) == (None, None, None)


def test_the_environment_fills_what_is_not_given(monkeypatch):
    for place, axis in enumerate(("dp_replicate", "dp_shard", "tp", "cp"), start=2):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", str(place))
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig(tp_size=8)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.cp_size) == (2, 3, 8, 5)
    assert config.cp_handler == TorchContextParallelConfig("alltoall")


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    with pytest.raises(
        ValueError, match="PARALLELISM_CONFIG_TP_SIZE has the value 'two'; allowed: an integer"
    ):
        ParallelismConfig()


@pytest.mark.parametrize("axis", AXES)
def test_sizes_are_positive_integers(axis):
    with pytest.raises(ValueError, match=f"{axis}_size must be 1 or more, not 0"):
        config_of(**{axis: 0})
    with pytest.raises(ValueError, match=f"{axis}_size must be 1 or more, not -1"):
        config_of(**{axis: -1})
    with pytest.raises(TypeError, match=rf"{axis}_size must be an integer, not 2\.0"):
        config_of(**{axis: 2.0})
    with pytest.raises(TypeError, match=f"{axis}_size must be an integer, not True"):
        config_of(**{axis: True})


def test_unknown_backends_are_named():
    with pytest.raises(ValueError, match="cp_backend cannot be 'nccl'; allowed: 'torch'"):
        ParallelismConfig(cp_backend="nccl")
    with pytest.raises(ValueError, match="sp_backend cannot be 'torch'; allowed: 'deepspeed'"):
        ParallelismConfig(sp_backend="torch")


def test_context_and_sequence_parallel_exclude_each_other():
    with pytest.raises(
        ValueError, match=r"cp_size=2 and sp_size=4: both split the sequence.*Set the other to 1"
    ):
        config_of(cp=2, sp=4)


# Handlers


def test_active_axes_get_their_default_handlers():
    config = config_of(tp=2, cp=2)
    assert config.tp_handler == TorchTensorParallelConfig(enable_async_tp=False)
    assert config.cp_handler == TorchContextParallelConfig("allgather")
    assert config.sp_handler is None
    assert config_of(sp=2).sp_handler == DeepSpeedSequenceParallelConfig(None, True, "sdpa")


def test_a_given_handler_is_kept():
    handler = TorchTensorParallelConfig(enable_async_tp=True)
    assert ParallelismConfig(tp_size=2, tp_handler=handler).tp_handler is handler


def test_a_handler_of_an_inactive_axis_is_warned_of():
    with pytest.warns(UserWarning, match="cp_handler is ignored, because cp_size is 1") as caught:
        ParallelismConfig(cp_handler=TorchContextParallelConfig())
    assert caught[0].filename == __file__


def test_a_handler_of_another_class_is_rejected():
    with pytest.raises(TypeError, match="tp_handler must be a TorchTensorParallelConfig, not 'async'"):
        ParallelismConfig(tp_size=2, tp_handler="async")


def test_context_parallel_strategies(monkeypatch):
    assert TorchContextParallelConfig().cp_comm_strategy == "allgather"
    assert TorchContextParallelConfig("alltoall").cp_comm_strategy == "alltoall"
    with pytest.raises(
        ValueError, match="cp_comm_strategy cannot be 'ring'; allowed: 'allgather', 'alltoall'"
    ):
        TorchContextParallelConfig("ring")


def test_sequence_parallel_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "4096")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "flash_attention_2")
    assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(
        4096, False, "flash_attention_2"
    )


def test_wrong_sequence_parallel_settings_are_named():
    with pytest.raises(ValueError, match="sp_seq_length_is_variable=False needs sp_seq_length"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    with pytest.raises(ValueError, match="sp_seq_length must be 1 or more, not 0"):
        DeepSpeedSequenceParallelConfig(sp_seq_length=0)
    with pytest.raises(ValueError, match="sp_attn_implementation cannot be 'eager'; allowed: 'sdpa'"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")
    with pytest.raises(
        ValueError, match=r"sp_seq_length=10 does not divide by sp_size=4: 10 / 4 leaves 2 tokens"
    ):
        ParallelismConfig(sp_size=4, sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length=10))


# Names and sizes


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({}, {}),
        (
            {"dp_shard": 4},
            {"active": "dp_shard", "dp": "dp_shard", "dp_shard_cp": "dp_shard", "fsdp": "dp_shard_cp"},
        ),
        ({"dp_replicate": 4}, {"active": "dp_replicate", "dp": "dp_replicate", "fsdp": "dp_replicate"}),
        (
            {"tp": 2, "cp": 2, "dp_shard": 2, "dp_replicate": 2},
            {
                "active": "dp_replicate dp_shard cp tp",
                "dp": "dp_replicate dp_shard",
                "non_dp": "cp tp",
                "dp_shard_cp": "dp_shard cp",
                "fsdp": "dp_replicate dp_shard_cp",
            },
        ),
        ({"sp": 2, "tp": 2}, {"active": "sp tp", "non_dp": "sp tp"}),
        ({"cp": 4}, {"active": "cp", "non_dp": "cp", "dp_shard_cp": "cp", "fsdp": "dp_shard_cp"}),
    ],
)
def test_names(sizes, names):
    config = config_of(**sizes)
    expected = {name: text.split() for name, text in names.items()}
    assert config.active_mesh_dims == expected.get("active", [])
    assert config.dp_dim_names == expected.get("dp", [])
    assert config.non_dp_dim_names == expected.get("non_dp", [])
    assert config.dp_shard_cp_dim_names == expected.get("dp_shard_cp", [])
    assert config.dp_cp_dim_names == [axis for axis in config.active_mesh_dims if axis not in ("sp", "tp")]
    assert config.fsdp_dim_names == expected.get("fsdp", [])
    for axis in AXES:
        assert getattr(config, f"{axis}_enabled") is (axis in config.active_mesh_dims)


def test_sizes():
    config = config_of(dp_replicate=2, dp_shard=3, cp=5, tp=7)
    assert config.data_parallel_size == 6
    assert config.non_data_parallel_size == 35
    assert config.total_size == 210
    assert config_of(sp=4).non_data_parallel_size == 4


def test_to_json():
    config = config_of(dp_shard=2, cp=2)
    assert json.loads(json.dumps(config.to_json())) == {
        "dp_replicate_size": 1,
        "dp_shard_size": 2,
        "tp_size": 1,
        "cp_size": 2,
        "cp_backend": "torch",
        "sp_size": 1,
        "sp_backend": "deepspeed",
        "tp_handler": None,
        "cp_handler": {"cp_comm_strategy": "allgather"},
        "sp_handler": None,
    }
    with fake_world(0, 4):
        config.build_device_mesh("cpu")
    json.dumps(config.to_json())


# Validation


def test_validation_prints_the_arithmetic():
    config = config_of(dp_replicate=2, dp_shard=2, tp=3)
    message = (
        r"dp_replicate\(2\) \* dp_shard\(2\) \* tp\(3\) = 12, but 8 processes are running\. "
        r"Change a size of the ParallelismConfig, or start 12 processes\."
    )
    with pytest.raises(ValueError, match=message):
        config.validate(8)
    with pytest.raises(ValueError, match=r"= 12, but 1 process is running"):
        config.validate(1)
    config.validate(12)


@given(st.integers(1, 4096))
def test_a_configuration_of_nothing_fits_every_world(size):
    ParallelismConfig().validate(size)


def test_a_mesh_that_does_not_fit_is_not_built():
    with fake_world(0, 8), pytest.raises(ValueError, match=r"tp\(3\) = 3, but 8 processes are running"):
        config_of(tp=3).build_device_mesh("cpu")


@pytest.mark.usefixtures("fresh_state")
def test_a_mesh_needs_its_processes():
    with pytest.raises(ValueError, match=r"tp\(2\) = 2, but 1 process is running"):
        config_of(tp=2).build_device_mesh("cpu")


# Meshes

layouts = st.fixed_dictionaries(
    {
        "dp_replicate": st.sampled_from([1, 2, 3]),
        "dp_shard": st.sampled_from([1, 2, 4]),
        "split": st.sampled_from([("cp", 1), ("cp", 2), ("cp", 4), ("sp", 2), ("sp", 4)]),
        "tp": st.sampled_from([1, 2, 8]),
    }
)


@settings(max_examples=60, deadline=None)
@given(layouts, st.data())
def test_rank_layout_at_any_size(layout, data):
    axis, size = layout.pop("split")
    config = config_of(**layout, **{axis: size})
    if config.total_size == 1:
        return
    rank = data.draw(st.integers(0, config.total_size - 1))
    active = {name: getattr(config, f"{name}_size") for name in config.active_mesh_dims}
    with fake_world(rank, config.total_size):
        mesh = config.build_device_mesh("cpu")
        assert mesh.mesh_dim_names == tuple(name for name in AXES if name in active)
        assert tuple(mesh.shape) == tuple(active.values())
        assert list(mesh.get_coordinate()) == coordinates(rank, list(active.values()))
        for name in active:
            assert config.get_submesh([name]).mesh.tolist() == expected_ranks(active, rank, {name})
        for name, axes in FLATTENED.items():
            check_flattened(config, name, [axis for axis in axes if axis in active], active, rank)


def check_flattened(config, name, axes, active, rank):
    if not axes:
        with pytest.raises(ValueError, match=f"No mesh has the axes .*{name}"):
            config.get_submesh([name])
        return
    submesh = config.get_submesh([name])
    assert submesh.mesh_dim_names == (name,)
    assert submesh.mesh.tolist() == expected_ranks(active, rank, set(axes))
    assert submesh.mesh[submesh.get_local_rank()] == rank
    assert submesh.size() == math.prod(active[axis] for axis in axes)


@pytest.mark.parametrize("rank", [0, 77, 511])
def test_layout_of_512_processes(rank):
    config = config_of(dp_replicate=4, dp_shard=8, cp=2, tp=8)
    with fake_world(rank, 512):
        mesh = config.build_device_mesh("cpu")
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
        assert mesh.mesh.flatten().tolist() == list(range(512))
        assert config.get_submesh(["tp"]).mesh.tolist() == [rank // 8 * 8 + i for i in range(8)]
        assert config.get_submesh(["dp_shard_cp"]).mesh.tolist() == [
            rank // 128 * 128 + rank % 8 + 8 * i for i in range(16)
        ]


def test_hybrid_sharding_joins_an_axis_and_a_flattened_one():
    config = config_of(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    with fake_world(5, 16), warnings.catch_warnings():
        warnings.simplefilter("error")
        config.build_device_mesh("cpu")
        submesh = config.get_submesh(config.fsdp_dim_names)
        assert submesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
        assert submesh.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert list(submesh.get_coordinate()) == [0, 2]


def test_documented_flattened_names_are_found_on_the_mesh():
    config = config_of(dp_replicate=2, dp_shard=2, cp=2)
    with fake_world(5, 8), warnings.catch_warnings():
        # torch announces that slicing flattened axes from the root will go; get_submesh is ready for it.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        mesh = config.build_device_mesh("cpu")
        assert mesh["dp"].mesh.tolist() == [1, 3, 5, 7]
        assert mesh["dp_shard_cp"].mesh.tolist() == [4, 5, 6, 7]
        assert mesh["dp_cp"].size() == 8


def test_one_axis():
    config = config_of(dp_shard=4)
    with fake_world(2, 4):
        mesh = config.build_device_mesh("cpu")
        assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("dp_shard",), (4,))
        for name in ("dp_shard", "dp", "dp_shard_cp", "dp_cp"):
            submesh = config.get_submesh([name])
            assert (submesh.mesh_dim_names, submesh.mesh.tolist()) == ((name,), [0, 1, 2, 3])


def test_nothing_to_arrange_needs_no_mesh():
    config = ParallelismConfig()
    assert config.build_device_mesh("cpu") is None
    assert config.get_device_mesh("cpu") is None
    assert not dist.is_initialized()
    with pytest.raises(
        ValueError, match=r"No mesh has the axes \['tp'\]: active and flattened axes are \[\]"
    ):
        config.get_submesh(["tp"])


def test_the_mesh_is_built_once():
    config = config_of(dp_shard=2, tp=2)
    with fake_world(0, 4):
        mesh = config.get_device_mesh("cpu")
        assert config.get_device_mesh("cpu") is mesh
        assert config.get_device_mesh() is mesh
        with pytest.raises(
            ValueError, match=r"built for 'cpu'.*'cuda'.*build_device_mesh\('cuda'\) to replace it"
        ):
            config.get_device_mesh("cuda")
        rebuilt = config.build_device_mesh("cpu")
        assert config.get_device_mesh() is rebuilt


def test_unknown_axes_are_named():
    config = config_of(dp_shard=2, tp=2)
    with fake_world(0, 4):
        config.build_device_mesh("cpu")
        with pytest.raises(
            ValueError, match=r"axes \['pp'\]: active and flattened axes are \['dp_shard', 'tp', 'dp'"
        ):
            config.get_submesh(["pp"])


def test_copies_leave_the_mesh_behind():
    config = config_of(dp_shard=2, tp=2)
    with fake_world(0, 4):
        config.build_device_mesh("cpu")
        for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert copied == config
            assert copied._mesh is None
            assert copied._flattened == {}


def reduce_over_axes():
    config = config_of(dp_shard=2, tp=2)
    mesh = config.get_device_mesh()
    sums = {}
    for name in ("dp_shard", "tp", "dp", "dp_shard_cp"):
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=config.get_submesh([name]).get_group())
        sums[name] = total.item()
    return mesh.device_type, mesh.mesh.tolist(), sums


def test_groups_reduce_over_their_axes(world):
    results = world.run(reduce_over_axes, size=4)
    for rank, (device_type, layout, sums) in enumerate(results):
        assert (device_type, layout) == ("cpu", [[0, 1], [2, 3]])
        across, beside = rank % 2 + rank % 2 + 2, rank // 2 * 4 + 1
        assert sums == {"dp_shard": across, "tp": beside, "dp": across, "dp_shard_cp": across}


def build_before_the_state():
    config = config_of(dp_shard=2)
    mesh = config.build_device_mesh("cpu")
    state = PartialState(cpu=True)
    return mesh.get_local_rank(), state.process_index, state.num_processes


def test_building_the_mesh_joins_the_process_group(world):
    assert world.run(build_before_the_state, size=2, init=False) == [(0, 0, 2), (1, 1, 2)]
