"""Local SGD on real gloo workers, against the same steps written out in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel.accelerator import Accelerator
from accel.local_sgd import LocalSGD
from accel_optim.handlers import DistributedDataParallelKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")

SLOW_S = 100  # a worker's first optimizer or DDP imports torch's compiler, which takes seconds


class Model(torch.nn.Module):
    """A linear layer, a frozen parameter and a batch norm; fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.frozen


def batch(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def written_out(size: int, steps: int, every: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's weights after the block, from plain models of this process alone."""
    models = [Model() for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]

    def average() -> None:
        with torch.no_grad():
            for name in models[0].state_dict():
                values = [model.state_dict()[name] for model in models]
                if values[0].is_floating_point():
                    mean = torch.stack(values).mean(0)
                    for value in values:
                        value.copy_(mean)

    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for micro in range(accumulation):
                (loss_of(model, batch(rank, step * accumulation + micro)) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % every == 0:
            average()
    average()
    return [model.state_dict() for model in models]


def trained(steps: int, every: int, accumulation: int, enabled: bool) -> tuple[dict[str, Any], list[bool]]:
    """The weights after the block, and after which micro-batches all ranks had the same parameters."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    plain = Model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    same = []
    with LocalSGD(accelerator, model, local_sgd_steps=every, enabled=enabled) as local_sgd:
        for index in range(steps * accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch(accelerator.process_index, index)))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            same.append(all_same(plain.linear.weight.detach()))
    return {name: value.clone() for name, value in plain.state_dict().items()}, same


def all_same(tensor: torch.Tensor) -> bool:
    if not dist.is_initialized():
        return True
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize(("size", "accumulation"), [(2, 1), (3, 2)])
def test_steps_are_local_and_parameters_averaged(world, size, accumulation):
    results = world.run(trained, 5, 2, accumulation, True, size=size, timeout_s=SLOW_S)
    expected = written_out(size, 5, 2, accumulation)

    closing = [
        True if accumulation == 1 else index % accumulation == accumulation - 1
        for index in range(5 * accumulation)
    ]
    for (weights, same), wanted in zip(results, expected, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)
            assert torch.equal(weights[name], results[0][0][name])
        steps_done = torch.tensor(closing).cumsum(0).tolist()
        # together before the first step and after each second one, apart in between
        assert same == [done % 2 == 0 for done in steps_done]


def test_disabled_it_is_ordinary_training(world):
    on, off = (world.run(trained, 4, 2, 1, enabled, timeout_s=SLOW_S) for enabled in (True, False))

    assert all(all(same) for _, same in off)
    assert not torch.equal(on[0][0]["linear.weight"], off[0][0]["linear.weight"])


def test_one_process_trains_as_without():
    weights, _ = trained(3, 2, 1, True)
    expected = written_out(1, 3, 2, 1)[0]

    for name, value in expected.items():
        assert torch.equal(weights[name], value)


def gradients_after_the_block() -> list[bool]:
    accelerator = Accelerator()
    plain = torch.nn.Linear(3, 1, bias=False)
    model = accelerator.prepare(plain)
    seen = []

    def backward() -> bool:
        plain.zero_grad()
        accelerator.backward(model(torch.ones(1, 3) * (accelerator.process_index + 1)).sum())
        assert plain.weight.grad is not None
        return all_same(plain.weight.grad)

    with LocalSGD(accelerator, model, 8):
        seen.append(backward())
    seen.append(backward())

    def fail() -> None:
        with LocalSGD(accelerator, model, 8):
            plain.weight.data += accelerator.process_index
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    seen.append(all_same(plain.weight.detach()))  # no average: the other rank might not be there
    seen.append(backward())
    return seen


def test_gradients_are_averaged_again_after_the_block_however_it_was_left(world):
    assert world.run(gradients_after_the_block, timeout_s=SLOW_S)[0] == [False, True, False, True]


def buffers(broadcast: bool) -> float:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=broadcast)])
    plain = Model()
    model = accelerator.prepare(plain)
    with LocalSGD(accelerator, model, 1):
        plain.norm.running_mean.fill_(float(accelerator.process_index))
    return float(plain.norm.running_mean[0])


def test_buffers_are_averaged_unless_ddp_leaves_them_apart(world):
    assert world.run(buffers, True, timeout_s=SLOW_S) == [0.5, 0.5]
    assert world.run(buffers, False, timeout_s=SLOW_S) == [0.0, 1.0]


def refusals() -> list[str]:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    found = []
    with pytest.raises(ValueError, match="LocalSGD") as error:
        LocalSGD(accelerator, accelerator.unwrap_model(model), 2)
    found.append(str(error.value))
    with pytest.raises(ValueError, match="LocalSGD") as error, LocalSGD(accelerator, model, 2):
        pass
    found.append(str(error.value))
    accelerator.backward(model(torch.ones(1, 2)).sum())  # learns the graph
    with LocalSGD(accelerator, model, 2):
        pass
    return found


def test_what_cannot_be_held_back_is_rejected(world):
    whole, static = world.run(refusals, timeout_s=SLOW_S)[0]

    assert "got Linear. Pass what accelerator.prepare(model) returned" in whole
    assert "static_graph=True" in static
    assert "make one ordinary step before" in static


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_a_wrong_number_of_steps_is_rejected(steps):
    with pytest.raises(ValueError, match=f"1 or more, not {steps!r}"):
        LocalSGD(Accelerator(), torch.nn.Linear(1, 1), steps)


def test_sharded_models_are_rejected(world):
    assert "under FSDP a process does not train one alone" in world.run(sharded, timeout_s=SLOW_S)[0]


def sharded() -> str:
    from types import SimpleNamespace

    from accel_state.enums import DistributedType

    accelerator = SimpleNamespace(process=Accelerator().process, distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match="FSDP") as error:
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 2)
    return str(error.value)
