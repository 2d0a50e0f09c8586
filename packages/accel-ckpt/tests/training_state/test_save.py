from __future__ import annotations

import copy
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, Sampler

from accel_ckpt.background import thread
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.file_names import MANIFEST
from accel_ckpt.files import tensors
from accel_ckpt.folder.staging import staged
from accel_ckpt.training_state.load import load_accelerator_state, load_custom_state
from accel_ckpt.training_state.save import (
    save_accelerator_state,
    save_custom_state,
)
from accel_state.process.state import current_process

SLOW_S = 100  # a worker's first optimizer or DDP imports torch's compiler, which takes seconds


class Shuffled(Sampler[int]):
    """A sampler with a state: its generator and how much of the epoch is used."""

    def __init__(self, length: int, rank: int = 0, size: int = 1) -> None:
        self.length, self.rank, self.size, self.used, self.epoch = length, rank, size, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order[self.used * self.size + self.rank :: self.size]:
            self.used += 1
            yield index
        self.used, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used, self.epoch = state["used"], state["epoch"]


class StatefulLoader:
    """A loader with its own state, as prepared loaders are."""

    def __init__(self, sampler: Shuffled) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in self.sampler:
            yield torch.full((2, 4), float(index))

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])


class Run:
    """A small training run with everything that a checkpoint holds."""

    def __init__(self, seed: int = 0) -> None:
        process = current_process()
        torch.manual_seed(seed)
        random.seed(seed + process.rank)
        plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.model: nn.Module = plain
        self.second: nn.Module = nn.Linear(2, 1)
        if process.world_size > 1:
            self.model, self.second = (DistributedDataParallel(part) for part in (plain, self.second))
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=0.05),
            torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9),
        ]
        self.schedulers = [
            lrs.OneCycleLR(self.optimizers[0], 0.1, total_steps=40),
            lrs.SequentialLR(
                self.optimizers[1],
                [lrs.LinearLR(self.optimizers[1], total_iters=3), lrs.ExponentialLR(self.optimizers[1], 0.9)],
                [3],
            ),
        ]
        self.loader = StatefulLoader(Shuffled(20, process.rank, process.world_size))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.batches = self._forever()
        torch.manual_seed(100 + process.rank)

    def _forever(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = next(self.batches) + random.random()
            loss = self.second(self.model(batch)).square().mean()
            if self.schedulers[0].last_epoch in (1, 4):
                loss = loss * float("inf")  # a step that the scaler skips
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def objects(self) -> tuple[Any, ...]:
        return [self.model, self.second], self.optimizers, self.schedulers, [self.loader]

    def save(self, folder: Path, **options: Any) -> str:
        models, *others = self.objects()
        states = [getattr(model, "module", model).state_dict() for model in models]
        rank = current_process().rank
        return save_accelerator_state(folder, states, *others, rank, 3, self.scaler, **options)

    def load(self, folder: Path | str, **options: Any) -> dict[str, Any]:
        self.batches = self._forever()  # an iteration that has begun keeps the order it began with
        return load_accelerator_state(folder, *self.objects(), current_process().rank, self.scaler, **options)

    def everything(self) -> list[Any]:
        models, optimizers, schedulers, loaders = self.objects()
        parts = [*models, *optimizers, *schedulers, *loaders, self.scaler]
        return copy.deepcopy([part.state_dict() for part in parts])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


FILES = [
    MANIFEST,
    "dl_state_dict.bin",
    "model.safetensors",
    "model_1.safetensors",
    "optimizer.bin",
    "optimizer_1.bin",
    "random_states_0.pkl",
    "scaler.pt",
    "scheduler.bin",
    "scheduler_1.bin",
]


def resume(folder: str, safe: bool = True, map_location: str | None = None) -> list[bool]:
    """Six steps without a break against three, a save, a fresh run that loads, and three more."""
    path = Path(folder) / "c"
    straight = Run()
    losses = straight.train(6)

    first = Run()
    before = first.train(3)
    assert first.save(path, safe_serialization=safe) == str(path)
    second = Run(seed=7)
    second.train(1)
    result = second.load(path, map_location=map_location)
    after = second.train(3)
    return [
        losses[:3] == before,
        losses[3:] == after,
        same(straight.everything(), second.everything()),
        result == {"step": 3},
    ]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("device", [None, "cpu", "on_device"])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, safe: bool, device: str | None) -> None:
    assert resume(str(tmp_path), safe, device) == [True] * 4


