"""Loggers in one process and in several."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from accel_state.logging.loggers import MultiProcessAdapter, get_logger
from accel_state.process.state import PartialState

NAME = "aa_test_logging"


class ToFile(logging.Handler):
    """Appends each message to a file that all ranks share."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def emit(self, record):
        with open(self.path, "a") as file:
            file.write(record.getMessage() + "\n")


class Broken(logging.Handler):
    def handle(self, record):
        raise OSError("disk full")


def logger_to(path, level="DEBUG"):
    adapter = get_logger(NAME, log_level=level)
    adapter.logger.handlers = [ToFile(path)]
    adapter.logger.propagate = False
    return adapter


@pytest.fixture
def logger():
    adapter = get_logger(NAME, log_level="DEBUG")
    yield adapter
    adapter.logger.setLevel(logging.NOTSET)
    adapter.logger.handlers = []


@pytest.fixture
def state(fresh_state):
    return PartialState(cpu=True)


# One process


def test_logging_before_the_state_says_what_to_do(logger, fresh_state):
    with pytest.raises(RuntimeError, match=r"initialise PartialState\(\) or Accelerator\(\) before logging"):
        logger.info("hello")
    with pytest.raises(RuntimeError, match="PartialState"):
        logger.warning_once("hello")


@pytest.mark.usefixtures("state")
class TestOneProcess:
    def test_every_level_is_logged(self, logger, caplog):
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(logger, level)("a %s message", level)
        logger.log(25, "a %d message", 25)
        levels = [(record.levelno, record.getMessage()) for record in caplog.records]
        assert levels == [
            (10, "a debug message"),
            (20, "a info message"),
            (30, "a warning message"),
            (40, "a error message"),
            (50, "a critical message"),
            (25, "a 25 message"),
        ]

    def test_both_new_arguments_are_taken(self, logger, caplog):
        logger.info("one", main_process_only=False)
        logger.info("two", main_process_only=True)
        logger.info("three", in_order=True)
        logger.info("four", main_process_only=False, in_order=True)
        logger.info("five", main_process_only=True, in_order=True)
        assert caplog.messages == ["one", "two", "three", "four", "five"]

    @pytest.mark.parametrize("arguments", [{}, {"in_order": True}, {"main_process_only": False}])
    def test_records_name_the_callers_line(self, logger, caplog, arguments):
        logger.info("here", **arguments)
        assert (caplog.records[0].filename, caplog.records[0].funcName) == (
            "test_loggers.py",
            "test_records_name_the_callers_line",
        )

    def test_records_of_log_and_warning_once_name_the_callers_line(self, logger, caplog):
        logger.log(logging.INFO, "here")
        logger.warning_once("here")
        logger.warning_once("here", in_order=True)
        this = "test_records_of_log_and_warning_once_name_the_callers_line"
        assert [record.funcName for record in caplog.records] == [this] * 3

    def test_a_stacklevel_of_the_caller_counts_from_the_caller(self, logger, caplog):
        def helper():
            logger.info("here", stacklevel=2)

        helper()
        assert caplog.records[0].funcName == "test_a_stacklevel_of_the_caller_counts_from_the_caller"

    @pytest.mark.parametrize("stacklevel", [None, 1, 2, 3, 4])
    def test_records_through_another_adapter_name_the_line_of_the_call(self, logger, caplog, stacklevel):
        # Adapters that were written for other loggers count with or without the logger's own frames.
        class Outer(logging.LoggerAdapter):
            def log(self, level, msg, *args, **kwargs):
                if stacklevel is not None:
                    kwargs["stacklevel"] = stacklevel
                self.logger.log(level, msg, *args, **kwargs)

        outer = Outer(logger, {})
        outer.warning("here")
        outer.log(logging.INFO, "here")
        outer.info("here", in_order=True)
        here = sys._getframe()
        assert [record.lineno for record in caplog.records] == [here.f_lineno - n for n in (4, 3, 2)]
        for record in caplog.records:
            assert (record.funcName, record.pathname) == (here.f_code.co_name, __file__)

    def test_a_plain_adapter_passes_the_stacklevel_of_the_call_on(self, logger, caplog):
        def helper():
            logging.LoggerAdapter(logger, {}).info("here", stacklevel=2)

        helper()
        assert caplog.records[0].funcName == "test_a_plain_adapter_passes_the_stacklevel_of_the_call_on"

    def test_exceptions_and_extra_fields_pass_through(self, logger, caplog):
        try:
            raise ValueError("inside")
        except ValueError:
            logger.exception("failed", extra={"step": 3})
        assert caplog.records[0].step == 3
        assert caplog.records[0].exc_info[0] is ValueError

    def test_extra_fields_of_the_adapter_and_of_the_call_meet(self, logger, caplog):
        adapter = MultiProcessAdapter(logger.logger, {"run": "a", "step": 0})
        adapter.info("message", extra={"step": 3})
        adapter.info("message")
        assert [(record.run, record.step) for record in caplog.records] == [("a", 3), ("a", 0)]

    def test_disabled_levels_are_not_logged(self, caplog):
        logger = get_logger(NAME, log_level="error")
        logger.info("quiet")
        logger.info("quiet", in_order=True)
        logger.error("loud")
        logger.logger.setLevel(logging.NOTSET)
        assert caplog.messages == ["loud"]

    def test_warning_once(self, logger, caplog):
        for _ in range(3):
            logger.warning_once("about %s", "this")
            logger.warning_once("about %s", "that")
        assert caplog.messages == ["about this", "about that"]
        assert {record.levelno for record in caplog.records} == {logging.WARNING}

    def test_warning_once_takes_arguments_that_do_not_hash(self, logger, caplog):
        logger.warning_once("about %s", [1])
        logger.warning_once("about %s", [1])
        logger.warning_once("about %s", [2])
        assert caplog.messages == ["about [1]", "about [2]"]

    def test_warning_once_is_per_logger(self, logger, caplog):
        logger.warning_once("this")
        get_logger(NAME).warning_once("this")
        assert caplog.messages == ["this", "this"]


