"""Tensor parallelism on real gloo workers; that whole runs are equal is in tests-integration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accel.accelerator import Accelerator
from accel.engines.common.layouts import get_model_tp_size
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.engines.tensor_parallel import tensor_plan
from accel.engines.tp_plugin import TorchTensorParallelPlugin
from accel_state.parallelism.config import ParallelismConfig, TorchTensorParallelConfig
from accel_world.warned import warns_once

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("fresh_state")]

WORDS, WIDTH, HEADS = 6, 8, 4


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH // HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Model(torch.nn.Module):
    """A weight that is tied, heads with a norm of their own, and a buffer."""

    _tp_plan = {  # noqa: RUF012 - as transformers' models have it
        "embed": "embedding_rowwise",
        "up": "colwise",
        "scale": "replicated_with_grad_allreduce",
        "down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.scale = Scale()
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        heads = self.up(self.embed(words) + self.shift).unflatten(-1, (-1, WIDTH // HEADS))
        return self.head(self.down(self.scale(heads).flatten(-2))).sin()


def words() -> torch.Tensor:
    return torch.arange(WORDS).reshape(2, 3)


def expected() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Model()
    loss = model(words()).square().mean()
    loss.backward()
    return loss.detach(), {name: item.grad for name, item in model.named_parameters()}


def step(sizes: dict[str, int], on_meta: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Any]]:
    options: dict[str, Any] = {}
    if "dp_shard_size" in sizes:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=on_meta
        )
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), **options)
    with torch.device("meta" if on_meta and not accelerator.is_main_process else "cpu"):
        model = accelerator.prepare(Model(accelerator.process_index))
    assert model.head.weight is model.embed.weight
    loss = model(words()).square().mean()
    accelerator.backward(loss)
    grads = {}
    for name, item in model.named_parameters():
        grads[name] = (item.grad.full_tensor() if isinstance(item.grad, DTensor) else item.grad).clone()
    facts = [
        get_model_tp_size(model),
        accelerator.tensor_parallel_rank,
        accelerator.engine.data_parallel.size,
    ]
    return loss.detach(), grads, [*facts, float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]


@pytest.mark.parametrize(
    ("sizes", "on_meta"),
    [
        ({"tp_size": 2}, False),
        ({"tp_size": 2}, True),
        ({"dp_shard_size": 2, "tp_size": 2}, True),
        ({"dp_replicate_size": 2, "tp_size": 2}, False),
    ],
    ids=str,
)
def test_split_weights_have_the_gradients_of_full_ones(world, sizes, on_meta):
    loss, gradients = expected()
    norm = float(torch.nn.utils.get_total_norm(gradients.values()))
    size = 2 * sizes.get("dp_shard_size", sizes.get("dp_replicate_size", 1))

    for rank, (found, grads, facts) in enumerate(world.run(step, sizes, on_meta, size=size, timeout_s=100)):
        torch.testing.assert_close(found, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-6)
        assert facts == [2, rank % 2, size // 2, pytest.approx(norm, rel=1e-5)]


def refused(change: Any) -> str:
    model = Model()
    for name, value in change.items():
        setattr(model, name, value)
    with pytest.raises(ValueError, match="Model") as error:
        tensor_plan(model, 2)
    return str(error.value)


def test_what_does_not_divide_is_rejected_by_name():
    class Config:
        num_attention_heads = 4
        num_key_value_heads = 3

    assert "num_key_value_heads=3" in refused({"config": Config()})
    model = Model()
    model.up = torch.nn.Linear(WIDTH, 7)
    with pytest.raises(ValueError, match=r"splits up colwise, and its out_features=7.*tp_size=2"):
        tensor_plan(model, 2)


@pytest.mark.parametrize("plan", [{"head": "colwise"}, {"head": "rowwise", "embed": "embedding_rowwise"}])
def test_a_tied_weight_is_split_in_one_way(plan):
    model = Model()
    model._tp_plan = plan
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one weight.*rowwise, a linear"):
        tensor_plan(model, 2)


def split_before() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Model()
    model.up.weight = torch.nn.Parameter(
        DTensor.from_local(model.up.weight.detach()[:4], mesh, [Shard(0)], run_check=False)
    )
    weight = model.up.weight
    assert get_model_tp_size(model) == 2
    found = []
    for options in ({}, {"parallelism_config": ParallelismConfig(dp_shard_size=2)}):
        with pytest.raises(ValueError, match="split over 2 processes already") as error:
            Accelerator(cpu=True, **options).prepare(model)
        found.append(str(error.value))
    plugin = TorchTensorParallelPlugin(torch_device_mesh=mesh)
    accelerator = Accelerator(cpu=True, torch_tp_plugin=plugin)
    assert accelerator.torch_device_mesh is mesh
    assert accelerator.prepare(model).up.weight is weight
    return found


def test_models_that_are_split_already_pass_through_where_it_is_known(world):
    for message in world.run(split_before, timeout_s=100)[0]:
        assert "ParallelismConfig(tp_size=2, ...)" in message


def ask_by_plugin() -> tuple[str, int | None]:
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    return accelerator.engine.name, get_model_tp_size(accelerator.prepare(Model()))


def test_the_plugin_requests_tensor_parallelism(world):
    assert world.run(ask_by_plugin, timeout_s=100) == [("tp", 2)] * 2


def train_again() -> tuple[torch.Tensor, torch.Tensor]:
    first, *_ = step({"tp_size": 2}, on_meta=False)
    Accelerator(cpu=True).end_training()
    Accelerator(cpu=True)
    dist.new_group()  # so that the groups of the second mesh have other names
    return first, step({"tp_size": 2}, on_meta=False)[0]


def test_a_second_training_does_not_talk_to_groups_that_are_gone(world):
    for first, second in world.run(train_again, timeout_s=100):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def freeze() -> list[str]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    model = Model()
    for frozen in (model.up, model.scale, model.embed):
        frozen.requires_grad_(False)
    model = accelerator.prepare(model)
    accelerator.backward(model(words()).square().mean())
    assert all((item.grad is not None) is item.requires_grad for item in model.parameters())
    return [name for name, item in model.named_parameters() if item.requires_grad]


def test_frozen_weights_are_split_and_stay_frozen(world):
    assert world.run(freeze) == [["down.weight", "down.bias"]] * 2


def ask_for_overlap() -> None:
    handler = TorchTensorParallelConfig(enable_async_tp=True)
    with warns_once(UserWarning, r"enable_async_tp=True\) is ignored"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))


def test_overlap_that_is_not_there_is_reported(world):
    world.run(ask_for_overlap)


def test_a_full_model_has_no_tp_size():
    assert get_model_tp_size(Model()) is None


class Adapter(torch.nn.Module):
    """A layer with an adapter, as peft makes them."""

    def __init__(self, base_layer: torch.nn.Module, **parts: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        for name, part in parts.items():
            setattr(self, name, torch.nn.ModuleDict({"default": part}))


class Around(torch.nn.Module):
    """A model inside of another one that answers with its attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_the_plan_of_a_model_inside_of_another_one_splits_it_and_its_adapters():
    model = Model()
    model.up = Adapter(model.up, lora_A=torch.nn.Linear(WIDTH, 3), lora_B=torch.nn.Linear(3, WIDTH))
    model.down = Adapter(model.down, lora_A=torch.nn.Linear(WIDTH, 3), lora_B=torch.nn.Linear(3, WIDTH))

    plan = tensor_plan(Around(model), 2)

    assert set(plan) == {
        "inner.embed",
        "inner.scale",
        "inner.head",
        *("inner.up.base_layer", "inner.up.lora_B.default"),
        *("inner.down.base_layer", "inner.down.lora_A.default"),
    }


