"""save and load by names: replicas, sharded models, and what goes wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accel_ckpt
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError

pytestmark = pytest.mark.usefixtures("fresh_state")


class Loader:
    """What a loader of accel-data is to a checkpoint."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """The objects of a small run."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)).double()
        if kind == "ddp":
            model = DistributedDataParallel(model)
        if kind == "sharded":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for part in (model[0], model[2], model):
                fully_shard(part, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.loader = Loader()
        self.others = [torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))]

    def objects(self) -> dict[str, Any]:
        return vars(self)

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).double()
            loss = self.model(data + 0.01 * torch.rand(())).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.loader.position += 1
            self.others[0].update_parameters(nn.Linear(1, 1))
            losses.append(loss.item())
        return losses


def save_and_go_on(kind: str, folder: str, blocking: bool = True) -> list[float]:
    training = Training(kind, 0)
    training.run(range(3))
    accel_ckpt.save(folder, **training.objects(), step=3, blocking=blocking)
    losses = training.run(range(3, 7))
    accel_ckpt.wait()
    return losses


def load_and_go_on(kind: str, folder: str) -> list[float]:
    training = Training(kind, 1)
    step = accel_ckpt.load(folder, **training.objects())
    assert (step, training.loader.position, training.scheduler.last_epoch) == (3, 3, 3)
    assert int(training.others[0].n_averaged) == 3
    return training.run(range(step, 7))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(("kind", "size"), [("plain", 1), ("ddp", 2), ("sharded", 2)])
def test_a_run_continues_bit_for_bit(world, tmp_path, kind, size, blocking):
    folder = str(tmp_path / "run" / "checkpoint_3")
    expected = world.run(save_and_go_on, kind, folder, blocking, size=size)
    assert world.run(load_and_go_on, kind, folder, size=size) == expected
    assert accel_ckpt.latest(tmp_path / "run") == Path(folder)


on_others = pytest.mark.filterwarnings("ignore:.*random generators are (derived|those of):UserWarning")


def loaded_sums(kind: str, folder: str) -> list[float]:
    training = Training(kind, 1)
    accel_ckpt.load(folder, **training.objects())
    parameters = [item.full_tensor() if kind == "sharded" else item for item in training.model.parameters()]
    return [float(item.detach().sum()) for item in parameters]


@on_others
@pytest.mark.parametrize(("saved", "loaded"), [(("ddp", 2), ("plain", 1)), (("plain", 1), ("ddp", 2))])
def test_replicas_load_on_any_number_of_processes(world, tmp_path, saved, loaded):
    folder = str(tmp_path / "checkpoint_3")
    world.run(save_and_go_on, saved[0], folder, size=saved[1])
    same = world.run(loaded_sums, saved[0], folder, size=saved[1])[0]
    assert world.run(loaded_sums, loaded[0], folder, size=loaded[1])[0] == same


@on_others
@pytest.mark.parametrize("size", [1, 3])
def test_shards_load_on_any_number_of_processes(world, tmp_path, size):
    folder = str(tmp_path / "checkpoint_3")
    world.run(save_and_go_on, "sharded", folder)
    same = world.run(loaded_sums, "sharded", folder)[0]
    kind = "plain" if size == 1 else "sharded"
    assert world.run(loaded_sums, kind, folder, size=size)[0] == pytest.approx(same, rel=1e-12)


def refuses_whole_weights(folder: str) -> str:
    training = Training("sharded", 1)
    with pytest.raises(CheckpointError) as caught:
        accel_ckpt.load(folder, model=training.model, optimizer=training.optimizer)
    return str(caught.value)


def test_full_weights_are_rejected_for_a_sharded_model(world, tmp_path):
    folder = str(tmp_path / "checkpoint_3")
    world.run(save_and_go_on, "ddp", folder)
    for message in world.run(refuses_whole_weights, folder):
        assert "has full weights, and the model is sharded. Load it before the model is sharded" in message


def refuses_a_stranger(folder: str) -> str:
    training = Training("sharded", 0)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer 1 .SGD. has no parameters of a passed model") as caught:
        accel_ckpt.save(folder, model=training.model, optimizer=[training.optimizer, other])
    return str(caught.value)


def test_an_optimizer_of_no_model_is_rejected_before_anything_is_written(world, tmp_path):
    world.run(refuses_a_stranger, str(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


def test_verify_names_the_file_with_a_wrong_bit(tmp_path):
    folder = accel_ckpt.save(tmp_path / "run", **Training("plain", 0).objects())
    accel_ckpt.verify(folder)
    file = folder / random.Random(0).choice(["model.safetensors", "optimizer.bin", "scheduler.bin"])
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=file.name):
        accel_ckpt.verify(folder)
    (folder / "accel_manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no accel_manifest\.json: its files cannot be checked"):
        accel_ckpt.verify(folder)
    with pytest.raises(FileNotFoundError):
        accel_ckpt.verify(tmp_path / "elsewhere")


def test_an_object_that_is_missing_in_the_folder_is_an_error(tmp_path):
    training = Training("plain", 0)
    folder = accel_ckpt.save(tmp_path / "run", model=training.model)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        accel_ckpt.load(folder, model=training.model, optimizer=training.optimizer)
    assert accel_ckpt.load(folder, model=training.model) == 0


class Average:
    """A shadow of a model's parameters, as sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: item.detach().clone() for name, item in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.shadow[name].copy_(value)


def average_of_shards(folder: str) -> tuple[list[float], list[float]]:
    training = Training("sharded", 0)
    average = Average(training.model)
    before = [float(item.full_tensor().sum()) for item in average.shadow.values()]
    accel_ckpt.save(folder, model=training.model, others=average)
    for item in average.shadow.values():
        item.zero_()
    accel_ckpt.load(folder, model=training.model, others=average)
    return before, [float(item.full_tensor().sum()) for item in average.shadow.values()]


def test_parts_of_other_objects_are_those_of_each_process(world, tmp_path):
    for before, after in world.run(average_of_shards, str(tmp_path / "run")):
        assert after == before


class FailingLoader:
    """A loader whose position cannot be saved; only the main process requests it."""

    def state_dict(self) -> dict[str, int]:
        raise OSError("the position is unknown")


def save_beside_failing_loader(folder: str) -> tuple[str, str, list[str]]:
    training = Training("sharded", seed=0)
    objects = {**training.objects(), "loader": FailingLoader()}
    with pytest.raises((OSError, CheckpointError)) as raised:
        accel_ckpt.save(folder, **objects)
    return type(raised.value).__name__, str(raised.value), os.listdir(Path(folder).parent)


def test_all_processes_raise_if_one_fails_before_the_shards_are_written(world, tmp_path):
    main, other = world.run(save_beside_failing_loader, str(tmp_path / "runs/checkpoint_1"))
    assert main == ("OSError", "the position is unknown", [])
    assert other[0] == "CheckpointError"
    assert "process 0: OSError: the position is unknown" in other[1]
