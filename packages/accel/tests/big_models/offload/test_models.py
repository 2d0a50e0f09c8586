"""Models whose weights are in memory or on the disk, and come for each module's forward."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from accel.big_modeling import cpu_offload, cpu_offload_with_hook, disk_offload
from accel.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_ckpt.errors import CorruptCheckpointError
from accel_state.process.state import current_process
from accel_world.devices import needs_cuda, on_devices

META = torch.device("meta")
Offload = Callable[[nn.Module], nn.Module]


@dataclass
class Output:
    """What a model may return."""

    logits: torch.Tensor
    more: tuple[dict[str, torch.Tensor], ...]


class Net(nn.Module):
    """A tied embedding, a buffer of each kind, and modules that read the weights of others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("unsaved", torch.arange(4.0) + 1, persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def forward(self, ids: torch.Tensor, *, factor: torch.Tensor | float = 1.0) -> Output:
        hidden, _ = self.lstm(self.embed(ids))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = self.attention(hidden, hidden, hidden)[0] * self.unsaved + self.table
        hidden = self.layer(hidden) * factor * self.scale
        return Output(self.head(hidden), ({"hidden": hidden},))


IDS = torch.arange(6).reshape(2, 3)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(params=["memory", "disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Offload:
    """Offload a model to memory, or to the disk."""
    if request.param == "memory":
        return cpu_offload
    return lambda model: disk_offload(model, tmp_path / "offload")


@torch.no_grad()
def assert_equal_outputs(model: nn.Module, other: nn.Module, times: int = 3) -> None:
    expected = other(IDS, factor=torch.tensor(2.0))
    for _ in range(times):
        found = model(IDS, factor=torch.tensor(2.0))
        assert type(found) is Output
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.more[0]["hidden"], expected.more[0]["hidden"])


def devices(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters()}


def test_outputs_are_those_of_the_model(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))

    assert devices(model) == {META}
    assert model.table.device == model.unsaved.device == torch.device("cpu")
    assert_equal_outputs(model, net)
    assert devices(model) == {META}


def test_tied_weights_are_kept_once(net: nn.Module, tmp_path: Path) -> None:
    model = disk_offload(copy.deepcopy(net), tmp_path)

    assert model.head.weight is model.embed.weight
    assert sum("embed" in file.name or "head" in file.name for file in tmp_path.iterdir()) == 1
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embed.weight

    model = cpu_offload(copy.deepcopy(net))
    assert model.head.weight is model.embed.weight
    assert model.head._hf_hook.weights_map["weight"] is model.embed._hf_hook.weights_map["weight"]


def test_the_state_dict_is_complete(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))
    expected, found = net.state_dict(), model.state_dict()

    assert list(found) == list(expected)
    assert found.pop("_extra_state") == expected.pop("_extra_state")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not any(isinstance(value, nn.Parameter) for value in found.values())
    part = model.layer.state_dict(prefix="layer.")
    assert torch.equal(part["layer.linear1.weight"], expected["layer.linear1.weight"])


def test_loading_a_state_dict_is_an_error_and_not_lost(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))
    with pytest.raises(RuntimeError, match=r"cannot load .*weight.*remove_hook_from_submodules"):
        model.load_state_dict(net.state_dict())

    model.load_state_dict({"table": torch.zeros(4)}, strict=False)
    assert model.table.eq(0).all()


def test_removed_hooks_leave_no_trace(net: nn.Module, offload: Offload) -> None:
    model = copy.deepcopy(net)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    offload(model)
    assert_equal_outputs(model, net)
    remove_hook_from_submodules(model)

    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert not any(part._state_dict_hooks or part._load_state_dict_pre_hooks for part in model.modules())
    assert devices(model) == {torch.device("cpu")}
    if offload is cpu_offload:
        assert all(model.get_parameter(name) is value for name, value in parameters.items())
    assert_equal_outputs(model, net, times=1)
    model.load_state_dict(net.state_dict())


