"""What well-known clients read from accelerate's objects and call on them is what they use it for."""

from __future__ import annotations

import contextlib
import copy
import functools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import fsdp
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accel.state import AcceleratorState
from accel.utils import (
    CustomDtype,
    DeepSpeedPlugin,
    DistributedType,
    GradientAccumulationPlugin,
    compute_module_sizes,
)
from accel.utils.deepspeed import HfDeepSpeedConfig
from accel.utils.fsdp_utils import get_parameters_from_modules
from repo_checks.covered import covering

pytestmark = pytest.mark.usefixtures("fresh_state")

MEMBERS, covers = covering()
ELSEWHERE = {"accelerator.deepspeed_ulysses_dl_adapter"}  # test_deepspeed_transformers.py trains with it


def test_every_member_is_used() -> None:
    clients = runpy.run_path(str(Path(__file__).with_name("test_clients.py")))
    assert clients["listed"]("members used") - clients["FOREIGN"] - ELSEWHERE == MEMBERS


class Model(torch.nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


X = torch.arange(12.0).view(6, 2) / 6


# As TrainingArguments requests them.
@covers("AcceleratorState._reset_state", "PartialState._reset_state", "PartialState._shared_state")
@covers("PartialState.default_device", "PartialState.device", "PartialState.num_processes")
@covers("DistributedType.NO", "distributed_state.device", "distributed_state.distributed_type")
@covers("distributed_state.is_local_main_process", "distributed_state.is_main_process")
@covers("distributed_state.local_process_index", "distributed_state.num_processes")
@covers("distributed_state.process_index")
def test_the_state_of_one_process() -> None:
    assert PartialState._shared_state == {}
    state = PartialState(cpu=True)
    assert PartialState._shared_state != {}
    assert PartialState().device == state.device == torch.device("cpu")
    accelerated = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert state.default_device == (accelerated or torch.device("cpu"))
    assert state.distributed_type == DistributedType.NO == "NO"
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.is_main_process, state.is_local_main_process) == (True, True)

    PartialState._reset_state()
    assert PartialState._shared_state == {}
    assert AcceleratorState(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == AcceleratorState._shared_state == {}


@covers("accelerator._models", "accelerator.prepare", "accelerator.backward", "accelerator.clip_grad_norm_")
@covers("accelerator.gradient_state", "accelerator.sync_gradients", "accelerator.no_sync")
@covers("accelerator.optimizer_step_was_skipped", "accelerator.scaler", "accelerator.distributed_type")
@covers("gradient_state._set_sync_gradients", "gradient_state.end_of_dataloader")
@covers("gradient_state.plugin_kwargs", "accelerator.clear", "accelerator.free_memory")
def test_a_loop_that_counts_its_windows_itself() -> None:
    """transformers' Trainer sets what `accumulate` would."""
    accelerator = Accelerator(cpu=True)
    model, plain = Model(), Model()
    optimizer, expected = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(X, batch_size=2))
    assert accelerator._models[-1] is model
    assert accelerator.scaler is None
    ends = []
    for step, batch in enumerate(loader):
        ends.append(accelerator.gradient_state.end_of_dataloader)
        steps = step != 0
        accelerator.gradient_state._set_sync_gradients(steps)
        assert accelerator.sync_gradients is steps
        assert not accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        assert accelerator.distributed_type != DistributedType.DEEPSPEED
        context = contextlib.nullcontext if steps else functools.partial(accelerator.no_sync, model=model)
        with context():
            accelerator.backward(model(batch).square().mean())
        plain(batch).square().mean().backward()
        if steps:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            assert norm == torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            expected.step()
            assert accelerator.optimizer_step_was_skipped is False
            model.zero_grad()
            plain.zero_grad()
    assert ends == [False, False, True]
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)

    accelerator.free_memory()
    assert accelerator._models == []
    accelerator.prepare(Model())
    assert accelerator.clear() == []
    assert accelerator._models == []


