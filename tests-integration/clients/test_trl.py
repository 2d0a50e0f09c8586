"""trl on accel: its trainers train."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import accel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_state")]

TEXT = "w1 w2 w3 w4 w5 w6 w7 w8"
STEPS = 3
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_length": 16,
    "gradient_checkpointing": False,
}


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=61, pad_token_id=0, bos_token_id=None, eos_token_id=1, **sizes)
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(58)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def losses(trainer: Any) -> list[float]:
    trainer.train()
    assert isinstance(trainer.accelerator, accel.Accelerator)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_supervised_finetuning_takes_the_steps_of_a_plain_loop(tmp_path: Path):
    tokenizer, plain = make_tokenizer(), make()
    rows = Dataset.from_dict({"text": [TEXT] * 8})  # all equal: the order does not matter
    trainer = SFTTrainer(
        make(), SFTConfig(tmp_path, **OPTIONS), train_dataset=rows, processing_class=tokenizer
    )

    found = losses(trainer)

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids = torch.tensor([[*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]] * 2)
    expected = []
    for _ in range(STEPS):
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]


def test_preferences_are_learned(tmp_path: Path):
    rows = Dataset.from_dict(
        {"prompt": ["w1 w2 w3 "] * 8, "chosen": ["w4 w5 w6"] * 8, "rejected": ["w7 w8 w9"] * 8}
    )
    trainer = DPOTrainer(
        make(),
        make(),
        args=DPOConfig(tmp_path, **OPTIONS),
        train_dataset=rows,
        processing_class=make_tokenizer(),
    )

    found = losses(trainer)

    assert found[0] == pytest.approx(0.6931472, rel=1e-5)  # log 2: the model is the reference still
    assert found[0] > found[1] > found[2]
