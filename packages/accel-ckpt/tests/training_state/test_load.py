"""Strict and itemised restores."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.files import tensors
from accel_ckpt.folder import commit, manifest
from accel_ckpt.folder.staging import staged
from accel_ckpt.training_state.load import load_accelerator_state
from accel_ckpt.training_state.save import save_accelerator_state, save_custom_state
from accel_ckpt.weights.files import save_weights
from accel_state.process.state import current_process

pytestmark = pytest.mark.core


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """One of everything, each with a state that shows whether it was loaded."""

    def __init__(self, value: float = 0.0) -> None:
        self.model = nn.Linear(2, 2)
        nn.init.constant_(self.model.weight, value)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=value)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader, self.custom = Counter(int(value)), Counter(int(value))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=value + 1)

    def save(self, folder: Path, hook: bool = False) -> None:
        with staged(folder) as staging:
            if hook and current_process().is_main:
                (staging.path / "extra.json").write_text("{}")
            state, rank = self.model.state_dict(), current_process().rank
            parts = [self.optimizer], [self.scheduler], [self.loader]
            save_accelerator_state(staging.path, [state], *parts, rank, 0, self.scaler)
            save_custom_state(self.custom, staging.path, 0)

    def load(self, folder: Path, **options: Any) -> dict[str, Any]:
        rank = current_process().rank
        parts = [self.model], [self.optimizer], [self.scheduler], [self.loader]
        return load_accelerator_state(
            folder, *parts, rank, self.scaler, custom_objects=[self.custom], **options
        )

    def values(self) -> dict[str, float]:
        return {
            "model.safetensors": self.model.weight[0, 0].item(),
            "optimizer.bin": self.optimizer.param_groups[0]["lr"],
            "dl_state_dict.bin": self.loader.count,
            "custom_checkpoint_0.pkl": self.custom.count,
            "scaler.pt": self.scaler.get_scale() - 1,
        }


def without(folder: Path, name: str, seal: bool = True) -> Path:
    """A copy without one file, as if it had been saved like that."""
    facts = manifest.read(folder)
    assert facts is not None
    copy = Path(shutil.copytree(folder, folder.parent / f"without_{name}"))
    (copy / name).unlink()
    if seal:
        commit.seal(copy, facts.facts)
    return copy


PARTS = [*Run().values(), "scheduler.bin", "random_states_0.pkl"]


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_part_is_an_error_or_reported_and_the_rest_is_restored(tmp_path: Path, name: str) -> None:
    Run(3.0).save(tmp_path / "c")
    folder = without(tmp_path / "c", name)
    run = Run()
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=rf"there is no {name}( or pytorch_model\.bin)?.* strict=False"):
        run.load(folder)
    assert set(run.values().values()) == {0}  # nothing is changed
    assert torch.equal(before, torch.get_rng_state())
    with pytest.warns(UserWarning, match=rf"there is no {name}"):
        run.load(folder, strict=False)
    assert {part: value for part, value in run.values().items() if value != 3} == (
        {name: 0} if name in run.values() else {}
    )


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_file_that_the_manifest_names_is_damage(tmp_path: Path, name: str) -> None:
    Run(3.0).save(tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
        Run().load(without(tmp_path / "c", name, seal=False), strict=False, verify=False)


@pytest.mark.parametrize("name", PARTS)
def test_in_folders_of_others_only_the_core_is_required(tmp_path: Path, name: str) -> None:
    Run(3.0).save(tmp_path / "c")
    folder = without(tmp_path / "c", name, seal=False)
    (folder / "accel_manifest.json").unlink()
    critical = name in ("model.safetensors", "optimizer.bin", "scheduler.bin")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if critical:
            with pytest.raises(CheckpointError, match=f"there is no {name}"):
                Run().load(folder)
        else:
            Run().load(folder)
    assert any(f"there is no {name}" in str(entry.message) for entry in caught) != critical
    with (
        pytest.warns(UserWarning, match="another implementation"),
        pytest.raises(CheckpointError, match=name),
    ):
        Run().load(folder, strict=True)


@pytest.mark.parametrize(
    "name", ["README.md", "trainer_state.json", ".DS_Store", ".notes.swp", "sub/notes.txt", "link"]
)
@pytest.mark.parametrize("strict", [None, True])
def test_a_file_that_the_user_has_put_into_the_folder_is_ignored(
    tmp_path: Path, name: str, strict: bool | None
) -> None:
    Run(3.0).save(tmp_path / "c")
    (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
    if name == "link":
        (tmp_path / "c" / name).symlink_to(tmp_path)
    else:
        (tmp_path / "c" / name).write_text("mine")
    run = Run()
    run.load(tmp_path / "c", strict=strict)
    assert set(run.values().values()) == {3}


@pytest.mark.parametrize("name", ["scheduler_1.bin", "model_1.safetensors", "random_states_7.pkl"])
def test_a_file_called_as_one_of_a_checkpoint_is_noted_and_ignored(tmp_path: Path, name: str) -> None:
    Run(3.0).save(tmp_path / "c")
    (tmp_path / "c" / name).write_text("not saved by accel")
    run = Run()
    with pytest.warns(UserWarning, match=rf"{name} is ignored: it is not in accel_manifest\.json"):
        run.load(tmp_path / "c")
    assert set(run.values().values()) == {3}


def sealed_with(folder: Path, name: str, value: Any, **facts: Any) -> None:
    """Put a file into a checkpoint, as if it had been saved like that."""
    read = manifest.read(folder)
    assert read is not None
    tensors.save(value, folder / name, safe_serialization=name.endswith(".safetensors"))
    commit.seal(folder, {**read.facts, **facts})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gradients_0.safetensors", "no accumulation window was open"),
        ("gradients_1.safetensors", "it belongs to none of the 1 processes"),
        ("random_states_3.pkl", "it belongs to none of the 1 processes"),
        ("sampler.bin", "dl_state_dict.bin is loaded instead"),
        ("sampler_1.bin", "there is no sampler for it here"),
        ("pytorch_model.bin", "model.safetensors is loaded instead"),
    ],
)
def test_a_surplus_part_is_an_error_or_reported(tmp_path: Path, name: str, message: str) -> None:
    Run(3.0).save(tmp_path / "c")
    sealed_with(tmp_path / "c", name, {"x": torch.ones(1)})
    run = Run()
    run.loader.sampler = Counter()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=f"{name} is not loaded: {message}"):
        run.load(tmp_path / "c")
    assert set(run.values().values()) == {0}
    with pytest.warns(UserWarning, match=f"{name} is not loaded: {message}"):
        run.load(tmp_path / "c", strict=False)
    assert set(run.values().values()) == {3}
    (tmp_path / "c" / file_names.MANIFEST).unlink()
    with pytest.warns(UserWarning, match="another implementation|is not loaded") as told:
        run.load(tmp_path / "c")
    assert any(f"{name} is not loaded: {message}" in str(entry.message) for entry in told)


def test_gradients_that_are_missing_of_another_world_or_of_other_weights(tmp_path: Path) -> None:
    Run(3.0).save(tmp_path / "c")
    name, gradients = "gradients_0.safetensors", {"0.weight": torch.ones(2, 2)}
    sealed_with(tmp_path / "c", name, gradients, open_window=True)
    run = Run()
    run.load(tmp_path / "c")
    assert run.model.weight.grad is not None
    assert run.model.weight.grad.tolist() == [[1, 1], [1, 1]]
    assert run.model.bias.grad is None

    for folder, facts in ((without(tmp_path / "c", name), {}), (tmp_path / "c", {"world_size": 2})):
        sealed_with(folder, "random_states_1.pkl" if facts else "random_states_0.pkl", {}, **facts)
        message = (
            "window on 2 processes, and their gradients cannot be used on 1: load it on 2"
            if facts
            else r"in the middle of an accumulation window, and has no gradients_0\.safetensors: load one"
        )
        with pytest.raises(CheckpointError, match=message):
            Run().load(folder)
        with pytest.warns(UserWarning, match=message):
            assert Run().load(folder, strict=False)["step"] == 0  # a new window

    sealed_with(tmp_path / "c", name, {"0.other": torch.ones(1)}, world_size=1)
    (tmp_path / "c" / "random_states_1.pkl").unlink()
    sealed_with(tmp_path / "c", name, {"0.other": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"gradients of an open accumulation window for 0\.other"):
        Run().load(tmp_path / "c")


def test_a_sampler_that_is_missing_or_of_another_world(tmp_path: Path) -> None:
    class Loader:
        sampler = Counter()

    def load(folder: Path, **options: Any) -> None:
        load_accelerator_state(folder, [], [], [], [Loader()], 0, **options)

    save_accelerator_state(tmp_path / "c", [], [], [], [Loader()], 0, 0)
    folder = without(tmp_path / "c", "sampler.bin")
    with pytest.raises(CheckpointError, match=r"there is no sampler\.bin for loader 0"):
        load(folder)
    with pytest.warns(UserWarning, match=r"there is no sampler\.bin for loader 0"):
        load(folder, strict=False)
    sealed_with(tmp_path / "c", "random_states_1.pkl", {}, world_size=2)
    message = "the state of a sampler was saved by one of 2 processes, and may not fit 1"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "c")
    with pytest.warns(UserWarning, match=message):
        load(tmp_path / "c", strict=False)


def save_by_names(folder: Path, prefix: str = "") -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    """pytorch_model_fsdp.bin, and an optimizer's state by the names of weights, in another order."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
    named = {
        "state": {prefix + names[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [prefix + n for n in names[::-1]]} for group in state["param_groups"]
        ],
    }
    torch.save(model.state_dict(), folder / "pytorch_model_fsdp.bin")
    torch.save(named, folder / "optimizer.bin")
    return model, optimizer, names


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_full_states_that_others_wrote_for_sharded_models_are_loaded(tmp_path: Path, prefix: str) -> None:
    model, optimizer, _ = save_by_names(tmp_path, prefix)
    again = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other = torch.optim.AdamW(again.parameters())
    with pytest.warns(UserWarning, match=r"another implementation wrote it|no random_states_0\.pkl"):
        load_accelerator_state(tmp_path, [again], [other], [], [], 0)

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(other.state_dict()["state"][number][key], values[key]) for key in values)


