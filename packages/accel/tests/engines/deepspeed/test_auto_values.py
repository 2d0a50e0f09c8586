"""What "auto" becomes, and what has to fit what is prepared; DeepSpeed is not needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.engines.deepspeed.auto_values import PrepareInfo, complete
from accel.engines.deepspeed.placeholders import DummyOptim, DummyScheduler
from accel.engines.deepspeed.plugin import DeepSpeedPlugin


def info(**changes: Any) -> PrepareInfo:
    model = torch.nn.Linear(2, 2)
    given = PrepareInfo(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scheduler=None,
        batch_sizes=(4,),
        previous_batch_size=None,
        num_steps=2,
        num_processes=3,
        scheduler_steps_per_step=3,
        device_type="cpu",
        mixed_precision="no",
    )
    return replace(given, **changes)


def test_batches_are_counted():
    plugin = DeepSpeedPlugin(zero_stage=1)

    config = complete(plugin, info())

    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 4
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 2
    assert plugin.deepspeed_config["train_batch_size"] == 24
    assert config["zero_allow_untested_optimizer"] is True
    assert config["gradient_clipping"] == 0.0  # DeepSpeed would clip at 1.0
    assert "gradient_clipping" not in plugin.deepspeed_config


@pytest.mark.parametrize(
    ("sizes", "known", "is_min", "expected"),
    [((4, 8), None, True, 4), ((4, 8), None, False, 8), ((), 6, True, 6), ((), None, True, 1)],
)
def test_whose_batches_count(sizes, known, is_min, expected):
    plugin = DeepSpeedPlugin(zero_stage=1, is_train_batch_min=is_min)

    complete(plugin, info(batch_sizes=sizes, previous_batch_size=known))

    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == expected


def test_a_batch_of_every_process_is_that_of_all_groups_under_sequence_parallelism():
    """transformers' Trainer counts processes, and DeepSpeed groups of them."""
    plugin = DeepSpeedPlugin({"train_batch_size": 48, "zero_optimization": {"stage": 1}})

    config = complete(plugin, info(sequence_parallel_size=2))

    assert config["train_batch_size"] == 24
    assert plugin.deepspeed_config["train_batch_size"] == 48  # the user's number stays
    plugin.forget_filled()
    assert plugin.deepspeed_config["train_batch_size"] == 48
    with pytest.raises(ValueError, match="DummyOptim stands for"):
        complete(plugin, info(sequence_parallel_size=2, optimizer=DummyOptim([])))
    assert plugin.deepspeed_config["train_batch_size"] == 48
    with pytest.raises(ValueError, match="train_batch_size=47, and here it is 24"):
        complete(DeepSpeedPlugin({"train_batch_size": 47}), info(sequence_parallel_size=2))


def test_what_was_filled_in_is_filled_in_again_for_other_objects():
    plugin = DeepSpeedPlugin(zero_stage=1)

    complete(plugin, info())
    complete(plugin, info(batch_sizes=(8,), num_steps=1))

    assert plugin.deepspeed_config["train_batch_size"] == 24
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 8


def test_numbers_that_fit_are_left_and_others_listed():
    plugin = DeepSpeedPlugin({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8})
    assert complete(plugin, info(batch_sizes=(4, 8), num_steps=1))["train_batch_size"] == 24

    with pytest.raises(ValueError, match="does not fit") as error:
        complete(plugin, info())
    assert str(error.value).splitlines()[1:-1] == [
        "- train_batch_size=24, and here it is 48",
        "- train_micro_batch_size_per_gpu=8, and here it is 4",
    ]


def test_a_loop_that_marks_windows_itself_may_say_so_to_deepspeed_alone():
    config = {"gradient_accumulation_steps": 4, "train_batch_size": "auto"}

    plugin = DeepSpeedPlugin(config)
    complete(plugin, info(num_steps=1))

    assert plugin.deepspeed_config["train_batch_size"] == 48
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4, and here it is 2"):
        complete(DeepSpeedPlugin(config), info())


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(hidden_size=10),
        SimpleNamespace(hidden_sizes=[4, 10]),
        SimpleNamespace(text_config=SimpleNamespace(hidden_size=10)),
    ],
)
def test_buffers_follow_the_models_size(config):
    zero = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 3, **zero}}, zero3_init_flag=False)
    model = torch.nn.Linear(2, 2)
    model.config = config  # type: ignore[assignment]

    complete(plugin, info(model=model))

    filled = plugin.deepspeed_config["zero_optimization"]
    assert [filled[name] for name in zero] == [100, 90, 100]
    with pytest.raises(ValueError, match=r"- zero_optimization\.reduce_bucket_size is 'auto'"):
        complete(plugin, info())


def test_what_comes_twice_or_not_at_all_is_listed():
    model = torch.nn.Linear(2, 2)
    stand_in = DummyOptim(model.parameters())
    both = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    schedule = torch.optim.lr_scheduler.StepLR(info().optimizer, 1)

    for config, given, texts in (
        (both, info(scheduler=schedule), ["pass a DummyOptim", "pass a DummyScheduler"]),
        (
            {},
            info(optimizer=stand_in, scheduler=DummyScheduler(stand_in)),
            ["which has none: pass a real one", "give it lr_scheduler_callable, or pass a real one"],
        ),
    ):
        with pytest.raises(ValueError, match="does not fit") as error:
            complete(DeepSpeedPlugin(config), given)
        lines = str(error.value).splitlines()[1:-1]
        assert [line.endswith(text) for line, text in zip(lines, texts, strict=True)] == [True, True]


def test_adam_on_the_cpu_is_torchs_unless_somebody_says_otherwise():
    stand_in = DummyOptim(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    for device, given, expected in (
        ("cpu", {}, {"lr": 0.1, "torch_adam": True}),
        ("cpu", {"torch_adam": False}, {"lr": 0.1, "torch_adam": False}),
        ("cuda", {}, {"lr": 0.1}),
    ):
        config = {"optimizer": {"type": "Adam", "params": {"lr": "auto", **given}}}
        started = complete(DeepSpeedPlugin(config), info(optimizer=stand_in, device_type=device))
        assert started["optimizer"]["params"] == expected


def test_a_model_that_is_evaluated_needs_no_optimizer_of_the_configuration():
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3},
    }

    started = complete(DeepSpeedPlugin(config, zero3_init_flag=False), info(optimizer=None, batch_sizes=()))

    assert started["train_micro_batch_size_per_gpu"] == 1
    assert not {"optimizer", "scheduler"} & set(started)


def test_stand_ins_keep_groups_and_what_they_are_given():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = DummyOptim([{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters()}], lr=0.2)

    assert [group["lr"] for group in groups.param_groups] == [0.5, 0.2]
    assert [len(group["params"]) for group in groups.param_groups] == [2, 2]
    assert [len(group["params"]) for group in groups.param_groups] == [2, 2]  # asked twice
    assert len(DummyOptim(first.parameters()).param_groups[0]["params"]) == 2


@pytest.mark.parametrize(("second", "expected"), [({}, 0.2), ({"lr": 0.5}, [0.2, 0.5])])
def test_a_schedule_warms_each_group_up_to_its_own_rate(second, expected):
    first, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    stand_in = DummyOptim([{"params": first.parameters()}, {"params": other.parameters(), **second}], lr=0.2)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }

    started = complete(DeepSpeedPlugin(config), info(optimizer=stand_in, scheduler=DummyScheduler(stand_in)))

    assert started["scheduler"]["params"]["warmup_max_lr"] == expected
