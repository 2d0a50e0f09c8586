"""Settings by Megatron-LM's names as arguments of megatron-core's classes; without megatron-core."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.megatron import arguments
from accel.engines.megatron.data import MegatronLMDummyDataLoader, with_micro_batches
from accel.engines.megatron.models.steps import causal_mask, hidden_from
from accel.engines.megatron.models.t5 import T5TrainStep
from accel.engines.megatron.optimizers import schedule_arguments
from accel.engines.megatron.options import check_transformer_engine
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel.engines.megatron.runtime import check_device

pytestmark = pytest.mark.usefixtures("fresh_state")


def args_of(**options: object) -> dict[str, object]:
    return MegatronLMPlugin(**options).megatron_lm_default_args


def test_sizes_of_process_groups():
    args = args_of(tp_degree=2, pp_degree=2, context_parallel_size=2, expert_model_parallel_size=4)
    assert arguments.parallel_arguments(args) == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
    }
    virtual = args_of(pp_degree=2, num_layers_per_virtual_pipeline_stage=3) | {"num_layers": 12}
    assert arguments.parallel_arguments(virtual)["virtual_pipeline_model_parallel_size"] == 2
    with pytest.raises(ValueError, match="num_layers_per_virtual_pipeline_stage=3 with pp_degree=1"):
        arguments.parallel_arguments(args_of(num_layers_per_virtual_pipeline_stage=3) | {"num_layers": 12})


def test_models_get_their_fields_and_no_others():
    args = args_of(pp_degree=2, decoder_last_pipeline_num_layers=1, attention_backend=True) | {
        "num_layers": 4,
        "bf16": True,
        "swiglu": True,
        "lr": 0.1,
    }
    found = arguments.transformer_arguments(args, {"num_layers", "bf16", "attention_backend"})
    assert found == {
        "num_layers": 4,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "num_layers_in_last_pipeline_stage": 1,
        "activation_func": torch.nn.functional.silu,
    }


def test_optimizers_and_data_parallelism_get_their_fields():
    args = args_of(optimizer_cpu_offload=True, use_distributed_optimizer=True, use_custom_fsdp=True)
    known = {"clip_grad", "use_distributed_optimizer", "use_custom_fsdp"}
    optimizer = arguments.optimizer_arguments(args, known - {"use_custom_fsdp"})
    assert optimizer["optimizer_offload_fraction"] == 1.0
    assert (optimizer["clip_grad"], optimizer["use_distributed_optimizer"]) == (1.0, True)
    wrapping = arguments.ddp_arguments(args | {"fp16": True}, known - {"clip_grad"})
    assert (wrapping["grad_reduce_in_fp32"], wrapping["use_megatron_fsdp"]) == (True, True)
    assert "use_custom_fsdp" not in wrapping


def test_a_misspelt_setting_is_rejected_with_the_nearest():
    arguments.check_names({"moe_grouped_gemm": True}, {"moe_grouped_gemm"})
    with pytest.raises(ValueError, match=r"'moe_gruped_gemm'.*Did you mean 'moe_grouped_gemm'"):
        arguments.check_names({"moe_gruped_gemm": True}, {"moe_grouped_gemm"})


SCHEDULE = {
    "global_batch_size": 8,
    "lr": 0.1,
    "min_lr": 0.0,
    "lr_decay_style": "cosine",
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "constant",
}


def test_schedules_count_samples():
    found = schedule_arguments(SCHEDULE | {"train_iters": 100, "lr_warmup_iters": 10})
    assert (found["lr_decay_steps"], found["lr_warmup_steps"], found["wd_incr_steps"]) == (800, 80, 800)
    given = {"train_samples": 1000, "lr_decay_samples": 500, "lr_warmup_fraction": 0.1}
    found = schedule_arguments(SCHEDULE | given)
    assert (found["lr_decay_steps"], found["lr_warmup_steps"], found["wd_incr_steps"]) == (500, 50, 1000)
    with pytest.raises(ValueError, match="total_num_steps"):
        schedule_arguments(SCHEDULE)
    ending = SCHEDULE | {"train_iters": 100, "lr_decay_style": "WSD"}
    assert schedule_arguments(ending | {"lr_wsd_decay_iters": 5})["wsd_decay_steps"] == 40
    with pytest.raises(ValueError, match="'lr_wsd_decay_iters'"):
        schedule_arguments(ending)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"attention_backend": "flash", "tp_degree": 2, "sequence_parallelism": True},
            "sequence_parallelism",
        ),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True},
            "use_precision_aware_optimizer=True",
        ),
    ],
)
def test_what_transformer_engine_does_is_rejected_without_it(monkeypatch, options, named):
    monkeypatch.setattr("accel.engines.megatron.options.is_package_available", lambda module: False)
    with pytest.raises(ImportError, match=rf"{named}.*'\./packages/accel\[transformer-engine\]'"):
        check_transformer_engine(MegatronLMPlugin(**options))
    check_transformer_engine(MegatronLMPlugin(tp_degree=2, attention_backend=True))
    own = MegatronLMPlugin(context_parallel_size=2, custom_model_provider_function=lambda first, last: None)
    check_transformer_engine(own)
    monkeypatch.setattr("accel.engines.megatron.options.is_package_available", lambda module: True)
    check_transformer_engine(MegatronLMPlugin(**options))


def test_loaders_hold_the_micro_batches_of_a_step():
    loader = DataLoader(range(20), batch_size=3, drop_last=True, num_workers=0)
    assert with_micro_batches(loader, 1) is loader
    assert [len(batch) for batch in with_micro_batches(loader, 2)] == [6, 6, 6]
    own = DataLoader(range(20), batch_sampler=[[0, 1]])
    with pytest.raises(ValueError, match="Set batch_size"):
        with_micro_batches(own, 2)


def test_datasets_are_described():
    data = MegatronLMDummyDataLoader(data_path=["a", "b"], splits_string="9,1,0", seq_length=4, seed=1)
    assert data.set_megatron_data_args() == {
        "blend": (["a", "b"], None),
        "split": "9,1,0",
        "random_seed": 1,
        "seq_length": 4,
    }
    with pytest.raises(ValueError, match="data_path"):
        MegatronLMDummyDataLoader().set_megatron_data_args()


def test_masks_are_true_where_nothing_is_attended_to():
    kept = torch.tensor([[1, 1, 0]])
    assert hidden_from(kept, kept).tolist() == [
        [[False, False, True], [False, False, True], [True, True, True]]
    ]
    assert torch.equal(T5TrainStep.attn_mask_postprocess(kept), hidden_from(kept, kept))
    assert causal_mask(2, torch.device("cpu")).tolist() == [[[[False, True], [False, False]]]]
    assert causal_mask(3, torch.device("cpu"), kept)[0, 0, 1].tolist() == [False, False, True]
    assert T5TrainStep.get_decoder_mask(2, "cpu").tolist() == [[[False, True], [False, False]]]
    assert T5TrainStep.get_enc_dec_mask(kept, 2, "cpu").tolist() == [[[False, False, True]] * 2]


def test_without_megatron_core_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr("accel.engines.is_package_available", lambda module: False)
    with pytest.raises(ImportError, match=r"MEGATRON_LM.*megatron\.core.*'\./packages/accel\[megatron\]'"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())


def test_the_environment_requests_megatron(monkeypatch):
    monkeypatch.setattr("accel.engines.is_package_available", lambda module: False)
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ImportError, match="MEGATRON_LM"):
        Accelerator(cpu=True)


def test_a_process_without_cuda_is_rejected():
    with pytest.raises(ValueError, match=r"CUDA devices.*runs on cpu"):
        check_device(torch.device("cpu"))


def test_another_engines_plugin_is_rejected():
    with pytest.raises(TypeError, match="MegatronLMPlugin"):
        Accelerator(cpu=True, megatron_lm_plugin=FullyShardedDataParallelPlugin())
