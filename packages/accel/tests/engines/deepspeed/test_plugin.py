"""DeepSpeedPlugin: every field, files, the environment, and what has to agree; DeepSpeed is not needed."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch

from accel.engines.deepspeed.config import HfDeepSpeedConfig
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.env import patch_environment


def test_the_defaults():
    plugin = DeepSpeedPlugin()

    assert plugin.deepspeed_config == {
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    assert plugin.deepspeed_config is plugin.hf_ds_config.config
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (
        2,
        None,
        None,
    )
    assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("none", "none")
    assert (plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (False, False)
    assert plugin.is_train_batch_min is True
    assert plugin.selected is False


def test_arguments_make_the_configuration():
    plugin = DeepSpeedPlugin(
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_param_device="cpu",
        offload_optimizer_nvme_path="/fast",
        zero3_init_flag=True,
        zero3_save_16bit_model=True,
        transformer_moe_cls_names="Experts, Others",
    )

    assert plugin.deepspeed_config == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    assert plugin.is_zero3_init_enabled()


def test_the_environment_fills_what_is_not_given():
    with patch_environment(
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="2",
        ACCELERATE_GRADIENT_CLIPPING="1.5",
        ACCELERATE_DEEPSPEED_ZERO_STAGE="3",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="nvme",
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH="/fast",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="true",
        ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL="true",
        ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES="Experts,Others",
    ):
        plugin = DeepSpeedPlugin()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            given = DeepSpeedPlugin(zero_stage=1, gradient_clipping=0.1, offload_param_device="none")

    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping, plugin.zero_stage) == (2, 1.5, 3)
    assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("cpu", "nvme")
    assert plugin.offload_param_nvme_path == "/fast"
    assert plugin.zero3_init_flag
    assert plugin.zero3_save_16bit_model
    assert plugin.transformer_moe_cls_names == "Experts,Others"
    assert (given.zero_stage, given.gradient_clipping) == (1, 0.1)
    messages = sorted(str(warning.message) for warning in told)
    beginnings = (
        "DeepSpeedPlugin ignores offload_param_nvme_path='/fast'",
        "DeepSpeedPlugin ignores transformer_moe_cls_names='Experts,Others'",
        "zero3_init_flag=True is ignored: with zero_stage=1",
    )
    assert len(messages) == 3
    assert all(text.startswith(start) for text, start in zip(messages, beginnings, strict=True))


def test_a_file_comes_before_the_defaults_and_agrees_with_what_else_is_given(tmp_path):
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto", "train_batch_size": 8}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(config))
    with patch_environment(ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file)):
        plugin = DeepSpeedPlugin(gradient_clipping=0.5, zero_stage=3)

    assert plugin.deepspeed_config == {**config, "gradient_clipping": 0.5}
    assert plugin.zero3_init_flag is True  # with a configuration
    assert DeepSpeedPlugin(config, zero3_init_flag=False).zero3_init_flag is False
    assert config["gradient_clipping"] == "auto"  # a copy was filled in


def test_an_object_with_the_same_methods_is_taken_as_it_is():
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 1}})

    plugin = DeepSpeedPlugin(hf_ds_config=config)

    assert plugin.hf_ds_config is config
    plugin.deepspeed_config = {"zero_optimization": {"stage": 2}}
    assert config.is_zero2()


def test_an_error_lists_everything_that_is_given_twice_and_differs():
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "gradient_accumulation_steps": 4}

    with pytest.raises(ValueError, match="differ") as error:
        DeepSpeedPlugin(config, zero_stage=3, gradient_clipping=0.5, gradient_accumulation_steps=4)

    assert str(error.value).splitlines()[1:-1] == [
        "- gradient_clipping=1.0 in DeepSpeed's configuration, gradient_clipping=0.5 here",
        "- zero_optimization.stage=2 in DeepSpeed's configuration, zero_stage=3 here",
    ]


def test_an_error_says_what_comes_from_the_config_file_of_the_launcher():
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    launched = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_clipping",
    }

    with patch_environment(**launched), pytest.raises(ValueError, match="differ") as error:
        DeepSpeedPlugin(config, zero_stage=3)

    stage, clipping = str(error.value).splitlines()[1:-1]
    assert stage.endswith("zero_stage=3 here")
    assert clipping.endswith("gradient_clipping=0.5 in the config file of accel launch")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero_stage": 4}, "stages 0, 1, 2 and 3"),
        ({"offload_optimizer_device": "gpu"}, "it takes 'none', 'cpu', 'nvme'"),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs zero_stage=1 or more, and it is 0"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "needs zero_stage=3, and it is 2"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "needs offload_param_nvme_path"),
        ({"enable_msamp": True}, "MS-AMP is not supported"),
        ({"hf_ds_config": 3}, "not int"),
    ],
)
def test_what_is_not_known_is_rejected_with_what_is(options, text):
    with pytest.raises(ValueError, match=text):
        DeepSpeedPlugin(**options)


def test_sharding_while_building_is_for_stage_3():
    with pytest.warns(UserWarning, match="zero3_init_flag=True is ignored"):
        plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)

    assert not plugin.is_zero3_init_enabled()
    with plugin.zero3_init_context_manager(enable=True):
        assert not plugin.is_zero3_init_enabled()


def test_values_are_requested_by_dotted_names_and_filled_in():
    plugin = DeepSpeedPlugin({"a": {"b": "auto", "c": 2}, "d": "auto", "zero_optimization": {"stage": 0}})
    found: list[str] = []

    assert (plugin.get_value("a.c"), plugin.get_value("a.x", 5), plugin.get_value("x.y")) == (2, 5, None)
    assert plugin.is_auto("a.b")
    assert not plugin.is_auto("a.c")
    plugin.fill_match("a.b", found, **{"a.b": 7})
    plugin.fill_match("a.c", found, **{"a.c": 3})
    plugin.fill_match("a.c", found, must_match=False, **{"a.c": 4})
    plugin.fill_match("nowhere", found, nowhere=1)

    assert plugin.deepspeed_config["a"] == {"b": 7, "c": 2}
    assert found == ["- a.c=2, and here it is 3"]
    with pytest.raises(ValueError, match="d is 'auto'"):
        plugin.fill_match("d")
    plugin.forget_filled()
    assert plugin.is_auto("a.b")


def test_the_whole_configuration_is_processed_and_every_difference_listed():
    config = {"a": {"b": "auto", "c": 2}, "d": "auto", "e": 1, "zero_optimization": {"stage": 0}}
    plugin = DeepSpeedPlugin(config)

    with pytest.raises(ValueError, match="differ") as error:
        plugin.deepspeed_config_process(**{"a.b": 1, "a.c": 3, "e": 2})

    assert str(error.value).splitlines()[1:-1] == [
        "- a.c=2, and here it is 3",
        "- d is 'auto', and no prepared object has a value for it",
        "- e=1, and here it is 2",
    ]
    plugin.deepspeed_config_process(must_match=False, **{"a.c": 3, "d": 4, "e": 2})
    assert plugin.deepspeed_config == {
        "a": {"b": 1, "c": 2},
        "d": 4,
        "e": 1,
        "zero_optimization": {"stage": 0},
    }


@pytest.mark.parametrize(
    ("given", "precision", "expected"),
    [
        ({}, "bf16", (False, True)),
        ({"bf16": {"enabled": "auto"}}, "no", (False, False)),
        ({"fp16": {"enabled": True}}, "fp16", (True, False)),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16", (False, False)),
    ],
)
def test_the_precision_is_switched_on(given, precision, expected):
    plugin = DeepSpeedPlugin(given)

    plugin.set_mixed_precision(precision)

    assert (plugin.get_value("fp16.enabled"), plugin.get_value("bf16.enabled")) == expected


def test_another_precision_than_the_configurations_is_rejected():
    plugin = DeepSpeedPlugin({"bf16": {"enabled": True}, "fp16": {"enabled": False}})

    with pytest.raises(ValueError, match="mixed_precision='fp16' here") as error:
        plugin.set_mixed_precision("fp16")

    assert len(str(error.value).splitlines()) == 4  # both


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload_optimizer_nvme_path": "/disk"}, "offload_optimizer_device is not 'nvme'"),
        ({"offload_param_nvme_path": "/disk"}, "offload_param_device is not 'nvme'"),
        ({"msamp_opt_level": "O2"}, "enable_msamp is not set"),
        ({"transformer_moe_cls_names": "Experts"}, "only zero_stage=3"),
    ],
)
def test_a_setting_that_nothing_reads_is_reported(options, reason):
    (name,) = options
    with pytest.warns(UserWarning, match=f"ignores {name}=.*{reason}") as told:
        DeepSpeedPlugin(**options)
    assert told[0].filename == __file__


@pytest.mark.usefixtures("fresh_state")
def test_one_of_several_is_selected_by_the_state():
    plugins = {"train": DeepSpeedPlugin(zero_stage=2), "judge": DeepSpeedPlugin(zero_stage=3)}
    state = AcceleratorState(deepspeed_plugin=plugins, cpu=True)

    assert [plugin.selected for plugin in plugins.values()] == [True, False]
    state.select_deepspeed_plugin("judge")
    assert [plugin.selected for plugin in plugins.values()] == [False, True]
    with pytest.raises(RuntimeError, match="select_deepspeed_plugin"):
        plugins["train"].select()
    plugins["train"].select(_from_accelerator_state=True)
    assert plugins["train"].selected


def test_classes_of_experts_that_the_model_has_not_are_named():
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Linear, Experts")

    with pytest.raises(ValueError, match="Experts, of which Sequential has no module"):
        plugin.set_moe_leaf_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_plugins_are_copied_with_their_configuration():
    plugin = DeepSpeedPlugin(zero_stage=1)

    other = copy.deepcopy(plugin)
    other.deepspeed_config["zero_optimization"]["stage"] = 0

    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 1
