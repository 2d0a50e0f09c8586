"""Which modules are sharded separately, and which parameters are not sharded."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.engines.fsdp_groups import choose_groups, ignored_parameters
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin


def chosen(**options: Any) -> list[str]:
    """Names of the groups of a model with 20, 40 and 36 parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", **options)
    groups = choose_groups(model, plugin).modules
    return [name for name, module in model.named_modules() if module in groups]


@pytest.mark.parametrize(
    ("size", "names"), [(20, ["0", "1.0", "1.1"]), (30, ["1.0", "1.1"]), (38, ["1.0"]), (50, ["1"])]
)
def test_the_smallest_size_says_which_modules_stand_alone(size, names):
    assert chosen(min_num_params=size) == names


def test_ignored_parameters_do_not_count():
    assert chosen(min_num_params=30, ignored_modules=r"1\.0") == ["1.1"]


def test_a_text_has_to_match_whole_names_and_modules_are_the_models_own():
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "heads": nn.Linear(2, 2)})

    assert ignored_parameters(model, "head") == set(model["head"].parameters())
    assert ignored_parameters(model, [model["heads"]]) == set(model["heads"].parameters())
    with pytest.raises(ValueError, match="matches no module of ModuleDict"):
        ignored_parameters(model, [torch.nn.Linear(2, 2)])


def test_a_policy_that_was_set_since_is_taken_without_a_word():
    """transformers' Trainer puts peft's policy in the place of the one that the plugin was made with."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    plugin.auto_wrap_policy = lambda module, recurse, **sizes: recurse or isinstance(module, nn.Linear)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    assert choose_groups(model, plugin).modules == (model[0],)  # warnings are errors


def choices_of_one_prepare(version: int) -> tuple[int, int, int]:
    counted = mock.Mock(wraps=choose_groups)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="size_based_wrap")
    with mock.patch("accel.engines.sharded_engine.choose_groups", counted):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        once = counted.call_count
        two = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
        accelerator.prepare(*two, torch.optim.SGD(two[0].parameters(), lr=0.1))
        return once, counted.call_count, len(accelerator.engine._groups)


@pytest.mark.parametrize("version", [1, 2])
def test_groups_are_chosen_once_for_each_model_and_forgotten(world, version):
    assert world.run(choices_of_one_prepare, version) == [(1, 3, 0)] * 2


def changes_after_a_refusal() -> int:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="1")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(ValueError, match="Adafactor"):
        accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    model[1] = torch.nn.Linear(4, 3).requires_grad_(False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return sum(isinstance(item, DTensor) for item in model[1].parameters())


def test_a_model_that_is_changed_after_a_rejection_is_looked_at_again(world):
    assert world.run(changes_after_a_refusal) == [0, 0]


def changes_after_an_evaluation() -> tuple[int, int]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="1")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    accelerator.prepare_model(model, evaluation_mode=True)
    with pytest.raises(ValueError, match="ignored_modules leaves"):  # trainable ones, to each process
        accelerator.prepare(model)
    kept = len(accelerator.engine._groups)
    model[1] = torch.nn.Linear(4, 3).requires_grad_(False)
    accelerator.prepare(model)
    return kept, sum(isinstance(item, DTensor) for item in model[0].parameters())


def test_a_rejection_of_a_model_that_was_evaluated_leaves_no_groups(world):
    assert world.run(changes_after_an_evaluation) == [(0, 2)] * 2
