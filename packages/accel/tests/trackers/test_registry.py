"""Trackers: own ones, TensorBoard's real event files, and what log_with accepts."""

from __future__ import annotations

import pytest

from accel.accelerator import Accelerator
from accel.trackers import registry
from accel.tracking import GeneralTracker, TensorBoardTracker, on_main_process

pytestmark = pytest.mark.usefixtures("fresh_state")


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self, run_name: str = "run") -> None:
        super().__init__()
        self.run_name = run_name
        self.calls: list = []

    @property
    def tracker(self) -> list:
        return self.calls

    @on_main_process
    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    @on_main_process
    def finish(self):
        self.calls.append("finish")


def test_a_tracker_of_ones_own_gets_everything():
    own = ListTracker()
    accelerator = Accelerator(log_with=own)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"list": {"extra": 1}})
    assert accelerator.get_tracker("list") is own
    assert accelerator.get_tracker("list", unwrap=True) is own.calls
    with pytest.raises(ValueError, match=r"no tracker 'other'; started are \['list'\]"):
        accelerator.get_tracker("other")
    accelerator.end_training()

    assert own.calls == [("config", {"lr": 0.1}), ({"loss": 1.0}, 3, {"extra": 1}), "finish"]


def test_every_tracker_is_finished_once_and_a_failing_one_is_told():
    class Failing(ListTracker):
        name = "failing"

        def finish(self):
            raise RuntimeError("planted")

    own = ListTracker()
    accelerator = Accelerator(log_with=[own, Failing()])
    accelerator.init_trackers("project")
    with pytest.raises(RuntimeError, match="planted"):
        accelerator.end_training()
    accelerator.end_training()
    accelerator.end_training()

    assert own.calls == ["finish"]


def only_main_logs() -> int:
    own = ListTracker()
    accelerator = Accelerator(log_with=[own])
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    blank = accelerator.get_tracker("list")
    blank.log({"more": 1})
    return len(own.calls)


def test_trackers_log_on_the_main_process_alone(world):
    assert world.run(only_main_logs) == [2, 0]


class UnguardedTracker(ListTracker):
    """As most people write one: no method looks at the rank."""

    name = "unguarded"

    def start(self):
        self.calls.append("start")

    def log(self, values, step=None, **kwargs):
        self.calls.append(values)


class EverywhereTracker(UnguardedTracker):
    name = "everywhere"
    main_process_only = False


def calls_of_unguarded_trackers() -> tuple[list, list]:
    own, everywhere = UnguardedTracker(), EverywhereTracker()
    accelerator = Accelerator(log_with=[own, everywhere])
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    return own.calls, everywhere.calls


def test_the_accelerator_guards_trackers_that_do_not_guard_themselves(world):
    done = ["start", {"loss": 1.0}, "finish"]

    assert world.run(calls_of_unguarded_trackers) == [(done, done), ([], done)]


def test_tensorboard_writes_event_files_that_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run", config={"lr": 0.1, "layers": [1, 2]})
    for step in range(3):
        accelerator.log({"loss": 1.0 / (step + 1), "note": "text", "pair": {"a": 1.0, "b": 2.0}}, step=step)
    assert isinstance(accelerator.get_tracker("tensorboard"), TensorBoardTracker)
    accelerator.end_training()

    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([1.0, 0.5, 1 / 3])


def test_registered_trackers_are_found_by_name():
    registry.register_tracker_class(ListTracker)
    try:
        assert "list" in registry.get_available_trackers()
        accelerator = Accelerator(log_with=["list"])
        accelerator.init_trackers("project", init_kwargs={"list": {}})
        assert accelerator.get_tracker("list").run_name == "project"
    finally:
        registry._REGISTERED.clear()
    with pytest.raises(TypeError, match="subclass of GeneralTracker"):
        registry.register_tracker_class(int)


def test_log_with_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'tensorboard'"):
        Accelerator(log_with="tensorbord")
    with pytest.raises(ValueError, match="project_dir"):
        Accelerator(log_with="tensorboard")
    with pytest.raises(NotImplementedError, match="wandb"):
        Accelerator(log_with="wandb")
    assert "tensorboard" in Accelerator(log_with="all", project_dir=str(tmp_path)).log_with


def test_a_tracker_without_its_attributes_is_refused():
    class Bare(GeneralTracker):
        pass

    with pytest.raises(NotImplementedError, match="name, requires_logging_directory, tracker"):
        Bare()
    assert GeneralTracker(_blank=True).log({}) is None
