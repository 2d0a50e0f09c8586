"""What the scripts of this folder train: a small network on scikit-learn's handwritten digits."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator

__all__ = ["Progress", "evaluate", "loaders", "network"]

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    from accel_state.imports.packages import install_hint

    raise ImportError(
        f"The examples need scikit-learn. Install it with: {install_hint('examples')}"
    ) from None


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return the training data (1408 images, shuffled, in full batches) and the test data (389 images)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16  # (1797, 64), from 0 to 1
    labels = torch.tensor(digits.target)
    # Its own generator: the split must not move with the seed of a run.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1408], order[1408:]
    train_data = DataLoader(TensorDataset(images[train], labels[train]), batch_size, True, drop_last=True)
    return train_data, DataLoader(TensorDataset(images[test], labels[test]), batch_size=64)


def network(dropout: float = 0.0) -> nn.Module:
    """Return a network from 64 pixels to the logits of ten digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, test_data: DataLoader) -> float:
    """Return the accuracy over all processes, the same on each."""
    model.eval()
    num_correct = num_images = 0
    for images, labels in test_data:
        # Each test image once: what only fills up the last batches is dropped.
        guesses, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
        num_correct += int((guesses == labels).sum())
        num_images += len(labels)
    model.train()
    return num_correct / num_images


@dataclass
class Progress:
    """A script's own variables; a checkpoint takes any object with these two methods."""

    step: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint saves."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.step = state["step"]