def test_states_by_names_load_where_models_have_the_same_names(tmp_path: Path) -> None:
    models = [nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1) for model in models]
    for number, model in enumerate(models):
        suffix = f"_{number}" if number else ""
        torch.save(model.state_dict(), tmp_path / f"pytorch_model_fsdp{suffix}.bin")
        named = {
            "state": {name: {"momentum_buffer": value + 1} for name, value in model.state_dict().items()},
            "param_groups": [{**optimizers[number].param_groups[0], "params": ["weight", "bias"]}],
        }
        torch.save(named, tmp_path / f"optimizer{suffix}.bin")
    with pytest.warns(UserWarning, match=r"another implementation wrote it|no random_states_0\.pkl"):
        load_accelerator_state(tmp_path, models, optimizers, [], [], 0)

    for model, optimizer in zip(models, optimizers, strict=True):
        for value in model.parameters():
            assert torch.equal(optimizer.state[value]["momentum_buffer"], value + 1)


def test_states_by_names_that_the_models_do_not_have_are_rejected(tmp_path: Path) -> None:
    _, _, names = save_by_names(tmp_path)
    (again := nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))).register_parameter(
        "odd", nn.Parameter(torch.ones(3))
    )
    known = dict(again.named_parameters())
    other = torch.optim.AdamW([known[name] for name in ("odd", *names[1:])])
    torch.save(again.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    before = again[0].weight.clone()
    with (
        pytest.warns(UserWarning, match="another implementation"),
        pytest.raises(
            CheckpointError, match=r"no odd in group 0 for optimizer 0; .* has 0\.weight in group 0"
        ),
    ):
        load_accelerator_state(tmp_path, [again], [other], [], [], 0)
    assert torch.equal(again[0].weight, before)


def test_an_optimizer_of_other_groups_is_rejected_before_anything_is_changed(tmp_path: Path) -> None:
    Run(3.0).save(tmp_path / "c")
    run = Run()
    run.optimizer = torch.optim.SGD([run.model.weight], lr=0.0)
    message = r"optimizer\.bin has parameter groups of \[2\] parameters, and optimizer 0 has \[1\]"
    with pytest.raises(CheckpointError, match=message):
        run.load(tmp_path / "c")
    assert set(run.values().values()) == {0}
    with pytest.warns(UserWarning, match=message):
        run.load(tmp_path / "c", strict=False)
    assert {part for part, value in run.values().items() if value != 3} == {"optimizer.bin"}


def test_the_schedule_of_an_optimizer_of_other_groups_is_left_with_it(tmp_path: Path) -> None:
    def make(rate: float, *groups: nn.Parameter) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([{"params": [item]} for item in groups], lr=rate)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))

    model = nn.Linear(2, 2)
    saved = [make(1.0, model.weight, model.bias), make(2.0, model.weight)]
    for optimizer, scheduler in saved:
        optimizer.step()
        scheduler.step()
    optimizers, schedulers = zip(*saved, strict=True)
    save_accelerator_state(tmp_path, [model.state_dict()], optimizers, schedulers, [], 0, 0)

    other, same = make(8.0, model.weight), make(0.0, model.weight)
    optimizers, schedulers = zip(other, same, strict=True)
    message = r"parameter groups of \[1, 1\].*; scheduler\.bin is not loaded: its optimizer is not loaded"
    with pytest.warns(UserWarning, match=message) as told:
        load_accelerator_state(tmp_path, [model], optimizers, schedulers, [], 0, strict=False)
    assert "scheduler_1.bin" not in str(told[0].message)
    for optimizer, scheduler in (other, same):
        optimizer.step()
        scheduler.step()
    assert other[0].param_groups[0]["lr"] == 4.0
    assert same[0].param_groups[0]["lr"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("safe", [True, False])
def test_weights_in_several_files_are_loaded(tmp_path: Path, safe: bool) -> None:
    model, again = (
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)),
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)),
    )
    names = save_weights(model.state_dict(), tmp_path, 80, safe)
    assert len(names) > 2
    with pytest.warns(UserWarning, match=r"another implementation|no random_states_0\.pkl") as told:
        load_accelerator_state(tmp_path, [again], [], [], [], 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not any("is not loaded" in str(entry.message) for entry in told)

    strays = ["model-00001-of-00009.safetensors", "pytorch_model-00001-of-00009.bin"]
    for stray in strays:  # of an earlier save
        (tmp_path / stray).touch()
    lines = [f"{stray} is not loaded: {names[-1]} does not name it" for stray in strays]
    with pytest.warns(UserWarning, match=r"another implementation|no random_states_0\.pkl") as told:
        load_accelerator_state(tmp_path, [again], [], [], [], 0)
    assert all(any(line in str(entry.message) for entry in told) for line in lines)
    with pytest.warns(UserWarning, match="another"), pytest.raises(CheckpointError, match=lines[0]):
        load_accelerator_state(tmp_path, [again], [], [], [], 0, strict=True)

    index = next(tmp_path.glob("*.index.json"))
    index.write_text(index.read_text().replace(names[0], f"../{names[0]}"))
    with (
        pytest.warns(UserWarning, match="another implementation"),
        pytest.raises(CorruptCheckpointError, match="not inside its folder"),
    ):
        load_accelerator_state(tmp_path, [again], [], [], [], 0)


def test_files_that_were_there_before_the_checkpoint_are_no_difference(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.log").touch()
    Run(3.0).save(tmp_path / "c")
    run = Run()
    run.load(tmp_path / "c")

    assert set(run.values().values()) == {3}


def test_a_file_of_a_hook_is_reported_where_no_hook_could_read_it(tmp_path: Path) -> None:
    Run(3.0).save(tmp_path / "c", hook=True)
    with pytest.warns(UserWarning, match=r"extra\.json was written by a hook; no registered hook reads it"):
        Run().load(tmp_path / "c")


def test_counts_that_differ(tmp_path: Path) -> None:
    run = Run(3.0)
    run.save(tmp_path / "c")
    parts = [run.model], [run.optimizer], [run.loader], 0
    model, optimizer, loader, rank = parts
    for schedulers, message in (
        ([], r"scheduler\.bin is not loaded: there is no scheduler for it"),
        ([run.scheduler] * 2, r"there is no scheduler_1\.bin for scheduler 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_accelerator_state(tmp_path / "c", model, optimizer, schedulers, loader, rank, run.scaler)


def test_a_scaler_that_is_off_takes_no_state(tmp_path: Path) -> None:
    run = Run(3.0)
    run.save(tmp_path / "c")
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.save(tmp_path / "off")
    run.load(tmp_path / "off")
    with pytest.raises(CheckpointError, match="the loss scaler here is off"):
        run.load(tmp_path / "c")


# Other world sizes


def _roundtrip(folder: str, save: bool, sync: bool) -> Any:
    rank = current_process().rank
    if save:
        torch.manual_seed(5 if sync else 5 + rank)
        random.seed(rank)
        Run(3.0).save(Path(folder))
    else:
        run = Run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.load(Path(folder))
        assert set(run.values().values()) == {3}
        assert len([entry for entry in caught if "saved on" in str(entry.message)]) == (rank == 0)
    return torch.rand(2).tolist(), random.random()


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_random_generators_follow_the_rule(
    world: Any, tmp_path: Path, saved: int, loaded: int, sync: bool
) -> None:
    before = world.run(_roundtrip, str(tmp_path / "c"), True, sync, size=saved, timeout_s=100)
    after = world.run(_roundtrip, str(tmp_path / "c"), False, sync, size=loaded, timeout_s=100)
    again = world.run(_roundtrip, str(tmp_path / "c"), False, sync, size=loaded, timeout_s=100)
    common = min(saved, loaded)

    assert after[:common] == before[:common]
    assert after == again
    torch_draws = {tuple(draw) for draw, _ in after}
    python_draws = {draw for _, draw in after}
    # In step stays in step; what differs continues differing. Of one process nothing is known to differ.
    assert len(torch_draws) == (1 if sync or saved == 1 else loaded)
    assert len(python_draws) == (1 if saved == 1 else loaded)


def _opened(folder: str) -> list[str]:
    """Load, and return the files of random generators that were opened here."""
    names: list[str] = []
    load = tensors.load

    def note(path: Any, **options: Any) -> Any:
        names.append(Path(path).name)
        return load(path, **options)

    tensors.load = note
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Run().load(Path(folder))
    finally:
        tensors.load = load
    return [name for name in names if name.startswith("random")]


@pytest.mark.parametrize(("saved", "loaded"), [(3, 3), (4, 2), (2, 4)])
def test_each_process_opens_one_file_of_random_generators(
    world: Any, tmp_path: Path, saved: int, loaded: int
) -> None:
    world.run(_roundtrip, str(tmp_path / "c"), True, False, size=saved, timeout_s=100)
    opened = world.run(_opened, str(tmp_path / "c"), size=loaded, timeout_s=100)
    assert opened == [[f"random_states_{rank % saved}.pkl"] for rank in range(loaded)]


def _load_only(folder: str, strict: bool | None) -> str:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Run().load(Path(folder), strict=strict)
        return "; ".join(str(entry.message) for entry in caught)
    except CheckpointError as error:
        return f"error: {error}"


def test_without_all_random_states_another_world_size_is_an_error(world: Any, tmp_path: Path) -> None:
    world.run(_roundtrip, str(tmp_path / "c"), True, True, size=2, timeout_s=100)
    folder = without(tmp_path / "c", "random_states_1.pkl")

    assert _load_only(str(folder), None).startswith("error: ")
    assert "no random_states_1.pkl, from which the generators here are derived" in _load_only(
        str(folder), False
    )


def test_links_and_pipes_are_rejected_also_without_digests(tmp_path: Path) -> None:
    for kind in ("link", "pipe"):
        folder = tmp_path / kind
        Run(3.0).save(folder)
        (folder / "optimizer.bin").rename(tmp_path / f"{kind}.bin")
        if kind == "link":
            (folder / "optimizer.bin").symlink_to(tmp_path / "link.bin")
        else:
            os.mkfifo(folder / "optimizer.bin")
        for strict in (None, False):
            with pytest.raises(CorruptCheckpointError, match=r"optimizer\.bin is a (symbolic link|pipe)"):
                Run().load(folder, verify=False, strict=strict)
        (folder / "accel_manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"optimizer\.bin is a (symbolic link|pipe)"):
            Run().load(folder)


def test_a_schedule_stays_as_it_is_where_its_optimizer_has_no_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    saved, loaded = (torch.optim.lr_scheduler.StepLR(item, 1, 0.1) for item in optimizers)
    optimizers[0].step()
    saved.step()
    save_accelerator_state(tmp_path / "c", [model.state_dict()], optimizers[:1], [saved], [], 0, 0)
    folder = without(tmp_path / "c", "optimizer.bin")
    with pytest.warns(UserWarning, match=r"scheduler\.bin is not loaded: its optimizer is not loaded"):
        load_accelerator_state(folder, [model], optimizers[1:], [loaded], [], 0, strict=False)
    assert loaded.last_epoch == 0
