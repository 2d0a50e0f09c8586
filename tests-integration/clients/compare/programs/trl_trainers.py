"""trl's trainers on a tiny model: supervised finetuning, preferences, and rewards of what is generated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "seed": 7,
    "train_sampling_strategy": "sequential",
}


def finetune(folder: Path) -> dict[str, Any]:
    """Learn completions of prompts, with evaluation and checkpoints, and continue from a checkpoint."""
    rows = Dataset.from_dict(
        {
            "prompt": [tiny.make_text(row, 2 + row % 3) + " " for row in range(18)],
            "completion": [tiny.make_text(row + 1, 3 + row % 4) for row in range(18)],
        }
    )
    options = {
        **OPTIONS,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_total_limit": 2,
        "max_length": 16,
    }
    trainers = []
    for name, resume in (("whole", False), ("resumed", True)):
        if resume:
            options["max_steps"] = trainers[0].state.global_step + 2
        trainer = SFTTrainer(
            tiny.make_model(),
            SFTConfig(folder / ("whole" if resume else name), **options),
            train_dataset=rows,
            eval_dataset=rows.select(range(5)),
            processing_class=tiny.make_tokenizer(),
        )
        trainer.train(resume_from_checkpoint=resume)
        trainers.append(trainer)
    trainer.save_model(folder / "final")
    predictions = trainer.predict(trainer.eval_dataset)
    return {
        "log": [tiny.log_of(trainer) for trainer in trainers],
        "weights": [tiny.weights_of(trainer.model) for trainer in trainers],
        "predictions": float(abs(predictions.predictions).sum()),
        "metrics": tiny.numbers_of(predictions.metrics),
    }


def pack(folder: Path) -> dict[str, Any]:
    """Learn texts that are packed together, with an adapter."""
    rows = Dataset.from_dict({"text": [tiny.make_text(row, 4 + row % 5) for row in range(24)]})
    trainer = SFTTrainer(
        tiny.make_model(attn_implementation="eager"),
        SFTConfig(folder, **OPTIONS, packing=True, max_length=16, max_steps=4, dataset_num_proc=None),
        train_dataset=rows,
        processing_class=tiny.make_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
    )
    trainer.train()
    return {"log": tiny.log_of(trainer), "weights": tiny.weights_of(trainer.model)}


def prefer(folder: Path, **more: Any) -> dict[str, Any]:
    """Learn preferences against a reference model."""
    rows = Dataset.from_dict(
        {
            "prompt": [tiny.make_text(row, 3) + " " for row in range(8)],
            "chosen": [tiny.make_text(row + 2, 3) for row in range(8)],
            "rejected": [tiny.make_text(row + 5, 2 + row % 3) for row in range(8)],
        }
    )
    adapter = more.pop("peft_config", None)
    trainer = DPOTrainer(
        tiny.make_model(),
        None if adapter else tiny.make_model(),
        args=DPOConfig(
            folder,
            **OPTIONS,
            max_length=16,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=4,
            **more,
        ),
        train_dataset=rows,
        eval_dataset=rows.select(range(3)),
        processing_class=tiny.make_tokenizer(),
        peft_config=adapter,
    )
    trainer.train()
    return {"log": tiny.log_of(trainer), "weights": tiny.weights_of(trainer.model)}


def prefer_with_an_adapter(folder: Path) -> dict[str, Any]:
    """Learn preferences with an adapter; the reference's figures are computed once, before the training."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    return prefer(folder, peft_config=adapter, precompute_ref_log_probs=True, gradient_accumulation_steps=2)


def count_even(completions: list[str], **columns: Any) -> list[float]:
    """Reward even words."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()) / 4 for text in completions
    ]


def reward(folder: Path) -> dict[str, Any]:
    """Generate completions, reward them, and learn from that, each generation for two steps."""
    rows = Dataset.from_dict({"prompt": [tiny.make_text(row, 3) for row in range(8)]})
    start = folder / f"start-{os.environ.get('RANK', '0')}"  # each process its own: none waits for another
    tiny.make_model().save_pretrained(start)
    trainer = GRPOTrainer(
        str(start),
        count_even,
        args=GRPOConfig(
            folder,
            **OPTIONS | {"per_device_train_batch_size": 4},
            num_generations=4,
            shuffle_dataset=False,
            max_completion_length=6,
            max_steps=4,
            num_iterations=2,
            steps_per_generation=2,
            gradient_accumulation_steps=2,
            beta=0.1,
            epsilon=0.2,
            temperature=1.0,
            eval_strategy="steps",
            eval_steps=4,
            per_device_eval_batch_size=4,
            save_steps=4,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny.make_tokenizer(),
    )
    trainer.train()
    return {"log": tiny.log_of(trainer), "weights": tiny.weights_of(trainer.model)}


if __name__ == "__main__":
    tiny.run_parts([finetune, pack, prefer, prefer_with_an_adapter, reward])
