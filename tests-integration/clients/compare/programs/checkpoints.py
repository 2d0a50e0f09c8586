"""Train with accelerate and save in the middle of an epoch; or continue from folders that such runs left.

    checkpoints.py FOLDER save CASE ...
    checkpoints.py FOLDER load CASE ... -- RUN ...

A RUN is the FOLDER of a run that saved. results.json says what was drawn from the random generators right
after the checkpoint, and the losses after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    load_checkpoint_in_model,
    skip_first_batches,
)
from accelerate.commands.accelerate_cli import main as run_command
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from safetensors.torch import load_file
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
    "two_models": {"models": 2},
    "seedable": {"loader": {"use_seedable_sampler": True}, "shuffle": True},
    **{
        f"fsdp{version}_sharded": {
            "fsdp": {"fsdp_version": version, "state_dict_type": "SHARDED_STATE_DICT", **options}
        }
        for version, options in ((1, {"use_orig_params": True}), (2, {}))
    },
    "fsdp2_full": {"fsdp": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}},
    # accelerate crashes where it saves the full weights of version 1 without a GPU: both load those of 2.
    "fsdp1_full": {
        "fsdp": {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT", "use_orig_params": True},
        "saved_as": "fsdp2_full",
    },
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
    """A registered object, with a number and a tensor."""

    def __init__(self) -> None:
        self.steps, self.average = 0, torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.average = state["steps"], state["average"]


class Training:
    """What one run trains, all of it prepared.

    Args:
        case: The name of its case.
        folder: Where it writes.
        seed: Of everything. A run that continues must take nothing from it but accelerate's order of samples.
    """

    def __init__(self, case: str, folder: Path, seed: int) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        set_seed(seed)
        self.case, self.folder = CASES[case], folder
        self.automatic = bool(self.case.get("automatic"))
        self.stateful = bool(self.case.get("loader", {}).get("use_stateful_dataloader"))
        self.accelerator = accelerator = make_accelerator(self.case, folder)
        models = [Net(self.case.get("dropout", 0.0)) for _ in range(self.case.get("models", 1))]
        generator = torch.Generator().manual_seed(1)
        samples = BATCHES * 2 * accelerator.num_processes
        data = TensorDataset(
            torch.randn(samples, 6, generator=generator), torch.randn(samples, 2, generator=generator)
        )
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step) for optimizer in optimizers
        ]
        loader = DataLoader(data, batch_size=2, shuffle=self.case.get("shuffle", False))
        self.loader, *prepared = accelerator.prepare(loader, *models, *optimizers, *schedulers)
        number = len(models)
        self.models, self.optimizers = prepared[:number], prepared[number : 2 * number]
        self.schedulers = prepared[2 * number :]
        self.draws: list[Any] = []  # after the checkpoint
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
            if hasattr(batches, "set_epoch"):
                batches.set_epoch(epoch)
            for batch in batches:
                loss = self.step(*batch)
                count += 1
                if save and epoch == 0 and count <= SAVED_AFTER:
                    self.save(count)
                else:
                    rate = self.schedulers[0].get_last_lr()[0]
                    losses.append([epoch, count, rate, float(self.progress.average), *from_all(loss)])
        return losses

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        accelerator = self.accelerator
        with accelerator.accumulate(*self.models):
            loss = sum(F.mse_loss(model(x), y) for model in self.models)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                for model in self.models:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        self.progress.steps += 1
        self.progress.average = self.progress.average * 0.9 + 0.1 * self.progress.steps
        return float(loss.detach())

    def save(self, count: int) -> None:
        if self.automatic:
            self.accelerator.save_state()
        elif count == SAVED_AFTER:
            options = {key: self.case[key] for key in ("safe_serialization",) if key in self.case}
            self.accelerator.save_state(str(self.folder / "checkpoint"), **options)
        if count == SAVED_AFTER:
            self.draws = draws()

    def load(self, source: Path) -> None:
        if self.automatic:
            shutil.copytree(source / "checkpoints", self.folder / "checkpoints")
            self.accelerator.load_state()
        else:
            self.accelerator.load_state(str(source / "checkpoint"))
        assert self.progress.steps == SAVED_AFTER, self.progress.steps
        self.draws = draws()


def make_accelerator(case: dict[str, Any], folder: Path) -> Accelerator:
    project = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming="automatic" in case, total_limit=2
    )
    plugins: dict[str, Any] = {"cpu": True}
    if "zero" in case:
        plugins = {"deepspeed_plugin": deepspeed_plugin(case["zero"])}
    if "fsdp" in case:
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            auto_wrap_policy="size_based_wrap", min_num_params=50, **case["fsdp"]
        )
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=case.get("mixed_precision", "no"),
        project_config=project,
        dataloader_config=DataLoaderConfiguration(**case.get("loader", {})),
        **plugins,
    )
    if "fsdp" in case and getattr(accelerator.state, "fsdp_plugin", None) is None:
        shard_on_cpus(plugins["fsdp_plugin"])
    return accelerator


def shard_on_cpus(plugin: FullyShardedDataParallelPlugin) -> None:
    """Have accelerate itself shard: on CPUs it makes replicas, whatever the plugin requests."""
    kind = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    PartialState._shared_state.update(kind)
    AcceleratorState._shared_state.update(kind, fsdp_plugin=plugin)


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


def draws() -> list[Any]:
    """Draw from each random generator of each process."""
    return from_all([random.random(), float(numpy.random.rand()), float(torch.rand(1))])


def from_all(value: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def save(case: str, folder: Path) -> dict[str, Any]:
    training = Training(case, folder, seed=0)
    losses = training.train(save=True)
    if "fsdp" not in CASES[case]:  # accelerate's save_model of FSDP fails without a GPU
        safe = CASES[case].get("safe_serialization", True)
        training.accelerator.save_model(training.models[0], str(folder / "weights"), 500, safe)
    training.accelerator.wait_for_everyone()
    return {"draws": training.draws, "losses": losses}


def load(case: str, folder: Path, source: Path) -> dict[str, Any]:
    # accelerate does not save the seed of its orders.
    training = Training(case, folder, seed=0 if CASES[case].get("shuffle") else 100)
    training.load(source)
    result: dict[str, Any] = {"draws": training.draws, "losses": training.train(start=SAVED_AFTER)}
    if training.automatic:
        training.accelerator.save_state()
        result["names"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    shards = source / "checkpoint" / "pytorch_model_fsdp_0"
    if shards.is_dir():
        sys.argv[1:] = ["merge-weights", str(shards), str(folder / "merged")]
        with contextlib.suppress(SystemExit):  # it ends a process, as commands do
            run_command()
        training.accelerator.wait_for_everyone()
        result["weights"] = lists(load_file(folder / "merged" / "model.safetensors"))
    if (source / "weights").is_dir():
        model = Net(0.0)
        load_checkpoint_in_model(model, source / "weights")
        result["weights"] = lists(model.state_dict())
    return result


def lists(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: weights[name].flatten().tolist() for name in sorted(weights)}


def main() -> None:
    folder, mode, *rest = sys.argv[1:]
    cases, _, sources = " ".join(rest).partition(" -- ")
    if "zero" in cases:
        # accelerate starts DeepSpeed on CPUs where nobody requests a CPU, and as one process.
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
            results[case].append(load(case, target, Path(source) / CASES[case].get("saved_as", case)))
    if PartialState().is_main_process:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        # A process whose peer has left already may be aborted by gloo.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


main()
