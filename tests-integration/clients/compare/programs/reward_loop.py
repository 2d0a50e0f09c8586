"""A script in the style of trl's examples: data prepared by the main process first, generation split over
processes, rewards gathered, objects broadcast, an adapter trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    broadcast_object_list,
    gather,
    gather_object,
    is_peft_model,
    is_wandb_available,
    set_seed,
    tqdm,
)
from accelerate.utils.versions import is_torch_version
from datasets import Dataset, load_from_disk
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from trl.models import unwrap_model_for_generation

logger = get_logger(__name__)


def reward(folder: Path) -> dict[str, Any]:
    """Generate, reward, learn: two rounds of it."""
    state = PartialState(cpu=True)
    with state.main_process_first():
        if state.is_main_process:
            rows = {"prompt": [tiny.make_text(row, 3) for row in range(7)]}
            Dataset.from_dict(rows).save_to_disk(folder / "rows")
        prompts = load_from_disk(folder / "rows")["prompt"]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(9, device_specific=True)
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    model = get_peft_model(tiny.make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    name = [f"run of {accelerator.num_processes}" if accelerator.is_main_process else None]
    broadcast_object_list(name, from_process=0)
    found: dict[str, Any] = {"name": name[0], "losses": [], "rewards": [], "texts": []}
    set_seed(9)
    for _ in tqdm(range(2), desc="rounds", disable=True):
        with accelerator.split_between_processes(list(prompts), apply_padding=True) as own:
            batch = tokenizer(own, return_tensors="pt", padding=True)
            with unwrap_model_for_generation(model, accelerator) as generator:
                ids = generator.generate(**batch, max_new_tokens=4, do_sample=False)
            texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found["texts"].append(gather_object(texts)[: len(prompts)])
        rewards = torch.tensor([len(set(text.split())) / 4 for text in texts])
        everyone = gather(rewards)
        found["rewards"].append(everyone.tolist())
        advantages = rewards - everyone.mean()
        for part in DataLoader(list(zip(ids, advantages, strict=True)), batch_size=2):
            tokens, advantage = part
            with accelerator.accumulate(model), accelerator.autocast():
                scores = model(tokens).logits[:, :-1].log_softmax(-1)
                chosen = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
                loss = -(chosen.mean(1) * (advantage + 0.5)).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
    padded = accelerator.pad_across_processes(torch.ones(1, 2 + accelerator.process_index), dim=1)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "adapter", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.wait_for_everyone()
    merged = PeftModel.from_pretrained(tiny.make_model(), folder / "adapter").merge_and_unload()
    found |= {
        "weights": tiny.weights_of(unwrapped),
        "merged": tiny.weights_of(merged),
        "padded": accelerator.gather(padded).tolist(),
        "peft": [is_peft_model(model), is_peft_model(unwrapped), is_peft_model(unwrapped.base_model)],
        "state": [
            accelerator.device.type,
            state.distributed_type == DistributedType.NO,
            state.num_processes,
            str(accelerator.mixed_precision),
            str(AcceleratorState().deepspeed_plugin),
        ],
        "versions": [is_torch_version(">=", "2.0"), bool(is_wandb_available())],
    }
    logger.info("done", main_process_only=True)
    accelerator.wait_for_everyone()
    return found


if __name__ == "__main__":
    tiny.run_parts([reward])
