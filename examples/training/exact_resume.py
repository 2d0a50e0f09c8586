"""Stop and resume anywhere in an epoch: the same weights, bit for bit, as without the stop.

    python exact_resume.py --project_dir full
    python exact_resume.py --project_dir stopped --stop_after 30
    python exact_resume.py --project_dir stopped

The first and the last print the same digest, and so they do on two processes, with `accel launch
--num_processes 2 --cpu` in the place of `python`. A checkpoint has the weights, the optimizer, the
schedule, the random generators (here dropout's), the place in the data, and what you register. It is
complete or not there at all, whenever the process is killed.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from handwriting import Progress, loaders, network

from accel import Accelerator
from accel.utils import ProjectConfiguration, set_seed

NUM_EPOCHS = 3


def main(args: argparse.Namespace) -> None:
    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    train_data, _ = loaders(batch_size=64)
    model = network(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    model, optimizer, scheduler, train_data = accelerator.prepare(model, optimizer, scheduler, train_data)
    progress = Progress()  # a variable of the loop has to be in a registered object
    accelerator.register_for_checkpointing(progress)

    if accelerator.load_state(missing_ok=True):  # the newest checkpoint, if there is one
        accelerator.print(f"resuming after step {progress.step}")
    while train_data.iteration < NUM_EPOCHS:  # each pass is an epoch, or what is left of it
        for images, labels in train_data:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % 10 == 0:
                accelerator.print(f"step {progress.step}: loss {loss.item():.6f}")
                accelerator.save_state()
            if progress.step == args.stop_after:
                accelerator.print(f"stopping after step {progress.step}")
                return
    weights = [weight.cpu().numpy().tobytes() for weight in accelerator.get_state_dict(model).values()]
    digest = hashlib.sha256(b"".join(weights)).hexdigest()
    accelerator.print(f"digest of the weights after step {progress.step}: {digest[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--project_dir", default="run", help="checkpoints go to its folder checkpoints")
    parser.add_argument("--stop_after", type=int, help="number of the step after which to stop")
    main(parser.parse_args())
