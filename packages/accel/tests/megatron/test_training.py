"""Megatron-LM training with the real megatron-core, whose CUDA calls are answered by the CPU here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.accelerator import Accelerator
from accel.megatron.dummies import MegatronLMDummyScheduler
from accel.plugins.megatron import MegatronLMPlugin

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.usefixtures("fresh_state"), pytest.mark.filterwarnings("ignore")]

LENGTH, VOCAB, SAMPLES, MICRO, BATCHES, STEPS = 8, 256, 32, 2, 2, 5


def shim() -> Any:
    spec = importlib.util.spec_from_file_location("on_cpu", Path(__file__).with_name("on_cpu.py"))
    module = sys.modules.setdefault("on_cpu", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module.cuda_calls_answered_by_the_cpu()


class GPT2(torch.nn.Module):
    """Only described: Megatron-LM builds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(
            model_type="gpt2",
            n_layer=2,
            n_embd=16,
            n_head=2,
            n_inner=None,
            n_positions=LENGTH,
            vocab_size=VOCAB,
            layer_norm_epsilon=1e-5,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            initializer_range=0.02,
            tie_word_embeddings=True,
        )


OTHER = {
    "use_cpu_initialization": True,  # the same weights for every tp_degree
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}


def make(**options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    options = {"num_micro_batches": BATCHES, "other_megatron_args": OTHER} | options
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))
    model = GPT2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=2)
    tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row} for row in tokens]
    # Processes with data of their own have fewer samples of each step.
    loader = DataLoader(data, batch_size=MICRO // accelerator.engine.data_shard[1] or 1)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def train(steps: int = STEPS, **options: Any) -> dict[str, Any]:
    with shim():
        accelerator, model, optimizer, scheduler, loader = make(**options)
        found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
        for _, batch in zip(range(steps), loader, strict=False):
            output = model(**batch)
            optimizer.zero_grad()
            accelerator.backward(output.loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            found["losses"].append(output.loss.item())
            found["norms"].append(float(optimizer.grad_norm))
            found["rates"].append(scheduler.get_last_lr()[0])
        accelerator.end_training()
        leave()
    return found


def leave() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def test_tensor_parallel_training_has_the_losses_of_one_process(world):
    (one,) = world.run(train, size=1, timeout_s=90)
    both = world.run(train, size=2, timeout_s=90, tp_degree=2)
    assert one["losses"][-1] < one["losses"][0]
    for each in both:
        assert each["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert each["norms"] == pytest.approx(one["norms"], rel=1e-3)
        assert each["rates"] == one["rates"]
