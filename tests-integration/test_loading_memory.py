"""The memory that loading a large model takes: what stays in memory, and one shard's buffers at most."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SIZE = 1664  # of a layer: 11 MB
LAYERS = 24
SHARDS = 8
LAYER_BYTES = SIZE * SIZE * 4
SHARD_BYTES = LAYER_BYTES * LAYERS // SHARDS
SLACK_BYTES = 12 * 2**20  # threads, modules imported on first use

# Two measures. RssAnon is the memory that only this process has. With RssFile, the pages of mapped files, it
# is what VmHWM and ru_maxrss are the peak of; those pages belong to the system's cache of files and go when
# others need the memory, so that weights which stay mapped cost nothing of the first.
PROGRAM = """
import contextlib, json, sys, threading, time
import torch
from torch import nn
from accel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model

def resident():
    with open("/proc/self/status") as status:
        sizes = dict(line.split(":") for line in status)
    private, mapped = (int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return private, private + mapped

def sample():
    while not ended.is_set():
        peaks.append(resident())
        time.sleep(0.0005)

folder, offloaded, layers, size, case = *sys.argv[1:3], *map(int, sys.argv[3:5]), json.loads(sys.argv[5])
with init_empty_weights() if case["empty"] else contextlib.nullcontext():
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
x = torch.ones(1, size)
torch.ones(8, 8) @ torch.ones(8, 8)
before, peaks, ended = resident(), [], threading.Event()
sampler = threading.Thread(target=sample)
sampler.start()
if case["device_map"] is None:
    load_checkpoint_in_model(model, folder)
else:
    load_checkpoint_and_dispatch(
        model, folder, case["device_map"], offload_folder=offloaded, dtype=case["dtype"]
    )
with torch.no_grad():
    output = model(x.to(getattr(torch, case["dtype"] or "float32")))
peaks.append(resident())
ended.set()
sampler.join()
private, total = (max(column) - start for column, start in zip(zip(*peaks), before))
found = {"private": private, "total": total, "samples": len(peaks), "output": output.float().sum().item()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 266 MB in eight files, of layers whose outputs are the means of their inputs."""
    folder = tmp_path_factory.mktemp("checkpoint")
    weight = torch.full((SIZE, SIZE), 1 / SIZE)
    names = [f"{number}.weight" for number in range(LAYERS)]
    each = LAYERS // SHARDS
    files = {
        f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors": names[n * each :][:each] for n in range(SHARDS)
    }
    for file, inside in files.items():
        save_file({name: weight.clone() for name in inside}, folder / file)
    index = {"weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    yield folder
    for file in files:
        (folder / file).unlink()  # pytest keeps the folders of its last runs


RESIDENT = 4
ON_DISK = {"": "disk"} | {str(number): "cpu" for number in range(RESIDENT)}
WHOLE = LAYERS * LAYER_BYTES


@pytest.mark.parametrize(
    ("case", "resident", "private"),
    [
        ({"device_map": {"": "cpu"}, "empty": True, "dtype": None}, WHOLE, 0),
        ({"device_map": None, "empty": True, "dtype": None}, WHOLE, WHOLE),
        ({"device_map": None, "empty": False, "dtype": None}, 0, 0),  # its memory was there before
        ({"device_map": ON_DISK, "empty": True, "dtype": None}, RESIDENT * LAYER_BYTES, 0),
        (
            {"device_map": ON_DISK, "empty": True, "dtype": "bfloat16"},
            RESIDENT * LAYER_BYTES // 2,
            RESIDENT * LAYER_BYTES // 2,
        ),
    ],
    ids=["mapped", "copied", "filled", "on the disk", "converted"],
)
def test_loading_takes_what_stays_and_one_shard_at_most(
    folder: Path, tmp_path: Path, case: dict[str, object], resident: int, private: int
):
    """With what stays in memory, and which part of it is private: not mapped from a file."""
    arguments = [str(folder), str(tmp_path), str(LAYERS), str(SIZE), json.dumps(case)]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, check=True)
    found = json.loads(run.stdout)

    assert found["output"] == pytest.approx(SIZE, rel=0.02)
    assert found["samples"] > 5
    assert 0.9 * resident <= found["total"] < resident + SHARD_BYTES + SLACK_BYTES
    assert 0.9 * private <= found["private"] < private + LAYER_BYTES + SLACK_BYTES
