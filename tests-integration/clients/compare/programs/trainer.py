"""transformers' Trainer on a small GPT-2: `python trainer.py FOLDER CASE...`, one folder for each case."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# Twelve steps on one process and six on two: checkpoint-2 is within the first epoch.
SAVING = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
SHORT = {**SAVING, "max_steps": 5}
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
ZERO2 = {**ZERO, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
ZERO3 = {
    **ZERO,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "reshard_after_forward": True}
FSDP = {**SHORT, "fsdp": "full_shard auto_wrap"}
FULL = {**FSDP, "fsdp_config": {**FSDP2, "state_dict_type": "FULL_STATE_DICT"}}
PARTS = {**FSDP, "fsdp_config": {**FSDP2, "state_dict_type": "SHARDED_STATE_DICT"}}
CASES: dict[str, dict[str, Any]] = {
    "whole": SAVING,
    "whole_resumed": {**SAVING, "resume": "whole"},
    "limited": {"max_steps": 10, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2},
    "bf16": {"bf16": True, "max_steps": 4},
    "best": {**SAVING, **BEST, "eval_accumulation_steps": 1, "dataloader_num_workers": 1},
    "stream": SHORT,
    "stream_resumed": {**SHORT, "resume": "stream"},
    "compiled": {**SAVING, "torch_compile": True},
    "compiled_resumed": {**SAVING, "torch_compile": True, "resume": "compiled"},
    "configured": SHORT,  # sharded, as the config file of the launcher says
    "fsdp2": FULL,
    "fsdp2_resumed": {**FULL, "resume": "fsdp2"},
    "parts": PARTS,
    "parts_resumed": {**PARTS, "resume": "parts"},
    "zero2": {**SHORT, "deepspeed": ZERO2},
    "zero2_resumed": {**SHORT, "deepspeed": ZERO2, "resume": "zero2"},
    "zero3": {**SHORT, "deepspeed": ZERO3},
    "zero3_resumed": {**SHORT, "deepspeed": ZERO3, "resume": "zero3"},
}


def rows(count: int, first: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(first)
    ids = torch.randint(61, (count, 8), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


class Stream(torch.utils.data.IterableDataset):
    """Rows of which nobody says how many there are."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(rows(22, 0))


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    guesses = predicted.predictions.argmax(-1)
    return {"accuracy": float((guesses[:, :-1] == predicted.label_ids[:, 1:]).mean()), "rows": len(guesses)}


def run(case: str, folder: Path) -> dict[str, Any]:
    options = {"save_strategy": "no", "use_cpu": True, **CASES[case]}
    start = options.pop("resume", None)
    if "deepspeed" in options or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
        if os.environ.get("WORLD_SIZE", "1") == "1":
            # accelerate starts DeepSpeed on CPUs where nobody requests a CPU, and as one process.
            os.environ.pop("ACCELERATE_USE_CPU", None)
            os.environ.update(
                RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
            )
            options["use_cpu"] = False
    arguments = TrainingArguments(
        folder / case,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        num_train_epochs=2,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=7,
        **options,
    )
    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    trainer = Trainer(
        model,
        arguments,
        data_collator=default_data_collator,
        train_dataset=Stream() if "stream" in case else rows(22, 0),
        eval_dataset=rows(7, 1),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=str(folder / start / "checkpoint-2") if start else None)
    log = trainer.state.log_history
    steps = [
        [record["step"], record["loss"], record["learning_rate"], float(record.get("grad_norm", -1))]
        for record in log
        if "loss" in record
    ]
    best = trainer.state.best_model_checkpoint
    evaluated = trainer.evaluate()
    predicted = trainer.predict(rows(5, 2))
    trainer.save_model(str(folder / case / "last"))
    return {
        "steps": steps,
        "evaluations": [untimed(record) for record in log if "eval_loss" in record],
        "best": best and Path(best).name,
        "evaluated": untimed(evaluated),
        "predicted": untimed(predicted.metrics),
        "shape": list(predicted.predictions.shape),
        "logits": predicted.predictions.astype("float64").sum(axis=(1, 2)).tolist(),
        "labels": predicted.label_ids.tolist(),
        "epoch": trainer.state.epoch,
        "processes": trainer.accelerator.num_processes,
        "compiled": arguments.torch_compile and torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0,
    }


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.endswith(("_runtime", "_per_second"))}


def main(folder: Path, *cases: str) -> None:
    results = {case: run(case, folder) for case in cases}
    if os.environ.get("RANK", "0") == "0":
        (folder / "results.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