def test_level_from_argument_or_environment(monkeypatch):
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    name = NAME + "_level"
    assert get_logger(name).logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "info")
    assert get_logger(name).logger.level == logging.INFO
    assert get_logger(name, log_level="DEBUG").logger.level == logging.DEBUG
    assert logging.getLogger().level == logging.WARNING


def test_unknown_level_is_named(monkeypatch):
    with pytest.raises(
        ValueError, match="'loud' is not a log level; use DEBUG, INFO, WARNING, ERROR or CRITICAL"
    ):
        get_logger(NAME, log_level="loud")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "louder")
    with pytest.raises(ValueError, match=r"'louder' is not a log level.*ACCELERATE_LOG_LEVEL"):
        get_logger(NAME)


# Several processes


def log_from_all(path, arguments, levels=None):
    state = PartialState(cpu=True)
    logger = logger_to(path, levels[state.process_index] if levels else "DEBUG")
    # The first rank comes last, so that an order by rank cannot be by chance.
    time.sleep(0.05 * (state.num_processes - 1 - state.process_index))
    logger.info(f"rank {state.process_index}", **arguments)
    logger.logger.handlers = []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["rank 0"]),
        ({"main_process_only": True}, ["rank 0"]),
        ({"main_process_only": True, "in_order": True}, ["rank 0"]),
        ({"main_process_only": False}, ["rank 2", "rank 1", "rank 0"]),
        ({"in_order": True}, ["rank 0", "rank 1", "rank 2"]),
        ({"main_process_only": False, "in_order": True}, ["rank 0", "rank 1", "rank 2"]),
    ],
)
def test_who_logs_and_in_which_order(world, tmp_path, arguments, expected):
    path = tmp_path / "log"
    world.run(log_from_all, path, arguments, size=3)
    lines = path.read_text().splitlines()
    if arguments == {"main_process_only": False}:
        assert sorted(lines) == sorted(expected)
    else:
        assert lines == expected


def warn_twice(path):
    PartialState(cpu=True)
    logger = logger_to(path)
    for name in ("once", "once", "in order", "in order"):
        logger.warning_once(name, in_order=name == "in order")
    logger.logger.handlers = []


def test_warning_once_is_once_for_all_unless_each_is_asked(world, tmp_path):
    path = tmp_path / "log"
    world.run(warn_twice, path, size=2)
    assert path.read_text().splitlines() == ["once", "in order", "in order"]


def test_in_order_does_not_hang_where_levels_differ(world, tmp_path):
    path = tmp_path / "log"
    world.run(log_from_all, path, {"in_order": True}, ["INFO", "ERROR", "INFO"], size=3)
    assert path.read_text().splitlines() == ["rank 0", "rank 2"]


def log_with_a_broken_handler(path):
    state = PartialState(cpu=True)
    logger = logger_to(path)
    if state.process_index == 0:
        logger.logger.handlers = [Broken()]
    try:
        logger.info(f"rank {state.process_index}", in_order=True)
    except OSError as error:
        return str(error)
    finally:
        logger.logger.handlers = []
    return None


def test_a_handler_that_fails_leaves_no_rank_waiting(world, tmp_path):
    path = tmp_path / "log"
    assert world.run(log_with_a_broken_handler, path, size=2) == ["disk full", None]
    assert path.read_text().splitlines() == ["rank 1"]
