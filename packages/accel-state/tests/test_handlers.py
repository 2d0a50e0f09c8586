"""Handlers: what they pass on, and what they reject."""

from __future__ import annotations

import dataclasses
import inspect
from datetime import timedelta

import pytest
import torch

from accel_state.enums import DynamoBackend
from accel_state.handlers import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)


def defaults_of(cls):
    return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}


def test_documented_defaults():
    assert defaults_of(InitProcessGroupKwargs) == {"backend": "nccl", "init_method": None, "timeout": None}
    assert defaults_of(GradientAccumulationPlugin) == {
        "num_steps": None,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
        "step_scheduler_per_process": True,  # accel's own, and after the documented ones
    }
    assert defaults_of(TorchDynamoPlugin) == {
        "backend": None,
        "mode": None,
        "fullgraph": None,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": None,
    }
    assert list(defaults_of(ProfileKwargs).items()) == [
        ("activities", None),
        ("schedule_option", None),
        ("on_trace_ready", None),
        ("record_shapes", False),
        ("profile_memory", False),
        ("with_stack", False),
        ("with_flops", False),
        ("with_modules", False),
        ("output_trace_dir", None),
        ("summary", None),
    ]


# KwargsHandler


@dataclasses.dataclass
class Sample(KwargsHandler):
    a: int = 0
    b: bool = False
    c: list[int] = dataclasses.field(default_factory=list)


def test_to_kwargs_has_what_differs_from_the_defaults():
    assert Sample().to_kwargs() == {}
    assert Sample(a=2).to_kwargs() == {"a": 2}
    assert Sample(a=2, b=True, c=[1]).to_kwargs() == {"a": 2, "b": True, "c": [1]}


def test_to_dict_is_a_deep_copy():
    sample = Sample(c=[1])
    sample.to_dict()["c"].append(2)
    sample.to_kwargs()["c"].append(2)
    assert sample.to_dict() == {"a": 0, "b": False, "c": [1]}


def test_a_required_field_is_always_passed_on():
    @dataclasses.dataclass
    class Required(KwargsHandler):
        a: int
        b: int = 1

    assert Required(0).to_kwargs() == {"a": 0}


# InitProcessGroupKwargs


def test_init_process_group_passes_on_what_was_set():
    assert InitProcessGroupKwargs().to_kwargs() == {}
    handler = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=3))
    assert handler.to_kwargs() == {"backend": "gloo", "timeout": timedelta(minutes=3)}


def test_timeouts_are_durations():
    with pytest.raises(TypeError, match=r"timedelta, not 60; for seconds, write timedelta\(seconds=60\)"):
        InitProcessGroupKwargs(timeout=60)
    with pytest.raises(ValueError, match=r"longer than nothing, not datetime\.timedelta"):
        InitProcessGroupKwargs(timeout=timedelta(0))


# ProfileKwargs


def test_profiler_records_what_was_requested():
    ready = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=ready.append,
        record_shapes=True,
        with_flops=True,
    )
    with handler.build() as profiler:
        for _ in range(4):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    assert ready == [profiler]
    product = next(event for event in ready[0].events() if event.name == "aten::mm")
    assert product.input_shapes == [[4, 4], [4, 4]]
    assert product.flops == 2 * 4**3


def test_profiler_without_a_schedule_records_all():
    with ProfileKwargs(activities=["cpu"]).build() as profiler:
        torch.ones(1).add(1)
    assert "aten::add" in {event.name for event in profiler.events()}


def test_profiler_by_default_records_all_activities():
    profiler = ProfileKwargs().build()
    assert set(profiler.activities) == set(torch.profiler.supported_activities())


@pytest.mark.parametrize("activity", ["cpu", "xpu", "mtia", "cuda", "hpu"])
def test_every_documented_activity_is_torchs(activity):
    assert ProfileKwargs(activities=[activity])._profiler_activities() == [
        torch.profiler.ProfilerActivity.__members__[activity.upper()]
    ]


