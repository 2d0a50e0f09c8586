"""sentence-transformers: its trainers, with their shuffled orders, and models placed by device maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import tiny
import torch
from accelerate import PartialState
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.losses import BatchAllTripletLoss, CoSENTLoss, MultipleNegativesRankingLoss
from transformers import BertConfig, BertForSequenceClassification, BertModel

TEXTS = [tiny.make_text(row, 4) for row in range(5)]
OPTIONS: dict[str, Any] = {
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
}


def save_start(folder: Path, kind: type[Any]) -> str:
    """Save a small encoder and its tokenizer; returns the folder."""
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if state.is_main_process:
        config = BertConfig(vocab_size=61, num_labels=1, max_position_embeddings=32, **sizes)
        kind(config).save_pretrained(folder / "start")
        tiny.make_tokenizer().save_pretrained(folder / "start")
    state.wait_for_everyone()
    return str(folder / "start")


def make_pairs(count: int) -> Dataset:
    """Return pairs of texts."""
    texts = {
        "one": [tiny.make_text(row, 4) for row in range(count)],
        "two": [tiny.make_text(row + 1, 3) for row in range(count)],
    }
    return Dataset.from_dict(texts)


def order_of(trainer: Any) -> list[list[list[int]]]:
    """Return a figure of each batch of this process, in two epochs."""
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(
            [
                [int(value.sum()) for key, value in batch.items() if key.endswith("input_ids")]
                for batch in loader
            ]
        )
    return epochs


def found_by(trainer: Any) -> dict[str, Any]:
    """Return what a trainer found, after its training."""
    return {
        "log": tiny.log_of(trainer),
        "weights": tiny.weights_of(trainer.model),
        "order": order_of(trainer),
    }


def embed(folder: Path) -> dict[str, Any]:
    """Train embeddings on two data sets with a loss each, and continue from a checkpoint."""
    path = save_start(folder, BertModel)
    pairs = make_pairs(8)
    data = {"pairs": pairs, "scored": pairs.add_column("score", [round(0.1 * row, 1) for row in range(8)])}
    found = []
    for resume in (False, True):
        model = SentenceTransformer(path, device="cpu")
        losses = {"pairs": MultipleNegativesRankingLoss(model), "scored": CoSENTLoss(model)}
        arguments = SentenceTransformerTrainingArguments(
            folder / "run", **OPTIONS, per_device_train_batch_size=2, max_steps=8 if resume else 6
        )
        trainer = SentenceTransformerTrainer(model, arguments, data, eval_dataset=data, loss=losses)
        trainer.train(resume_from_checkpoint=resume)
        found.append(found_by(trainer))
    trainer.save_model(folder / "final")
    return {"runs": found, "embeddings": figure_of(model.encode(TEXTS))}


def sample(folder: Path) -> dict[str, Any]:
    """Train embeddings on one data set, in the order of each kind of sampler."""
    path = save_start(folder, BertModel)
    pairs = make_pairs(16)
    labelled = pairs.remove_columns("two").add_column("label", [row % 4 for row in range(16)])
    cases = {
        "batch_sampler": (pairs, MultipleNegativesRankingLoss),
        "no_duplicates": (pairs, MultipleNegativesRankingLoss),
        "group_by_label": (labelled, BatchAllTripletLoss),
    }
    found = {}
    for name, (data, loss) in cases.items():
        model = SentenceTransformer(path, device="cpu")
        arguments = SentenceTransformerTrainingArguments(
            folder / name,
            **OPTIONS,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=6,
            batch_sampler=name,
        )
        trainer = SentenceTransformerTrainer(model, arguments, data, eval_dataset=data, loss=loss(model))
        trainer.train()
        found[name] = found_by(trainer)
    return found


def rank(folder: Path) -> dict[str, Any]:
    """Train scores of pairs in a shuffled order, keep the best, and continue within an epoch."""
    path = save_start(folder, BertForSequenceClassification)
    scores = [round(0.05 * (7 * row % 20), 2) for row in range(16)]
    pairs = make_pairs(16)
    data = pairs.add_column("label", scores)
    examples = list(zip(pairs["one"], pairs["two"], strict=True))
    found = []
    for resume in (None, str(folder / "run" / "checkpoint-3")):
        model = CrossEncoder(path, num_labels=1, device="cpu")
        arguments = CrossEncoderTrainingArguments(
            folder / ("resumed" if resume else "run"),
            **OPTIONS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            load_best_model_at_end=True,
            ddp_find_unused_parameters=False,  # its default fails on several processes, with accelerate too
        )
        evaluator = CrossEncoderCorrelationEvaluator(examples, scores, name="pairs", show_progress_bar=False)
        trainer = CrossEncoderTrainer(model, arguments, data, eval_dataset=data, evaluator=evaluator)
        trainer.train(resume_from_checkpoint=resume)
        found.append(found_by(trainer))
    trainer.save_model(folder / "final")
    return {"runs": found, "scores": figure_of(model.predict(examples))}


def place(folder: Path) -> dict[str, Any]:
    """Load embeddings by device maps."""
    path = save_start(folder, BertModel)
    answers = []
    for options in (
        {},
        {"device_map": "auto"},
        {"device_map": {"": "disk"}, "offload_folder": folder / "offloaded"},
    ):
        loaded = SentenceTransformer(path, model_kwargs=options)
        answers.append(figure_of(loaded.encode(TEXTS)))
    return {"embeddings": answers}


def figure_of(rows: Any) -> float:
    """Return a figure that changes with every number."""
    return float(numpy.square(rows.astype(float)).sum())


if __name__ == "__main__":
    tiny.run_parts([embed, sample, rank, place])
