"""The mesh engine: FSDP2 on real gloo workers; what all engines share is in tests-integration."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from accel.accelerator import Accelerator
from accel.engines.fsdp2_gradients import sharded_parameters
from accel.engines.fsdp_groups import CheckpointedForward
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.tp_plugin import TorchTensorParallelPlugin
from accel_state.parallelism.config import ParallelismConfig
from accel_world.warned import warns_once

pytestmark = pytest.mark.usefixtures("fresh_state")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.calls = 0
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.linear.weight.dtype)
        return x + torch.tanh(self.linear(x))


class Net(torch.nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = torch.nn.Linear(6, 6, bias=False)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("table", torch.randn(3, 2).T)  # not contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_accelerator(precision: str = "no", **options: Any) -> Accelerator:
    options = {"auto_wrap_policy": "transformer_based_wrap"} | options
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)


def data() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def step_and_state(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """One SGD step on the process's shard of the data; the full state after it."""
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    own = data().chunk(accelerator.num_processes)[accelerator.process_index]
    accelerator.backward(model(own).square().mean())
    optimizer.step()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    accelerator.end_training()
    return state


def expected_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model(data()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


def assert_close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def step_with(options: dict[str, Any], precision: str) -> dict[str, torch.Tensor]:
    accelerator = make_accelerator(precision, **options)
    return step_and_state(accelerator, Net(accelerator.process_index))


@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": "no_wrap"},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"cpu_ram_efficient_loading": True},
    ],
    ids=str,
)
def test_every_option_trains_like_one_process(world, options):
    (state, other) = world.run(step_with, options, "no")

    assert_close(state, expected_state(Net()), 1e-5)
    assert list(other) == []  # of one machine, one process holds the full model


def check_groups() -> None:
    accelerator = make_accelerator()
    raw = Net(accelerator.process_index)
    model = accelerator.prepare(raw)
    assert model is raw
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is raw
    assert accelerator.is_fsdp2
    assert accelerator.is_composable_parallelism_enabled
    assert accelerator.should_save_model == accelerator.is_main_process
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard",)
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["", "layers.0", "layers.1"]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.head.weight.to_local().shape == (3, 6)
    torch.testing.assert_close(model.shift, Net(0).shift)  # the first process's
    torch.testing.assert_close(model.table, Net(0).table)


def test_the_model_is_sharded_in_groups_and_stays_itself(world):
    world.run(check_groups)


def test_one_process_that_requests_fsdp_gets_it():
    accelerator = make_accelerator()
    model = accelerator.prepare(Net())
    assert accelerator.engine.name == "fsdp2"
    assert isinstance(model.layers[0].linear.weight, DTensor)
    accelerator.end_training()


def test_a_mesh_with_shards_is_fsdp2_without_a_plugin(world):
    assert world.run(mesh_alone, size=2) == [("fsdp2", True, (0, 0)), ("fsdp2", True, (0, 1))]


def mesh_alone() -> tuple[str, bool, tuple[int, int]]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
    ranks = (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank)
    return accelerator.engine.name, accelerator.is_fsdp2, ranks


def weights_from_main() -> dict[str, torch.Tensor]:
    accelerator = make_accelerator(cpu_ram_efficient_loading=True)
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = Net()
    return step_and_state(accelerator, model)


def test_only_the_first_process_needs_weights(world):
    assert_close(world.run(weights_from_main)[0], expected_state(Net()), 1e-5)


def own_weights() -> dict[str, torch.Tensor]:
    accelerator = make_accelerator(sync_module_states=False)
    return accelerator.get_state_dict(accelerator.prepare(Net(accelerator.process_index)))


def test_each_process_shards_its_own_weights_on_request(world):
    weight = world.run(own_weights)[0]["layers.0.linear.weight"]
    torch.testing.assert_close(weight[:3], Net(0).layers[0].linear.weight[:3].detach())
    torch.testing.assert_close(weight[3:], Net(1).layers[0].linear.weight[3:].detach())


def dtypes_in(precision: str, policy: Any) -> tuple[set[torch.dtype], torch.dtype, torch.dtype]:
    accelerator = make_accelerator(precision, mixed_precision_policy=policy)
    model = accelerator.prepare(Net())
    out = model(data())
    accelerator.backward(out.float().square().mean())
    weight = model.layers[0].linear.weight
    return set(model.layers[0].seen), weight.dtype, weight.grad.dtype


