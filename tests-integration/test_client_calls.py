"""Every keyword argument that well-known clients give has the effect that they give it for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    cpu_offload,
    cpu_offload_with_hook,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
)
from accel.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accel.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DummyOptim,
    DummyScheduler,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    broadcast_object_list,
    compute_module_sizes,
    extract_model_from_parallel,
    find_executable_batch_size,
    get_balanced_memory,
    load_fsdp_model,
    load_fsdp_optimizer,
    named_module_tensors,
    save_fsdp_model,
    save_fsdp_optimizer,
    send_to_device,
    set_module_tensor_to_device,
    set_seed,
    tqdm,
)
from repo_checks.covered import covering

pytestmark = pytest.mark.usefixtures("fresh_state")

CLIENTS = (Path(__file__).parents[1] / "tools/reference/client-imports.txt").read_text()
CALLS, covers = covering()


def test_every_call_is_made() -> None:
    lines = re.findall(r"^keyword arguments: (.+)$", CLIENTS, re.MULTILINE)
    assert {call for line in lines for call in line.split(", ")} == CALLS


class Model(torch.nn.Module):
    """Two layers of 3 and 1 rows, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, noted: list[str] | None = None) -> torch.Tensor:
        if noted is not None:
            noted.append(self.first.weight.device.type)
        return self.second(self.first(x)) * self.scale


X = torch.ones(1, 2)


@covers(
    "Accelerator(**)", "DataLoaderConfiguration(**)", "GradientAccumulationPlugin(**)", "PartialState(**)"
)
@covers("DistributedDataParallelKwargs(**)", "PartialState(cpu=)")
def test_settings() -> None:
    assert PartialState(cpu=True, backend="gloo").device.type == "cpu"
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=5)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=None),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False),
        kwargs_handlers=[handler],
    )
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] is False
    assert accelerator.dataloader_config.split_batches is True
    assert handler.to_kwargs() == {"find_unused_parameters": True, "bucket_cap_mb": 5}


@covers("TorchDynamoPlugin(backend=)", "TorchDynamoPlugin(dynamic=)", "TorchDynamoPlugin(mode=)")
def test_compiling() -> None:
    plugin = TorchDynamoPlugin(backend="eager", mode="max-autotune", dynamic=True)
    given = plugin.to_kwargs()
    assert (given["backend"], given["mode"], given["dynamic"]) == ("eager", "max-autotune", True)


@covers("ParallelismConfig(dp_shard_size=)", "ParallelismConfig(tp_size=)")
def test_a_mesh() -> None:
    config = ParallelismConfig(dp_shard_size=2, tp_size=4)
    assert (config.total_size, config.tp_enabled, config.dp_shard_enabled) == (8, True, True)


@covers("FullyShardedDataParallelPlugin(**)")
def test_a_plugin_of_fsdp() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)


@covers("DeepSpeedPlugin(hf_ds_config=)", "DummyOptim(params=)", "DummyScheduler(lr_scheduler_callable=)")
def test_deepspeed_without_its_engine() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}, "train_batch_size": 4})
    assert (plugin.zero_stage, plugin.hf_ds_config.is_zero3()) == (3, True)
    optimizer = DummyOptim(params=list(Model().parameters()))
    assert len(optimizer.params) == 4

    def make(optimizer: Any) -> str:
        return "made"

    assert DummyScheduler(optimizer, lr_scheduler_callable=make).lr_scheduler_callable is make


@covers("AlignDevicesHook(io_same_device=)", "remove_hook_from_module(recurse=)")
def test_hooks() -> None:
    model, plain = Model(), Model().forward.__func__
    add_hook_to_module(model.first, AlignDevicesHook(io_same_device=True))
    assert model.first._hf_hook.io_same_device
    assert torch.equal(model(X), plain(model, X))
    remove_hook_from_module(model)
    assert hasattr(model.first, "_hf_hook")
    remove_hook_from_module(model, recurse=True)
    assert not hasattr(model.first, "_hf_hook")


@covers("cpu_offload(offload_buffers=)", "cpu_offload_with_hook(prev_module_hook=)")
def test_offloading() -> None:
    model = Model()
    expected = model(X)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert {model.scale.device.type, model.first.weight.device.type} == {"meta"}
    assert torch.equal(model(X), expected)

    first, hook = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu")
    second, _ = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    assert second._hf_hook.prev_module_hook is hook
    assert second(first(X)).shape == (1, 2)


