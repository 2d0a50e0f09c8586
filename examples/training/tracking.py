"""Track a run: curves, images and a table, in a file of JSON lines or in your favourite system.

    python tracking.py
    accel report runs
    accel launch --num_processes 2 --cpu tracking.py --log_with jsonl tensorboard

`accel report` draws what was logged as one HTML page. Every process calls `log`; only the main one writes.
A tracker that fails warns and never stops training.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from handwriting import evaluate, loaders, network

from accel import Accelerator
from accel.utils import set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--log_with", nargs="+", default=["jsonl"], help='"tensorboard", "wandb", "mlflow", ...')
parser.add_argument("--project_dir", type=Path, default=Path("runs"), help="where files go")
args = parser.parse_args()

accelerator = Accelerator(log_with=args.log_with, project_dir=str(args.project_dir))
accelerator.init_trackers("digits", config={"lr": 3e-3, "batch_size": 32, "model": {"hidden": 128}})
set_seed(0)
train_data, test_data = loaders(batch_size=32)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train_data, test_data = accelerator.prepare(model, optimizer, train_data, test_data)

step = 0
for epoch in range(3):
    for images, labels in train_data:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            accelerator.log({"loss": loss.detach()}, step=step)
    accelerator.log({"accuracy": evaluate(accelerator, model, test_data), "epoch": epoch}, step=step)

images, labels = next(iter(test_data))
with torch.no_grad():
    guesses = model(images).argmax(dim=1)
if "tensorboard" not in args.log_with:  # which has no tables
    rows = torch.stack([labels, guesses], dim=1).tolist()
    accelerator.log_table("guesses", columns=["digit", "guess"], data=rows, step=step)
accelerator.log_images({"digit": images[0].view(1, 8, 8)}, step=step)
accelerator.end_training()  # finishes the trackers

if accelerator.is_main_process and "jsonl" in args.log_with:
    for line in map(json.loads, (args.project_dir / "digits.jsonl").read_text().splitlines()):
        if "values" in line:
            print(f"step {line['step']}:", ", ".join(f"{k} {v:.4g}" for k, v in line["values"].items()))
