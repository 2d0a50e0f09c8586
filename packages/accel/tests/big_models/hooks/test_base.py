"""Hooks on a module's forward."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from accel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Add(ModelHook):
    """Adds to the first input and to the output; records what it is asked."""

    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before, self.after = before, after
        self.calls: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("pre")
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls.append("post")
        return output + self.after

    def forward_failed(self, module: nn.Module) -> None:
        self.calls.append("failed")

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append("detach")
        return module


class Scale(nn.Module):
    """Multiplies; the factor is a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, *, times: float = 1) -> torch.Tensor:
        return x * self.weight * times


def test_the_base_class_changes_nothing() -> None:
    module = Scale()
    add_hook_to_module(module, ModelHook())

    assert module(torch.tensor(3.0), times=2) == 12


def test_a_hook_sees_inputs_and_outputs_and_keywords() -> None:
    module, hook = Scale(), Add(before=1, after=10)
    returned = add_hook_to_module(module, hook)

    assert returned is module
    assert module._hf_hook is hook
    assert module(torch.tensor(3.0), times=2) == (3 + 1) * 2 * 2 + 10
    assert module._old_forward(torch.tensor(3.0)) == 6
    assert hook.calls == ["init", "pre", "post"]


def test_a_second_hook_replaces_the_first_or_is_appended() -> None:
    module, first, second, third = Scale(), Add(before=1), Add(after=10), Add(after=100)
    add_hook_to_module(module, first)
    add_hook_to_module(module, second)
    assert module(torch.tensor(3.0)) == 16
    assert first.calls == ["init", "detach"]

    add_hook_to_module(module, first, append=True)
    add_hook_to_module(module, third, append=True)

    assert module._hf_hook.hooks == (second, first, third)
    assert module(torch.tensor(3.0)) == 4 * 2 + 110
    assert second.calls.count("init") == 1


def test_append_without_a_hook_adds_it() -> None:
    module, hook = Scale(), Add()
    add_hook_to_module(module, hook, append=True)

    assert module._hf_hook is hook


def test_hooks_in_a_sequence_are_called_in_order() -> None:
    order: list[str] = []

    class Named(ModelHook):
        def __init__(self, name: str) -> None:
            self.name = name

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            order.append(f"pre {self.name}")
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            order.append(f"post {self.name}")
            return output

    module = add_hook_to_module(Scale(), SequentialHook(Named("a"), Named("b")))
    module(torch.tensor(1.0))

    assert order == ["pre a", "pre b", "post a", "post b"]


@pytest.mark.parametrize("wrap", [lambda hook: hook, lambda hook: SequentialHook(ModelHook(), hook)])
def test_no_grad(wrap: Any) -> None:
    hook = ModelHook()
    hook.no_grad = True
    module = add_hook_to_module(Scale(), wrap(hook))

    assert not module(torch.tensor(3.0)).requires_grad
    remove_hook_from_module(module)
    assert module(torch.tensor(3.0)).requires_grad


def test_a_removed_hook_leaves_no_trace() -> None:
    module = nn.Sequential(Scale(), Scale())
    before = [dict(vars(part)) for part in module.modules()]
    for part in module.modules():
        add_hook_to_module(part, Add(before=1))
    remove_hook_from_module(module)
    assert module(torch.tensor(3.0)) == ((3 + 1) * 2 + 1) * 2
    remove_hook_from_submodules(module)

    assert [dict(vars(part)) for part in module.modules()] == before
    assert module(torch.tensor(3.0)) == 12
    assert "forward" not in vars(module[0])
    remove_hook_from_module(module, recurse=True)  # there is none any more


def test_a_forward_of_the_instance_comes_back() -> None:
    module = Scale()
    replaced = MethodType(lambda self, x: x * 7, module)
    module.forward = replaced
    add_hook_to_module(module, Add(after=1))
    assert module(torch.tensor(1.0)) == 8
    remove_hook_from_module(module)

    assert module.forward == replaced
    module.forward = function = lambda x: x * 5
    add_hook_to_module(module, Add(after=1))
    remove_hook_from_module(module)
    assert module.forward is function


