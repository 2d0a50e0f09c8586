"""Train on one process from installed wheels, save, and load; run by `release.isolated`."""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator


def main() -> None:
    """Fit a line, and fail if it is not fitted, or not the same after a checkpoint."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    inputs = torch.randn(64, 2)
    targets = inputs @ torch.tensor([[2.0], [-1.0]])
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert loss.item() < 1e-2, f"the loss is {loss.item()} after 40 steps"

    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        accelerator.load_state(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


if __name__ == "__main__":
    main()
