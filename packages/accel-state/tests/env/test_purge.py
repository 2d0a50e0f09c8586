"""The decorator that leaves no ACCELERATE_* variable behind."""

from __future__ import annotations

import asyncio
import os
import unittest

import pytest

from accel_state.env.purge import purge_accelerate_environment


@pytest.fixture
def accelerate_variables(monkeypatch):
    monkeypatch.setenv("ACCELERATE_AA_OLD", "old")
    monkeypatch.setenv("ACCELERATE_AA_GONE", "gone")
    monkeypatch.setenv("AA_OTHER", "old")
    return environment()


def environment():
    """Return the environment without what pytest itself changes between a fixture and its test."""
    return {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def disturb():
    os.environ["ACCELERATE_AA_OLD"] = "new"
    os.environ["ACCELERATE_AA_NEW"] = "new"
    os.environ["AA_OTHER"] = "new"
    os.environ.pop("ACCELERATE_AA_GONE", None)


def assert_purged(before):
    assert environment() == {**before, "AA_OTHER": "new"}


def test_purge_a_function(accelerate_variables):
    @purge_accelerate_environment
    def function(a, *, b):
        """Its docstring."""
        disturb()
        assert os.environ["ACCELERATE_AA_NEW"] == "new"
        return a + b

    assert function(1, b=2) == 3
    assert (function.__name__, function.__doc__) == ("function", "Its docstring.")
    assert_purged(accelerate_variables)


def test_purge_a_function_that_fails(accelerate_variables):
    @purge_accelerate_environment
    def function():
        disturb()
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        function()
    assert_purged(accelerate_variables)


def test_purge_a_generator(accelerate_variables):
    @purge_accelerate_environment
    def function():
        disturb()
        sent = yield 1
        assert os.environ["ACCELERATE_AA_NEW"] == "new"
        return sent

    generator = function()
    assert next(generator) == 1
    with pytest.raises(StopIteration, match="7"):
        generator.send(7)
    assert_purged(accelerate_variables)


def test_purge_a_coroutine_and_an_asynchronous_generator(accelerate_variables):
    @purge_accelerate_environment
    async def function():
        disturb()
        await asyncio.sleep(0)
        assert os.environ["ACCELERATE_AA_NEW"] == "new"
        return 3

    @purge_accelerate_environment
    async def items():
        disturb()
        yield 1
        assert os.environ["ACCELERATE_AA_NEW"] == "new"
        yield 2

    async def collect():
        return [item async for item in items()]

    assert asyncio.run(function()) == 3
    assert_purged(accelerate_variables)
    assert asyncio.run(collect()) == [1, 2]
    assert_purged(accelerate_variables)


def test_purge_a_class(accelerate_variables):
    @purge_accelerate_environment
    class Sample:
        constant = 5

        class Inner:
            pass

        def __init__(self):
            disturb()

        def method(self):
            disturb()
            return self

        @staticmethod
        def static(a):
            disturb()
            return a

        @classmethod
        def made(cls):
            disturb()
            return cls

        @property
        def value(self):
            disturb()
            return 7

    sample = Sample()
    assert_purged(accelerate_variables)
    assert isinstance(sample, Sample)
    assert sample.method() is sample
    assert_purged(accelerate_variables)
    assert Sample.static(4) == sample.static(4) == 4
    assert Sample.made() is Sample
    assert (sample.value, Sample.constant, Sample.Inner.__name__) == (7, 5, "Inner")
    assert_purged(accelerate_variables)


class Plain:
    """Tests without the decorator, of every kind."""

    def test_plain(self):
        disturb()
        return "plain"

    async def test_coroutine(self):
        disturb()
        return "coroutine"

    def test_generator(self):
        disturb()
        yield "generator"

    @staticmethod
    def test_static():
        disturb()
        return "static"

    @classmethod
    def test_class(cls):
        disturb()
        return cls

    def helper(self):
        disturb()


def assert_tests_purged(sample, before):
    assert sample.test_plain() == "plain"
    assert_purged(before)
    assert asyncio.run(sample.test_coroutine()) == "coroutine"
    assert_purged(before)
    assert list(sample.test_generator()) == ["generator"]
    assert_purged(before)
    for owner in (sample, type(sample)):
        assert owner.test_static() == "static"
        assert_purged(before)
        assert owner.test_class() is type(sample)
        assert_purged(before)


def test_purge_inherited_tests(accelerate_variables):
    @purge_accelerate_environment
    class Sample(Plain):
        pass

    assert_tests_purged(Sample(), accelerate_variables)
    assert Sample.test_plain.__name__ == "test_plain"
    Plain().helper()
    assert os.environ.pop("ACCELERATE_AA_NEW") == "new"  # the class above is as it was


def test_purge_subclasses(accelerate_variables):
    made = []

    @purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, mark, **options):
            disturb()
            made.append(mark)

        def test_base(self):
            disturb()

    class Sample(Base, mark="a"):
        def method(self):
            disturb()

        def test_base(self):
            super().test_base()
            disturb()

    class Further(Sample, Plain, mark="b"):
        pass

    assert_purged(accelerate_variables)
    assert made == ["a", "b"]
    for kind in (Sample, Further):
        kind().method()
        assert_purged(accelerate_variables)
        kind().test_base()
        assert_purged(accelerate_variables)
    assert_tests_purged(Further(), accelerate_variables)


def test_an_inherited_test_is_that_of_the_order_of_classes(accelerate_variables):
    class Base:
        def test_one(self):
            return "base"

    @purge_accelerate_environment
    class Left(Base):
        pass

    class Right(Base):
        def test_one(self):
            return "right"

    class Both(Left, Right):
        pass

    assert (Left().test_one(), Both().test_one()) == ("base", "right")


def test_purge_a_test_case(accelerate_variables):
    seen = []

    @purge_accelerate_environment
    class Sample(unittest.TestCase):
        def setUp(self):
            os.environ["ACCELERATE_AA_SET_UP"] = "1"

        def test_one(self):
            seen.append(os.environ.get("ACCELERATE_AA_SET_UP"))
            disturb()

        def tearDown(self):
            seen.append(os.environ.get("ACCELERATE_AA_SET_UP"))
            disturb()

    result = unittest.TestResult()
    Sample("test_one")(result)

    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    assert seen == ["1", "1"]
    assert_purged(accelerate_variables)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_class_sets_up_is_there_until_its_tests_are_over(accelerate_variables, fails):
    seen = []

    @purge_accelerate_environment
    class Sample(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            super().setUpClass()
            os.environ["ACCELERATE_AA_SET_UP"] = "1"
            disturb()
            if fails:
                raise RuntimeError("inside")

        def test_one(self):
            seen.append(os.environ.get("ACCELERATE_AA_SET_UP"))

        test_two = test_one

        @classmethod
        def tearDownClass(cls):
            seen.append(os.environ.get("ACCELERATE_AA_SET_UP"))
            disturb()

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Sample)(result)

    assert len(result.errors) == fails
    assert seen == ([] if fails else ["1", "1", "1"])
    assert_purged(accelerate_variables)
