"""Observers: what they are notified of, in which order, and that a step without any does nothing for them."""

import contextlib
import copy
import sys
from collections import Counter
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


class Events(Observer):
    """Records the events of steps."""

    def __init__(self):
        self.seen = []

    def loader_started(self, loader):
        self.seen.append("loader_started")

    def before_batch(self, loader):
        self.seen.append("before_batch")

    def after_batch(self, loader, batch):
        self.seen.append("after_batch")
        return batch + 1

    def loader_ended(self, loader):
        self.seen.append("loader_ended")

    def loss_weighted(self, weight, factor):
        self.seen.append(f"loss_weighted {weight:.0f}")
        return 3.0

    def before_backward(self, loss, gradient):
        self.seen.append(f"before_backward {loss.item():.0f} {gradient}")

    def after_backward(self, loss):
        self.seen.append("after_backward")

    def gradients_ready(self):
        self.seen.append("gradients_ready")

    def gradients_clipped(self, norm):
        self.seen.append(f"gradients_clipped {norm.item():.0f}")

    def before_step(self, optimizer):
        self.seen.append("before_step")

    def after_step(self, optimizer):
        self.seen.append(f"after_step {optimizer.step_was_skipped}")


class Skips(Observer):
    def before_step(self, optimizer):
        return True


def one_step(accelerator, loader, optimizer, parameter, clip=False, **options):
    for batch in loader:
        with accelerator.accumulate():
            accelerator.backward((parameter * batch).sum(), **options)
            if clip:
                accelerator.clip_grad_norm_([parameter], 100.0)
            optimizer.step()
            optimizer.zero_grad()


def parts(*observers, lr=0.0, **options):
    accelerator = Accelerator(cpu=True, kwargs_handlers=list(observers), **options)
    weight = torch.nn.Parameter(torch.ones(()))
    loader, optimizer = DataLoader([1.0, 1.0]), torch.optim.SGD([weight], lr)
    return accelerator, *accelerator.prepare(loader, optimizer), weight


@pytest.mark.parametrize("clip", [False, True])
def test_the_events_of_a_window_come_in_order(clip):
    events = Events()
    one_step(*parts(events, gradient_accumulation_steps=2), clip=clip)
    assert events.seen == [
        *("loader_started", "before_batch", "after_batch", "before_backward 2 0.5", "after_backward"),
        *("before_batch", "after_batch", "before_backward 2 0.5", "after_backward", "gradients_ready"),
        *(["gradients_clipped 2"] if clip else []),
        *("before_step", "after_step False", "before_batch", "loader_ended"),
    ]


def test_a_factor_may_be_replaced():
    events = Events()
    one_step(*parts(events), weight=5)
    assert events.seen[3:6] == ["loss_weighted 5", "before_backward 6 None", "after_backward"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_step_that_any_observer_skips_is_skipped_and_all_observers_see_it(order):
    events = Events()
    accelerator, loader, optimizer, weight = parts(*[events, Skips()][::order], lr=1.0)
    one_step(accelerator, loader, optimizer, weight)
    assert events.seen.count("before_step") == events.seen.count("after_step True") == 2
    assert weight.item() == 1
    assert optimizer.step_was_skipped


def test_a_closure_is_called_once_before_the_step_may_be_skipped():
    events, calls = Events(), []
    accelerator, _, optimizer, weight = parts(events, Skips(), lr=1.0)

    def closure():
        calls.append(len(events.seen))
        accelerator.backward(weight * 1)

    optimizer.step(closure)
    assert calls == [0]
    assert events.seen[-3:] == ["gradients_ready", "before_step", "after_step True"]
    assert weight.item() == 1


def test_an_observer_of_no_step_adds_nothing_to_steps():
    accelerator, *rest = parts(NotesKwargs())
    one_step(accelerator, *rest)
    assert accelerator.gradient_state.events is None


def test_a_copy_has_no_observers_of_its_steps():
    accelerator, *_ = parts(Events())
    assert accelerator.gradient_state.events.observers
    assert not copy.deepcopy(accelerator.gradient_state).events.observers


def test_a_step_without_observers_makes_no_call_for_them():
    calls = []
    for observers in ((), (Events(),)):
        accelerator, loader, optimizer, weight = parts(*observers)
        one_step(accelerator, loader, optimizer, weight)  # checked for misuse
        counts = Counter()

        def profile(frame, event, argument, counts=counts):
            path = frame.f_code.co_filename.replace("\\", "/")
            ours = path.endswith(("step_events.py", "misuse.py")) or "accel/observe" in path
            if event == "call" and ours:
                counts[frame.f_code.co_name] += 1

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            one_step(accelerator, loader, optimizer, weight, clip=True)
        finally:
            sys.setprofile(before)
        calls.append(counts)
    assert calls[0] == {}
    assert calls[1]["begin_step"] == 2


class InBackward(torch.optim.SGD):
    """Steps in backward, as LOMO does."""

    def fused_backward(self, loss, lr):
        loss.backward()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= lr * parameter.grad
                parameter.grad = None

    def step(self, closure=None):
        raise AssertionError("has stepped in backward")


@pytest.mark.parametrize("call", ["backward", "backward with a rate", "lomo_backward"])
def test_passes_of_an_optimizer_that_steps_in_backward_are_published(call):
    observer = Events()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[observer])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, InBackward(model.parameters(), lr=1.0))
    loss = model(torch.ones(1, 1)).sum()
    if call == "lomo_backward":
        accelerator.lomo_backward(loss, 1.0)
    else:
        accelerator.backward(loss, **({"learning_rate": 1.0} if call == "backward with a rate" else {}))
    optimizer.step()
    assert observer.seen[:2] == ["before_backward 0 None", "after_backward"]
    assert model.weight.item() == -1.0
