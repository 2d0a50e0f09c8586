"""Stop early: one process decides, and all leave the loop in the same epoch.

    python early_stopping.py
    accel launch --num_processes 2 --cpu early_stopping.py --patience 2

If each process decided for itself, one could stop while another continues, which would then hang.
To keep the script short it watches the test data; in earnest, take separate validation data.
Any process may raise the flag with `set_trigger`; all of them see it at the next `check_trigger`.
"""

import argparse

import torch
import torch.nn.functional as F
from handwriting import evaluate, loaders, network

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--patience", type=int, default=3, help="epochs without progress before the end")
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(0)
train_data, test_data = loaders(batch_size=32)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, train_data, test_data = accelerator.prepare(model, optimizer, train_data, test_data)

best, best_epoch = 0.0, 0
for epoch in range(100):
    for images, labels in train_data:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accuracy = evaluate(accelerator, model, test_data)
    accelerator.print(f"epoch {epoch}: test accuracy {accuracy:.4f}")
    if accelerator.is_main_process:
        if accuracy > best:
            best, best_epoch = accuracy, epoch
        elif epoch - best_epoch >= args.patience:
            accelerator.set_trigger()
    if accelerator.check_trigger():
        break
print(f"process {accelerator.process_index} stopped after epoch {epoch}")
accelerator.print(f"best: {best:.4f} in epoch {best_epoch}")
accelerator.end_training()
