"""Train with accelerate and save in the middle of an epoch; or go on from folders that such runs left.

    checkpoints.py FOLDER save CASE ...
    checkpoints.py FOLDER load CASE ... -- RUN ...

A RUN is the FOLDER of a run that saved. results.json says the losses after the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch.utils.data import DataLoader, TensorDataset

BATCHES, SAVED_AFTER = 8, 4  # of the first epoch, on each process

CASES: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "pickled": {"safe_serialization": False},
    "named": {"automatic": True},
    "half": {"mixed_precision": "bf16"},
    "stateful": {"loader": {"use_stateful_dataloader": True}},
    "dispatched": {"loader": {"dispatch_batches": True}},
    "dropout": {"dropout": 0.2},
    **{f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)},
}


class Net(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 2)
        self.norm, self.dropout = torch.nn.LayerNorm(16), torch.nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.norm(torch.tanh(self.first(x))))) * self.scale


class Progress:
    """A registered object."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Training:
    """What one run trains, all of it prepared.

    Args:
        case: The name of its case.
        folder: Where it writes.
        seed: Of everything: a run that goes on must take nothing from it.
    """

    def __init__(self, case: str, folder: Path, seed: int) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        set_seed(seed)
        self.case, self.folder = CASES[case], folder
        self.automatic = bool(self.case.get("automatic"))
        self.stateful = bool(self.case.get("loader", {}).get("use_stateful_dataloader"))
        self.accelerator = accelerator = make_accelerator(self.case, folder)
        model = Net(self.case.get("dropout", 0.0))
        generator = torch.Generator().manual_seed(1)
        samples = BATCHES * 2 * accelerator.num_processes
        data = TensorDataset(
            torch.randn(samples, 6, generator=generator), torch.randn(samples, 2, generator=generator)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=2), scheduler
        )
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress)
        set_seed(seed + 1, device_specific=True)

    def train(self, start: int = 0, save: bool = False) -> list[list[float]]:
        """Train for two epochs, without the first `start` batches; return the losses after the checkpoint."""
        losses = []
        for epoch in range(2):
            count = start if epoch == 0 else 0
            # A stateful loader was set to its place by load_state.
            batches = skip_first_batches(self.loader, count) if count and not self.stateful else self.loader
            for batch in batches:
                loss = self.step(*batch)
                count += 1
                if save and epoch == 0 and count <= SAVED_AFTER:
                    self.save(count)
                else:
                    losses.append([epoch, count, self.scheduler.get_last_lr()[0], *from_all(loss)])
        return losses

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = F.mse_loss(self.model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.progress.steps += 1
        return float(loss.detach())

    def save(self, count: int) -> None:
        if self.automatic:
            if count % 2 == 0:
                self.accelerator.save_state()
        elif count == SAVED_AFTER:
            options = {key: self.case[key] for key in ("safe_serialization",) if key in self.case}
            self.accelerator.save_state(str(self.folder / "checkpoint"), **options)

    def load(self, source: Path) -> None:
        if self.automatic:
            shutil.copytree(source / "checkpoints", self.folder / "checkpoints")
            self.accelerator.load_state()
        else:
            self.accelerator.load_state(str(source / "checkpoint"))
        assert self.progress.steps == SAVED_AFTER, self.progress.steps


def make_accelerator(case: dict[str, Any], folder: Path) -> Accelerator:
    project = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming="automatic" in case, total_limit=2
    )
    plugins: dict[str, Any] = {"cpu": True}
    if "zero" in case:
        plugins = {"deepspeed_plugin": deepspeed_plugin(case["zero"])}
    return Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=case.get("mixed_precision", "no"),
        project_config=project,
        dataloader_config=DataLoaderConfiguration(**case.get("loader", {})),
        **plugins,
    )


def deepspeed_plugin(stage: int) -> DeepSpeedPlugin:
    import deepspeed

    # It would be compiled, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": 1000,
        },
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,  # accelerate's clip_grad_norm_ leaves it to DeepSpeed
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def from_all(value: float) -> list[float]:
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def save(case: str, folder: Path) -> dict[str, Any]:
    training = Training(case, folder, seed=0)
    losses = training.train(save=True)
    options = {"safe_serialization": CASES[case].get("safe_serialization", True)}
    training.accelerator.save_model(training.model, str(folder / "weights"), **options)
    training.accelerator.wait_for_everyone()
    return {"losses": losses}


def load(case: str, folder: Path, source: Path) -> dict[str, Any]:
    training = Training(case, folder, seed=100)
    training.load(source)
    return {"losses": training.train(start=SAVED_AFTER)}


def main() -> None:
    folder, mode, *rest = sys.argv[1:]
    cases, _, sources = " ".join(rest).partition(" -- ")
    if "zero" in cases:
        # accelerate starts DeepSpeed on CPUs where nobody asks for a CPU, and as one process.
        os.environ.pop("ACCELERATE_USE_CPU", None)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    results: dict[str, Any] = {}
    for case in cases.split():
        if mode == "save":
            (Path(folder) / case).mkdir(exist_ok=True)
            results[case] = save(case, Path(folder) / case)
            continue
        results[case] = []
        for number, source in enumerate(sources.split()):
            target = Path(folder) / f"{case}_{number}"
            target.mkdir(exist_ok=True)
            results[case].append(load(case, target, Path(source) / case))
    if PartialState().is_main_process:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


main()