@covers("accelerator.prepare_model", "accelerator.unwrap_model", "accelerator.get_state_dict")
@covers("accelerator.autocast", "accelerator.mixed_precision", "accelerator.device")
def test_a_model_of_lower_precision(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert (accelerator.mixed_precision, accelerator.device.type) == ("bf16", "cpu")
    with accelerator.autocast():
        assert (X @ X.T).dtype == torch.bfloat16
    plain = Model()
    evaluated = accelerator.prepare_model(plain, device_placement=False, evaluation_mode=True)
    assert evaluated(X).dtype == torch.float32
    assert torch.allclose(evaluated(X), Model()(X), atol=0.01)
    assert not torch.equal(evaluated(X), Model()(X))
    assert accelerator.unwrap_model(evaluated, keep_torch_compile=False) is plain
    assert accelerator.unwrap_model(plain) is plain
    weights = accelerator.get_state_dict(evaluated)
    assert {name: value.dtype for name, value in weights.items()} == dict.fromkeys(
        Model().state_dict(), torch.float32
    )


def test_a_scaler_that_skips_a_step(tmp_path: Path) -> None:
    """transformers' Trainer saves and loads the scaler itself."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = accelerator.scaler.get_scale()
    accelerator.backward(model(X).sum() * float("inf"))
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped is True
    assert accelerator.scaler.get_scale() == before / 2
    torch.save(accelerator.scaler.state_dict(), tmp_path / "scaler.pt")
    accelerator.scaler.update(7.0)
    accelerator.scaler.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    assert accelerator.scaler.get_scale() == before / 2


@covers("accelerator.parallelism_config", "accelerator.torch_device_mesh", "accelerator.state")
@covers("accelerator.maybe_context_parallel", "accelerator.end_training", "AcceleratorState.deepspeed_plugin")
@covers("parallelism_config.cp_backend", "parallelism_config.cp_enabled", "parallelism_config.sp_backend")
@covers("parallelism_config.sp_enabled", "parallelism_config.tp_size")
def test_training_without_parallelism() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert AcceleratorState().deepspeed_plugin is None
    assert accelerator.state.deepspeed_plugin is None
    assert getattr(accelerator.state, "fsdp_plugin", None) is None
    ids = torch.arange(8).view(2, 4)
    with accelerator.maybe_context_parallel(buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={ids}):
        assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    accelerator.end_training()

    config = ParallelismConfig(cp_size=2)
    assert (config.cp_enabled, config.cp_backend) == (True, "torch")
    assert (config.sp_enabled, config.sp_backend, config.tp_size) == (False, "deepspeed", 1)
    config = ParallelismConfig(sp_size=2, tp_size=2)
    assert (config.cp_enabled, config.sp_enabled, config.tp_size) == (False, True, 2)


@covers("CustomDtype.FP8", "CustomDtype.INT2", "CustomDtype.INT4")
def test_types_that_torch_lacks() -> None:
    """diffusers' quantizers give them for the size of a weight."""
    model = torch.nn.Linear(8, 4, bias=False)
    kinds = {CustomDtype.FP8: 32, CustomDtype.INT4: 16, CustomDtype.INT2: 8}
    assert {kind: compute_module_sizes(model, dtype=kind)[""] for kind in kinds} == kinds


@covers("DistributedType.DEEPSPEED", "deepspeed_plugin.deepspeed_config", "deepspeed_plugin.hf_ds_config")
@covers("deepspeed_plugin.set_deepspeed_weakref", "deepspeed_plugin.set_mixed_precision")
@covers("deepspeed_plugin.zero_stage", "hf_ds_config.config")
def test_settings_of_deepspeed() -> None:
    assert DistributedType.DEEPSPEED == "DEEPSPEED"
    given = {"zero_optimization": {"stage": 2}, "train_batch_size": 4, "bf16": {"enabled": "auto"}}
    config = HfDeepSpeedConfig(given)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert (plugin.zero_stage, plugin.hf_ds_config) == (2, config)
    plugin.set_mixed_precision("bf16")
    plugin.set_deepspeed_weakref()
    assert plugin.deepspeed_config is config.config
    assert config.config == {
        "zero_optimization": {"stage": 2},
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    # trl changes a copy, for a model that only evaluates.
    copied = copy.deepcopy(plugin.deepspeed_config)
    copied["zero_optimization"]["stage"] = 0
    assert plugin.zero_stage == config.get_value("zero_optimization.stage") == 2


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8))