def test_what_was_on_the_disk_outlives_the_folder(net: nn.Module, tmp_path: Path) -> None:
    model = disk_offload(copy.deepcopy(net), tmp_path)
    remove_hook_from_submodules(model)
    for file in tmp_path.iterdir():
        file.write_bytes(b"")

    assert_equal_outputs(model, net, times=1)


def test_a_copy_and_a_pickle_run_on_their_own(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))
    assert_equal_outputs(model, net)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_outputs(other, net)
        assert other.head.weight is other.embed.weight
        assert other.head.weight is not model.head.weight
        remove_hook_from_submodules(other)
        assert_equal_outputs(other, net, times=1)
    assert devices(model) == {META}


def test_offloaded_models_are_freed_without_the_collector(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))
    assert_equal_outputs(model, net)
    alive = [weakref.ref(part) for part in model.modules()]
    hook = weakref.ref(model.embed._hf_hook)
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(part() for part in alive)
        assert hook() is None
    finally:
        gc.enable()


def test_a_forward_that_fails_offloads_again(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))
    for _ in range(2):
        with pytest.raises(IndexError):
            model(torch.tensor([[100]]))
        with pytest.raises((RuntimeError, AssertionError)):
            model.attention(torch.ones(1, 1, 3), torch.ones(1, 1, 3), torch.ones(1, 1, 3))
        assert devices(model) == {META}
    assert_equal_outputs(model, net)