def test_an_adapter_that_is_not_known_is_rejected_by_name():
    model = Model()
    model.up = Adapter(model.up, scale_vector=torch.nn.Linear(1, WIDTH))

    with pytest.raises(ValueError, match=r"inner.up .* has an adapter \(Adapter with scale_vector\)"):
        tensor_plan(Around(model), 2)


class Saved(torch.nn.Module):
    """A layer of which a copy trains, as peft makes them for `modules_to_save`."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = layer.requires_grad_(False)
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(layer).requires_grad_()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["default"](x)


def with_copies() -> Around:
    model = Model()
    for name in ("up", "down"):
        setattr(model, name, Saved(getattr(model, name)))
    return Around(model)


def gradients_of_copies(accelerator: Accelerator | None) -> dict[str, torch.Tensor]:
    model = with_copies() if accelerator is None else accelerator.prepare(with_copies())
    model.inner(words()).square().mean().backward()
    found = {name: item.grad for name, item in model.named_parameters() if "modules_to_save" in name}
    return {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in found.items()}


def split_copies() -> tuple[dict[str, torch.Tensor], list[str]]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    return gradients_of_copies(accelerator), sorted(tensor_plan(with_copies(), 2))


def test_copies_that_train_in_place_of_layers_are_split_as_the_layers_are(world):
    expected = gradients_of_copies(None)
    for found, split in world.run(split_copies, timeout_s=100):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        assert [name for name in split if "up" in name] == [
            "inner.up.modules_to_save.default",
            "inner.up.original_module",
        ]


def test_a_module_that_cannot_be_split_is_refused_by_name():
    model = Model()
    model.down = Around(model.down)

    with pytest.raises(ValueError, match=r"splits inner\.down, a Around, with RowwiseParallel.*parallelism"):
        tensor_plan(Around(model), 2)
