"""transformers' Trainer on a small GPT-2: `python trainer.py FOLDER CASE...`, one folder for each case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

SAVING = {"save_strategy": "steps", "save_steps": 3}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "reshard_after_forward": True}
CASES: dict[str, dict[str, Any]] = {
    "whole": {"gradient_accumulation_steps": 2, **SAVING},
    "resumed": {"gradient_accumulation_steps": 2, **SAVING},
    "limited": {**SAVING, "max_steps": 10, "save_total_limit": 2},
    "bf16": {"bf16": True, "max_steps": 4},
    "fsdp2": {**SAVING, "max_steps": 4, "fsdp": "full_shard auto_wrap", "fsdp_config": FSDP2},
    "zero2": {**SAVING, "max_steps": 4, "deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "zero3": {**SAVING, "max_steps": 4, "deepspeed": {**ZERO, "zero_optimization": {"stage": 3}}},
}


def rows(count: int, first: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(first)
    ids = torch.randint(61, (count, 8), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


def run(case: str, folder: Path) -> dict[str, Any]:
    if "deepspeed" in CASES[case]:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    arguments = TrainingArguments(
        folder / case,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        num_train_epochs=2,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=7,
        **{"save_strategy": "no", **CASES[case]},
    )
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    trainer = Trainer(
        model,
        arguments,
        data_collator=default_data_collator,
        train_dataset=rows(22, 0),
        eval_dataset=rows(7, 1),
    )
    trainer.train(resume_from_checkpoint=str(folder / "whole/checkpoint-3") if case == "resumed" else None)
    steps = [
        [record["step"], record["loss"], record["learning_rate"], float(record.get("grad_norm", -1))]
        for record in trainer.state.log_history
        if "loss" in record
    ]
    evaluated = trainer.evaluate()
    predicted = trainer.predict(rows(5, 2))
    trainer.save_model(str(folder / case / "last"))
    return {
        "steps": steps,
        "evaluated": untimed(evaluated),
        "predicted": untimed(predicted.metrics),
        "shape": list(predicted.predictions.shape),
        "logits": predicted.predictions.astype("float64").sum(axis=(1, 2)).tolist(),
        "labels": predicted.label_ids.tolist(),
        "epoch": trainer.state.epoch,
        "processes": trainer.accelerator.num_processes,
    }


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.endswith(("_runtime", "_per_second"))}


def main(folder: Path, *cases: str) -> None:
    results = {case: run(case, folder) for case in cases}
    (folder / "results.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
