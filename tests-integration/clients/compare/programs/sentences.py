"""sentence-transformers: its trainer, and models placed by device maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import tiny
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import CoSENTLoss, MultipleNegativesRankingLoss
from transformers import BertConfig, BertModel

TEXTS = [tiny.make_text(row, 4) for row in range(5)]
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "seed": 5,
    "train_sampling_strategy": "sequential",
}


def save_start(folder: Path, kind: type[Any]) -> str:
    """Save a small encoder and its tokenizer; returns the folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind(BertConfig(vocab_size=61, num_labels=1, max_position_embeddings=32, **sizes)).save_pretrained(
        folder / "start"
    )
    tiny.make_tokenizer().save_pretrained(folder / "start")
    return str(folder / "start")


def embed(folder: Path) -> dict[str, Any]:
    """Train embeddings on two data sets with a loss each, and go on from a checkpoint."""
    path = save_start(folder, BertModel)
    scores = [round(0.1 * row, 1) for row in range(8)]
    pairs = Dataset.from_dict(
        {
            "one": [tiny.make_text(row, 4) for row in range(8)],
            "two": [tiny.make_text(row + 1, 3) for row in range(8)],
        }
    )
    data = {"pairs": pairs, "scored": pairs.add_column("score", scores)}
    found = []
    for resume in (False, True):
        model = SentenceTransformer(path, device="cpu")
        losses = {"pairs": MultipleNegativesRankingLoss(model), "scored": CoSENTLoss(model)}
        arguments = SentenceTransformerTrainingArguments(
            folder / "run", **OPTIONS, max_steps=8 if resume else 6
        )
        trainer = SentenceTransformerTrainer(model, arguments, data, eval_dataset=data, loss=losses)
        trainer.train(resume_from_checkpoint=resume)
        found.append({"log": tiny.log_of(trainer), "weights": tiny.weights_of(model)})
    model.save_pretrained(str(folder / "final"))
    embeddings = [model.encode(TEXTS)]
    for options in (
        {"device_map": "auto"},
        {"device_map": {"": "disk"}, "offload_folder": folder / "offloaded"},
    ):
        loaded = SentenceTransformer(str(folder / "final"), model_kwargs=options)
        embeddings.append(loaded.encode(TEXTS))
    return {"runs": found, "embeddings": [numpy.abs(rows).astype(float).sum() for rows in embeddings]}


if __name__ == "__main__":
    tiny.run_parts([embed])