def test_a_wrapper_that_came_later_stays() -> None:
    module, hook = Scale(), Add(after=1)
    add_hook_to_module(module, hook)
    hooked = module.forward
    module.forward = lambda x: hooked(x) * 100
    remove_hook_from_module(module)
    assert module(torch.tensor(1.0)) == 200
    assert not {"_hf_hook", "_old_forward"} & vars(module).keys()

    add_hook_to_module(module, hook)
    assert module(torch.tensor(1.0)) == 201
    assert hook.calls.count("pre") == 1


def test_the_signature_is_that_of_the_module() -> None:
    module = add_hook_to_module(Scale(), ModelHook())

    assert list(inspect.signature(module.forward).parameters) == ["x", "times"]
    assert list(inspect.signature(module._old_forward).parameters) == ["x", "times"]
    assert module.forward.__name__ == "forward"
    assert functools.wraps(module.forward)(lambda x: x).__name__ == "forward"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = module.forward.nothing_of_the_kind


def test_a_hooked_module_is_copied_and_pickled() -> None:
    module = nn.Sequential(Scale(), Scale())
    add_hook_to_module(module[0], Add(before=1))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other[0].weight.data.fill_(10)
        assert other(torch.tensor(3.0)) == (3 + 1) * 10 * 2
        assert other[0]._hf_hook is not module[0]._hf_hook
        remove_hook_from_submodules(other)
        assert other(torch.tensor(3.0)) == 60
    assert module(torch.tensor(3.0)) == 16


def test_a_module_is_freed_without_the_collector() -> None:
    module = add_hook_to_module(Scale(), Add())
    module(torch.tensor(1.0))
    forward, alive = module.forward, weakref.ref(module)
    gc.disable()
    try:
        del module
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="Scale"):
        forward(torch.tensor(1.0))


def test_a_forward_that_fails_is_reported() -> None:
    module, hook = nn.Linear(2, 2), Add()
    add_hook_to_module(module, hook)
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 3))

    assert hook.calls == ["init", "pre", "failed"]


def test_of_a_sequence_those_that_began_are_reported() -> None:
    class Broken(Add):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("broken")

    class BrokenLater(Add):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            raise RuntimeError("broken")

    first, last = Add(), Add()
    module = add_hook_to_module(Scale(), SequentialHook(first, Broken(), last))
    with pytest.raises(RuntimeError, match="broken"):
        module(torch.tensor(1.0))
    assert (first.calls, last.calls) == (["init", "pre", "failed"], ["init"])

    first, last = Add(), Add()
    add_hook_to_module(module, SequentialHook(first, BrokenLater(), last))
    with pytest.raises(RuntimeError, match="broken"):
        module(torch.tensor(1.0))
    assert first.calls == ["init", "pre", "post"]
    assert last.calls == ["init", "pre", "failed"]


def test_a_hook_that_cannot_begin_is_not_added() -> None:
    class Broken(Add):
        def init_hook(self, module: nn.Module) -> nn.Module:
            raise RuntimeError("broken")

    module, first = Scale(), Add()
    before = dict(vars(module))
    with pytest.raises(RuntimeError, match="broken"):
        add_hook_to_module(module, SequentialHook(first, Broken()))

    assert dict(vars(module)) == before
    assert first.calls == ["init", "detach"]


def test_what_is_no_hook_is_an_error() -> None:
    with pytest.raises(TypeError, match="instance of a ModelHook"):
        add_hook_to_module(Scale(), ModelHook)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not to list"):
        add_hook_to_module([], ModelHook())  # type: ignore[arg-type]


def test_threads_call_the_same_module() -> None:
    module = add_hook_to_module(Scale(), Add(before=1))
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda: found.append(module(torch.tensor(3.0)).item())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [8.0] * 4


class Plus(ModelHook):
    """A hook without a record, which a compiler can follow."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_hooked_module_is_compiled_in_one_piece(in_place: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Scale())
    for part in module.modules():
        add_hook_to_module(part, Plus())
    x = torch.ones(1, 2)
    expected = module(x)
    if in_place:
        module.compile(backend="eager", fullgraph=True)
    compiled = module if in_place else torch.compile(module, backend="eager", fullgraph=True)

    assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


def test_a_traced_graph_takes_a_hook() -> None:
    module = torch.fx.symbolic_trace(Scale())
    add_hook_to_module(module, Plus())
    assert module(torch.tensor(3.0)) == 7
    remove_hook_from_module(module)
    assert module(torch.tensor(3.0)) == 6