@pytest.mark.parametrize(
    ("precision", "policy"), [("bf16", None), ("no", "bf16"), ("no", {"param_dtype": "bf16"})]
)
def test_parameters_compute_in_the_policy_and_rest_in_float32(world, precision, policy):
    for computed, rest, gradient in world.run(dtypes_in, precision, policy):
        assert computed == {torch.bfloat16}
        assert (rest, gradient) == (torch.float32, torch.float32)


def upcast_and_mixture() -> tuple[set[torch.dtype], set[torch.dtype]]:
    """A frozen bf16 model with a trainable bf16 part, as adapters are trained."""
    accelerator = make_accelerator("bf16")
    model = Net().to(torch.bfloat16).requires_grad_(False)
    model.layers[1].requires_grad_(True)
    with warns_once(UserWarning, r"2 of Net became float32 \(layers.1.linear.weight"):
        model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.layers[1].parameters()))
    accelerator.backward(model(data()).square().mean())
    optimizer.step()
    grads = {name for name, item in model.named_parameters() if item.grad is not None}
    assert grads == {"layers.1.linear.weight", "layers.1.linear.bias"}
    dtypes = {item.dtype for item in model.parameters() if not item.requires_grad}
    return {item.dtype for item in model.layers[1].parameters()}, dtypes


def test_trainable_parameters_become_float32_and_frozen_ones_stay(world):
    for trained, frozen in world.run(upcast_and_mixture):
        assert trained == {torch.float32}
        assert frozen == {torch.bfloat16}


def what_reaches_torch() -> list[tuple[bool, ...]]:
    """What cannot be seen in the numbers of a CPU process, for two plugins."""
    found = []
    both = {"activation_checkpointing": True, "activation_checkpointing_offload": True, "cpu_offload": True}
    for options in ({}, {"reshard_after_forward": False, **both}):
        accelerator = make_accelerator(**options)
        model = accelerator.prepare(Net())
        with accelerator.no_sync(model):
            accelerator.backward(model(data()).square().mean())
        is_held_back = all(item.grad is None for item in model.parameters())
        accelerator.backward(model(data()).square().mean())
        is_reduced = all(isinstance(item.grad, DTensor) for item in model.parameters())
        model(data())
        is_resharded = isinstance(model.layers[0].linear.weight, DTensor)
        offloads_activations = getattr(model.layers[0].forward, "offload", False)
        (offloads,) = {item.offload_to_cpu for item in sharded_parameters(model)}
        found.append((is_held_back, is_reduced, is_resharded, offloads_activations, offloads))
    return found


def test_options_reach_torch_and_no_sync_reduces_nothing(world):
    for plain, others in world.run(what_reaches_torch):
        assert plain == (True, True, True, False, False)
        assert others == (True, True, False, True, True)


def recomputed(checkpointing: bool) -> int:
    accelerator = make_accelerator(activation_checkpointing=checkpointing)
    model = accelerator.prepare(Net())
    assert isinstance(model.layers[0].forward, CheckpointedForward) is checkpointing
    accelerator.backward(model(data()).square().mean())
    return model.layers[0].calls


def test_activations_are_computed_again_in_backward(world):
    assert world.run(recomputed, True) == [2, 2]
    assert world.run(recomputed, False) == [1, 1]


