"""Optimizers of sharded models, saved by themselves and by save_state, where parameters have no state."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from accel_ckpt.errors import CheckpointError
from accel_ckpt.sharded.dcp_reader import read_metadata

Run = tuple[Accelerator, torch.nn.Module, Any]


def train(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Partly(torch.nn.Module):
    """One module is frozen, and one never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.unused = torch.nn.Linear(3, 5)
        self.frozen.requires_grad_(False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(data)).tanh())


class Counting(torch.optim.AdamW):
    """Counts its steps in its groups, as schedule-free optimizers do; draws; decays weights at any rate."""

    def step(self, closure: Any = None) -> None:
        torch.rand(1)
        for group in self.param_groups:
            group["count"] += 1
            group["decay"] = 0.99
            for item in group["params"]:
                if item.grad is not None:
                    item.detach().mul_(group["decay"])
        super().step(closure)


LAYOUTS = {"flat": (1, False), "original": (1, True), "sharded": (2, None)}


def make_partly(layout: str, kind: str, seed: int) -> Run:
    version, original = LAYOUTS[layout]
    own = {"sync_module_states": True, "use_orig_params": original} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        **own,
    )
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Partly()
    groups = [{"params": list(model.parameters())[::-1], "count": torch.tensor(0)}]
    return accelerator, *accelerator.prepare(model, Counting(groups, lr=torch.tensor(0.1)))


def account(optimizer: Any) -> list[Any]:
    """Copies of what an optimizer has, in the order of its parameters."""
    inner = optimizer.optimizer
    states = [inner.state.get(item) for group in inner.param_groups for item in group["params"]]
    groups = [{**group, "params": len(group["params"])} for group in inner.param_groups]
    return copy.deepcopy([len(inner.state), states, groups])


def equal(one: Any, other: Any) -> bool:
    """Whether two accounts are the same bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def save_by(how: str, run: Run, folder: str) -> None:
    accelerator, model, optimizer = run
    if how == "state":
        accelerator.save_state(folder)
        return
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)
    save_fsdp_optimizer(accelerator.state.fsdp_plugin, accelerator, optimizer, model, folder)


def load_by(how: str, run: Run, folder: str) -> None:
    accelerator, model, optimizer = run
    if how == "state":
        accelerator.load_state(folder)
        return
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)
    load_fsdp_optimizer(accelerator.state.fsdp_plugin, accelerator, optimizer, model, folder)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [getattr(item, "_local_tensor", item).detach().clone() for item in model.parameters()]


def save_when_fresh(folder: str, layout: str, kind: str) -> None:
    run = make_partly(layout, kind, 1)
    straight = train(*run), weights(run[1])
    for how in ("files", "state"):
        run = make_partly(layout, kind, 1)
        before = account(run[2]), weights(run[1])
        save_by(how, run, f"{folder}/{how}")
        assert equal([account(run[2]), weights(run[1])], [*before])
        assert equal([train(*run), weights(run[1])], [*straight])
        # It is fresh again, whatever it had.
        load_by(how, run, f"{folder}/{how}")
        assert equal([account(run[2]), weights(run[1])], [*before])
        assert equal([train(*run), weights(run[1])], [*straight])


EACH = [(layout, kind) for layout in LAYOUTS for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")]


@pytest.mark.parametrize(("layout", "kind"), EACH)
def test_saving_a_fresh_optimizer_changes_nothing(world, tmp_path, layout, kind):
    world.run(save_when_fresh, str(tmp_path), layout, kind, size=2)


def save_when_partly_begun(folder: str, layout: str, kind: str) -> None:
    for how in ("files", "state"):
        run = make_partly(layout, kind, 1)
        train(*run)
        before = account(run[2]), weights(run[1])
        save_by(how, run, f"{folder}/{how}")
        assert equal([account(run[2]), weights(run[1])], [*before])
        drawn = torch.get_rng_state()
        straight = train(*run), weights(run[1])
        fresh = make_partly(layout, kind, 2)
        for again in (fresh, run):
            stepped: list[Any] = []
            hook = again[2].optimizer.register_step_pre_hook(
                lambda *given, stepped=stepped: stepped.append(given)
            )
            load_by(how, again, f"{folder}/{how}")
            hook.remove()
            assert not stepped
            assert equal([account(again[2]), weights(again[1])], [*before])
            assert how == "files" or torch.equal(torch.get_rng_state(), drawn)
            assert equal([train(*again), weights(again[1])], [*straight])


@pytest.mark.parametrize(("layout", "kind"), EACH)
def test_parameters_that_are_frozen_or_had_no_gradient_are_restored(world, tmp_path, layout, kind):
    world.run(save_when_partly_begun, str(tmp_path), layout, kind, size=2)


def damage(folder: Path, kind: str) -> None:
    """Spoil what is read of an optimizer last, so that sizes stay."""
    if kind == "FULL_STATE_DICT":
        state = torch.load(folder / "optimizer.bin")
        state["param_groups"][0]["params"].pop()
        torch.save(state, folder / "optimizer.bin")
        return
    for index, info in read_metadata(folder / "optimizer_0").storage_data.items():
        if "exp_avg" in index.fqn and info.relative_path == "__1_0.distcp":
            with open(folder / "optimizer_0" / info.relative_path, "r+b") as file:
                file.seek(info.offset)
                file.write(bytes(info.length))


def load_what_is_damaged(folder: str, layout: str, kind: str) -> None:
    saved = make_partly(layout, kind, 1)
    saved[2].param_groups[0]["lr"].fill_(0.3)
    train(*saved)
    for how in ("files", "state"):
        place = f"{folder}/{how}"
        save_by(how, saved, place)
        if saved[0].is_main_process:
            damage(Path(place), kind)
        saved[0].wait_for_everyone()
        fresh, begun = make_partly(layout, kind, 2), make_partly(layout, kind, 3)
        train(*begun)
        for accelerator, model, optimizer in (fresh, begun):
            before = account(optimizer)
            plugin = accelerator.state.fsdp_plugin
            load = {
                "state": partial(accelerator.load_state, place, verify=False),
                "files": partial(load_fsdp_optimizer, plugin, accelerator, optimizer, model, place),
            }
            with pytest.raises((CheckpointError, ValueError)):
                load[how]()
            assert equal(account(optimizer), before)


@pytest.mark.parametrize(("layout", "kind"), EACH)
def test_a_load_that_fails_leaves_the_optimizer_as_it_was(world, tmp_path, layout, kind):
    world.run(load_what_is_damaged, str(tmp_path), layout, kind, size=2)


class Second(torch.nn.Sequential):
    """Runs the second of its modules alone."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self[1](data)


