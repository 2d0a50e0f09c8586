"""Survive preemption: at a signal all processes save and exit; the same command continues.

    accel launch --num_processes 2 --cpu preemption.py --project_dir run --signal_at_step 25
    accel launch --num_processes 2 --cpu preemption.py --project_dir run

The first ends with exit code 75 ("start me again") two steps later. `--signal_at_step` stands for the
scheduler: the last process gets SIGTERM, as Slurm sends it before it takes the machine away. `accel launch`
passes a SIGTERM that it receives on to all workers.
"""

import argparse
import signal

import torch
import torch.nn.functional as F
from handwriting import Progress, evaluate, loaders, network

from accel import Accelerator
from accel.utils import ProjectConfiguration, set_seed

NUM_EPOCHS = 4

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--project_dir", default="run", help="checkpoints go to its folder checkpoints")
parser.add_argument("--signal_at_step", type=int, help="number of the step after which to send a signal")
args = parser.parse_args()

project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(project_config=project)
set_seed(0)
train_data, test_data = loaders(batch_size=32)
model = network(dropout=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train_data, test_data = accelerator.prepare(model, optimizer, train_data, test_data)
progress = Progress()
accelerator.register_for_checkpointing(progress)

accelerator.load_state(missing_ok=True)  # nothing on the first start
while train_data.iteration < NUM_EPOCHS:  # each pass is an epoch, or what is left of it
    for images, labels in train_data:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % 10 == 0:
            accelerator.print(f"step {progress.step}: loss {loss.item():.6f}")
        if progress.step == args.signal_at_step and accelerator.is_last_process:
            signal.raise_signal(signal.SIGTERM)
        accelerator.save_on_preemption()  # costs one small message, which no step waits for
accuracy = evaluate(accelerator, model, test_data)
accelerator.print(f"trained to the end, test accuracy {accuracy:.4f}")
accelerator.end_training()
