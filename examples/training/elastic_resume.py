"""Save on two processes, resume on one, or on four: the training stays the same.

    accel launch --num_processes 2 --cpu elastic_resume.py --project_dir stopped --stop_after 30
    accel launch --num_processes 4 --cpu elastic_resume.py --project_dir stopped
    python elastic_resume.py --project_dir full

From step 31 on the second prints the losses of the third. The model is in shards (FSDP version 2): each
process writes its own part of the checkpoint, and reads what it needs of all parts. The loader's place
counts the samples of all processes, so that none is lost or seen twice.
"""

import argparse

import torch
import torch.nn.functional as F
from handwriting import Progress, loaders, network

from accel import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accel.utils import ProjectConfiguration, set_seed

NUM_EPOCHS = 3


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"),
        # 64 images per step on any number of processes that divides 64.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True),
        step_scheduler_with_optimizer=True,
    )
    set_seed(0)
    train_data, _ = loaders(batch_size=64)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    model, optimizer, scheduler, train_data = accelerator.prepare(model, optimizer, scheduler, train_data)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if accelerator.load_state(missing_ok=True):
        accelerator.print(f"{accelerator.num_processes} processes resume after step {progress.step}")
    while train_data.iteration < NUM_EPOCHS:  # each pass is an epoch, or what is left of it
        for images, labels in train_data:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % 3 == 0:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(f"step {progress.step}: loss {mean:.6f}")
            if progress.step == args.stop_after:
                accelerator.save_state()
                accelerator.print(f"{accelerator.num_processes} processes saved after step {progress.step}")
                return
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--project_dir", default="run", help="checkpoints go to its folder checkpoints")
    parser.add_argument("--stop_after", type=int, help="number of the step after which to save and stop")
    main(parser.parse_args())