def load_where_one_fails(folder: str, layout: str, kind: str) -> None:
    run = make_partly(layout, kind, 1)
    train(*run)
    save_by("files", run, folder)
    accelerator, model, optimizer = make_partly(layout, kind, 2)
    train(accelerator, model, optimizer)
    before = account(optimizer)
    if not accelerator.is_main_process:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("no memory here")

        optimizer.optimizer.load_state_dict = fail
    with pytest.raises((CheckpointError, OSError), match="no memory here"):
        load_fsdp_optimizer(accelerator.state.fsdp_plugin, accelerator, optimizer, model, folder)
    assert equal(account(optimizer), before)


@pytest.mark.parametrize(("layout", "kind"), EACH)
def test_where_one_process_fails_all_keep_the_optimizer_as_it_was(world, tmp_path, layout, kind):
    world.run(load_where_one_fails, str(tmp_path), layout, kind)


def load_into_one_vector(folder: str, kind: str) -> list[str]:
    found = []
    for place, unused in enumerate(("before", "behind")):
        for version in (2, 1):
            own = {"sync_module_states": True, "use_orig_params": False} if version == 1 else {}
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **own)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            model = torch.nn.Linear(4, 2)
            if unused == "behind":
                model.unused = torch.nn.Linear(3, 5)
            else:
                model = Second(torch.nn.Linear(3, 5), model)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            run = accelerator, model, optimizer
            if version == 2:
                train(*run)
                save_by("files", run, f"{folder}/{place}")
        before = account(optimizer)
        with pytest.raises(ValueError) as caught:
            load_by("files", run, f"{folder}/{place}")
        assert equal(account(optimizer), before)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_state_for_a_part_of_a_flat_parameter_is_rejected(world, tmp_path, kind):
    for found in world.run(load_into_one_vector, str(tmp_path), kind, size=2):
        for message in found:
            assert "use_orig_params=True" in message


def load_other_groups(folder: str, layout: str, kind: str) -> None:
    accelerator, model, optimizer = make_partly(layout, kind, 1)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)))
    train(accelerator, model, optimizer)
    schedule.step()
    accelerator.save_state(folder)

    accelerator, model, _ = make_partly(layout, kind, 2)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 8.0}]
    optimizer = accelerator.prepare(torch.optim.SGD(groups, lr=4.0))
    accelerator.run.prepared.optimizers.pop(0)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)))
    before = account(optimizer), schedule.state_dict()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accelerator.load_state(folder, strict=False)
    assert equal([account(optimizer), schedule.state_dict()], [*before])
    if accelerator.is_main_process:
        left = "scheduler.bin is not loaded: its optimizer is not loaded"
        assert [str(item.message) for item in told if left in str(item.message)]


@pytest.mark.parametrize(("layout", "kind"), EACH)
def test_a_schedule_stays_as_it_is_with_its_optimizer(world, tmp_path, layout, kind):
    world.run(load_other_groups, str(tmp_path), layout, kind, size=2)
