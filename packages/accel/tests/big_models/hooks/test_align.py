"""The hook of one module: where weights, inputs and outputs are before, during and after its forward."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_models.hooks.tensors import as_device, is_on, tied_key
from accel.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

META = torch.device("meta")


class Recorder(nn.Module):
    """Records the devices that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.ones(2))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *, more: Any = None) -> Any:
        self.seen.append((self.weight.device.type, x.device.type, more and more["kept"].device.type))
        return {"sum": x + self.weight, "nested": [(x,)]}


def test_devices_are_read_as_in_a_device_map() -> None:
    assert as_device("cpu") == as_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="this process uses no accelerator, so it has no device 0"):
        as_device(0)


def test_a_device_without_a_number_is_any_of_its_type() -> None:
    class Second:
        device = torch.device("cuda", 1)

    found: Any = Second()
    assert is_on(found, torch.device("cuda"))
    assert is_on(found, torch.device("cuda:1"))
    assert not is_on(found, torch.device("cuda:0"))
    assert not is_on(found, torch.device("cpu"))
    assert is_on(torch.ones(1), torch.device("cpu"))


def test_inputs_and_outputs_go_where_they_should() -> None:
    model = Recorder()
    add_hook_to_module(model, AlignDevicesHook("meta", io_same_device=True))
    x = torch.ones(2)
    with pytest.raises(NotImplementedError, match="meta"):  # nothing comes back from there
        model(x, more={"kept": x})

    assert model.seen == [("meta", "meta", "meta")]


def test_the_output_comes_back_to_the_device_of_the_first_input() -> None:
    model = Recorder()
    add_hook_to_module(model, AlignDevicesHook("meta", io_same_device=True))

    output = model(torch.ones(2, device="meta"))
    assert output["sum"].is_meta

    plain = Recorder()
    add_hook_to_module(plain, AlignDevicesHook("cpu", io_same_device=True))
    assert plain(torch.ones(2))["nested"][0][0].tolist() == [1, 1]


@pytest.mark.parametrize("skip", ["more", ["kept"]])
def test_keys_that_are_skipped_stay_where_they_are(skip: Any) -> None:
    model = Recorder()
    add_hook_to_module(model, AlignDevicesHook("meta", skip_keys=skip))
    model(torch.ones(2), more={"kept": torch.ones(2)})

    assert model.seen == [("meta", "meta", "cpu")]


def test_offloaded_weights_are_there_for_the_forward_alone() -> None:
    model = Recorder()
    before = model.weight
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True))
    assert model.weight.is_meta
    model(torch.ones(2))

    assert model.seen[0][0] == "cpu"
    assert model.weight.is_meta
    assert model.table.device.type == "cpu"
    remove_hook_from_module(model)
    assert model.weight is before


def test_buffers_are_offloaded_when_requested_and_come_back() -> None:
    model = Recorder()
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    assert model.table.is_meta
    assert model(torch.ones(2))["sum"].tolist() == [2, 2]
    remove_hook_from_module(model)

    assert model.table.tolist() == [1, 1]


def test_a_stored_weight_of_another_shape_is_named_and_nothing_stays_loaded() -> None:
    model = Recorder()
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(3)}))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weight has the shape \[3\], but in Recorder \[2\]"):
            model(torch.ones(2))
        assert model.weight.is_meta


def test_a_dtype_of_the_store_becomes_that_of_the_model() -> None:
    model = Recorder()
    add_hook_to_module(
        model,
        AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(2, dtype=torch.float64)}),
    )

    assert model(torch.ones(2))["sum"].dtype is torch.float32
    assert model.state_dict()["weight"].dtype is torch.float32


def test_weights_of_modules_inside_come_with_those_of_the_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    plain = copy.deepcopy(model)
    add_hook_to_module(model, AlignDevicesHook("cpu", offload=True, place_submodules=True))

    assert all(parameter.is_meta for parameter in model.parameters())
    x = torch.ones(3, 2)
    assert torch.equal(
        model(x)[0], plain(x)[0]
    )  # the list of weights that an LSTM keeps is brought up to date
    assert all(weight.is_meta for weight in model[1]._flat_weights)


def test_two_modules_share_the_copy_of_a_tied_weight_while_both_run() -> None:
    weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, outer: nn.Module, x: torch.Tensor) -> Any:
            return self.weight is outer.weight

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(self, x)

    model = Outer()
    ties: Any = {tied_key(weight): {}}
    stored = {"weight": weight.detach().clone()}
    for module in (model, model.inner):
        hook = AlignDevicesHook("cpu", offload=True, weights_map=stored, tied_params_map=ties)
        add_hook_to_module(module, hook)

    assert model.weight is model.inner.weight
    assert model(torch.ones(2)) is True
    assert model.weight is model.inner.weight
    assert model.weight.is_meta
    assert set(ties[tied_key(weight)]) == {META}  # the copy is gone when nobody runs


def test_a_hook_says_what_it_does_and_is_pickled() -> None:
    hook = AlignDevicesHook("cpu", offload=True, skip_keys="past")
    said = (
        "AlignDevicesHook(execution_device=cpu, offload=True, io_same_device=False, offload_buffers=False, "
    )

    assert repr(hook) == said + "place_submodules=False, skip_keys='past')"
    assert repr(pickle.loads(pickle.dumps(hook))) == repr(hook)


class Meeting(nn.Module):
    """A forward in which two threads are at the same time; with `inner` it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=60)

    def forward(self, x: torch.Tensor, inner: bool = False) -> torch.Tensor:
        if inner:
            assert self(x.to("meta")).is_meta
        elif threading.current_thread() is not threading.main_thread():
            self.barrier.wait()
        return torch.ones(1)


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_each_call_of_several_threads_gets_its_output_where_its_inputs_were(first: str) -> None:
    module = Meeting()
    add_hook_to_module(module, AlignDevicesHook(io_same_device=True))
    second = "meta" if first == "cpu" else "cpu"

    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda device: module(torch.ones(1, device=device)).device.type, [first, second])
        )

    assert found == [first, second]


def test_a_call_inside_of_another_does_not_change_where_that_ones_output_goes() -> None:
    module = Meeting()
    add_hook_to_module(module, AlignDevicesHook(io_same_device=True))

    assert module(torch.ones(1), inner=True).device.type == "cpu"
