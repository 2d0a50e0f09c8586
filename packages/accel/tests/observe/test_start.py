"""Observers: what they are notified of, and that none is asked in a step."""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.observe import Observer
from accel.observe.base import ObserverKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")


class Notes(Observer):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def model_prepared(self, model):
        self.seen.append(type(model).__name__)

    def optimizer_prepared(self, optimizer):
        self.seen.append("optimizer")

    def loader_prepared(self, loader):
        self.seen.append("loader")

    @contextlib.contextmanager
    def saving(self):
        self.seen.append("save")
        yield
        self.seen.append("saved")

    @contextlib.contextmanager
    def loading(self):
        self.seen.append("load")
        yield
        self.seen.append("loaded")

    def stop(self):
        self.seen.append("stop")


@dataclass
class NotesKwargs(ObserverKwargs):
    seen: list[str] = field(default_factory=list)

    def start(self, run):
        return Notes(self.seen)


def test_an_observer_is_notified_of_what_is_prepared_saved_and_loaded(tmp_path):
    settings = NotesKwargs()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[settings])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer, DataLoader([1, 2]))
    accelerator.prepare(model, optimizer)  # prepared already
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    accelerator.end_training()
    accelerator.end_training()
    assert settings.seen == ["Linear", "optimizer", "loader", "save", "saved", "load", "loaded", "stop"]


class FailingKwargs(ObserverKwargs):
    def start(self, run):
        raise RuntimeError("planted")


def test_where_one_cannot_start_the_others_are_stopped():
    settings = NotesKwargs()
    with pytest.raises(RuntimeError, match="planted"):
        Accelerator(cpu=True, kwargs_handlers=[settings, FailingKwargs()])
    assert settings.seen == ["stop"]


def test_two_observers_of_one_kind_are_an_error():
    with pytest.raises(ValueError, match="two NotesKwargs; pass one"):
        Accelerator(cpu=True, kwargs_handlers=[NotesKwargs(), NotesKwargs()])
