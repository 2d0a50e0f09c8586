"""What engines read of torch without a documented call is there, and does what they expect."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor

from accel.engines import torch_private
from accel_world.fake import fake_world

pytestmark = pytest.mark.core


def test_the_module_inside_of_a_compiled_one():
    model = torch.nn.Linear(2, 2)
    assert torch_private.uncompiled(torch.compile(model, backend="eager")) is model
    assert torch_private.uncompiled(model) is model


def test_prefixes_of_wrappers_are_removed_anywhere():
    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(1, 1, bias=False)))
    [(name, _)] = torch.compile(model, backend="eager").named_parameters()
    assert name.count("_") > 4
    assert torch_private.plain_name(name) == "0.weight"
    assert torch_private.plain_name("_fsdp_wrapped_module.a._fsdp_wrapped_module.b") == "a.b"


def test_forward_uses_what_the_dict_of_parameters_has():
    layer = torch.nn.Linear(2, 1)
    parameters = torch_private.direct_parameters(layer)
    assert parameters == {"weight": layer.weight, "bias": layer.bias}
    parameters["bias"] = layer.bias * 0 + 3
    parameters["weight"] = layer.weight * 0
    assert layer(torch.ones(2)).tolist() == [3]


def test_a_function_runs_when_backward_is_done():
    order = []
    first = torch.ones(1, requires_grad=True)
    second = first * 2
    second.register_hook(lambda gradient: torch_private.call_after_backward(lambda: order.append("end")))
    first.register_hook(lambda gradient: order.append("hook"))
    second.backward()
    assert order == ["hook", "end"]
    second = first * 2
    second.backward()
    assert order == ["hook", "end", "hook"]


def test_hooks_of_one_dict_are_called_for_both_tensors_until_their_handle_removes_them():
    calls = []
    old, new = (torch.ones(1, requires_grad=True) for _ in range(2))
    assert torch_private.gradient_hooks(old) is None
    handle = old.register_hook(calls.append)
    torch_private.set_gradient_hooks(new, torch_private.gradient_hooks(old))
    (2 * old).backward()
    (3 * new).backward()
    assert [call.item() for call in calls] == [2, 3]
    handle.remove()
    assert not torch_private.gradient_hooks(new)
    (4 * new).backward()
    assert len(calls) == 2


def test_hooks_of_accumulation():
    tensor = torch.ones(1, requires_grad=True)
    assert torch_private.accumulation_hooks(tensor) is None
    handle = tensor.register_post_accumulate_grad_hook(lambda parameter: None)
    assert len(torch_private.accumulation_hooks(tensor)) == 1
    handle.remove()
    assert not torch_private.accumulation_hooks(tensor)


def test_a_layout_takes_an_equal_mesh():
    with fake_world(0, 2):
        first, second = (init_device_mesh("cpu", (2,)) for _ in range(2))
        tensor = distribute_tensor(torch.arange(4.0), first, [Shard(0)], src_data_rank=None)
        torch_private.layout_of(tensor).mesh = second
        assert tensor.device_mesh is second
        assert (tensor + 1).device_mesh is second
        assert tensor.to_local().tolist() == [0, 1]


def test_operations_on_dtensors_are_planned_again():
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        assert planned(tensor) >= 1
        assert planned(tensor) == 0
        torch_private.clear_sharding_caches()
        assert planned(tensor) == 1


def planned(tensor: DTensor) -> int:
    """How often torch plans an operation anew."""
    before = debug._get_fast_path_sharding_prop_cache_stats()
    torch.atan(tensor)
    return debug._get_fast_path_sharding_prop_cache_stats()[1] - before[1]


def test_groups_of_fully_shard_say_what_is_gathered():
    with fake_world(0, 2):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for unit in (*model, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        assert list(torch_private.parameter_groups(model)) == []  # the layers have all parameters
        [group] = torch_private.parameter_groups(model[0])
        assert torch_private.unsharded_parameter(group.fsdp_params[0]) is None
        assert not torch_private.is_gathered(group)

        model[0].unshard()
        assert torch_private.is_gathered(group)
        assert torch_private.unsharded_parameter(group.fsdp_params[0]) is model[0].weight
        model[0].reshard()
        assert not torch_private.is_gathered(group)


def test_groups_of_fully_shard_say_that_backward_has_reached_them():
    with fake_world(0, 2):
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        [group] = torch_private.parameter_groups(model)
        reached = []
        output = model(torch.ones(1, 4))
        output.register_hook(lambda gradient: reached.append(torch_private.is_in_backward(group)))
        reached.append(torch_private.is_in_backward(group))
        output.sum().backward()
        reached.append(torch_private.is_in_backward(group))
        assert reached == [False, True, False]


def test_gradients_that_no_backward_pass_reduced_are_reduced_at_its_end():
    with fake_world(0, 2):
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is None or not isinstance(model.weight, DTensor)
        model.set_requires_gradient_sync(True)
        torch_private.end_backward(model)
        assert [type(parameter.grad) for parameter in model.parameters()] == [DTensor] * 2