class Twice(nn.Module):
    """Calls a module twice, and itself once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.inner(self.inner(x))
        return (self(x, depth - 1) if depth else x) * self.weight


def test_modules_called_twice_and_by_themselves(offload: Offload) -> None:
    plain = Twice()
    model = offload(copy.deepcopy(plain))
    x = torch.ones(1, 2)

    assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))
    assert devices(model) == {META}


def test_threads_run_the_same_model(net: nn.Module, offload: Offload) -> None:
    model = offload(copy.deepcopy(net))
    expected = net(IDS).logits
    wrong: list[Any] = []

    def run() -> None:
        try:
            outputs = [model(IDS).logits for _ in range(5)]
            wrong.extend(output for output in outputs if not torch.equal(output, expected))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert devices(model) == {META}


def test_gradients_reach_the_inputs_also_through_checkpoints(offload: Offload) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).requires_grad_(False)
    model = offload(copy.deepcopy(plain))
    grads = []
    for network in (plain, model):
        for use_checkpoint in (False, True):
            x = torch.ones(1, 3, requires_grad=True)
            y = checkpoint(network, x, use_reentrant=False) if use_checkpoint else network(x)
            y.sum().backward()
            grads.append(x.grad)

    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert devices(model) == {META}
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Tagged(nn.Parameter):
    """A class of parameters that has attributes."""


def test_classes_of_parameters_are_kept(offload: Offload) -> None:
    model = nn.Linear(2, 2)
    model.weight = Tagged(model.weight.detach(), requires_grad=False)
    model.weight.tag = "mine"
    seen = []

    class Look(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(module.weight)
            return args, kwargs

    offload(model)
    add_hook_to_module(model, Look(), append=True)
    model(torch.ones(1, 2))

    for weight in (model.weight, *seen):
        assert type(weight) is Tagged
        assert weight.tag == "mine"
        assert not weight.requires_grad
    assert (model.weight.device, seen[0].device.type) == (META, "cpu")


def test_a_quantized_model_is_offloaded_to_memory() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    x, kind = torch.ones(1, 32), type(model[0].weight)
    expected = model(x)
    cpu_offload(model)

    assert type(model[0].weight) is kind
    assert model[0].weight.is_meta
    assert torch.equal(model(x), expected)


def test_buffers_too(net: nn.Module) -> None:
    model = cpu_offload(copy.deepcopy(net), offload_buffers=True)

    assert model.table.device == model.norm.running_mean.device == META
    assert model.unsaved.device.type == "cpu"
    assert_equal_outputs(model, net)
    assert torch.equal(model.state_dict()["table"], net.table)


OLD_WAYS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("old", OLD_WAYS.values(), ids=OLD_WAYS)
def test_weights_that_torch_computes_before_the_forward_are_an_error(old: Any, offload: Offload) -> None:
    """torch calls such hooks before the one that loads, on placeholders: the output had no meaning."""
    model = nn.Sequential(nn.Linear(3, 4), old(nn.Linear(4, 3))).eval()
    expected = model(torch.ones(2, 3))

    with pytest.raises(ValueError, match=r"Linear has torch's \w+, .*before the model is offloaded"):
        offload(model)
    assert torch.equal(model(torch.ones(2, 3)), expected)
    assert not any(weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrized_weights_are_offloaded(name: str, offload: Offload) -> None:
    parametrize = getattr(nn.utils.parametrizations, name)
    model = nn.Sequential(nn.Linear(3, 4), parametrize(nn.Linear(4, 3))).eval()
    expected = model(torch.ones(2, 3))

    assert torch.equal(offload(model)(torch.ones(2, 3)), expected)


def test_the_state_dict_given_is_used(net: nn.Module) -> None:
    state = {
        name: value.clone() for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)
    }
    model = copy.deepcopy(net).to("meta")
    model.table, model.unsaved = net.table, net.unsaved
    model.norm.load_state_dict(net.norm.state_dict(), assign=True)
    cpu_offload(model, state_dict=state)

    assert_equal_outputs(model, net)


def test_weights_without_values_are_an_error_that_names_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = [dict(vars(part)) for part in model.modules()]
    with pytest.raises(ValueError, match=r"no values for 1\.weight, 1\.bias"):
        cpu_offload(model)
    with pytest.raises(ValueError, match=r"no values for 1\.weight, 1\.bias .*nor has"):
        disk_offload(model, tmp_path)
    with pytest.raises(ValueError, match="no values for weight"):
        add_hook_to_module(model[1], AlignDevicesHook("cpu"))

    assert [dict(vars(part)) for part in model.modules()] == before


def test_a_folder_serves_a_model_without_values(net: nn.Module, tmp_path: Path) -> None:
    disk_offload(copy.deepcopy(net), tmp_path)
    model = copy.deepcopy(net)
    for part in model.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.detach().to("meta"))
    model.head.weight = model.embed.weight
    disk_offload(model, tmp_path)

    assert_equal_outputs(model, net)


def test_values_of_the_model_count_before_an_older_folder(net: nn.Module, tmp_path: Path) -> None:
    disk_offload(copy.deepcopy(net), tmp_path)
    with torch.no_grad():
        net.scale.fill_(7)
    model = disk_offload(copy.deepcopy(net), tmp_path)

    assert_equal_outputs(model, net)


@pytest.mark.parametrize("damage", ["missing", "short", "pipe", "link"])
def test_a_damaged_file_is_named(net: nn.Module, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "offload"
    model = disk_offload(copy.deepcopy(net), folder)
    file = folder / "scale.dat"
    file.unlink()
    if damage == "short":
        file.write_bytes(b"1")
    elif damage == "pipe":
        os.mkfifo(file)
    elif damage == "link":
        (tmp_path / "other").write_bytes(b"1234")
        file.symlink_to(tmp_path / "other")

    kind = FileNotFoundError if damage == "missing" else CorruptCheckpointError
    for _ in range(2):
        with pytest.raises(kind, match=r"scale\.dat"):
            model(IDS)
        assert devices(model) == {META}


@pytest.mark.parametrize("way", [cpu_offload, cpu_offload_with_hook])
def test_a_number_without_accelerators_is_an_error(net: nn.Module, way: Callable[..., Any]) -> None:
    if current_process().device.type != "cpu":
        pytest.skip("there is an accelerator")
    with pytest.raises(ValueError, match="this process uses no accelerator, so it has no device 0"):
        way(net, 0)
    assert "_hf_hook" not in vars(net)


def test_a_full_disk_leaves_model_and_folder_as_they_were(net: nn.Module, tmp_path: Path) -> None:
    model = copy.deepcopy(net)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"the weight embed\.weight \(128 bytes\) cannot be offloaded"):
            disk_offload(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list(tmp_path.iterdir()) == []
    assert devices(model) == {torch.device("cpu")}
    assert "_hf_hook" not in vars(model)
    assert_equal_outputs(model, net, times=1)


def test_a_folder_that_cannot_be_made(net: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        disk_offload(net, tmp_path / "file" / "offload")
    assert "_hf_hook" not in vars(net)


def test_cpu_offload_with_hook_keeps_a_model_until_the_next_one_runs() -> None:
    first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "meta")
    second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), "meta", prev_module_hook=first_hook)
    x = torch.ones(1, 2)

    assert first(x).is_meta
    assert (first.weight.device, second.weight.device.type) == (META, "cpu")
    first.to_empty(device="meta")
    assert isinstance(first_hook.hook, CpuOffload)
    assert first_hook.model is first
    second_hook.remove()
    assert "_hf_hook" not in vars(second)
    assert second(x).device.type == "cpu"


def test_the_previous_model_goes_when_the_next_one_comes() -> None:
    went: list[str] = []

    class Previous:
        def offload(self) -> None:
            went.append("offload")

    model, _ = cpu_offload_with_hook(nn.Linear(2, 2), "meta", prev_module_hook=Previous())  # type: ignore[arg-type]
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))  # it is there: nothing has to go

    assert went == ["offload"]
    remove_hook_from_module(model)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        table = torch.ones(2)
        for layer in self.layers:
            layer.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * layer.table
        return x


@on_devices
def test_a_buffer_of_two_modules_is_theirs_when_hooks_are_removed(device: str) -> None:
    model = cpu_offload(Shared(), device)
    model(torch.ones(1, 2))
    first, second = model.layers
    first.table.add_(1)
    assert second.table.device.type == device
    remove_hook_from_submodules(model)

    assert first.table is second.table
    assert first.table.device == torch.device("cpu")
    assert first.table.tolist() == [2, 2]


@pytest.mark.gpu
@needs_cuda
def test_offloaded_models_run_on_the_gpu(net: nn.Module, tmp_path: Path) -> None:
    plain, ids = copy.deepcopy(net).to("cuda:0"), IDS.cuda()
    for model in (
        cpu_offload(copy.deepcopy(net), "cuda:0"),
        cpu_offload(copy.deepcopy(net), 0, offload_buffers=True),
        disk_offload(copy.deepcopy(net), tmp_path, "cuda:0"),
    ):
        assert devices(model) == {META}
        for _ in range(3):
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert devices(model) == {META}
        remove_hook_from_submodules(model)
        assert devices(model) == {torch.device("cpu")}
        assert {buffer.device for buffer in model.buffers()} == {torch.device("cpu")}
        assert_equal_outputs(model, net, times=1)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("device", ["cuda:0", "cuda", None])
def test_a_model_with_a_hook_stays_on_the_gpu_until_the_next_one_runs(device: str | None) -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), device)
    second, last = cpu_offload_with_hook(nn.Linear(2, 2), device, prev_module_hook=hook)
    x = torch.ones(1, 2)
    assert first(x).device == first.weight.device == torch.device("cuda:0")
    assert second(first(x)).is_cuda

    assert (first.weight.device.type, second.weight.device.type) == ("cpu", "cuda")
    first(x)
    second(x)  # it is there: the first one need not go
    assert (first.weight.device.type, second.weight.device.type) == ("cuda", "cuda")
    last.offload()
    assert second.weight.device.type == "cpu"


def test_compiled_models_run(offload: Offload) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).requires_grad_(False)
    model = offload(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 3)
    for _ in range(3):
        assert torch.equal(compiled(x), plain(x))
    assert devices(model) == {META}
    torch._dynamo.reset()
