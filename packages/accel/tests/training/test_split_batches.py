"""split_batches=True: the same training on any number of processes, whatever is left for the last batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_data.config import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")

BATCH = 12  # samples of all processes together
REMAINDERS = range(BATCH)
Trained = tuple[list[float], list[float]]


def train(remainder: int, even: bool, weighted: bool) -> Trained:
    """Train for two epochs that end with `remainder` samples; return the losses and the parameters."""
    config = DataLoaderConfiguration(split_batches=True, even_batches=even)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(0)
    count = BATCH + remainder
    data = TensorDataset(torch.randn(count, 3, dtype=torch.float64), torch.randint(4, (count,)))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
    losses = []
    for _ in range(2):
        for x, y in loader:
            if weighted:
                counts = loader.real_samples
                real = len(y) if counts is None else counts[accelerator.process_index]
                loss = F.cross_entropy(model(x)[:real], y[:real], reduction="sum")
                accelerator.backward(loss, weight=real)
            else:
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                losses.append(accelerator.gather(loss.detach()).mean().item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def train_with_each(remainders: list[int], even: bool, weighted: bool) -> list[Trained]:
    return [train(remainder, even, weighted) for remainder in remainders]


def is_alike(remainder: int, processes: int) -> bool:
    """What the manual promises: a piece of the usual size is enough to have each sample equally often."""
    return remainder == 0 or remainder // math.gcd(remainder, processes) <= BATCH // processes


def same(found: Trained, expected: Trained) -> bool:
    return all(map(lambda a, b: a == pytest.approx(b, rel=1e-9, abs=1e-12), found, expected))


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_mean_losses_train_equally_with_every_remainder_that_can_be_divided(world, processes):
    expected = train_with_each(REMAINDERS, True, False)
    for results in world.run(train_with_each, list(REMAINDERS), True, False, size=processes):
        alike = [same(found, wanted) for found, wanted in zip(results, expected, strict=True)]

        assert alike == [is_alike(remainder, processes) for remainder in REMAINDERS]
    assert all(is_alike(remainder, processes) for remainder in REMAINDERS if remainder % processes == 0)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_weighted_losses_train_equally_with_every_remainder(world, processes, even):
    # Without padding every process needs its own sample.
    remainders = [left for left in REMAINDERS if even or left == 0 or left >= processes]
    expected = [parameters for _, parameters in train_with_each(remainders, True, False)]
    for results in world.run(train_with_each, remainders, even, True, size=processes):
        for remainder, (_, found), wanted in zip(remainders, results, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12), remainder