def ignoring(ignored: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    accelerator = make_accelerator(ignored_modules=ignored)
    model = Net(accelerator.process_index)
    model.layers[0].requires_grad_(False)
    whole = accelerator.prepare(model)
    return [name for name, item in whole.named_parameters() if not isinstance(item, DTensor)], step_and_state(
        accelerator, whole
    )


def test_ignored_modules_stay_whole(world):
    expected = Net()
    expected.layers[0].requires_grad_(False)

    for names, _ in (results := world.run(ignoring, r"layers\.0\..*")):
        assert names == ["layers.0.linear.weight", "layers.0.linear.bias"]
    assert_close(results[0][1], expected_state(expected), 1e-5)


def optimizer_with_state() -> list[Any]:
    """Prepared first, alone, with its own state and groups."""
    accelerator = make_accelerator()
    model = Net()
    first = list(model.layers.parameters())
    optimizer = torch.optim.SGD([{"params": first, "lr": 0.5}, {"params": [model.embed.weight]}], 0.1, 0.9)
    model(data()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    held = [item for group in optimizer.param_groups for item in group["params"]]
    assert {id(item) for item in held} == {id(item) for item in model.parameters()}
    accelerator.backward(model(data()).square().mean())
    optimizer.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    shapes = {tuple(state["momentum_buffer"].to_local().shape) for state in optimizer.state.values()}
    return [rates, shapes, accelerator.get_state_dict(model)]


def test_an_optimizer_keeps_its_groups_and_state_in_parts(world):
    model = Net()
    groups = [{"params": list(model.layers.parameters()), "lr": 0.5}, {"params": [model.embed.weight]}]
    optimizer = torch.optim.SGD(groups, 0.1, 0.9)
    for _ in range(2):
        model(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (rates, shapes, state), _ = world.run(optimizer_with_state)

    assert rates == [0.5, 0.1]
    assert shapes == {(3, 6), (3,)}
    assert_close(state, model.state_dict(), 1e-5)


def clipping(norm_type: float) -> tuple[float, float, float]:
    accelerator = make_accelerator()
    model = accelerator.prepare(Net())
    accelerator.backward(model(data()).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 100.0, norm_type)  # larger than the norm: nothing changes
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    after = accelerator.clip_grad_norm_(model.parameters(), 100.0, norm_type)
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    largest = max(float(item.grad.to_local().abs().max()) for item in model.parameters())
    return float(norm), float(after), largest


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_sees_every_element_once(world, norm_type):
    model = Net()
    model(data()).square().mean().backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))

    for norm, after, largest in world.run(clipping, norm_type):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.1, rel=1e-4)
        assert largest == pytest.approx(1e-3)


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def refuse(name: str, accelerator: Accelerator, *objects: Any) -> None:
        with pytest.raises((ValueError, NotImplementedError)) as error:
            accelerator.prepare(*objects)
        found[name] = str(error.value)
        assert not any(isinstance(item, FSDPModule) for item in objects)

    refuse(
        "checkpointing", make_accelerator(auto_wrap_policy="no_wrap", activation_checkpointing=True), Net()
    )
    refuse("ignored", make_accelerator(ignored_modules="head"), Net())
    refuse("nothing", make_accelerator(ignored_modules="heads"), Net())
    mixed = Net()
    mixed.layers[0].linear.bias.data = mixed.layers[0].linear.bias.data.bfloat16()
    refuse("dtypes", make_accelerator(), mixed)
    with torch.device("meta"):
        bare = Net()
    refuse("meta", make_accelerator(sync_module_states=False), bare)
    spread = Net()
    spread.hf_device_map = {"embed": 0, "layers": 1}
    refuse("map", make_accelerator(), spread)
    return found


def test_what_cannot_be_sharded_is_rejected_with_the_alternative(world):
    found = world.run(refusals)[0]

    assert "'transformer_based_wrap' with transformer_cls_names_to_wrap" in found["checkpointing"]
    assert "head.weight" in found["ignored"] or "embed.weight" in found["ignored"]
    assert "requires_grad_(False)" in found["ignored"]
    assert "'heads' matches no module of Net" in found["nothing"]
    assert "layers.0.linear.bias in torch.bfloat16" in found["dtypes"]
    assert "cpu_ram_efficient_loading=True" in found["meta"]
    assert "without device_map" in found["map"]


def test_version_1_next_to_a_mesh_is_rejected_by_name():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match=r"dp_shard.*fsdp_version=2"):
        Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
    with pytest.raises(TypeError, match="FullyShardedDataParallelPlugin, not 'yes'"):
        Accelerator(fsdp_plugin="yes")


def save_in_a_window(folder: str) -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = accelerator.prepare(Net())
    with accelerator.accumulate(model):
        accelerator.backward(model(data()).sum())
    with pytest.raises(ValueError, match="1 of 2 micro-batches") as error:
        accelerator.save_state(folder)
    return str(error.value)


def test_a_window_that_is_held_back_is_not_lost_by_a_save(world, tmp_path):
    assert "sync_gradients is True" in world.run(save_in_a_window, str(tmp_path / "saved"))[0]


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square()


def tensor_refusals() -> list[str]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    plans: list[Any] = [None, {"middle": "colwise"}, {"up": "diagonal"}]
    found = []
    for plan in plans:
        model = Pair()
        model._tp_plan = plan
        with pytest.raises(ValueError, match="Pair") as error:
            accelerator.prepare(model)
        found.append(str(error.value))
        assert type(model.up.weight) is torch.nn.Parameter
    tied = Net()
    tied._tp_plan = {"head": "colwise"}
    with pytest.raises(ValueError, match="are one weight") as error:
        accelerator.prepare(tied)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(ValueError, match="nothing to shard over"):
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2), fsdp_plugin=plugin)
    return [*found, str(error.value)]


