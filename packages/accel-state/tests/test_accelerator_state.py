from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import train_plan
from accel_state.accelerator_state import (
    AcceleratorState,
    ThreadLocalSharedDict,
    do_nothing,
    is_initialized,
)
from accel_state.devices.spec import DeviceSpec
from accel_state.enums import DistributedType
from accel_state.parallelism.config import ParallelismConfig
from accel_state.process.state import PartialState
from accel_world.pool import World

SIZES = (1, 2, 3, 4)


@dataclass
class Plugin:
    """An engine's plugin as far as the state looks at it."""

    fsdp_version: int = 1
    selected: bool = False

    def configured_precision(self) -> None:
        """It configures none."""

    def configured_steps(self) -> None:
        """It configures none."""


@pytest.fixture(autouse=True)
def _clean(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_bare_state_makes_one_where_there_is_none() -> None:
    assert not is_initialized()
    state = AcceleratorState()

    assert is_initialized()
    assert state.initialized
    assert AcceleratorState._shared_state
    assert PartialState._shared_state
    assert (state.mixed_precision, state.distributed_type) == ("no", DistributedType.NO)
    assert state.process is PartialState().process
    assert not state.fork_launched
    assert state.dynamo_plugin.backend == "NO"
    for plugin in ("deepspeed", "fsdp", "torch_tp", "megatron_lm"):
        assert getattr(state, f"{plugin}_plugin") is None
    assert (state.parallelism_config, state.device_mesh, state.deepspeed_plugins) == (None, None, None)


def test_two_states_with_different_precision_live_side_by_side() -> None:
    first = AcceleratorState(mixed_precision="bf16", _from_accelerator=True)
    second = AcceleratorState(mixed_precision="no", _from_accelerator=True)

    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert AcceleratorState().mixed_precision == "no"


def test_states_of_accelerators_are_independent_even_when_equal() -> None:
    plugins = {"train": Plugin(), "evaluate": Plugin()}
    first = AcceleratorState(deepspeed_plugin=plugins, _from_accelerator=True)
    second = AcceleratorState(deepspeed_plugin=dict(plugins), _from_accelerator=True)
    first.select_deepspeed_plugin("evaluate")

    assert first.deepspeed_plugin is plugins["evaluate"]
    assert second.deepspeed_plugin is plugins["train"]


def test_bare_state_is_a_handle_on_the_newest_and_keeps_it() -> None:
    AcceleratorState(mixed_precision="bf16")
    handle = AcceleratorState()
    AcceleratorState(mixed_precision="fp16")

    assert handle.mixed_precision == "bf16"
    assert AcceleratorState().mixed_precision == "fp16"


def test_same_settings_again_are_a_handle() -> None:
    plugin = Plugin()
    first = AcceleratorState(mixed_precision="bf16", fsdp_plugin=plugin)
    again = AcceleratorState(mixed_precision="bf16")
    other = AcceleratorState(fsdp_plugin=Plugin())

    assert again.plan is first.plan
    assert again.fsdp_plugin is plugin
    assert other.fsdp_plugin is not plugin
    assert other.mixed_precision == "no"


@pytest.mark.parametrize("value", ["no", "fp16", "bf16", "fp8", "BF16"])
def test_precision_comes_from_the_argument_then_the_environment(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)

    assert AcceleratorState().mixed_precision == value.lower()
    assert type(AcceleratorState().mixed_precision) is str
    assert AcceleratorState(mixed_precision="fp16").mixed_precision == "fp16"


def test_unknown_precision_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mixed_precision='fp12' is unknown; allowed: no, fp8"):
        AcceleratorState(mixed_precision="fp12")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION has the value 'half'; allowed: no"):
        AcceleratorState()
    assert not is_initialized()


def test_precision_that_the_hardware_lacks_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = DeviceSpec("cpu", DistributedType.MULTI_CPU, "gloo", None, frozenset({"bf16"}), lambda: True)
    monkeypatch.setattr(train_plan, "device_spec", lambda device: limited)

    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"
    with pytest.raises(ValueError, match=r"'fp16' is not available on cpu; allowed here: no, bf16\."):
        AcceleratorState(mixed_precision="fp16")


ENGINES = {
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", DistributedType.FSDP),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", DistributedType.MEGATRON_LM),
}


