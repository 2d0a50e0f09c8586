"""Constructor arguments: environment, plugins and their contradictions."""

from __future__ import annotations

import importlib
import re

import pytest

from accel import Accelerator
from accel.training import arguments
from accel.training.arguments import UNSET
from accel_ckpt.config import ProjectConfiguration
from accel_data.config import DataLoaderConfiguration
from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_state.enums import RNGType
from accel_state.handlers import (
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def test_handlers_are_sorted_by_kind():
    given = [
        ProfileKwargs(),
        AutocastKwargs(),
        GradScalerKwargs(),
        InitProcessGroupKwargs(),
        DistributedDataParallelKwargs(),
    ]

    handlers = arguments.sort_handlers(given)

    assert [handlers.profile, handlers.autocast, handlers.scaler, handlers.init, handlers.ddp] == given
    assert arguments.sort_handlers(None) == arguments.Handlers()


def test_loader_configuration_and_its_own_argument_meet():
    assert arguments.resolve_dataloader_config(None, UNSET) == DataLoaderConfiguration()
    assert arguments.resolve_dataloader_config(None, True).split_batches
    given = DataLoaderConfiguration(data_seed=3)
    merged = arguments.resolve_dataloader_config(given, True)
    assert merged.split_batches
    assert merged.data_seed == 3
    assert not given.split_batches


def test_project_configuration_is_filled_and_never_overwritten(tmp_path):
    assert arguments.resolve_project("a", None).project_dir == "a"
    assert arguments.resolve_project("a", ProjectConfiguration()).project_dir == "a"
    assert arguments.resolve_project("b", ProjectConfiguration(project_dir="b")).project_dir == "b"
    with pytest.warns(UserWarning, match=r"ignores project_dir='a'.*'b'"):
        assert arguments.resolve_project("a", ProjectConfiguration(project_dir="b")).project_dir == "b"


def test_rng_types_by_name_and_by_enum():
    assert arguments.resolve_rng_types(None) == [RNGType.GENERATOR]
    assert arguments.resolve_rng_types(["torch", RNGType.CUDA]) == [RNGType.TORCH, RNGType.CUDA]
    with pytest.raises(ValueError, match="torchy"):
        arguments.resolve_rng_types(["torchy"])


def test_an_unknown_argument_is_no_suggestion_for_itself():
    for name in ("unknown", "self"):
        with pytest.raises(TypeError, match=f"^Accelerator\\(\\) has no argument '{name}'\\.") as caught:
            arguments.reject_unknown(Accelerator, {name: 1})
        assert f"mean '{name}'" not in str(caught.value)


def test_the_message_names_observers_where_they_are():
    with pytest.raises(TypeError, match="kwargs_handlers got 3") as caught:
        arguments.sort_handlers([3])
    names = re.findall(r"accel\.observe[\w.]*\w", str(caught.value))
    assert len(names) == 4
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)
