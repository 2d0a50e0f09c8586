"""Trackers of one's own, errors of trackers, and what log_with accepts."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from accel.accelerator import Accelerator
from accel.trackers import registry
from accel.tracking import GeneralTracker, on_main_process
from accel_state.enums import LoggerType

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
    accelerator.log({"loss": 0.5}, log_kwargs={"list": None})  # as of a section of a file that is empty
    assert accelerator.get_tracker("list") is own
    assert accelerator.get_tracker("list", unwrap=True) is own.calls
    with pytest.raises(ValueError, match=r"no tracker 'other'; log_with has \['list'\]"):
        accelerator.get_tracker("other")
    accelerator.end_training()

    assert own.calls == [
        ("config", {"lr": 0.1}),
        ({"loss": 1.0}, 3, {"extra": 1}),
        ({"loss": 0.5}, None, {}),
        "finish",
    ]


def test_a_second_start_finishes_what_the_first_one_started(tmp_path):
    own = ListTracker()
    accelerator = Accelerator(log_with=["jsonl", own], project_dir=tmp_path)
    accelerator.init_trackers("first")
    first = accelerator.get_tracker("jsonl")
    accelerator.init_trackers("second", config={"lr": 0.1})
    accelerator.log({"loss": 1.0})
    accelerator.end_training()

    assert own.calls == ["finish", ("config", {"lr": 0.1}), ({"loss": 1.0}, None, {}), "finish"]
    with pytest.raises(RuntimeError, match=r"first\.jsonl is not open"):
        first.log({"loss": 1.0})
    assert (tmp_path / "first.jsonl").read_text() == ""
    assert len((tmp_path / "second.jsonl").read_text().splitlines()) == 2


class FailingTracker(ListTracker):
    """Every call after `start` raises."""

    name = "failing"

    def store_init_configuration(self, values):
        raise RuntimeError("planted in config")

    def log(self, values, step=None, **kwargs):
        self.calls.append(values)
        raise RuntimeError("planted in log")

    def finish(self):
        raise RuntimeError("planted in finish")


class UnstartedTracker(ListTracker):
    name = "unstarted"

    def start(self):
        raise ConnectionError("planted in start")


def test_every_tracker_is_finished_once_and_failing_ones_are_reported_once():
    own, failing = ListTracker(), FailingTracker()
    accelerator = Accelerator(log_with=[failing, UnstartedTracker(), own])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.init_trackers("project", config={"lr": 0.1})
        for loss in (1.0, 2.0):
            accelerator.log({"loss": loss})
        accelerator.end_training()
        accelerator.end_training()
    told = [str(warning.message) for warning in caught]

    assert own.calls == [
        ("config", {"lr": 0.1}),
        ({"loss": 1.0}, None, {}),
        ({"loss": 2.0}, None, {}),
        "finish",
    ]
    assert failing.calls == [{"loss": 1.0}, {"loss": 2.0}]
    assert [text.split(". ")[0] for text in told] == [
        "The unstarted tracker failed in start(): ConnectionError: planted in start",
        "The failing tracker failed in store_init_configuration(): RuntimeError: planted in config",
        "The failing tracker failed in log(): RuntimeError: planted in log",
        "The failing tracker failed in finish(): RuntimeError: planted in finish",
    ]
    assert "nothing is logged there. This warning comes once; ACCELERATE_STRICT_TRACKERS=1 raises" in told[0]
    assert all(Path(warning.filename) == Path(__file__) for warning in caught)


def test_one_that_could_not_start_is_blank():
    accelerator = Accelerator(log_with=[UnstartedTracker()])
    with pytest.warns(UserWarning, match="unstarted tracker failed in start"):
        accelerator.init_trackers("project")
    assert accelerator.trackers == []
    accelerator.get_tracker("unstarted").log({"loss": 1.0})
    accelerator.get_tracker("unstarted", unwrap=True).log_images({})
    accelerator.get_tracker("unstarted").log_artifact("weights")  # training continues


def get_trackers() -> tuple[list[str], list[str], list[str]]:
    """Which trackers a process gets: one whose library is missing, one that was not requested."""
    row = replace(registry.TRACKERS["tensorboard"], library="no_such_library")
    with mock.patch.dict(registry.TRACKERS, tensorboard=row):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator = Accelerator(log_with=["tensorboard", ListTracker()])
        told = [str(warning.message) for warning in caught]
        with pytest.raises(ValueError, match="Call init_trackers"):
            accelerator.get_tracker("list")
        accelerator.init_trackers("project")
        kinds = [type(accelerator.get_tracker(name)).__name__ for name in ("tensorboard", "list")]
        accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("loss", 1.0, 3)
        refused = []
        for name in ("jsonl", "tensorbord"):
            with pytest.raises(ValueError, match="there is no tracker") as error:
                accelerator.get_tracker(name)
            refused.append(str(error.value))
    return told, kinds, refused


def test_what_get_tracker_gives_does_not_depend_on_the_process(world):
    main, other = world.run(get_trackers)
    assert "'tensorboard', whose library is not installed" in main[0][0]
    assert main[1] == ["BlankTracker", "ListTracker"]
    assert other[1] == ["BlankTracker", "BlankTracker"]
    assert main[2] == other[2]


def test_trackers_are_kept_after_the_end():
    own = ListTracker()
    accelerator = Accelerator(log_with=own)
    accelerator.init_trackers("project")
    accelerator.end_training()
    accelerator.end_training()
    accelerator.log({"loss": 1.0})

    assert accelerator.trackers == [own]
    assert accelerator.get_tracker("list") is own
    assert own.calls == ["finish"]


def test_an_object_may_have_a_name_and_its_processes_of_its_own(world):
    done = ["start", {"loss": 1.0}, "finish"]

    assert world.run(calls_of_a_tracker_with_attributes_of_its_own) == [done, done]


def calls_of_a_tracker_with_attributes_of_its_own() -> list:
    class NamedTracker(GeneralTracker):
        requires_logging_directory = False

        def __init__(self) -> None:
            self.name, self.main_process_only, self.calls = "named", False, []
            super().__init__()

        @property
        def tracker(self) -> list:
            return self.calls

        def start(self):
            self.calls.append("start")

        def log(self, values, step=None, **kwargs):
            self.calls.append(values)

        def finish(self):
            self.calls.append("finish")

    own = NamedTracker()
    accelerator = Accelerator(log_with=own)
    accelerator.init_trackers("project", init_kwargs={"named": {}})
    assert accelerator.get_tracker("named") is own
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    return own.calls


@pytest.mark.parametrize("option", ["name", "method", "function", "values", "self", "step"])
def test_options_of_a_tracker_may_have_any_name(option):
    own = ListTracker()
    accelerator = Accelerator(log_with=own)
    accelerator.init_trackers("project")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.log({"loss": 1.0}, step=3, log_kwargs={"list": {option: 5}})

    if option in ("values", "self"):  # which the tracker's method has given already
        (warning,) = caught
        assert "The list tracker failed in log(): TypeError" in str(warning.message)
        assert own.calls == []
    else:
        assert not caught
        step, rest = (5, {}) if option == "step" else (3, {option: 5})
        assert own.calls == [({"loss": 1.0}, step, rest)]


def test_strict_trackers_raise_after_all_are_finished(monkeypatch):
    monkeypatch.setenv("ACCELERATE_STRICT_TRACKERS", "1")
    own = ListTracker()
    accelerator = Accelerator(log_with=[FailingTracker(), own])
    with pytest.raises(RuntimeError, match="planted in config"):
        accelerator.init_trackers("project", config={})
    with pytest.raises(RuntimeError, match="planted in log"):
        accelerator.log({"loss": 1.0})
    with pytest.raises(RuntimeError, match="planted in finish"):
        accelerator.end_training()
    accelerator.end_training()

    assert own.calls == ["finish"]


def test_images_and_tables_go_to_the_trackers_that_have_them():
    class PictureTracker(ListTracker):
        name = "pictures"

        def log_images(self, values, step=None, **kwargs):
            self.calls.append((values, step, kwargs))

        def log_table(self, table_name, columns=None, data=None, dataframe=None, step=None, **kwargs):
            self.calls.append((table_name, columns, data, dataframe, step, kwargs))

    own, pictures = ListTracker(), PictureTracker()
    accelerator = Accelerator(log_with=[pictures, own])
    accelerator.init_trackers("project")
    with pytest.warns(UserWarning, match="The list tracker has no images: they are not logged there"):
        accelerator.log_images({"image": 1}, step=2, log_kwargs={"pictures": {"caption": "a"}})
    with pytest.warns(UserWarning, match="The list tracker has no tables"):
        accelerator.log_table("table", ["a"], [[1]], step=3)

    assert pictures.calls == [({"image": 1}, 2, {"caption": "a"}), ("table", ["a"], [[1]], None, 3, {})]
    assert own.calls == []


def only_main_logs() -> int:
    own = ListTracker()
    accelerator = Accelerator(log_with=[own])
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    blank = accelerator.get_tracker("list")
    blank.log({"more": 1})
    own.log({"by": "itself"})  # the decorator's part
    return len(own.calls)


def test_trackers_log_on_the_main_process_alone(world):
    assert world.run(only_main_logs) == [3, 0]


class RunTracker(ListTracker):
    """With more than the base class has, as those of a library."""

    name = "run"

    def __init__(self) -> None:
        super().__init__()
        self.config: dict = {}

    def log_artifact(self, path):
        self.calls.append(path)
        return self

    @property
    def tracker(self):
        return self


def use_it_on_all_processes() -> tuple[list, dict, list]:
    own = RunTracker()
    accelerator = Accelerator(log_with=[own])
    accelerator.init_trackers("project")
    accelerator.get_tracker("run").log_artifact("weights").log_artifact("more")
    run = accelerator.get_tracker("run", unwrap=True)
    run.config["lr"] = run.config.get("lr", 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.log({"loss": 1.0}, log_kwargs={"run": {}})
        if run is not own:
            run.log_images({"picture": 1})
            run.log_table("table", ["a"], [[1]])
    return own.calls[:2], own.config, [item for item in run.calls if item in ("weights", "more")]


def test_a_script_needs_no_if_around_what_it_does_with_a_tracker(world):
    paths = ["weights", "more"]

    assert world.run(use_it_on_all_processes) == [(paths, {"lr": 0.1}, paths), ([], {}, [])]


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


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", {})
    return registry.REGISTERED


@pytest.mark.usefixtures("registered")
def test_registered_trackers_are_found_by_name():
    registry.register_tracker_class(ListTracker)
    registry.register_tracker_class(ListTracker)  # as a notebook's cell that runs twice
    assert "list" in registry.get_available_trackers()
    accelerator = Accelerator(log_with=["list"])
    accelerator.init_trackers("project", init_kwargs={"list": None, "wandb": {"tags": ["for others"]}})
    assert accelerator.get_tracker("list").run_name == "project"
    with pytest.warns(UserWarning, match=r"init_kwargs has 'lists', .* Did you mean 'list'"):
        accelerator.init_trackers("project", init_kwargs={"lists": {}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.log({}, log_kwargs={"lists": {}, "wandb": {"for": "others"}})
        accelerator.log_images({}, log_kwargs={"lists": {}})
        accelerator.log_table("table", ["a"], [[1]], log_kwargs={"lists": {}})
    told = [str(warning.message) for warning in caught if "log_kwargs" in str(warning.message)]
    assert len(told) == 3
    assert all("log_kwargs has 'lists', " in text and "Did you mean 'list'" in text for text in told)


@pytest.mark.usefixtures("registered")
def test_only_a_tracker_with_a_name_can_be_registered():
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    class Mine(ListTracker):
        name = "jsonl"

    with pytest.raises(TypeError, match="subclass of GeneralTracker"):
        registry.register_tracker_class(int)
    with pytest.raises(ValueError, match="Nameless, whose `name` is None"):
        registry.register_tracker_class(Nameless)
    with pytest.warns(UserWarning, match="There is a tracker 'jsonl' already: Mine takes its place"):
        registry.register_tracker_class(Mine)
    assert registry.tracker_class("jsonl") is Mine
    assert registry.get_available_trackers().count("jsonl") == 1


def test_log_with_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'tensorboard'"):
        Accelerator(log_with="tensorbord")
    with pytest.raises(ValueError, match=r"got the class ListTracker: make an object of it, ListTracker\("):
        Accelerator(log_with=[ListTracker])
    with pytest.raises(ValueError, match="the jsonl tracker needs a folder: pass project_dir"):
        Accelerator(log_with="jsonl")


def test_all_is_every_tracker_that_is_installed_and_has_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "is_package_available", lambda library: library in ("aim", "wandb"))
    assert Accelerator(log_with="all", project_dir=tmp_path).log_with == ["aim", "jsonl", "wandb"]
    own = ListTracker()
    with pytest.warns(UserWarning, match="log_with='all' leaves out aim, jsonl, which need a folder"):
        assert Accelerator(log_with=["all", own]).log_with == [own, "wandb"]


def test_one_whose_library_is_missing_is_left_out_with_its_extra(monkeypatch):
    monkeypatch.setattr(registry, "is_package_available", lambda library: False)
    with pytest.warns(UserWarning, match=r"'wandb', whose library is not installed.*accel\[wandb\]"):
        assert registry.filter_trackers(["wandb"]) == []


@pytest.mark.parametrize("name", registry.TRACKERS)
def test_every_built_in_tracker_says_what_it_needs(name, tmp_path, monkeypatch):
    kind = registry.tracker_class(name)
    assert kind.name == name
    assert name in LoggerType.list()
    assert all(hasattr(kind, member) for member in ("tracker", "requires_logging_directory"))
    library = registry.TRACKERS[name].library
    if library is None:
        return
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    tracker = kind("run", logging_dir=tmp_path) if kind.requires_logging_directory else kind("run")
    with pytest.raises(ImportError, match=rf"accel\[{name}\]"):
        tracker.start()


NOTHING_STARTS = """
import sys
from accel import Accelerator
from accel.trackers.registry import TRACKERS
accelerator = Accelerator(cpu=True, log_with=["tensorboard", "jsonl"], project_dir="logs")
import accel.tracking
libraries = {row.library for row in TRACKERS.values()}
print(sorted(libraries & set(sys.modules)), "torch.utils.tensorboard" in sys.modules)
"""


def test_no_library_is_imported_and_no_file_made_before_init_trackers(tmp_path):
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-c", NOTHING_STARTS]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)

    assert run.stdout == "[] False\n"
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_without_its_attributes_is_rejected():
    class Bare(GeneralTracker):
        pass

    with pytest.raises(NotImplementedError, match="name, requires_logging_directory, tracker"):
        Bare()
    assert GeneralTracker(_blank=True).log({}) is None