@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_run_of_several_processes_continues_bit_for_bit(
    world: Any, tmp_path: Path, size: int
) -> None:
    assert world.run(resume, str(tmp_path), size=size, timeout_s=SLOW_S) == [[True] * 4] * size
    own = [f"random_states_{rank}.pkl" for rank in range(size)]
    assert sorted(os.listdir(tmp_path / "c")) == sorted({*FILES, *own})


def test_the_test_would_notice_what_is_not_restored(tmp_path: Path) -> None:
    # Each part matters to the comparison above: without it the resumed run differs.
    run = Run()
    run.train(3)
    run.save(tmp_path / "c")
    expected = (run.train(3), run.everything())
    for left_out in ("random_states_0.pkl", "dl_state_dict.bin", "scaler.pt"):
        shutil.copytree(tmp_path / "c", tmp_path / left_out)
        (tmp_path / left_out / MANIFEST).unlink()
        (tmp_path / left_out / left_out).unlink()
        again = Run(seed=7)
        with pytest.warns(UserWarning, match=left_out):
            again.load(tmp_path / left_out)
        assert not same([again.train(3), again.everything()], list(expected)), left_out


def test_the_files_are_the_documented_ones(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c")) == FILES
    opened = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert same(dict(sorted(opened.items())), dict(sorted(run.model.state_dict().items())))

    run.save(tmp_path / "c", safe_serialization=False)
    names = {"pytorch_model.bin" if name == "model.safetensors" else name for name in FILES}
    assert set(os.listdir(tmp_path / "c")) == (names - {"model_1.safetensors"}) | {"pytorch_model_1.bin"}
    for name in set(os.listdir(tmp_path / "c")) - {MANIFEST}:
        tensors.load(tmp_path / "c" / name)
    assert same(torch.load(tmp_path / "c" / "pytorch_model.bin", weights_only=True), run.model.state_dict())


def test_a_sampler_with_a_state_is_saved_where_the_loader_has_none(tmp_path: Path) -> None:
    def make() -> tuple[Shuffled, DataLoader[int]]:
        sampler = Shuffled(6)
        return sampler, DataLoader(range(6), sampler=sampler)  # type: ignore[arg-type]

    _, loader = make()
    seen = [int(next(batches)) for batches in [iter(loader)] for _ in range(2)]
    save_accelerator_state(tmp_path / "c", [], [], [], [DataLoader(range(3)), loader], 0, 0)  # type: ignore[arg-type]
    assert (tmp_path / "c" / "sampler_1.bin").exists()
    assert not (tmp_path / "c" / "sampler.bin").exists()

    _, loader = make()
    load_accelerator_state(tmp_path / "c", [], [], [], [DataLoader(range(3)), loader], 0)  # type: ignore[arg-type]
    assert (
        seen + [int(x) for x in loader]
        == torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
    )


# Names of weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def load_model(folder: Path, model: nn.Module, **options: Any) -> dict[str, Any]:
    return load_accelerator_state(folder, [model], [], [], [], 0, **options)


def test_tied_weights_load_strictly_and_stay_tied(tmp_path: Path) -> None:
    model, again = Tied(), Tied()
    save_accelerator_state(tmp_path / "c", [model.state_dict()], [], [], [], 0, 0)
    load_model(tmp_path / "c", again)

    assert torch.equal(again.head.weight, model.embed.weight)
    assert again.head.weight is again.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tied_weights_of_files_that_do_not_name_the_ties(tmp_path: Path, kept: str) -> None:
    model = Tied()
    weights = torch.randn(5, 3)
    folder = tmp_path / "foreign"
    folder.mkdir()
    safetensors.torch.save_file({kept: weights}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="another implementation|no random_states_0.pkl"):
        load_model(folder, model)

    assert torch.equal(model.embed.weight, weights)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_wrappers_have_lengthened(tmp_path: Path, prefix: str) -> None:
    model, again = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {prefix + name: value for name, value in model.state_dict().items()}
    save_accelerator_state(tmp_path / "c", [state], [], [], [], 0, 0)
    load_model(tmp_path / "c", again)

    assert same(again.state_dict(), model.state_dict())


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model, again = nn.ModuleDict({"module": nn.Linear(3, 2)}), nn.ModuleDict({"module": nn.Linear(3, 2)})
    save_accelerator_state(tmp_path / "c", [model.state_dict()], [], [], [], 0, 0)
    load_model(tmp_path / "c", again)

    assert same(again.state_dict(), model.state_dict())


def test_options_of_load_state_dict(tmp_path: Path) -> None:
    save_accelerator_state(tmp_path / "c", [nn.Linear(3, 2).state_dict()], [], [], [], 0, 0)
    with pytest.raises(
        CheckpointError, match=r"model 0 has no bias; model 0 has no weight; the file has no 0\."
    ):
        load_model(tmp_path / "c", nn.Sequential(nn.Linear(3, 2)))
    with pytest.warns(UserWarning, match=r"model 0 has no bias; .* the file has no 0\.weight for model 0"):
        load_model(tmp_path / "c", nn.Sequential(nn.Linear(3, 2)), strict=False)
    model = nn.Linear(4, 2)
    with pytest.raises(
        CheckpointError, match=r"weight has the shape \[2, 3\] in the file and \[2, 4\] in model 0"
    ):
        load_model(tmp_path / "c", model)
    load_model(tmp_path / "c", nn.Linear(3, 2), assign=True)


# Bad folders


def test_flipped_bits_are_noticed_and_named_and_nothing_is_changed(tmp_path: Path) -> None:
    run = Run()
    run.train(3)
    run.save(tmp_path / "c")
    other = Run(seed=7)
    before = other.everything()
    generator = random.Random(0)
    for _ in range(200):
        name = generator.choice(FILES)
        file = tmp_path / "c" / name
        good = file.read_bytes()
        place = generator.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match=name) as caught:
            other.load(tmp_path / "c")
        begin = 8 + int.from_bytes(good[:8], "little")
        if name == "model.safetensors" and place // 8 >= begin:
            assert ", in 1.num_batches_tracked, 0.bias, 0.weight" in str(caught.value)
        file.write_bytes(good)
    assert same(other.everything(), before)
    other.load(tmp_path / "c")