@pytest.mark.parametrize("name", ENGINES)
def test_plugin_or_variable_names_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, expected = ENGINES[name]
    plugin = Plugin()
    state = AcceleratorState(**{name: plugin})

    assert state.distributed_type == expected
    assert getattr(state, name) is plugin
    assert state.process.distributed_type == DistributedType.NO

    monkeypatch.setenv(variable, "true")

    AcceleratorState._reset_state()
    assert AcceleratorState().distributed_type == expected


def test_plugin_wins_over_the_variable_of_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")

    assert AcceleratorState(fsdp_plugin=Plugin()).distributed_type == DistributedType.FSDP


def test_two_engines_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="deepspeed_plugin and fsdp_plugin request different engines"):
        AcceleratorState(deepspeed_plugin=Plugin(), fsdp_plugin=Plugin())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP and ACCELERATE_USE_MEGATRON_LM request"):
        AcceleratorState()


@pytest.mark.parametrize(("version", "expected"), [(1, False), (2, True)])
def test_fsdp2_follows_the_plugins_version(version: int, expected: bool) -> None:
    assert AcceleratorState(fsdp_plugin=Plugin(fsdp_version=version)).is_fsdp2 is expected


def test_fsdp2_is_not_what_another_engine_does() -> None:
    assert not AcceleratorState().is_fsdp2


def test_deepspeed_plugins_are_selected_by_name() -> None:
    plugins = {"teacher": Plugin(), "student": Plugin()}
    state = AcceleratorState(deepspeed_plugin=plugins)

    assert state.deepspeed_plugin is plugins["teacher"]
    assert [plugin.selected for plugin in plugins.values()] == [True, False]

    state.select_deepspeed_plugin("student")

    assert state.deepspeed_plugin is plugins["student"]
    assert [plugin.selected for plugin in plugins.values()] == [False, True]
    assert state.get_deepspeed_plugin("teacher") is plugins["teacher"]

    state.select_deepspeed_plugin()

    assert state.deepspeed_plugin is plugins["teacher"]


def test_single_deepspeed_plugin_is_the_active_one() -> None:
    plugin = Plugin()
    state = AcceleratorState(deepspeed_plugin=plugin)

    assert state.deepspeed_plugin is plugin
    assert state.deepspeed_plugins == {"default": plugin}


def test_unknown_deepspeed_plugin_is_rejected() -> None:
    state = AcceleratorState(deepspeed_plugin={"teacher": Plugin()})
    with pytest.raises(ValueError, match="no DeepSpeed plugin 'student'; there are: teacher"):
        state.select_deepspeed_plugin("student")
    with pytest.raises(ValueError, match="no DeepSpeed plugin 'student'; there are: none"):
        AcceleratorState(_from_accelerator=True).get_deepspeed_plugin("student")
    with pytest.raises(ValueError, match="there are: none"):
        AcceleratorState(_from_accelerator=True).select_deepspeed_plugin()
    with pytest.raises(ValueError, match="deepspeed_plugin is an empty dictionary"):
        AcceleratorState(deepspeed_plugin={})


def test_device_mesh_is_built_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    config = ParallelismConfig(tp_size=2)
    mesh = object()
    monkeypatch.setattr(config, "get_device_mesh", lambda device_type: built.append(device_type) or mesh)

    state = AcceleratorState(parallelism_config=config)

    assert built == []
    assert state.device_mesh is mesh
    assert built == ["cpu"]


