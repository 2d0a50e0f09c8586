"""Every example in a docstring of the Accelerator runs."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import Accelerator


def examples() -> dict[str, str]:
    """The code under "Example:" of each docstring, by the member's name."""
    documented = {"Accelerator": Accelerator, **vars(Accelerator)}
    found = {}
    for name, member in documented.items():
        _, _, code = (inspect.getdoc(member) or "").partition("\nExample:\n")
        if code and (name == "Accelerator" or name[0] != "_"):
            found[name] = textwrap.dedent(code)
    return found


EXAMPLES = examples()
WITHOUT = {
    # Sequences are split over a group of at least two processes: on one it raises, whatever the engine.
    "deepspeed_ulysses_dl_adapter",
}


def test_every_method_has_an_example():
    methods = {name for name, member in vars(Accelerator).items() if name[0] != "_" and callable(member)}
    methods |= {name for name, member in vars(Accelerator).items() if isinstance(member, staticmethod)}
    assert methods - EXAMPLES.keys() == WITHOUT


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, fresh_state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES[name].strip().splitlines()) <= 8
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    inputs, targets = torch.ones(4, 2), torch.full((4, 1), 9.0)  # far off: gradients are large enough to clip
    model, teacher = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2)
    if not name.startswith("prepare") and name != "Accelerator":
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    outputs = model(inputs)
    loss_function = torch.nn.functional.mse_loss
    loss = loss_function(outputs, targets)
    if name in ("unscale_gradients", "clip_grad_norm_", "clip_grad_value_"):
        accelerator.backward(loss)
    names = {**locals(), "Accelerator": lambda **options: Accelerator(cpu=True, **options), "torch": torch}
    names |= {"tokens": torch.ones(2, 3), "accel": accel}
    if name == "lomo_backward":
        names["lomo_optim"] = pytest.importorskip("lomo_optim")
        names["model"] = torch.nn.Linear(2, 1)
    exec(compile(EXAMPLES[name], f"example of {name}", "exec"), names)
    accelerator.end_training()
