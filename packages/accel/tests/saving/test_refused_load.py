"""A load_state that is rejected leaves everything as it was, whatever rejects it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors
from accel_ckpt.folder import commit, manifest

pytestmark = pytest.mark.usefixtures("fresh_state")


class Notes:
    """A registered object that rejects a state that is marked."""

    def __init__(self) -> None:
        self.average = torch.zeros(2)
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "refuses": self.refuses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.copy_(state["average"])  # half loaded when it rejects
        if state["refuses"]:
            raise ValueError("this state is refused")


class Fussy(torch.optim.SGD):
    """An optimizer that rejects a state that is marked, when it has loaded half of it."""

    refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "refuses": self.refuses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["refuses"]:
            raise ValueError("this state is refused")


class Training:
    def __init__(self, samples: int = 16, to_validate: int = 4, milestones: bool = False) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
        first = torch.optim.Adam(model[0].parameters(), lr=0.1)
        second = Fussy(model[2].parameters(), lr=0.1, momentum=0.9)
        schedule: Any = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
        if milestones:
            schedule = torch.optim.lr_scheduler.SequentialLR(second, [schedule], [])
        self.model, self.first, self.second, self.schedule, self.loader, self.validation = (
            self.accelerator.prepare(
                model, first, second, schedule, loader(samples, shuffle=True), loader(to_validate)
            )
        )
        self.notes = [Notes(), Notes()]
        self.accelerator.register_for_checkpointing(*self.notes)

    def train(self, batches: int) -> list[list[float]]:
        """Go on for some batches of the epoch; return their samples."""
        seen = []
        for (x,) in self.loader:
            seen.append(x.flatten().tolist())
            self.accelerator.backward(self.model(x).mean())
            for optimizer in (self.first, self.second):
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
            for notes in self.notes:
                notes.average += 1
            if len(seen) == batches:
                break
        return seen

    def validate(self) -> int:
        return sum(len(x) for (x,) in self.validation)

    def everything(self) -> Any:
        """All that a load writes to."""
        prepared = (self.model, self.first, self.second, self.schedule, self.loader, self.validation)
        states = [copy.deepcopy(item.state_dict()) for item in (*prepared, *self.notes)]
        return [*states, random.getstate(), torch.get_rng_state()]


def loader(samples: int, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples).float().unsqueeze(1)), batch_size=2, **options)


def assert_same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def changed(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a file of a checkpoint, as if it had been saved like that."""
    described = manifest.read(folder)
    assert described is not None
    tensors.write(change(tensors.load(folder / name)), folder / name)
    commit.seal(folder, described.facts)


def refuse(state: Any) -> Any:
    return {**state, "refuses": True}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    training = Training()
    training.train(3)
    training.validate()
    return Path(training.accelerator.save_state(str(tmp_path / "state")))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the second registered object": (
        lambda folder: changed(folder, "custom_checkpoint_1.pkl", refuse),
        "this state is refused",
    ),
    "the second optimizer": (
        lambda folder: changed(folder, "optimizer_1.bin", refuse),
        "this state is refused",
    ),
    "a loader": (
        lambda folder: changed(folder, "dl_state_dict.bin", lambda state: {}),
        "dl_state_dict.bin does",
    ),
    "the random generators": (
        lambda folder: changed(
            folder, "random_states_0.pkl", lambda it: {**it, "random_state": (3, (1,), None)}
        ),
        "vector",
    ),
    "a file that cannot be read": (
        lambda folder: (folder / "custom_checkpoint_1.pkl").write_bytes(
            b"x" * (folder / "custom_checkpoint_1.pkl").stat().st_size
        ),
        "custom_checkpoint_1.pkl cannot be read",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_everything_stays_as_it_was(saved: Path, what: str):
    change, message = REFUSED[what]
    change(saved)
    training = Training()
    training.train(1)
    before = training.everything()

    with pytest.raises(Exception, match=message):
        training.accelerator.load_state(str(saved), verify=False)
    assert_same(training.everything(), before)
    assert len(training.train(100)) == 8


def test_a_schedule_of_another_kind_leaves_everything_as_it_was(saved: Path):
    training = Training(milestones=True)
    before = training.everything()

    with pytest.raises(KeyError):
        training.accelerator.load_state(str(saved))
    assert_same(training.everything(), before)


def test_a_dataset_that_has_changed_forbids_no_resuming(saved: Path):
    old, training = Training(), Training(samples=24)
    old.accelerator.load_state(str(saved))
    before = training.everything()

    with pytest.raises(CheckpointError, match=r"over 16 samples, but this dataset has 24.*strict=False"):
        training.accelerator.load_state(str(saved))
    assert_same(training.everything(), before)
    with pytest.warns(
        UserWarning, match=r"dl_state_dict\.bin does not fit loader 0, which begins from the st"
    ):
        training.accelerator.load_state(str(saved), strict=False)
    assert_same(old.first.state_dict()["state"][0]["step"], torch.tensor(3.0))
    for item in ("model", "first", "second", "schedule"):
        assert_same(getattr(training, item).state_dict(), getattr(old, item).state_dict())
    assert sorted(x for batch in training.train(100) for x in batch) == list(range(24))


def test_load_hooks_are_not_called_where_the_rest_is_rejected(saved: Path):
    training = Training(samples=24)
    called: list[Any] = []
    training.accelerator.register_load_state_pre_hook(lambda models, folder: called.append(models.pop()))

    with pytest.raises(CheckpointError, match="this dataset has 24"):
        training.accelerator.load_state(str(saved))
    assert called == []
    training.accelerator.register_for_checkpointing(Notes())
    with pytest.raises(CheckpointError, match=r"there is no custom_checkpoint_2\.pkl"):
        training.accelerator.load_state(str(saved))
    assert called == []


@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("options", [{"to_validate": 6}, {"to_validate": 2}])
def test_a_validation_set_that_has_changed_never_blocks(tmp_path: Path, at: str, options: dict[str, int]):
    before = Training()
    before.train(3)
    if at == "end":
        before.validate()
    folder = before.accelerator.save_state(str(tmp_path / "state"))
    training = Training(**options)
    training.accelerator.load_state(folder)

    assert training.validate() == options["to_validate"]
    assert len(training.train(100)) == 5  # what is left of the epoch


def test_in_the_middle_of_it_a_changed_validation_set_is_an_error(tmp_path: Path):
    before = Training(to_validate=8)
    next(iter(before.validation))
    folder = before.accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(CheckpointError, match=r"dl_state_dict_1\.bin does not fit loader 1.*over 8 samples"):
        Training().accelerator.load_state(folder)


def refused_on_one(folder: str) -> tuple[bool, str]:
    training = Training()
    training.train(3)
    training.accelerator.save_state(folder)
    training.train(1)
    before = training.everything()
    if not training.accelerator.is_main_process:
        training.notes[1].load_state_dict = lambda state: json.loads("no JSON")  # type: ignore[method-assign]
    with pytest.raises(Exception, match="Expecting value") as error:
        training.accelerator.load_state(folder)
    assert_same(training.everything(), before)
    return isinstance(error.value, CheckpointError), str(error.value)


def test_if_one_process_rejects_all_stay_as_they_were(world, tmp_path: Path):
    main, other = world.run(refused_on_one, str(tmp_path / "state"), size=2, timeout_s=100)

    assert (main[0], other[0]) == (True, False)
    assert "process 1: JSONDecodeError" in main[1]
