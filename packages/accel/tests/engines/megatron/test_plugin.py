"""MegatronLMPlugin: arguments before environment, and how models, optimizers and schedules are described."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.engines.deepspeed.placeholders import DummyOptim
from accel.engines.megatron import parsers
from accel.engines.megatron.optimizers import MegatronLMDummyScheduler
from accel.engines.megatron.parsers import add_model_config_to_megatron_parser
from accel.engines.megatron.plugin import MegatronLMPlugin


def described(**config: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(**config)
    return model


GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "n_inner": None,
    "n_positions": 8,
    "vocab_size": 300,
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.2,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 5e5},
}


def test_defaults_have_megatrons_names():
    args = MegatronLMPlugin().megatron_lm_default_args
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (1, 1)
    assert (args["num_micro_batches"], args["clip_grad"]) == (1, 1.0)
    assert args["consumed_samples"] == [0, 0, 0]
    assert not {"tp_degree", "return_logits", "custom_loss_function", "micro_batch_size"} & set(args)


def test_the_environment_reaches_settings_and_arguments_come_first(monkeypatch):
    for name, text in {
        "TP_DEGREE": "4",
        "PP_DEGREE": "2",
        "NUM_MICRO_BATCHES": "8",
        "GRADIENT_CLIPPING": "0.5",
        "SEQUENCE_PARALLELISM": "true",
        "RECOMPUTE_ACTIVATIONS": "true",
        "USE_DISTRIBUTED_OPTIMIZER": "true",
        "ATTENTION_DROPOUT": "0.3",
        "NO_LOAD_OPTIM": "true",
    }.items():
        monkeypatch.setenv(f"MEGATRON_LM_{name}", text)
    plugin = MegatronLMPlugin(pp_degree=1)
    args = plugin.megatron_lm_default_args
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (4, 1)
    assert (args["clip_grad"], args["sequence_parallel"]) == (0.5, True)
    assert (args["recompute_granularity"], args["use_distributed_optimizer"]) == ("selective", True)
    assert (plugin.num_micro_batches, plugin.attention_dropout, plugin.no_load_optim) == (8, 0.3, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_degree": 0}, "tp_degree is 0"),
        ({"num_micro_batches": 1.5}, "num_micro_batches is 1.5"),
        ({"pipeline_model_parallel_split_rank": 1}, "split_rank=1.*Leave it out"),
        ({"train_iters": 5, "train_samples": 50}, "train_iters=5 and train_samples=50.*Leave all but one"),
        ({"lr_decay_iters": 5, "lr_decay_samples": 50}, "lr_decay_samples=50"),
        ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, "lr_warmup_fraction=0.1"),
        ({"recompute_method": "uniform"}, "recompute_method='uniform'.*recompute_granularity='full'"),
        ({"recompute_num_layers": 1}, "recompute_num_layers=1"),
        ({"use_precision_aware_optimizer": True}, "use_distributed_optimizer=True too"),
    ],
)
def test_values_that_are_not_allowed_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MegatronLMPlugin(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensorboard_dir": "logs"}, "training loop"),
        ({"set_all_logging_options": True}, "training loop"),
        ({"lr_mult": 2.0}, "scale_lr_cond"),
        ({"custom_train_step_kwargs": {"size": 1}}, "custom_train_step_class"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "optimizer_cpu_offload"),
        ({"expert_tensor_parallel_size": 2}, "num_moe_experts"),
        ({"eod_mask_loss": True}, "megatron_dataset_flag"),
        ({"seq_length": 8}, "megatron_dataset_flag"),
        ({"encoder_seq_length": 8}, "megatron_dataset_flag"),
        ({"decoder_seq_length": 8}, "megatron_dataset_flag"),
        ({"consumed_samples": [1, 0, 0]}, "megatron_dataset_flag"),
        ({"custom_megatron_datasets_provider_function": print}, "megatron_dataset_flag"),
    ],
)
def test_a_setting_that_nothing_reads_is_reported(options, reason):
    (name,) = options
    with pytest.warns(UserWarning, match=f"ignores {name}=.*{reason}") as told:
        MegatronLMPlugin(**options)
    assert told[0].filename == __file__


def test_what_is_read_is_not_reported():
    experts = {"num_moe_experts": 2}
    MegatronLMPlugin(megatron_dataset_flag=True, seq_length=8, eod_mask_loss=True, consumed_samples=[1, 0, 0])
    MegatronLMPlugin(scale_lr_cond=lambda name, parameter: True, lr_mult=2.0)
    MegatronLMPlugin(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    MegatronLMPlugin(expert_tensor_parallel_size=2, other_megatron_args=experts)


FIELDS = {
    "tp_degree": ("tensor_model_parallel_size", 2),
    "pp_degree": ("pipeline_model_parallel_size", 2),
    "use_custom_fsdp": ("use_custom_fsdp", True),
    "optimizer_cpu_offload": ("optimizer_cpu_offload", True),
    "use_distributed_optimizer": ("use_distributed_optimizer", True),
    "decoder_last_pipeline_num_layers": ("decoder_last_pipeline_num_layers", 1),
    "recompute_granularity": ("recompute_granularity", "selective"),
    "attention_backend": ("attention_backend", "unfused"),
    "expert_model_parallel_size": ("expert_model_parallel_size", 2),
    "context_parallel_size": ("context_parallel_size", 2),
    "attention_dropout": ("attention_dropout", 0.3),
    "hidden_dropout": ("hidden_dropout", 0.3),
    "attention_softmax_in_fp32": ("attention_softmax_in_fp32", True),
    "calculate_per_token_loss": ("calculate_per_token_loss", True),
    "num_micro_batches": ("num_micro_batches", 3),
    "gradient_clipping": ("clip_grad", 0.3),
    "sequence_parallelism": ("sequence_parallel", True),
    "num_layers_per_virtual_pipeline_stage": ("num_layers_per_virtual_pipeline_stage", 1),
    "train_iters": ("train_iters", 3),
    "train_samples": ("train_samples", 3),
    "weight_decay_incr_style": ("weight_decay_incr_style", "linear"),
    "lr_decay_style": ("lr_decay_style", "cosine"),
    "lr_decay_iters": ("lr_decay_iters", 3),
    "lr_decay_samples": ("lr_decay_samples", 3),
    "lr_warmup_iters": ("lr_warmup_iters", 3),
    "lr_warmup_samples": ("lr_warmup_samples", 3),
    "lr_warmup_fraction": ("lr_warmup_fraction", 0.3),
    "min_lr": ("min_lr", 0.3),
    "megatron_dataset_flag": ("megatron_dataset_flag", True),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_becomes_megatrons(name):
    theirs, value = FIELDS[name]
    assert MegatronLMPlugin(**{name: value}).megatron_lm_default_args[theirs] == value


def test_what_the_user_says_comes_before_what_model_and_optimizer_say():
    plugin = MegatronLMPlugin(other_megatron_args={"ffn_hidden_size": 48, "adam_beta2": 0.95})
    plugin.set_network_size_args(described(**GPT2))
    plugin.set_optimizer_type(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=1e-3))
    args = plugin.megatron_lm_default_args
    assert (args["ffn_hidden_size"], args["adam_beta2"], args["num_layers"]) == (48, 0.95, 2)


def test_gpt2_is_described():
    plugin = MegatronLMPlugin(tp_degree=2, hidden_dropout=0.0)
    plugin.set_network_size_args(described(**GPT2))
    args = plugin.megatron_lm_default_args
    assert args["model_type_name"] == "gpt"
    assert (args["num_layers"], args["hidden_size"], args["ffn_hidden_size"]) == (2, 16, 64)
    assert args["padded_vocab_size"] == 512  # 128 for each process of tp_degree
    assert (args["attention_dropout"], args["hidden_dropout"]) == (0.1, 0.0)
    assert args["seq_length"] == 8
    plugin.set_network_size_args(described(**GPT2), {"input_ids": torch.zeros(2, 5)})
    assert plugin.megatron_lm_default_args["seq_length"] == 5
    rotary = MegatronLMPlugin(use_rotary_position_embeddings=True)
    rotary.set_network_size_args(described(**GPT2))
    assert rotary.megatron_lm_default_args["position_embedding_type"] == "rope"


def test_llama_is_described():
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(described(**LLAMA))
    args = plugin.megatron_lm_default_args
    assert (args["num_query_groups"], args["normalization"], args["swiglu"]) == (2, "RMSNorm", True)
    assert (args["rotary_base"], args["position_embedding_type"]) == (5e5, "rope")
    assert (args["add_bias_linear"], args["share_embeddings_and_output_weights"]) == (False, False)


def test_another_kind_of_model_is_rejected_until_it_is_described(monkeypatch):
    monkeypatch.setattr(parsers, "_PARSERS", dict(parsers._PARSERS))
    plugin = MegatronLMPlugin()
    with pytest.raises(ValueError, match=r"Linear \(model_type 'own'\).*gpt2, llama, megatron-bert, t5"):
        plugin.set_network_size_args(described(model_type="own"))

    @add_model_config_to_megatron_parser("own-for-this-test")
    def parse(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> dict[str, Any]:
        return {"num_layers": model.config.depth}

    plugin.set_network_size_args(described(model_type="own-for-this-test", depth=3))
    assert plugin.megatron_lm_default_args["num_layers"] == 3


def test_optimizers_are_described():
    plugin = MegatronLMPlugin(end_weight_decay=0.3)
    weight, bias = torch.nn.Linear(2, 2).parameters()
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    plugin.set_optimizer_type(torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-6))
    args = plugin.megatron_lm_default_args
    assert (args["optimizer"], args["lr"], args["weight_decay"]) == ("adam", 1e-3, 0.1)
    assert (args["adam_beta1"], args["adam_beta2"], args["adam_eps"]) == (0.8, 0.9, 1e-6)
    assert (args["start_weight_decay"], args["end_weight_decay"]) == (0.1, 0.3)
    assert args["decoupled_weight_decay"] is True
    plugin.set_optimizer_type(DummyOptim([weight], lr=1e-2, weight_decay=0.2, betas=(0.7, 0.8), eps=1e-5))
    assert (args["optimizer"], args["lr"], args["weight_decay"]) == ("adam", 1e-2, 0.2)
    assert (args["adam_beta1"], args["adam_beta2"], args["adam_eps"]) == (0.7, 0.8, 1e-5)
    plugin.set_optimizer_type(torch.optim.Adam([weight], lr=1e-3))
    assert args["decoupled_weight_decay"] is False
    plugin.set_optimizer_type(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    assert (args["optimizer"], args["sgd_momentum"]) == ("sgd", 0.9)
    with pytest.raises(ValueError, match="Rprop has no counterpart"):
        plugin.set_optimizer_type(torch.optim.Rprop([weight]))
    with pytest.raises(ValueError, match="different learning rates"):
        plugin.set_optimizer_type(torch.optim.SGD([{"params": [weight], "lr": 1.0}, {"params": [bias]}], 0.1))


def test_batch_sizes_and_schedules_count_as_those_of_other_engines():
    plugin = MegatronLMPlugin(num_micro_batches=4)
    plugin.set_training_args(micro_batch_size=3, dp_degree=2)
    assert plugin.global_batch_size == 24
    plugin.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=100, warmup_num_steps=10))
    args = plugin.megatron_lm_default_args
    assert (args["train_iters"], args["lr_warmup_iters"]) == (50, 5)
    fixed = MegatronLMPlugin(train_iters=7, lr_warmup_fraction=0.1)
    fixed.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=7, warmup_num_steps=10))
    args = fixed.megatron_lm_default_args
    assert (args["train_iters"], args["lr_warmup_iters"]) == (7, None)


@pytest.mark.parametrize(
    ("options", "total", "message"),
    [
        ({"train_iters": 5}, 100, r"train_iters=5\).*total_num_steps=100\).*it is 50 of these. Leave one"),
        ({"other_megatron_args": {"train_iters": 5}}, 100, "train_iters=5"),
        ({"train_samples": 500}, 100, r"train_samples=500\).*100\).*50 steps of 24 samples, 1200. Leave"),
        ({"train_iters": 50}, 100, None),
        ({"train_samples": 1190}, 100, None),  # the last step is not whole
        ({"train_samples": 500}, None, None),
    ],
)
def test_a_schedule_of_another_length_than_the_training_is_rejected(
    options: dict[str, Any], total: int | None, message: str | None
):
    plugin = MegatronLMPlugin(num_micro_batches=4, **options)
    plugin.set_training_args(micro_batch_size=3, dp_degree=2)
    before = {name: plugin.megatron_lm_default_args[name] for name in ("train_iters", "train_samples")}
    for _ in range(2):  # as an engine does
        if message is None:
            plugin.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=total))
        else:
            with pytest.raises(ValueError, match=message):
                plugin.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=total))
    assert {name: plugin.megatron_lm_default_args[name] for name in before} == before


def test_precisions():
    plugin = MegatronLMPlugin()
    plugin.set_mixed_precision("bf16")
    assert (plugin.megatron_lm_default_args["bf16"], plugin.megatron_lm_default_args["fp16"]) == (True, False)
    with pytest.raises(ValueError, match="fp8"):
        plugin.set_mixed_precision("fp8")