def test_wrong_activities_are_named():
    with pytest.raises(ValueError, match=r"'gpu' is not an activity.*cpu, xpu, mtia, cuda, hpu"):
        ProfileKwargs(activities=["cpu", "gpu"])
    with pytest.raises(ValueError, match="Did you mean 'cuda'"):
        ProfileKwargs(activities=["cudaa"])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"activ": 1}, r"'activ' is not a key.*wait, warmup, active, repeat, skip_first.*mean 'active'"),
        ({"wait": 1}, r"\{'wait': 1\} records nothing: add 'active'"),
        ({}, "records nothing: add 'active'"),
        ({"active": 0}, r"'active'\] counts steps: it must be 1 or more, not 0"),
        ({"active": 1, "wait": -1}, r"'wait'\] counts steps: it must be 0 or more, not -1"),
        ({"active": 1.5}, r"1 or more, not 1\.5"),
    ],
)
def test_wrong_schedules_are_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        ProfileKwargs(schedule_option=schedule)


@pytest.mark.parametrize("rows", [0, -1, True, 2.5])
def test_a_summary_needs_a_number_of_rows(rows):
    with pytest.raises(ValueError, match=f"summary counts rows.* 1 or more, or None, not {rows}"):
        ProfileKwargs(summary=rows)


# GradientAccumulationPlugin


def test_accumulation_passes_on_what_was_set():
    assert GradientAccumulationPlugin().to_kwargs() == {}
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    assert plugin.to_kwargs() == {"num_steps": 4, "sync_with_dataloader": False}


@pytest.mark.parametrize("steps", [0, -1, 1.5, "4", True])
def test_wrong_numbers_of_steps_are_named(steps):
    with pytest.raises(ValueError, match=f"num_steps counts.*1 or more, not {steps!r}"):
        GradientAccumulationPlugin(num_steps=steps)


# TorchDynamoPlugin


@pytest.fixture(autouse=True)
def no_dynamo_variables(monkeypatch):
    for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION"):
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}", raising=False)


def test_dynamo_defaults():
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert (plugin.options, plugin.disable, plugin.use_regional_compilation) == (None, False, False)


def test_dynamo_reads_the_environment_when_made(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "false")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("max-autotune", True, False)
    assert plugin.use_regional_compilation is True
    assert plugin.to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
        "fullgraph": True,
        "dynamic": False,
    }


def test_dynamo_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=False)
    assert (plugin.backend, plugin.fullgraph) == (DynamoBackend.EAGER, False)


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_dynamo_backend_spellings(backend):
    plugin = TorchDynamoPlugin(backend=backend)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": "inductor"}
    assert plugin.to_dict() == {
        "backend": "inductor",
        "mode": "default",
        "fullgraph": False,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": False,
    }


def test_what_dynamo_passes_on_compiles_and_computes_the_same():
    model = torch.nn.Linear(4, 2)
    compiled = torch.compile(model, **TorchDynamoPlugin(backend="eager", fullgraph=True).to_kwargs())
    x = torch.randn(3, 4)
    try:
        torch.testing.assert_close(compiled(x), model(x))
    finally:
        torch.compiler.reset()


def test_dynamo_options_replace_the_mode():
    plugin = TorchDynamoPlugin(backend="inductor", options={"trace.enabled": True})
    assert plugin.to_kwargs() == {"backend": "inductor", "options": {"trace.enabled": True}}
    with pytest.raises(
        ValueError, match=r"a mode or options, not both; got mode='max-autotune'.*Leave one out"
    ):
        TorchDynamoPlugin(backend="inductor", mode="max-autotune", options={"trace.enabled": True})


def test_dynamo_options_win_over_the_environments_mode(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    plugin = TorchDynamoPlugin(backend="inductor", options={"trace.enabled": True})
    assert plugin.to_kwargs() == {"backend": "inductor", "options": {"trace.enabled": True}}


def test_unknown_dynamo_backend_names_the_nearest():
    with pytest.raises(ValueError, match=r"'inductr' is not a valid DynamoBackend.*Did you mean 'INDUCTOR'"):
        TorchDynamoPlugin(backend="inductr")


def test_unknown_dynamo_mode_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"'max-autotun' is not a mode.*default, reduce-over.*'max-autotune'"
    ):
        TorchDynamoPlugin(mode="max-autotun")


def test_wrong_dynamo_environment_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductr")
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_BACKEND has the value 'inductr'"):
        TorchDynamoPlugin()
