"""The engine of FSDP version 1 on real gloo workers; what all engines share is in tests-integration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy

from accel.accelerator import Accelerator
from accel.engines.fsdp1 import flat
from accel.engines.fsdp_groups import CheckpointedForward
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ckpt.errors import CheckpointError
from accel_state.env import patch_environment

pytestmark = pytest.mark.usefixtures("fresh_state")

State = dict[str, torch.Tensor]


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_accelerator(precision: str = "no", **options: Any) -> Accelerator:
    options = {"auto_wrap_policy": "transformer_based_wrap", "sync_module_states": True} | options
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **options)
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)


def data() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=1.0, momentum=0.9)


def step(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = data().chunk(accelerator.num_processes)[accelerator.process_index]
    accelerator.backward(model(own).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trained(accelerator: Accelerator, raw: torch.nn.Module) -> State:
    """Two steps on the process's shard of the data; the full state after them."""
    model, optimizer = accelerator.prepare(raw, make_optimizer(raw))
    for _ in range(2):
        step(accelerator, model, optimizer)
    return accelerator.get_state_dict(model)


def expected_state(model: torch.nn.Module) -> State:
    optimizer = make_optimizer(model)
    for _ in range(2):
        model(data()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_close(state: State, expected: State) -> None:
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_orig_params": True},
    {"reshard_after_forward": "SHARD_GRAD_OP"},
    {"reshard_after_forward": "SHARD_GRAD_OP", "use_orig_params": True},
    {"auto_wrap_policy": "no_wrap"},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30},
    {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
    {"backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "activation_checkpointing_offload": True, "use_orig_params": True},
    {"cpu_ram_efficient_loading": True},
    {"mixed_precision_policy": "no"},
]


def train_with_every_option() -> list[State]:
    found = []
    for options in OPTIONS:
        accelerator = make_accelerator(**options)
        found.append(trained(accelerator, Net(accelerator.process_index)))
    return found


def test_every_option_trains_like_one_process(world):
    expected = expected_state(Net())
    states, others = world.run(train_with_every_option)

    for state, other in zip(states, others, strict=True):
        assert_close(state, expected)
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        assert other == {}  # of one machine, one process holds the full model


def train_with_replicas() -> list[Any]:
    """Four processes that take themselves for two machines of two."""
    found = []
    local = {"LOCAL_RANK": str(torch.distributed.get_rank() % 2), "LOCAL_WORLD_SIZE": "2"}
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"):
        with patch_environment(**local):
            accelerator = make_accelerator(reshard_after_forward=strategy, use_orig_params=True)
        mesh = accelerator.torch_device_mesh
        state = trained(accelerator, Net(accelerator.process_index))
        found.append((mesh.mesh_dim_names, tuple(mesh.shape), state))
    return found


@pytest.mark.filterwarnings("ignore:.*NO_SHARD.* is deprecated:FutureWarning")
def test_hybrid_strategies_have_a_replica_for_each_machine(world):
    found = world.run(train_with_replicas, size=4)

    expected = expected_state(Net())
    both = (("dp_replicate", "dp_shard"), (2, 2))
    assert [item[:2] for item in found[0]] == [both, both, (("dp_shard",), (4,))]
    for *_, state in found[0]:
        assert_close(state, expected)


def check_wrapping() -> None:
    accelerator = make_accelerator(activation_checkpointing=True, activation_checkpointing_offload=True)
    raw = Net(accelerator.process_index)
    model = accelerator.prepare(raw)
    assert isinstance(model, FullyShardedDataParallel)
    assert accelerator.prepare(raw) is accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is raw
    assert not accelerator.is_fsdp2
    assert accelerator.should_save_model == accelerator.is_main_process
    wrapped = [name for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    assert [name.replace("_fsdp_wrapped_module", "*") for name in wrapped] == [
        "",
        "*.layers.0",
        "*.layers.1",
    ]
    torch.testing.assert_close(raw.shift, Net(0).shift)  # the first process's
    accelerator.backward(model(data()).square().mean())
    layer = raw.layers[0].module
    assert isinstance(layer.forward, CheckpointedForward)
    assert layer.forward.offload
    assert layer.calls == 2
    spread = Net()
    spread.hf_device_map = {"embed": 0, "layers": 1}
    with pytest.raises(ValueError, match="hf_device_map"):
        accelerator.prepare(spread)


def test_the_model_is_wrapped_in_groups(world):
    world.run(check_wrapping)


def check_what_reaches_torch() -> None:
    """What cannot be seen in the numbers of a CPU process."""
    options = {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False}
    accelerator = make_accelerator(ignored_modules="embed", reshard_after_forward="SHARD_GRAD_OP", **options)
    raw = Net()
    raw.embed.requires_grad_(False)
    model = accelerator.prepare(raw)
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert model.forward_prefetch
    assert not model.limit_all_gathers
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert raw.embed.weight.shape == (6, 6)  # ignored: whole, and no part of a flat parameter
    assert raw.head.weight is raw.embed.weight
    flats = [handle.flat_param for _, handle in flat.fsdp_units([model])]
    with accelerator.no_sync(model):
        accelerator.backward(model(data()).square().mean())
    assert all(item.grad.numel() == item._unpadded_unsharded_size.numel() for item in flats)
    accelerator.backward(model(data()).square().mean())
    assert all(item.grad.shape == item.shape for item in flats)
    assert all(item.numel() < item._unpadded_unsharded_size.numel() for item in flats)


def test_options_reach_torch_and_no_sync_reduces_nothing(world):
    world.run(check_what_reaches_torch)


def test_one_process_that_requests_fsdp_gets_it():
    accelerator = make_accelerator()
    model = Net()
    state = trained(accelerator, model)
    assert accelerator.engine.name == "fsdp1"
    accelerator.end_training()
    assert_close(state, expected_state(Net()))


def own_weights() -> State:
    accelerator = make_accelerator(sync_module_states=False)
    return accelerator.get_state_dict(accelerator.prepare(Net(accelerator.process_index)))


def test_each_process_shards_its_own_weights_on_request(world):
    # The 42 elements of a layer lie in one vector, of which each process has the half of its own.
    weight = world.run(own_weights)[0]["layers.0.linear.weight"].flatten()
    torch.testing.assert_close(weight[:21], Net(0).layers[0].linear.weight.detach().flatten()[:21])
    torch.testing.assert_close(weight[21:], Net(1).layers[0].linear.weight.detach().flatten()[21:])


def weights_from_main() -> list[State]:
    found = []
    initialise = [None, lambda module: module.to_empty(device="cpu", recurse=False)]
    for function in initialise:
        for use_orig_params in (False, True):
            accelerator = make_accelerator(
                cpu_ram_efficient_loading=True, param_init_fn=function, use_orig_params=use_orig_params
            )
            with torch.device("cpu" if accelerator.is_main_process else "meta"):
                model = Net()
            found.append(trained(accelerator, model))
    return found


def test_only_the_first_process_needs_weights(world):
    expected = expected_state(Net())
    for state in world.run(weights_from_main)[0]:
        assert_close(state, expected)


def initialised() -> tuple[State, bool]:
    """Every process makes its own, equal weights from nothing."""

    def fill(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.constant_(tensor, 0.25)

    accelerator = make_accelerator(param_init_fn=fill, sync_module_states=False)
    with torch.device("meta"):
        model = Net()
    del model.shift
    model.shift = 0.25
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    return state, model.head.weight is model.embed.weight


def test_param_init_fn_makes_weights_where_there_are_none(world):
    (state, is_tied), _ = world.run(initialised)

    assert is_tied
    assert list(state) == [name for name in Net().state_dict() if name != "shift"]
    assert all(value.unique().tolist() == [0.25] for value in state.values())


def optimizer_states(use_orig_params: bool) -> list[Any]:
    """Momentum after two steps, with the optimizer prepared first, together, last, or made of what trains."""
    found = []
    for order in ("optimizer first", "together", "model first", "made last"):
        accelerator = make_accelerator(use_orig_params=use_orig_params)
        model = Net(accelerator.process_index)
        # In another order than the modules.
        optimizer = torch.optim.SGD(list(model.parameters())[::-1], lr=1.0, momentum=0.9)
        if order == "together":
            optimizer, model = accelerator.prepare(optimizer, model)
        elif order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            model = accelerator.prepare(model)
            if order == "made last":
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
            optimizer = accelerator.prepare(optimizer)
        for _ in range(2):
            step(accelerator, model, optimizer)
        whole = accelerator.engine.to_save(optimizer).state_dict()
        own = {name: values["momentum_buffer"] for name, values in whole["state"].items()}
        found.append((order, own, whole["param_groups"][0]["params"]))
        # Loaded again, it is what it was.
        objects = [whole]
        torch.distributed.broadcast_object_list(objects)
        accelerator.engine.to_load(optimizer).load_state_dict(objects[0])
        again = accelerator.engine.to_save(optimizer).state_dict()
        if accelerator.is_main_process:
            assert all(
                torch.equal(again["state"][name]["momentum_buffer"], value) for name, value in own.items()
            )
    return found


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_state_of_an_optimizer_has_names_in_the_order_in_which_parameters_were_given(
    world, use_orig_params
):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(2):
        model(data()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = {
        name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in model.named_parameters()
    }

    for order, state, names in world.run(optimizer_states, use_orig_params)[0]:
        assert names == list(state) == (list(expected) if order == "made last" else list(expected)[::-1])
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def clipping() -> list[tuple[float, float]]:
    found = []
    for use_orig_params in (False, True):
        for norm_type in (1.0, 2.0, float("inf")):
            accelerator = make_accelerator(use_orig_params=use_orig_params)
            model = accelerator.prepare(Net(accelerator.process_index).double())
            accelerator.backward(model(data().double()).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 100.0, norm_type)  # nothing changes
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            after = accelerator.clip_grad_norm_(model.parameters(), 100.0, norm_type)
            found.append((float(norm), float(after)))
    return found


def test_clipping_sees_every_element_once(world):
    expected = []
    for norm_type in (1.0, 2.0, float("inf")):
        model = Net().double()
        model(data().double()).square().mean().backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)))

    for found in world.run(clipping):
        assert [norm for norm, _ in found] == pytest.approx(expected * 2, rel=1e-10)
        assert [after for _, after in found] == pytest.approx([0.1] * 6, rel=1e-4)


def dtypes() -> list[Any]:
    found = []
    for precision, policy in (
        ("bf16", None),
        ("no", "bf16"),
        ("no", {"param_dtype": "bf16", "cast_forward_inputs": True}),
    ):
        accelerator = make_accelerator(precision, mixed_precision_policy=policy, use_orig_params=True)
        raw = Net(accelerator.process_index)
        model = accelerator.prepare(raw)
        accelerator.backward(model(data()).float().square().mean())
        layer = raw.layers[0].module
        found.append(
            (
                set(layer.seen),
                {item.dtype for item in model.parameters()},
                {item.grad.dtype for item in model.parameters() if item.grad is not None},
            )
        )
    return found


def test_parameters_compute_in_the_policy_and_rest_in_float32(world):
    for computed, rest, gradients in (item for found in world.run(dtypes) for item in found):
        assert computed == {torch.bfloat16}
        assert (rest, gradients) == ({torch.float32}, {torch.float32})


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def refuse(name: str, accelerator: Accelerator, *objects: Any) -> None:
        before = [type(item) for item in objects]
        with pytest.raises(ValueError, match=r"Set |set |Cast |Prepare |Freeze |Load ") as error:
            accelerator.prepare(*objects)
        found[name] = str(error.value)
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        assert [type(item) for item in objects] == before
        assert not any(FullyShardedDataParallel.fsdp_modules(model) for model in models)

    refuse("ignored", make_accelerator(ignored_modules="head"), Net())
    mixed = Net()
    mixed.layers[0].linear.bias.data = mixed.layers[0].linear.bias.data.bfloat16()
    refuse("dtypes", make_accelerator(), mixed)
    partly = Net()
    partly.layers[0].linear.bias.requires_grad_(False)
    refuse("frozen", make_accelerator(), partly)
    with torch.device("meta"):
        bare = Net()
    refuse("meta", make_accelerator(sync_module_states=False), bare)
    stepped = Net()
    optimizer = make_optimizer(stepped)
    stepped(data()).sum().backward()
    optimizer.step()
    refuse("state", make_accelerator(use_orig_params=False), stepped, optimizer)
    net = Net()
    split = torch.optim.SGD([net.layers[0].linear.weight, net.layers[1].linear.weight], 0.1)
    refuse("part", make_accelerator(), net, split)
    late = make_accelerator()
    late.prepare(net)
    refuse("late", late, split)
    return found


def test_what_cannot_be_trained_is_rejected_with_the_alternative(world):
    found = world.run(refusals)[0]

    assert "requires_grad_(False)" in found["ignored"]
    assert "layers.0.linear.bias in torch.bfloat16" in found["dtypes"]
    assert "layers.0.linear.weight is trained while layers.0.linear.bias is frozen" in found["frozen"]
    assert "use_orig_params=True" in found["frozen"]
    assert "cpu_ram_efficient_loading=True" in found["meta"]
    assert "SGD has a state" in found["state"]
    assert "load_state" in found["state"]
    assert "a group with 1 of 2 parameters" in found["part"]
    assert "a group with 1 of 2 parameters" in found["late"]


def test_cpu_offload_on_the_cpu_is_rejected():
    with pytest.raises(ValueError, match="Leave cpu_offload out"):
        make_accelerator(cpu_offload=True)


def own_files(folder: str, use_orig_params: bool) -> list[Any]:
    """Save in each process's own file, and continue from it in another training that was evaluated before."""
    options = {"state_dict_type": "LOCAL_STATE_DICT", "use_orig_params": use_orig_params}
    options |= {"reshard_after_forward": "SHARD_GRAD_OP", "ignored_modules": "embed"}
    outputs = []
    for seed in (0, 5):
        accelerator = make_accelerator(**options)
        raw = Net(seed)
        raw.embed.requires_grad_(False)
        model, optimizer = accelerator.prepare(raw, make_optimizer(raw))
        if seed:
            with torch.no_grad():
                model(data())
            accelerator.load_state(folder)
        else:
            step(accelerator, model, optimizer)
            accelerator.save_state(folder)
        with torch.no_grad():
            outputs.append(model(data()))
        step(accelerator, model, optimizer)
        outputs.append(accelerator.get_state_dict(model))
    other = make_accelerator(use_orig_params=use_orig_params)
    other.prepare(Net())
    for accelerator in (other, Accelerator(cpu=True)):
        with pytest.raises(CheckpointError, match="LOCAL_STATE_DICT") as error:
            accelerator.load_state(folder)
    return [*outputs, str(error.value)]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_each_process_can_keep_its_part_in_a_file_of_its_own(world, tmp_path, use_orig_params):
    for out, after, out_again, after_again, message in world.run(
        own_files, str(tmp_path / "saved"), use_orig_params
    ):
        assert torch.equal(out, out_again)
        assert after.keys() == after_again.keys()
        assert all(torch.equal(after[name], after_again[name]) for name in after)
        assert "the engine here is ddp" in message
    assert {path.name for path in tmp_path.glob("saved/local*")} == {"local_state_0.bin", "local_state_1.bin"}
    assert not [*tmp_path.glob("saved/model*"), *tmp_path.glob("saved/optimizer*")]


def test_collectives_go_through_models_in_the_order_of_prepare(monkeypatch):
    """Each process follows this order by itself: where one took another, they would wait for each other."""
    accelerator = make_accelerator(auto_wrap_policy="no_wrap", use_orig_params=True)
    layers = [[torch.nn.Linear(2, 2) for _ in range(size)] for size in range(1, 9)]
    models = [accelerator.prepare(torch.nn.Sequential(*each)) for each in layers]
    parameters = [item for model in models for item in model.parameters()]
    optimizer = accelerator.prepare(torch.optim.SGD(parameters, lr=0.1))
    sizes = []
    reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", noted)
    accelerator.engine.checkpoint.check([optimizer])

    assert sizes == [2 * size for size in range(1, 9)]
    accelerator.end_training()
