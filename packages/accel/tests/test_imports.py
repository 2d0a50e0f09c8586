"""What a program imports with accel: torch itself takes a second, and accel is to add little to it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Of torch, and what it would bring along, each takes 0.05 to 0.6 s.
_HEAVY = {
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
}
# What not every program needs, or none before it prepares a loader.
_LATER = {
    "accel.big_models",
    "accel.engines.ddp",
    "accel.engines.fsdp1",
    "accel.engines.fsdp2",
    "accel.precision.fp8.recipes",
    "accel.observe.guard",
    "accel.observe.profiling.recording",
    "accel.observe.statistics",
    "accel.training.metrics",
    "accel_data.dispatch",
    "accel_data.loader",
    "accel_data.stream",
    "accel_launch",
    "rich",
    "safetensors",
    "tqdm",
    "yaml",
}

_PROGRAM = """
import json, sys

seen = set(sys.modules)

def show():
    new = set(sys.modules) - seen
    seen.update(new)
    print(json.dumps(sorted(new)))

import accel
show()
import torch
from torch.utils.data import DataLoader
show()
from accel import Accelerator
show()
accelerator = Accelerator(cpu=True)
model, loader = accelerator.prepare(torch.nn.Linear(2, 1), DataLoader(torch.ones(4, 2), batch_size=2))
show()
for batch in loader:
    with torch.no_grad():
        accelerator.gather_for_metrics(model(batch))
show()
"""

_IMPORT_ALL = """
from importlib import import_module
from pkgutil import walk_packages

for part in ("state", "ops", "data", "optim", "ckpt", "launch", ""):
    package = f"accel_{part}".removesuffix("_")
    for module in walk_packages(import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
            print(module.name)
"""


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """The modules that came with accel, torch, the Accelerator, a prepared model and its evaluation."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_accel_alone_imports_no_torch(imported):
    assert "accel" in imported[0]
    assert not {"torch", "numpy"} & imported[0]
    assert {name for name in imported[0] if name.startswith("accel")} == {
        "accel",
        "accel_state",
        "accel_state.lazy",
    }


def test_the_accelerator_brings_what_every_program_needs(imported):
    assert "torch" in imported[1]  # so that what torch imports by itself is not counted
    assert "accel.accelerator" in imported[2]
    assert not (_HEAVY | _LATER) & imported[2]


def test_a_plain_model_and_its_loader_need_no_compiler(imported):
    # With an optimizer torch imports its compiler by itself.
    assert "accel_data.loader.shard" in imported[3]
    assert not _HEAVY & imported[3]
    assert not (_LATER - {"accel_data.dispatch", "accel_data.loader", "accel_data.stream"}) & imported[3]


def test_evaluation_of_a_plain_model_needs_no_compiler(imported):
    assert "accel.training.metrics" in imported[4]
    assert not _HEAVY & imported[4]


@pytest.mark.core  # the tests of the core import a part of them
def test_every_module_can_be_imported():
    done = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "accel.engines.fsdp2" in done.stdout.split()
