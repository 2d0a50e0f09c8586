"""A plain training loop: `python loop.py FOLDER`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


def main(folder: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, project_dir=folder)
    set_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    # Without a generator accel shuffles by its own seed, see docs/data.md.
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True, generator=generator)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, rates = [], []
    for epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss).mean().item())
            rates.append(scheduler.get_last_lr())
        accelerator.save_state(folder / f"epoch-{epoch}")
    accelerator.save_model(model, folder / "model")
    if accelerator.is_main_process:
        module = sys.modules[type(accelerator).__module__].__name__
        results = {
            "version": version("accelerate"),
            "losses": losses,
            "rates": rates,
            "processes": accelerator.num_processes,
        }
        (folder / "results.json").write_text(json.dumps(results))
        print(f"module {module}, {accelerate.__version__}")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
