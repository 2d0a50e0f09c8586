"""Registered objects that hold tensors of a sharded model are saved as what they are, and resharded."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ckpt.errors import CheckpointError
from accel_state.parallelism.config import ParallelismConfig

# Of loading on another number of processes.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint .* processes:UserWarning")

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "single": dict,
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2, state_dict_type="FULL_STATE_DICT")},
    "fsdp2 sharded": lambda: {"fsdp_plugin": FSDP(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1)},
}


class Layers(torch.nn.Sequential):
    _tp_plan: ClassVar = {"0": "colwise", "2": "rowwise"}

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


class Average:
    """An average of parameters, as diffusers' EMAModel keeps it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = [item.detach().clone() for item in model.parameters()]
        self.updates = 0

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        for average, item in zip(self.weights, model.parameters(), strict=True):
            average.lerp_(item.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]

    def whole(self) -> list[torch.Tensor]:
        return [item.full_tensor() if isinstance(item, DTensor) else item for item in self.weights]


def train(accelerator: Accelerator, model: Any, optimizer: Any, average: Average, steps: int) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)


def begin(engine: str) -> tuple[Accelerator, Any, Any, Average]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    return accelerator, model, optimizer, average


def save(engine: str, folder: str) -> list[torch.Tensor]:
    accelerator, model, optimizer, average = begin(engine)
    train(accelerator, model, optimizer, average, 3)
    saved = [item.clone() for item in average.whole()]
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, average, 2)
    accelerator.load_state(folder)
    assert [isinstance(item, DTensor) for item in average.weights] == [
        isinstance(item, DTensor) for item in model.parameters()
    ]
    assert all(torch.equal(a, b) for a, b in zip(average.whole(), saved, strict=True))
    train(accelerator, model, optimizer, average, 1)  # which meets parameters of the same layout
    return saved


def load(engine: str, folder: str) -> tuple[list[torch.Tensor], int]:
    accelerator, model, optimizer, average = begin(engine)
    accelerator.load_state(folder)
    found = [item.clone() for item in average.whole()], average.updates
    train(accelerator, model, optimizer, average, 1)
    return found


KINDS = ("single", "fsdp2", "fsdp2 sharded", "tp")
PAIRS = [  # a sharded checkpoint, and one of full weights, are read by engines that write the same
    (before, after)
    for before in KINDS
    for after in KINDS
    if "single" in (before, after) or ("in parts" in before) == ("in parts" in after)
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_an_average_of_weights_is_resharded(world, tmp_path, before, after):
    saved = world.run(save, before, str(tmp_path / "saved"), size=1 if before == "single" else 2)[0]
    for weights, updates in world.run(
        load, after, str(tmp_path / "saved"), size=1 if after == "single" else 2
    ):
        assert updates == 3
        assert all(torch.equal(a, b) for a, b in zip(weights, saved, strict=True))


def save_flat_parts(folder: str) -> str:
    accelerator, _, _, _ = begin("fsdp1")
    with pytest.raises(ValueError, match="registered object 0") as error:
        accelerator.save_state(folder)
    return str(error.value)


def test_local_shards_are_rejected_with_the_way_out(world, tmp_path):
    for text in world.run(save_flat_parts, str(tmp_path / "saved")):
        assert "Average" in text
        assert "get_state_dict" in text
        assert "fsdp_version=2" in text
    assert not (tmp_path / "saved").exists()


def load_into_an_empty_one(engine: str, folder: str) -> str:
    accelerator, _, _, average = begin(engine)
    average.weights = []
    if engine == "single":
        accelerator.load_state(folder)
        return str(len(average.weights))
    with pytest.raises(CheckpointError) as error:
        accelerator.load_state(folder)
    return str(error.value)


@pytest.mark.parametrize("engine", ["fsdp2 sharded", "tp"])
def test_what_has_no_place_yet_is_reported_where_models_are_sharded(world, tmp_path, engine):
    folder = str(tmp_path / "saved")
    world.run(save, engine, folder)

    for text in world.run(load_into_an_empty_one, engine, folder):
        assert "state['weights'][0] was saved sharded" in text
        assert "registered object 0 (Average)" in text
        assert "Create its tensors before load_state" in text
    assert world.run(load_into_an_empty_one, "single", folder, size=1) == ["4"]


def fail_on_one_process(folder: str) -> str:
    accelerator, _, _, average = begin("fsdp2")

    def state_dict() -> dict[str, Any]:
        if accelerator.process_index == 1:
            raise KeyError("missing")
        return {}

    average.state_dict = state_dict
    with pytest.raises((KeyError, CheckpointError), match=r"missing|failed on another process") as error:
        accelerator.save_state(folder)
    return type(error.value).__name__


def test_a_state_that_fails_on_one_process_fails_on_all(world, tmp_path):
    assert world.run(fail_on_one_process, str(tmp_path / "saved")) == ["CheckpointError", "KeyError"]


def save_what_is_each_processs_own(folder: str) -> bool:
    accelerator, *_ = begin("fsdp2")

    class Counts:
        def __init__(self) -> None:
            self.seen = torch.tensor([accelerator.process_index])  # integers: of no parameter

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.seen = state["seen"]

    accelerator.register_for_checkpointing(Counts())
    accelerator.save_state(folder)
    return True


def test_integers_may_differ(world, tmp_path):
    assert world.run(save_what_is_each_processs_own, str(tmp_path / "saved")) == [True, True]