@covers("dispatch_model(**)", "dispatch_model(device_map=)", "dispatch_model(force_hooks=)")
@covers("dispatch_model(main_device=)", "dispatch_model(offload_dir=)", "dispatch_model(skip_keys=)")
@covers("dispatch_model(state_dict=)")
def test_dispatching(tmp_path: Path) -> None:
    model = Model()
    expected = model(X)
    dispatched = dispatch_model(
        model,
        device_map={"first": "disk", "second": "cpu", "scale": "cpu"},
        main_device="cpu",
        offload_dir=tmp_path,
        skip_keys="noted",
        state_dict=model.state_dict(),
    )
    noted: list[str] = []
    assert torch.equal(dispatched(X, noted=noted), expected)
    # Skipped: it is the very list, and the weight was on the disk when the forward began.
    assert noted == ["meta"]
    assert (tmp_path / "index.json").is_file()

    other = dispatch_model(Model(), device_map={"": "cpu"}, force_hooks=True)
    assert hasattr(other, "_hf_hook")


@covers("get_balanced_memory(**)", "get_balanced_memory(dtype=)", "get_balanced_memory(low_zero=)")
@covers("get_balanced_memory(max_memory=)", "get_balanced_memory(no_split_module_classes=)")
@covers("infer_auto_device_map(**)", "infer_auto_device_map(dtype=)", "infer_auto_device_map(max_memory=)")
@covers("infer_auto_device_map(no_split_module_classes=)", "compute_module_sizes(dtype=)")
def test_device_maps() -> None:
    model = Model()
    sizes = compute_module_sizes(model, dtype=torch.float16)
    assert (sizes[""], sizes["first"]) == (2 * 14, 2 * 9)
    memory = get_balanced_memory(
        model,
        max_memory={"cpu": 40, "disk": 1000},
        dtype=torch.float16,
        low_zero=False,
        no_split_module_classes=["Model"],
    )
    assert memory["cpu"] == 40
    half = infer_auto_device_map(model, max_memory=memory, dtype=torch.float16)
    assert half == {"": "cpu"}
    whole = infer_auto_device_map(model, max_memory=memory)
    assert set(whole.values()) == {"cpu", "disk"}
    kept = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=["Model"])
    assert kept == {"": "disk"}


@covers("init_empty_weights(include_buffers=)", "set_module_tensor_to_device(**)")
@covers("set_module_tensor_to_device(value=)", "named_module_tensors(recurse=)")
def test_empty_models() -> None:
    with init_empty_weights(include_buffers=True):
        model = Model()
    assert model.scale.device.type == "meta"
    set_module_tensor_to_device(model, "first.weight", "cpu", value=torch.ones(3, 2), dtype=torch.bfloat16)
    assert model.first.weight.dtype == torch.bfloat16
    assert model.first.weight.sum() == 6
    assert [name for name, _ in named_module_tensors(model, recurse=False)] == ["scale"]
    assert len(dict(named_module_tensors(model, recurse=True))) == 5


@covers("extract_model_from_parallel(**)")
def test_unwrapping() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Model())
    unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=False, recursive=True)
    assert isinstance(unwrapped, Model)
    assert unwrapped(X).dtype == torch.float32


@covers("accelerate_find_executable_batch_size(function=)")
@covers("accelerate_find_executable_batch_size(starting_batch_size=)")
def test_a_batch_size_that_fits() -> None:
    tried = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 20:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    assert find_executable_batch_size(function=train, starting_batch_size=64)() == tried[-1] <= 20
    assert tried[0] == 64


@covers("broadcast_object_list(from_process=)", "send_to_device(non_blocking=)", "set_seed(device_specific=)")
@covers("tqdm(desc=)", "tqdm(disable=)", "tqdm(iterable=)")
def test_small_functions(capsys: pytest.CaptureFixture[str]) -> None:
    PartialState(cpu=True)
    assert broadcast_object_list(["given"], from_process=0) == ["given"]
    assert send_to_device({"x": X}, "cpu", non_blocking=True)["x"] is X
    set_seed(7, device_specific=True)
    first = torch.rand(1)
    set_seed(7, device_specific=True)
    assert torch.equal(torch.rand(1), first)
    pytest.importorskip("tqdm")
    assert list(tqdm(iterable=range(3), desc="Epoch", disable=False)) == [0, 1, 2]
    assert "Epoch" in capsys.readouterr().err
    assert list(tqdm(iterable=range(3), desc="Hidden", disable=True)) == [0, 1, 2]
    assert "Hidden" not in capsys.readouterr().err


def save_and_load(folder: str) -> tuple[list[float], list[float]]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    plugin, options = accelerator.state.fsdp_plugin, {"adapter_only": False}
    before = model(X).flatten().tolist()
    save_fsdp_model(plugin, accelerator, model, folder, **options)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    accelerator.backward(model(X).sum())
    optimizer.step()
    assert model(X).flatten().tolist() != before
    load_fsdp_model(plugin, accelerator, model, folder, **options)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, **options)
    return before, model(X).flatten().tolist()


@covers("load_fsdp_model(**)", "load_fsdp_optimizer(**)", "save_fsdp_model(**)")
def test_weights_of_fsdp(world: Any, tmp_path: Path) -> None:
    for before, after in world.run(save_and_load, str(tmp_path)):
        assert after == before
