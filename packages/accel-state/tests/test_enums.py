from __future__ import annotations

import json
import pickle

import pytest

from accel_state import enums

ALL = [value for name, value in vars(enums).items() if name[0] != "_" and value.__module__ == enums.__name__]

DOCUMENTED = {
    "DDPCommunicationHookType": "batched_power_sgd bf16 fp16 no power_sgd",
    "DistributedType": "DEEPSPEED FSDP MEGATRON_LM MULTI_CPU MULTI_GPU MULTI_HPU MULTI_MLU MULTI_MUSA "
    "MULTI_NEURON MULTI_NPU MULTI_SDAA MULTI_XPU NO XLA",
    "ComputeEnvironment": "AMAZON_SAGEMAKER LOCAL_MACHINE",
    "CustomDtype": "fp8 int2 int4",
    "DynamoBackend": "AOT_EAGER AOT_TORCHXLA_TRACE_ONCE AOT_TS_NVFUSER CUDAGRAPHS EAGER FX2TRT HPU_BACKEND "
    "INDUCTOR NEURON NO NVPRIMS_NVFUSER OFI ONNXRT TENSORRT TORCHXLA_TRACE_ONCE TVM",
    "LoggerType": "aim all clearml comet_ml dvclive jsonl mlflow swanlab tensorboard trackio wandb",
    "PrecisionType": "bf16 fp16 fp8 no",
    "RNGType": "cuda generator hpu mlu musa neuron npu sdaa torch xla xpu",
    "SageMakerDistributedType": "DATA_PARALLEL MODEL_PARALLEL NO",
}


def test_values_are_the_documented_ones() -> None:
    assert {enum.__name__: " ".join(sorted(enum.list())) for enum in ALL} == DOCUMENTED


def test_member_names() -> None:
    for enum in ALL:
        for member in enum:
            if member is not enums.LoggerType.COMETML:
                assert member.name == member.value.upper()
    assert enums.LoggerType.COMETML == "comet_ml"


@pytest.mark.parametrize("enum", ALL, ids=lambda enum: enum.__name__)
def test_members_are_their_values(enum: type[enums._StringEnum]) -> None:
    for member in enum:
        text = member.value
        assert enum(text) is member
        assert enum(text.upper()) is member
        assert enum(f" {text.lower()} ") is member
        assert member == text
        assert {text: 1}[member] == 1
        assert text in {member}
        assert text in enum
        assert member in enum
        assert (str(member), f"{member}", "%s" % member) == (text, text, text)  # noqa: UP031
        assert json.loads(json.dumps([member])) == [text]
        assert pickle.loads(pickle.dumps(member)) is member
    assert "nonsense" not in enum
    assert 7 not in enum


def test_unknown_value_names_it_the_allowed_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'inductr' is not a valid DynamoBackend; allowed.*EAGER.*mean 'INDUCTOR'"
    ):
        enums.DynamoBackend("inductr")
    with pytest.raises(
        ValueError, match=r"16 is not a valid PrecisionType; allowed values: no, fp8, fp16, bf16"
    ):
        enums.PrecisionType(16)


def test_tpu_is_an_old_spelling_of_xla() -> None:
    with pytest.warns(FutureWarning, match="'TPU' is an old spelling; use 'XLA'") as caught:
        assert enums.DistributedType("TPU") is enums.DistributedType.XLA
    assert caught[0].filename == __file__
