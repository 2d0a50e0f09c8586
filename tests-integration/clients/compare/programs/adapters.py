"""peft's adapters: LoRA by accelerate's loop and by transformers' Trainer; saved, loaded and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

IDS = torch.arange(16).reshape(2, 8) + 3


def make_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens to predict."""
    tokenizer = tiny.make_tokenizer()
    rows = [torch.tensor(tokenizer(tiny.make_text(row, 6))["input_ids"]) for row in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


@torch.no_grad()
def outputs_of(model: torch.nn.Module) -> float:
    """Return a figure of what the model answers."""
    return model.eval()(IDS).logits.double().abs().sum().item()


def merge(folder: Path, adapter: Path) -> dict[str, Any]:
    """Load an adapter onto the model that it was trained from, merge it, save the whole, and load that."""
    loaded = PeftModel.from_pretrained(tiny.make_model(), adapter)
    answers = [outputs_of(loaded)]
    merged = loaded.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    answers.append(outputs_of(merged))
    answers.append(outputs_of(type(merged).from_pretrained(folder / "merged", device_map="auto")))
    return {"answers": answers, "weights": tiny.weights_of(merged)}


def loop(folder: Path) -> dict[str, Any]:
    """Train an adapter as peft's examples do, with dropout, bf16, accumulation and clipping."""
    set_seed(3)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    base = tiny.make_model()
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    loader = DataLoader(make_rows(11), batch_size=2)
    evaluation = DataLoader(make_rows(7), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 12)
    model, loader, evaluation, optimizer, schedule = accelerator.prepare(
        model, loader, evaluation, optimizer, schedule
    )
    losses, rates, norms, accuracies = [], [], [], []
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            rates.append(schedule.get_last_lr()[0])
        model.eval()
        for batch in evaluation:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            accuracies.append([len(labels), (guesses == labels).sum().item()])
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "adapter", save_function=accelerator.save, state_dict=accelerator.get_state_dict(model)
    )
    trained = tiny.weights_of(model)
    with torch.no_grad():
        for parameter in unwrapped.parameters():
            parameter.zero_()
    accelerator.load_state(str(folder / "state"))
    accelerator.end_training()
    return {
        "losses": losses,
        "rates": rates,
        "norms": norms,
        "accuracies": accuracies,
        "weights": [trained, tiny.weights_of(model)],
        **merge(folder, folder / "adapter"),
    }


def trainer(folder: Path) -> dict[str, Any]:
    """Train with transformers' Trainer, which writes adapters as checkpoints and continues from one."""
    set_seed(3)
    found = []
    for resume in (False, True):
        model = get_peft_model(
            tiny.make_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
        )
        arguments = TrainingArguments(
            folder / "run",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=8 if resume else 5,
            save_steps=2,
            train_sampling_strategy="sequential",
            logging_steps=1,
            learning_rate=0.02,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            eval_strategy="steps",
            eval_steps=2,
        )
        run = Trainer(model, arguments, train_dataset=make_rows(10), eval_dataset=make_rows(3))
        run.train(resume_from_checkpoint=resume)
        found.append({"log": tiny.log_of(run), "weights": tiny.weights_of(model)})
    run.save_model(folder / "adapter")
    return {"runs": found, **merge(folder, folder / "adapter")}


if __name__ == "__main__":
    tiny.run_parts([loop, trainer])