def test_checking_can_be_turned_off(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_accelerator_state(tmp_path / "c", [model.state_dict()], [], [], [], 0, 0)
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x40")
    load_model(tmp_path / "c", nn.Linear(3, 2), verify=False)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors differs"):
        load_model(tmp_path / "c", nn.Linear(3, 2))


def test_missing_parts_are_listed_before_anything_is_changed(tmp_path: Path) -> None:
    saved = nn.Linear(3, 2)
    save_accelerator_state(tmp_path / "c", [saved.state_dict()], [], [], [], 0, 0)
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    optimizers = [torch.optim.Adam(model.parameters()) for _ in range(2)]
    schedulers = [lrs.StepLR(optimizers[0], 1)]
    with pytest.raises(
        CheckpointError,
        match=r"there is no optimizer\.bin for optimizer 0; there is no optimizer_1\.bin for optimizer 1; "
        r"there is no scheduler\.bin for scheduler 0\. Load",
    ):
        load_accelerator_state(tmp_path / "c", [model], optimizers, schedulers, [], 0)
    assert same(model.state_dict(), before)
    message = (
        r"no model_1\.safetensors or pytorch_model_1\.bin or pytorch_model_fsdp_1\.bin or .* for model 1"
    )
    with pytest.raises(CheckpointError, match=message):
        load_accelerator_state(tmp_path / "c", [model, model], [], [], [], 0)


def test_what_nobody_requested_is_reported(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path / "c")
    parts = [
        *(
            f"{name} is not loaded: there is no {what} for it here"
            for name, what in (
                ("dl_state_dict.bin", "loader"),
                ("model_1.safetensors", "model"),
                ("optimizer.bin", "optimizer"),
                ("optimizer_1.bin", "optimizer"),
                ("scaler.pt", "loss scaler"),
                ("scheduler.bin", "scheduler"),
                ("scheduler_1.bin", "scheduler"),
            )
        )
    ]
    message = "; ".join(parts)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "c", run.model)
    with pytest.warns(UserWarning, match=message):
        load_model(tmp_path / "c", run.model, strict=False)


