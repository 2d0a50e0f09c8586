"""Trains, and writes in every way that accel has, into the folder of its argument."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.observe.statistics import StatisticsKwargs
from accel.tracking import GeneralTracker
from accel.utils import (
    FullyShardedDataParallelPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    load_fsdp_model,
    load_fsdp_optimizer,
    save,
    save_fsdp_model,
    save_fsdp_optimizer,
    set_seed,
)

out = Path(sys.argv[1])
is_verified = "ACCELERATE_VERIFY_FOLDER" in os.environ
has_checkpoints = (out / "checkpoints").is_dir()


class Lines(GeneralTracker):
    """Writes where it wants to."""

    name, requires_logging_directory = "lines", False
    tracker = property(lambda self: self)

    def start(self) -> None:
        with (out / "lines.txt").open("a") as file:
            file.write("started\n")


accelerator = Accelerator(
    cpu=True,
    log_with=["jsonl", Lines()],
    project_config=ProjectConfiguration(str(out), automatic_checkpoint_naming=True, total_limit=2),
    kwargs_handlers=[StatisticsKwargs(folder=str(out / "statistics"), summary=False)],
)
accelerator.init_trackers("run")
set_seed(1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_save_state_pre_hook(lambda _, __, folder: Path(folder, "own.txt").write_text("own"))
assert accelerator.load_state(missing_ok=True) == (has_checkpoints and not is_verified)
fsdp = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
if has_checkpoints:  # the user's, also where accel verify must not read them
    newest = max((out / "checkpoints").iterdir(), key=lambda folder: int(folder.name.rpartition("_")[2]))
    assert accelerator.load_state(str(newest)) != is_verified
    assert is_verified or not load_fsdp_model(fsdp, accelerator, model, out / "fsdp").missing_keys
if is_verified:
    (weight, _), before = model.parameters(), accelerator.unwrap_model(model).weight.clone()
    assert not load_fsdp_model(fsdp, accelerator, model, out / "fsdp").missing_keys
    load_fsdp_optimizer(fsdp, accelerator, optimizer, model, out / "fsdp")
    assert torch.equal(weight, before)
    assert not optimizer.state
try:
    for number, (x,) in enumerate(loader):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": number}, step=number)
        if number == 0:
            with accelerator.profile(ProfileKwargs(output_trace_dir=str(out / "traces"))):
                model(x)
        folder = accelerator.save_state()
        accelerator.save_model(model, out / "weights")
        save_fsdp_model(fsdp, accelerator, model, out / "fsdp")
        save_fsdp_optimizer(fsdp, accelerator, optimizer, model, out / "fsdp")
        accelerator.save({"step": number}, out / "accelerator.pt")
        save({"step": number}, str(out / "function.pt"))
        Path(str(accelerator.project_dir), "by the script.txt").write_text("step\n" * number)
        assert accelerator.load_state()  # of this run
finally:
    accelerator.get_tracker("jsonl").log({"loss": -1})
    accelerator.save({"step": -1}, out / "last.pt")
    accelerator.end_training()