def use_two_processes() -> list[Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
    rank = accelerator.process_index
    assert (accelerator.num_processes, accelerator.local_process_index) == (2, rank)
    assert accelerator.is_main_process is (rank == 0)
    assert accelerator.state.distributed_type == "MULTI_CPU"
    accelerator.print("once")
    accelerator.wait_for_everyone()

    own = torch.full((1, rank + 1), float(rank + 1))
    padded = accelerator.pad_across_processes(own, dim=1, pad_index=-100)
    found: list[Any] = [accelerator.gather(padded).tolist()]
    found.append(accelerator.reduce(torch.tensor([rank + 1.0, 1.0]), reduction="sum").tolist())
    with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
        found.append(prompts)
    # trl's GRPOTrainer reads the stream in each process, and takes its own part.
    assert accelerator.dataloader_config.dispatch_batches is None
    accelerator.dataloader_config.dispatch_batches = False
    read = []
    for batch in accelerator.prepare(DataLoader(Stream(), batch_size=3)):
        last = accelerator.gradient_state.end_of_dataloader
        read.append((batch.tolist(), accelerator.gather_for_metrics(batch).tolist(), last))
    return [*found, read]


@covers("accelerator.gather", "accelerator.gather_for_metrics", "accelerator.reduce", "accelerator.print")
@covers("accelerator.num_processes", "accelerator.process_index", "accelerator.local_process_index")
@covers("accelerator.is_main_process", "accelerator.pad_across_processes", "accelerator.wait_for_everyone")
@covers("accelerator.split_between_processes", "accelerator.dataloader_config")
def test_two_processes(world: Any, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = world.run(use_two_processes)
    assert first[:2] == second[:2] == [[[1.0, -100.0], [2.0, 2.0]], [3.0, 2.0]]
    assert (first[2], second[2]) == (["a", "b"], ["c"])
    assert first[3] == [([0, 1, 2], [0, 1, 2, 3, 4, 5], False), ([6, 7, 0], [6, 7], True)]
    assert second[3] == [([3, 4, 5], [0, 1, 2, 3, 4, 5], False), ([1, 2, 3], [6, 7], True)]


def shard_as_trl_does(version: int) -> tuple[list[float], list[float]]:
    """Shard a reference model by the settings of the plugin alone."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap")
    config = ParallelismConfig(dp_shard_size=2) if version == 2 else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    model, plugin = Model(), accelerator.state.fsdp_plugin
    expected = model(X).flatten().tolist()
    if plugin.fsdp_version == 1:
        plugin.set_auto_wrap_policy(model)
        sharded = fsdp.FullyShardedDataParallel(
            model,
            sharding_strategy=plugin.sharding_strategy or plugin.reshard_after_forward,
            cpu_offload=plugin.cpu_offload,
            auto_wrap_policy=plugin.auto_wrap_policy,
            mixed_precision=plugin.mixed_precision_policy,
            sync_module_states=plugin.sync_module_states,
            backward_prefetch=plugin.backward_prefetch,
            forward_prefetch=plugin.forward_prefetch,
            use_orig_params=plugin.use_orig_params,
            param_init_fn=plugin.param_init_fn,
            ignored_modules=plugin.ignored_modules,
            limit_all_gathers=plugin.limit_all_gathers,
            device_id=accelerator.device,
        )
        assert sharded.sharding_strategy == fsdp.ShardingStrategy.FULL_SHARD
    else:
        mesh = accelerator.torch_device_mesh
        sharded = fsdp.fully_shard(
            model,
            reshard_after_forward=plugin.reshard_after_forward,
            offload_policy=plugin.cpu_offload,
            mp_policy=plugin.mixed_precision_policy or fsdp.MixedPrecisionPolicy(),
            mesh=mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
            ignored_params=get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device),
        )
        assert all(parameter.placements[0].is_shard() for parameter in sharded.parameters())
        assert model.first.weight.to_local().shape == (2, 2)
    return expected, sharded.eval()(X).flatten().tolist()


@covers("fsdp_plugin.auto_wrap_policy", "fsdp_plugin.backward_prefetch", "fsdp_plugin.cpu_offload")
@covers("fsdp_plugin.forward_prefetch", "fsdp_plugin.fsdp_version", "fsdp_plugin.ignored_modules")
@covers("fsdp_plugin.limit_all_gathers", "fsdp_plugin.mixed_precision_policy", "fsdp_plugin.param_init_fn")
@covers("fsdp_plugin.reshard_after_forward", "fsdp_plugin.set_auto_wrap_policy")
@covers("fsdp_plugin.sharding_strategy", "fsdp_plugin.sync_module_states", "fsdp_plugin.use_orig_params")
@covers("parallelism_config.fsdp_dim_names")
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim from root mesh:UserWarning")  # as trl does
@pytest.mark.parametrize("version", [1, 2])
def test_a_model_is_sharded_by_the_plugins_settings(world: Any, version: int) -> None:
    for expected, found in world.run(shard_as_trl_does, version):
        assert found == expected


@covers("fsdp_plugin.activation_checkpointing", "fsdp_plugin.set_mixed_precision")
@covers("fsdp_plugin.state_dict_type")
def test_settings_of_fsdp() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    assert plugin.activation_checkpointing is True
    assert "SHARDED_STATE_DICT" in str(plugin.state_dict_type)
    assert "FULL_STATE_DICT" in str(FullyShardedDataParallelPlugin(fsdp_version=1).state_dict_type)
    assert plugin.mixed_precision_policy is None
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    # diffusers' choice for a plugin of either version.
    assert (plugin.sharding_strategy or fsdp.ShardingStrategy.FULL_SHARD).name == "FULL_SHARD"