def test_no_folder(tmp_path: Path) -> None:
    save_accelerator_state(tmp_path / "step_1", [], [], [], [], 0, 0)
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*/step_2\. There is: step_1\."):
        load_model(tmp_path / "step_2", nn.Linear(1, 1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(
        FileNotFoundError, match=r"is not a checkpoint: it has neither accel_manifest\.json nor a"
    ):
        load_model(tmp_path / "empty", nn.Linear(1, 1))


def test_an_unknown_place_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'cpu', 'on_device' or a device, not 'toaster'"):
        load_model(tmp_path / "c", nn.Linear(1, 1), map_location="toaster")


def test_a_folder_of_another_implementation_loads(tmp_path: Path) -> None:
    # Written with torch and safetensors alone, under the documented names.
    import numpy as np

    folder = tmp_path / "foreign"
    folder.mkdir()
    run = Run()
    run.train(3)
    for index, model in enumerate([run.model, run.second]):
        torch.save(model.state_dict(), folder / ("pytorch_model_1.bin" if index else "pytorch_model.bin"))
    for index in range(2):
        end = "_1.bin" if index else ".bin"
        torch.save(run.optimizers[index].state_dict(), folder / f"optimizer{end}")
        torch.save(run.schedulers[index].state_dict(), folder / f"scheduler{end}")
    torch.save(run.scaler.state_dict(), folder / "scaler.pt")
    torch.save(run.loader.state_dict(), folder / "dl_state_dict.bin")
    states = {
        "step": 2,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, folder / "random_states_0.pkl")
    expected = (run.train(3), run.everything())
    again = Run(seed=7)
    with pytest.warns(UserWarning, match=r"another implementation wrote it, and its files cannot be checked"):
        assert again.load(folder) == {"step": 2}

    assert same([again.train(3), again.everything()], list(expected))


# Objects in the files


class Callable:
    def __init__(self, power: Any) -> None:
        self.power = power

    def __call__(self, step: int) -> float:
        return 1.0


class Thing:
    value = 2


@pytest.mark.parametrize("blocking", [True, False])
def test_values_of_common_types_come_back_and_others_are_rejected_by_the_save(
    tmp_path: Path, blocking: bool
) -> None:
    def make(value: Any) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer.param_groups[0]["folder"] = value
        return optimizer, lrs.LambdaLR(optimizer, Callable(value))

    def save(optimizer: Any, scheduler: Any) -> None:
        with staged(tmp_path / "c", blocking=blocking) as staging:
            save_accelerator_state(staging.path, [], [optimizer], [scheduler], [], 0, 0)
        thread.wait()

    value = {Path("a"): (datetime(2024, 1, 1), {UUID(int=1)})}
    save(*make(value))
    optimizer, scheduler = make(None)
    load_accelerator_state(tmp_path / "c", [], [optimizer], [scheduler], [], 0)
    assert optimizer.param_groups[0]["folder"] == value
    assert scheduler.lr_lambdas[0].power == value

    optimizer, scheduler = make(None)
    scheduler.lr_lambdas[0].power = Thing()
    message = r"scheduler 0 \(LambdaLR\) .* its state\['lr_lambdas'\]\[0\]\['power'\] is of type .*Thing"
    with pytest.raises(ValueError, match=message):
        save(optimizer, scheduler)
    optimizer.param_groups[0]["folder"] = Thing()
    with pytest.raises(
        ValueError, match=r"optimizer 0 \(SGD\) .*\['param_groups'\]\[0\]\['folder'\] is of type .*Thing"
    ):
        save(optimizer, scheduler)
    with torch.serialization.safe_globals([Thing]):
        save(optimizer, scheduler)
        load_accelerator_state(tmp_path / "c", [], [optimizer], [scheduler], [], 0)


def test_what_other_implementations_saved_loads_when_requested(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = lrs.LambdaLR(optimizer, Callable(Thing()))
    save_accelerator_state(tmp_path / "c", [], [], [], [], 0, 0)
    (tmp_path / "c" / MANIFEST).unlink()
    torch.save(scheduler.state_dict(), tmp_path / "c/scheduler.bin")
    with (
        pytest.warns(UserWarning, match="another implementation"),
        pytest.raises(CheckpointError, match=r"scheduler\.bin holds more than tensors"),
    ):
        load_accelerator_state(tmp_path / "c", [], [], [scheduler], [], 0)
    with pytest.warns(UserWarning, match="another implementation"):
        load_accelerator_state(
            tmp_path / "c", [], [], [scheduler], [], 0, load_kwargs={"weights_only": False}
        )


SCHEDULERS: dict[str, Any] = {
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "ConstantLR": lrs.ConstantLR,
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.5**step),
    "LinearLR": lrs.LinearLR,
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=9),
    "PolynomialLR": lrs.PolynomialLR,
    "ReduceLROnPlateau": lrs.ReduceLROnPlateau,
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [2]),
    "StepLR": lambda o: lrs.StepLR(o, 2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_every_scheduler_is_plain(tmp_path: Path, name: str) -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        return SCHEDULERS[name](optimizer)

    scheduler = make()
    save_accelerator_state(tmp_path / "c", [], [], [scheduler], [], 0, 0)
    again = make()
    load_accelerator_state(tmp_path / "c", [], [], [again], [], 0)

    assert same(tensors.load(tmp_path / "c" / "scheduler.bin"), scheduler.state_dict())


class Counter:
    def __init__(self, count: Any) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_registered_objects(tmp_path: Path) -> None:
    objects = [Counter(3), Counter(torch.ones(2))]
    with staged(tmp_path / "c") as staging:
        save_accelerator_state(staging.path, [], [], [], [], 0, 7)
        for index, item in enumerate(objects):
            save_custom_state(item, staging.path, index)
        assert not (tmp_path / "c").exists()
    again = [Counter(0), Counter(0)]
    assert load_accelerator_state(tmp_path / "c", [], [], [], [], 0) == {"step": 7}
    for index, item in enumerate(again):
        load_custom_state(item, tmp_path / "c", index)

    assert again[0].count == 3
    assert again[1].count.tolist() == [1, 1]


def test_registered_objects_in_a_plain_folder(tmp_path: Path) -> None:
    item = Counter(Thing())
    with torch.serialization.safe_globals([Thing]):
        save_custom_state(item, tmp_path, 2)
    assert os.listdir(tmp_path) == ["custom_checkpoint_2.pkl"]
    with pytest.raises(CheckpointError, match="holds more than"):
        load_custom_state(item, tmp_path, 2)
    load_custom_state(item, tmp_path, 2, weights_only=False)
    assert item.count.value == 2


def test_a_weight_that_safetensors_cannot_hold_stops_the_save(tmp_path: Path) -> None:
    save_accelerator_state(tmp_path / "c", [nn.Linear(1, 1).state_dict()], [], [], [], 0, 0)
    before = (tmp_path / "c" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="'extra' is of type dict"):
        save_accelerator_state(tmp_path / "c", [{"extra": {}}], [], [], [], 0, 0)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]


# Several processes


def _load(folder: str, **options: Any) -> tuple[str, list[str]]:
    run = Run(seed=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.load(folder, **options)
            end = "loaded"
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
    return end, [str(entry.message) for entry in caught if entry.category is UserWarning]


def _save(folder: str, fail_on: int | None = None) -> str:
    run = Run()
    run.train(2)
    if current_process().rank == fail_on:
        run.optimizers[0].state_dict = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    try:
        return run.save(Path(folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_failed_save_fails_everywhere_and_keeps_the_old_one(world: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert world.run(_save, str(folder), timeout_s=SLOW_S) == [str(folder)] * 2
    before = (folder / MANIFEST).read_bytes()
    told = "writing the checkpoint failed on another process. process 0: ZeroDivisionError: division by zero"
    expected = ["ZeroDivisionError: division by zero", f"CheckpointError: {told}"]
    assert world.run(_save, str(folder), 0, timeout_s=SLOW_S) == expected
    assert (folder / MANIFEST).read_bytes() == before
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_1.pkl", MANIFEST])
def test_a_flipped_bit_fails_on_all(world: Any, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "c"
    world.run(_save, str(folder), timeout_s=SLOW_S)
    raw = bytearray((folder / name).read_bytes())
    raw[len(raw) // 2] ^= 4
    (folder / name).write_bytes(raw)
    ends = [end for end, _ in world.run(_load, str(folder), timeout_s=SLOW_S)]

    assert all(name in end for end in ends)
    assert any(end.startswith("CorruptCheckpointError") for end in ends)


def test_on_more_processes_than_saved(world: Any, tmp_path: Path) -> None:
    Run().save(tmp_path / "c")
    first, second = world.run(_load, str(tmp_path / "c"), timeout_s=SLOW_S)

    assert first[0] == "loaded"
    assert "saved on 1 and loaded on 2 processes: random generators are derived" in first[1][0]
    assert second == ("loaded", [])


def test_on_fewer_processes_than_saved(world: Any, tmp_path: Path) -> None:
    world.run(_save, str(tmp_path / "c"), timeout_s=SLOW_S)

    end, told = _load(str(tmp_path / "c"))
    assert end == "loaded"
    assert "saved on 2 and loaded on 1 processes: random generators are those of the first ranks" in told[0]


def _load_own(base: str) -> str:
    """Each process as if on its own machine, with its own disk."""
    here = current_process()
    process = replace(here, local_rank=0, local_world_size=1)
    return _load(str(Path(base) / f"disk{here.rank}"), process=process)[0]


def test_folders_of_different_saves_do_not_mix(world: Any, tmp_path: Path) -> None:
    world.run(_save, str(tmp_path / "disk0"), timeout_s=SLOW_S)
    world.run(_save, str(tmp_path / "disk1"), timeout_s=SLOW_S)
    first, second = world.run(_load_own, str(tmp_path), timeout_s=SLOW_S)

    assert "disk1 is not from the same save here" in second
    assert "disk1 is not from the same save here" in first

    shutil.rmtree(tmp_path / "disk1")
    shutil.copytree(tmp_path / "disk0", tmp_path / "disk1")
    assert world.run(_load_own, str(tmp_path), timeout_s=SLOW_S) == ["loaded", "loaded"]