def test_handles_have_no_settings_from_a_reset_to_the_next_state() -> None:
    state = AcceleratorState(mixed_precision="bf16")
    AcceleratorState._reset_state()

    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state
    plugins = "dynamo_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin deepspeed_plugin"
    others = "deepspeed_plugins mixed_precision distributed_type parallelism_config device_mesh is_fsdp2"
    for name in f"{plugins} {others}".split():
        assert not hasattr(state, name), name
    with pytest.raises(AttributeError, match=r"AcceleratorState\._reset_state\(\) was called.*Make a new"):
        _ = state.mixed_precision
    assert not state.initialized
    assert repr(state) == "AcceleratorState(reset)"

    assert AcceleratorState().mixed_precision == "no"
    assert state.mixed_precision == "bf16"


def test_reset_of_the_process_is_reported() -> None:
    state = AcceleratorState()
    AcceleratorState._reset_state(reset_partial_state=True)

    assert PartialState._shared_state == {}
    with pytest.raises(AttributeError, match=r"reset_partial_state=True.*Make a new PartialState"):
        _ = state.device
    with pytest.raises(AttributeError, match="settings of the Accelerator are not there"):
        _ = state.distributed_type


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'AcceleratorState' object has no attribute 'precision'"):
        _ = AcceleratorState().precision  # type: ignore[attr-defined]


def test_repr_has_place_and_precision() -> None:
    lines = repr(AcceleratorState(mixed_precision="bf16")).splitlines()

    assert lines[0] == "Distributed environment: NO"
    assert lines[-1] == "Mixed precision type: bf16"


def test_do_nothing_takes_anything() -> None:
    assert do_nothing(1, two=2) is None
    assert ThreadLocalSharedDict.__name__ == "ThreadLocalSharedDict"


def _two_states() -> tuple[Any, ...]:
    first = AcceleratorState(mixed_precision="bf16", _from_accelerator=True)
    second = AcceleratorState(fsdp_plugin=Plugin(), _from_accelerator=True)
    first.wait_for_everyone()
    second.wait_for_everyone()
    with second.split_between_processes(list(range(second.num_processes))) as mine:
        return (
            first.process_index,
            mine,
            first.mixed_precision,
            second.mixed_precision,
            first.distributed_type,
            second.distributed_type,
            first.use_distributed,
        )


@pytest.mark.parametrize("size", SIZES)
def test_two_states_in_each_process_of_a_run(world: World, size: int) -> None:
    kind = DistributedType.MULTI_CPU if size > 1 else DistributedType.NO

    assert world.run(_two_states, size=size, init=False) == [
        (rank, [rank], "bf16", "no", kind, DistributedType.FSDP, size > 1) for rank in range(size)
    ]


def _documented_reset() -> int:
    PartialState(timeout=datetime.timedelta(seconds=1800), backend="gloo")
    state = AcceleratorState()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(timeout=datetime.timedelta(seconds=1800), backend="gloo")
    state.wait_for_everyone()  # older states continue, because the facts are the same
    return AcceleratorState().num_processes


def test_reset_with_a_live_group(world: World) -> None:
    assert world.run(_documented_reset, init=False) == [2, 2]


def _second_training() -> tuple[bool, float]:
    first = AcceleratorState(_from_accelerator=True)
    if first.is_main_process:
        time.sleep(0.3)  # the other process is at its second group before this one has left the first
    first.destroy_process_group()
    gone = not dist.is_initialized()
    bare = AcceleratorState()  # a handle that some logger makes: starts nothing, whatever the others do
    assert not dist.is_initialized()
    assert bare.num_processes == 2
    AcceleratorState(_from_accelerator=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    return gone, total.item()


def test_accelerator_after_the_end_of_another_has_a_group_again(world: World) -> None:
    assert world.run(_second_training, init=False) == [(True, 2.0), (True, 2.0)]


def _mesh() -> tuple[tuple[str, ...] | None, int]:
    state = AcceleratorState(parallelism_config=ParallelismConfig(dp_replicate_size=2))
    mesh = state.device_mesh
    return mesh.mesh_dim_names, mesh["dp_replicate"].get_local_rank()


def test_device_mesh_of_a_run(world: World) -> None:
    for rank, (names, local_rank) in enumerate(world.run(_mesh)):
        assert names is not None
        assert "dp_replicate" in names
        assert local_rank == rank
