from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_ops.modules import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    get_pretty_name,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
    model_is_sharded,
    recursive_getattr,
    unsaved_buffers,
)


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.b = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_a_bare_model_comes_back_as_it_is():
    model = Outer()

    assert extract_model_from_parallel(model) is model


def test_containers_are_taken_off_however_deep():
    model = Outer()

    assert extract_model_from_parallel(DataParallel(DataParallel(model))) is model


def test_recursive_frees_the_children_too():
    model = Outer()
    inner = model.a
    model.a = DataParallel(inner)

    assert extract_model_from_parallel(model) is model
    assert model.a is not inner
    assert extract_model_from_parallel(model, recursive=True).a is inner


def check_ddp() -> None:
    model = Outer()
    ddp = DistributedDataParallel(model)
    compiled = torch.compile(ddp, backend="eager")
    assert extract_model_from_parallel(ddp) is model
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    kept = extract_model_from_parallel(compiled)
    assert is_compiled_module(kept)
    assert kept._orig_mod is model
    assert compiled._orig_mod is ddp


def test_a_compiled_ddp_model_keeps_its_container(world):
    world.run(check_ddp)


def test_a_compiled_model_without_container_is_itself():
    compiled = torch.compile(Outer(), backend="eager")

    assert extract_model_from_parallel(compiled) is compiled
    assert is_compiled_module(compiled)
    assert not is_compiled_module(Outer())


def test_the_precision_wrapper_is_taken_off_on_request():
    model = Outer()
    model._original_forward = model.forward
    model.forward = lambda x: x

    assert extract_model_from_parallel(model).forward(1) == 1
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(plain)
    assert not hasattr(plain, "_original_forward")


def test_a_forward_that_was_the_users_own_is_put_back():
    def own(x: torch.Tensor) -> str:
        return "own"

    model = Outer()
    model.forward = own
    model._original_forward = model.forward
    model.forward = lambda x: x

    assert extract_model_from_parallel(model, keep_fp32_wrapper=False).forward is own


def test_compiled_regions_are_found_inside():
    model = Outer()
    assert not has_compiled_regions(model)
    model.a = torch.compile(model.a, backend="eager")

    assert has_compiled_regions(model)
    in_place = Outer()
    in_place.b.compile(backend="eager")
    assert has_compiled_regions(in_place)
    assert extract_model_from_parallel(in_place, keep_torch_compile=False) is in_place


def check_dtensor() -> None:
    model = Outer()
    assert not model_has_dtensor(model)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(1, 2)
    model.b.weight = torch.nn.Parameter(DTensor.from_local(local, mesh))
    assert model_has_dtensor(model)


def check_sharded() -> list[bool]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    found = [model_is_sharded(Outer())]
    model = Outer()
    fully_shard(model.a)
    found.append(model_is_sharded(model))
    return [*found, model_is_sharded(FullyShardedDataParallel(Outer(), device_id=torch.device("cpu")))]


def test_models_that_are_sharded_are_found(world):
    assert world.run(check_sharded) == [[False, True, True]] * 2


def test_dtensors_are_found(world):
    world.run(check_dtensor)


def test_recursive_getattr():
    model = Outer()

    assert recursive_getattr(model, "a.0.weight") is model.a[0].weight
    with pytest.raises(AttributeError, match="nothing"):
        recursive_getattr(model, "a.nothing.weight")


def test_children_come_before_what_holds_them():
    model = Outer()

    assert get_module_children_bottom_up(model) == [model.a[0], model.a[1], model.a, model.b, model]
    names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    assert names == ["a.0", "a.1", "a", "b", ""]


def test_a_shared_module_is_listed_once():
    model = Outer()
    model.c = model.a[0]

    assert get_module_children_bottom_up(model).count(model.c) == 1


def test_a_model_compiled_inside_a_container_is_taken_out_of_both():
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    wrapped = torch.nn.DataParallel(compiled)

    assert extract_model_from_parallel(wrapped) is compiled
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is model


def test_names_of_functions_classes_and_objects():
    assert get_pretty_name(Outer) == get_pretty_name(Outer()) == "Outer"
    assert get_pretty_name(Outer.forward) == "Outer.forward"
    assert get_pretty_name({}) == "dict"


def test_buffers_that_are_not_saved_are_named():
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    model.inner = torch.nn.Linear(1, 1)
    model.inner.register_buffer("deeper", torch.zeros(1), persistent=False)

    assert unsaved_buffers(model) == {"scratch"}
    assert "scratch" not in model.state_dict()


@torch.no_grad()
def test_compiled_submodules_are_compiled_in_place():
    calls = []

    def backend(graph, inputs):
        calls.append("compiled")
        return graph.forward

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    expected, names = model(torch.ones(1, 2)), list(model.state_dict())
    model[0][0] = torch.compile(model[0][0], backend=backend)
    model[0] = torch.compile(model[0], backend=backend)
    model[1] = torch.compile(model[1], backend=backend)
    model[1].register_forward_hook(lambda *_: calls.append("hook"))

    assert extract_model_from_parallel(model) is model
    assert any("_orig_mod" in name for name in model.state_dict())
    assert extract_model_from_parallel(model, keep_torch_compile=False) is model
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert {"compiled", "hook"} <= set(calls)


def test_a_compiled_submodule_keeps_a_forward_that_was_put_into_it():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")
    model[0].forward = lambda x: x + 1
    assert extract_model_from_parallel(model, keep_torch_compile=False) is model
    assert torch.equal(model(torch.ones(1)), torch.tensor([2.0]))