def test_a_plan_that_does_not_fit_is_rejected_before_anything_is_split(world):
    none, lost, strange, tied = world.run(tensor_refusals)[0]

    assert "model._tp_plan =" in none
    assert "names 'middle', and no module" in lost
    assert "'diagonal' for 'up'; known: colwise, rowwise" in strange
    assert "embed.weight and head.weight are one weight" in tied


def tensor_parallel_metrics() -> tuple[Any, Any, tuple[int, int], set[torch.Size]]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = Pair()
    model._tp_plan = {"up": "colwise", "down": "rowwise"}
    model = accelerator.prepare(model)
    shapes = {model.up.weight.to_local().shape, model.down.weight.to_local().shape}
    rows = accelerator.gather_for_metrics(torch.arange(3)).tolist()
    texts = accelerator.gather_for_metrics(["a", "b"], use_gather_object=True)
    return rows, texts, accelerator.engine.data_parallel.rank_and_size, shapes


def test_a_tensor_parallel_group_counts_once(world):
    for rows, texts, shard, shapes in world.run(tensor_parallel_metrics):
        assert rows == [0, 1, 2]
        assert texts == ["a", "b"]
        assert shard == (0, 1)
        assert shapes == {(4, 4)}


def log_of_two_axes() -> list[str]:
    logger, handler = logging.getLogger("accel.engines"), logging.handlers.BufferingHandler(9)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    sizes = ParallelismConfig(dp_replicate_size=2, tp_size=2)
    accelerator = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(2), parallelism_config=sizes)
    logger.setLevel(before)
    logger.removeHandler(handler)
    assert not accelerator.is_composable_parallelism_enabled
    return [record.getMessage() for record in handler.buffer]


def test_the_log_line_has_each_axis_and_all_that_requested_it(world):
    (line,), *others = world.run(log_of_two_axes, size=4)
    assert line.startswith(
        "engine ddp x tp, because of torch_tp_plugin and parallelism_config; 4 process(es) on cpu, "
        "mesh dp_replicate=2 x tp=2;"
    )
    assert others == [[]] * 3


def dispatched() -> list[list[int]]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2))
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=2))  # iterable: read by process 0 alone
    return [batch.tolist() for batch in loader]


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_tensor_parallel_group_gets_one_batch_that_process_0_reads(world):
    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert world.run(dispatched, size=4) == [first, first, second, second]


def replicas_and_tensors() -> tuple[list[Any], set[torch.Size], str]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2))
    model = Pair()
    model._tp_plan = {"up": "colwise", "down": "rowwise"}
    model = accelerator.prepare(model)
    shapes = {model.up.weight.to_local().shape, model.down.weight.to_local().shape}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="up")
    sizes = ParallelismConfig(dp_shard_size=2, tp_size=2)
    frozen = Pair().requires_grad_(False)
    frozen._tp_plan = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(ValueError, match=r"ignored_modules='up' with tp_size=2.*one of the two out"):
        Accelerator(parallelism_config=sizes, fsdp_plugin=plugin).prepare(frozen)
    x = torch.full((1, 4), float(accelerator.engine.data_parallel.rank + 1))
    accelerator.backward(model(x).square().mean())
    gradients = {name: item.grad.full_tensor() for name, item in model.named_parameters()}
    half = Accelerator(parallelism_config=accelerator.parallelism_config, mixed_precision="bf16")
    plain = Net()
    plain._tp_plan = {"layers.*.linear": "colwise_rep"}
    assert half.prepare(plain)(data()).dtype is torch.float32
    assert plain.layers[0].seen == [torch.float32]  # as under DDP: nobody requested casts of parameters
    return [accelerator.engine.data_parallel.rank_and_size, gradients], shapes, accelerator.engine.name


def test_replicas_of_split_weights_average_their_gradients(world):
    found = world.run(replicas_and_tensors, size=4)

    assert [shard for (shard, _), *_ in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for (_, gradients), shapes, name in found:
        assert name == "ddp x tp"
        assert shapes == {(4, 4)}
        for own, first in zip(gradients.values(), found[0][0][1].values(), strict=True):
            torch.testing.assert_close(own, first)
