"""A model that fits on no single device: built empty, loaded to where there is room, run from there.

    python big_model_inference.py
    python big_model_inference.py --memory 300KB

`--memory` (600KB) is how much of the weights each device, and the memory of the CPU, may take; the rest stays
on the disk and is read while the model runs. In your own program leave `max_memory` out:
`device_map="auto"` then takes what is free. The outputs are those of the plain model.
"""

import argparse
import tempfile
from collections import Counter

import torch
from small_gpt import GPT, windows

from accel import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from accel.utils import compute_module_sizes, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--memory", default="600KB", help="of the weights, per device")
args = parser.parse_args()

accelerator = Accelerator()
set_seed(0)
plain = GPT().eval()
inputs, _, positions = next(iter(windows(batch_size=2)))
expected = plain(inputs, positions)

with tempfile.TemporaryDirectory() as weights:
    accelerator.save_model(plain, weights, max_shard_size="250KB")  # the checkpoint of this example
    with init_empty_weights():
        model = GPT().eval()  # shapes, and no memory
    print(f"{compute_module_sizes(model)['']:,} bytes of weights; a block has ", end="")
    print(f"{compute_module_sizes(model)['blocks.0']:,}")
    model = load_checkpoint_and_dispatch(
        model,
        weights,
        device_map="sequential",  # fill one device after the other, then the CPU, then the disk
        max_memory={**dict.fromkeys(range(torch.cuda.device_count()), args.memory), "cpu": args.memory},
        no_split_module_classes=["Block"],  # a residual connection stays on one device
    )
    for device, count in Counter(map(str, model.hf_device_map.values())).items():
        names = [name for name, place in model.hf_device_map.items() if str(place) == device]
        print(f"{device}: {count} modules, {names[0]} to {names[-1]}")
    with torch.no_grad():
        logits = model(inputs, positions)
print("the same outputs:", torch.allclose(logits, expected, atol=1e-4))
accelerator.end_training()
