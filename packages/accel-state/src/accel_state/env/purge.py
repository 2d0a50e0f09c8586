"""A decorator that removes the ACCELERATE_* variables set inside. Standard library only."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar, cast

from accel_state.env import keep_accelerate_environment

# The decorator returns its argument's type.
_Target = TypeVar("_Target", bound=Callable[..., Any])

# unittest calls these before and after tests, in TestCase.run: they set variables for the tests.
_TEST_FIXTURES = ("setUp", "asyncSetUp", "tearDown", "asyncTearDown", "tearDownClass")


def purge_accelerate_environment(func_or_cls: _Target) -> _Target:
    """Restore the ACCELERATE_* variables after each call, also after an exception.

    Of a class, the methods, static methods, class methods and properties defined in its body are treated so,
    and the test methods (`test...`) that it inherits; the same goes for its subclasses. Of a
    `unittest.TestCase`, what `setUp` sets is there in the test, and gone after `tearDown`; so is what
    `setUpClass` sets in all tests of the class, and gone after `tearDownClass`.

    Args:
        func_or_cls: A function (plain, generator, coroutine or asynchronous generator), or a class.

    Returns:
        The wrapped function, or the same class.
    """
    if isinstance(func_or_cls, type):
        _purge_methods(func_or_cls)
        _purge_subclasses(func_or_cls)
        return func_or_cls
    return cast("_Target", _purging(func_or_cls))


def _purge_subclasses(base: Any) -> None:
    """Purge subclasses too."""
    defined = vars(base).get("__init_subclass__")

    def init_subclass(cls: Any, /, **options: Any) -> None:
        # super(base, cls): the next class in the order of `cls` after this one, also with several bases.
        if defined is None:
            super(base, cls).__init_subclass__(**options)
        else:
            defined.__func__(cls, **options)
        _purge_methods(cls)

    base.__init_subclass__ = classmethod(init_subclass)


def _purge_methods(cls: type) -> None:
    is_test_case = "unittest" in sys.modules and issubclass(cls, sys.modules["unittest"].TestCase)
    # A list, as setattr changes the namespace during iteration.
    for name, member in list(vars(cls).items()):
        if is_test_case and name in _TEST_FIXTURES:
            continue
        if is_test_case and name == "setUpClass" and isinstance(member, classmethod):
            setattr(cls, name, classmethod(_purging_after_the_class(member.__func__)))
        elif isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(_purging(member.__func__)))
        elif isinstance(member, property):
            get, set_, delete = (
                accessor and _purging(accessor) for accessor in (member.fget, member.fset, member.fdel)
            )
            setattr(cls, name, property(get, set_, delete, member.__doc__))
        elif callable(member) and not isinstance(member, type):
            setattr(cls, name, _purging(member))
    for name in dir(cls):
        if name not in vars(cls) and (name.startswith("test") or (is_test_case and name == "run")):
            # Not getattr, which would bind the method and hide whether it is static.
            member = inspect.getattr_static(cls, name)
            if isinstance(member, staticmethod):
                setattr(cls, name, staticmethod(_purging(member.__func__, _inherited(cls, name, cls))))
            elif isinstance(member, classmethod):
                setattr(cls, name, classmethod(_purging(member.__func__, _inherited(cls, name))))
            elif inspect.isfunction(member):
                setattr(cls, name, _purging(member, _inherited(cls, name)))


def _inherited(cls: type, name: str, *owner: type) -> Callable[..., Any]:
    """Return a method that calls the inherited one, looked up at the call.

    Args:
        cls: The class.
        name: The method's name.
        *owner: The class again for a static method, which gets no `self`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        method_args: list[Any] = [*owner, *args]
        return getattr(super(cls, method_args[0]), name)(*method_args[1:], **kwargs)

    return call


def _purging_after_the_class(set_up: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `setUpClass` after which the class's cleanup purges, also where it fails."""

    @functools.wraps(set_up)
    def wrapper(cls: Any) -> None:
        # Closed by unittest after tearDownClass, where the `with` of a plain
        # wrapper would end with setUpClass.
        stack = ExitStack()
        stack.enter_context(keep_accelerate_environment())
        cls.addClassCleanup(stack.close)
        set_up(cls)

    return wrapper


def _purging(function: Callable[..., Any], call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function of the same kind that purges after each call.

    Args:
        function: The function.
        call: What is called in its place.
    """
    call = call or function

    async def asyncgen(*args: Any, **kwargs: Any) -> Any:
        with keep_accelerate_environment():
            async for item in call(*args, **kwargs):
                yield item

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with keep_accelerate_environment():
            return await call(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        with keep_accelerate_environment():
            # `yield from` also hands on what is sent into the generator, and its return value.
            return (yield from call(*args, **kwargs))

    def plain(*args: Any, **kwargs: Any) -> Any:
        with keep_accelerate_environment():
            return call(*args, **kwargs)

    # By the kind of function: each of them runs its body at another time than it is called.
    wrapper: Callable[..., Any] = plain
    if inspect.isasyncgenfunction(function):
        wrapper = asyncgen
    elif inspect.iscoroutinefunction(function):
        wrapper = coroutine
    elif inspect.isgeneratorfunction(function):
        wrapper = generator
    return functools.wraps(function)(wrapper)
