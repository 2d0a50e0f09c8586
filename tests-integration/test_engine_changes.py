"""What a loop does by hand to parameters, gradients and random numbers, under all engines.

Each program runs as plain PyTorch on one process, and under an engine with several. The weights are the same,
or every process gets an error that names what was changed, the engine and the way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.utils import GatheredParameters, set_seed
from accel_world.engine_cases import CASES, FEW, marked

WIDTH, BATCH = 8, 4


class Part(torch.nn.Module):
    """A feed-forward layer with a residual, as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(torch.nn.Module):
    _no_split_modules = ("Part",)
    _tp_plan = {"parts.*.up": "colwise", "parts.*.down": "rowwise"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.parts = torch.nn.ModuleList([Part(), Part()])
        self.head = torch.nn.Linear(WIDTH, 3)
        self.dropout = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = torch.nn.functional.dropout(part(x), self.dropout, self.training)
        return self.head(x)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


class ByHand:
    """The Accelerator's methods as plain PyTorch on one process has them."""

    process_index = 0

    def __init__(self) -> None:
        self.no_sync = self.trigger_sync_in_backward = lambda model: contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def prepare(self, *objects: Any) -> Any:
        return objects

    def unwrap_model(self, model: Any) -> Any:
        return model

    def get_state_dict(self, model: Any) -> dict[str, torch.Tensor]:
        return model.state_dict()


class Loop:
    """A model, an optimizer, and this process's shard of each batch."""

    def __init__(self, accelerator: Any, num_shards: int = 1, shard: int = 0) -> None:
        self.accelerator = accelerator
        self._shares = num_shards, shard
        self._data = torch.Generator().manual_seed(1)
        self.model: Any = make_net()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)

    def prepare(self) -> None:
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    @property
    def net(self) -> Net:
        """The model as the script wrote it."""
        return self.accelerator.unwrap_model(self.model)

    def loss(self) -> torch.Tensor:
        """That of the next batch."""
        num, shard = self._shares
        x = torch.randn(BATCH, WIDTH, generator=self._data)[shard::num]
        return self.model(x).square().mean()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.accelerator.backward(self.loss())
            self.step()


def run(program: Callable[[Loop], None], case: str | None = None) -> dict[str, torch.Tensor] | str:
    """The weights after a program, or the error that ended it."""
    if case is None:
        loop = Loop(ByHand())
        program(loop)
        return {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
    chosen = (CASES | FEW)[case]
    accelerator = Accelerator(**chosen.options())
    assert accelerator.engine.name == chosen.engine
    loop = Loop(accelerator, chosen.size // chosen.replicas, accelerator.process_index // chosen.replicas)
    try:
        program(loop)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    state = {name: value.clone() for name, value in accelerator.get_state_dict(loop.model).items()}
    accelerator.end_training()
    return state


def assert_as_by_hand(world: Any, program: Callable[[Loop], None], case: str) -> None:
    expected = run(program)
    results = world.run(run, program, case, size=CASES[case].size, timeout_s=60)
    assert isinstance(results[0], dict), results
    assert results[0].keys() == expected.keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def assert_refused(world: Any, program: Callable[[Loop], None], case: str, *words: str) -> None:
    for result in world.run(run, program, case, size=CASES[case].size, timeout_s=60):
        assert isinstance(result, str), "no error, and other weights"
        for word in words:
            assert word in result
        assert case == "ddp" or CASES[case].engine in result


over_engines = pytest.mark.parametrize("case", marked(CASES))
COPIES = ["deepspeed 1", "deepspeed 2", "deepspeed 3"]  # whose optimizers step copies of the weights
ZERO = ["deepspeed 0", *COPIES]


def sync_the_second_pass(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        with loop.accelerator.no_sync(loop.model):
            first, second = loop.loss(), loop.loss()
        loop.accelerator.backward(first)
        with loop.accelerator.trigger_sync_in_backward(loop.model):
            loop.accelerator.backward(second)
        loop.step()


def sync_after_a_pass_in_no_sync(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        with loop.accelerator.no_sync(loop.model):
            loop.accelerator.backward(loop.loss())
            second = loop.loss()
        with loop.accelerator.trigger_sync_in_backward(loop.model):
            loop.accelerator.backward(second)
        loop.step()


def sync_inside_no_sync(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        with loop.accelerator.no_sync(loop.model):
            loop.accelerator.backward(loop.loss())
            second = loop.loss()
            with loop.accelerator.trigger_sync_in_backward(loop.model):
                loop.accelerator.backward(second)
        loop.step()


def sync_at_the_step(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        with loop.accelerator.no_sync(loop.model):
            loop.accelerator.backward(loop.loss())
        loop.step()


@over_engines
@pytest.mark.parametrize(
    "program", [sync_the_second_pass, sync_after_a_pass_in_no_sync, sync_inside_no_sync, sync_at_the_step]
)
def test_gradients_held_back_by_no_sync_are_whole_in_the_step(world, case, program):
    if case == "fsdp1" and program is sync_the_second_pass:  # torch frees weights in the first pass
        assert_refused(world, program, case, "fsdp_version=2")
    else:
        assert_as_by_hand(world, program, case)


def freeze(loop: Loop) -> None:
    loop.prepare()
    loop.steps(2)
    loop.net.parts[0].requires_grad_(False)
    loop.steps(3)
    loop.net.parts[0].requires_grad_(True)
    loop.steps(1)


def unfreeze(loop: Loop) -> None:
    loop.model.parts[0].requires_grad_(False)
    loop.prepare()
    loop.steps(2)
    loop.net.parts[0].requires_grad_(True)
    loop.steps(2)


def freeze_in_each_second_pass(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        with loop.accelerator.no_sync(loop.model):
            loop.accelerator.backward(loop.loss())
        loop.net.parts[0].requires_grad_(False)
        loop.accelerator.backward(loop.loss())
        loop.net.parts[0].requires_grad_(True)
        loop.step()


@over_engines
@pytest.mark.parametrize("program", [freeze, unfreeze])
def test_parameters_frozen_in_the_middle_rest_or_the_error_names_one(world, case, program):
    if case in COPIES:
        assert_refused(world, program, case, "Net.parts.0.", "frozen after prepare()", "free_memory()")
    elif case == "ddp" and program is freeze:
        assert_refused(world, program, case, "find_unused_parameters=True")  # by torch
    else:
        assert_as_by_hand(world, program, case)


@over_engines
def test_parameters_frozen_inside_of_a_window_keep_the_gradients_that_they_have(world, case):
    if case in ("deepspeed 0", "deepspeed 3"):
        assert_refused(world, freeze_in_each_second_pass, case, "Net.parts.0.", "after optimizer.step()")
    elif case == "ddp":
        assert_refused(world, freeze_in_each_second_pass, case, "find_unused_parameters=True")  # by torch
    else:
        assert_as_by_hand(world, freeze_in_each_second_pass, case)


def change_weights(loop: Loop) -> None:
    loop.prepare()
    for number in range(4):
        loop.steps(1)
        with GatheredParameters(list(loop.net.parameters()), modifier_rank=0), torch.no_grad():
            for parameter in loop.net.parameters():
                (parameter if number % 2 else parameter.data).clamp_(-0.2, 0.2)
            loop.net.head.weight.fill_(0.1)


@over_engines
def test_weights_that_the_script_changes_between_steps_count(world, case):
    assert_as_by_hand(world, change_weights, case)


def replace_weights(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        loop.steps(1)
        for parameter in loop.net.parameters():
            parameter.data = parameter.data * 0.5


def ignores_replaced_weights(case: str) -> bool:
    """Torch drops `parameter.data = ...` of a DTensor; at stage 3 a script sees empty parameters."""
    return case == "deepspeed 3" or "fsdp2" in CASES[case].engine or "tp" in CASES[case].engine


@pytest.mark.parametrize("case", marked(name for name in CASES if not ignores_replaced_weights(name)))
def test_weights_that_the_script_replaces_by_others_count(world, case):
    assert_as_by_hand(world, replace_weights, case)


def train_a_temperature(loop: Loop) -> None:
    temperature = torch.tensor(1.0, requires_grad=True)
    loop.optimizer.add_param_group({"params": [temperature]})
    loop.prepare()
    for _ in range(3):
        loop.accelerator.backward(loop.loss() * temperature)
        loop.step()


@over_engines
def test_a_tensor_that_only_the_optimizer_has_is_trained_or_rejected_everywhere(world, case):
    if case in ZERO:
        assert_refused(world, train_a_temperature, case, "AdamW", "shape ()", "a torch.nn.Parameter")
    else:
        assert_as_by_hand(world, train_a_temperature, case)


def add_a_group(loop: Loop) -> None:
    loop.model.parts.requires_grad_(False)
    loop.optimizer = torch.optim.AdamW(loop.model.head.parameters(), lr=0.05)
    loop.prepare()
    loop.steps(2)
    loop.net.parts.requires_grad_(True)
    loop.optimizer.add_param_group({"params": list(loop.net.parts.parameters())})
    loop.steps(2)


@over_engines
def test_a_group_that_is_added_after_prepare_is_trained_or_rejected(world, case):
    if case in COPIES:
        assert_refused(world, add_a_group, case, "AdamW", "lr=0")
    else:
        assert_as_by_hand(world, add_a_group, case)


def change_gradients(loop: Loop) -> None:
    loop.prepare()
    for _ in range(3):
        loop.accelerator.backward(loop.loss())
        for parameter in loop.net.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        loop.step()


@pytest.mark.parametrize("case", marked(name for name in CASES if name not in COPIES))
def test_gradients_that_a_loop_changes_element_by_element_count(world, case):
    assert_as_by_hand(world, change_gradients, case)


TENSOR = {name: case for name, case in (CASES | FEW).items() if "tp" in name}


def drop_out(loop: Loop) -> None:
    loop.prepare()
    loop.net.dropout = 0.3
    set_seed(5, device_specific=True)
    for _ in range(3):
        loop.steps(1)
        if loop.accelerator.process_index % 2:
            torch.rand(1)  # on one process of each group alone


def switch_on_dropout(loop: Loop) -> None:
    loop.prepare()
    loop.steps(1)
    set_seed(5, device_specific=True)
    loop.net.dropout = 0.3
    loop.steps(1)


def test_dropout_under_tensor_parallelism_drops_what_one_process_drops(world):
    assert_as_by_hand(world, drop_out, "tp")


@pytest.mark.parametrize("case", TENSOR)
def test_dropout_keeps_weights_that_are_not_split_the_same_on_a_group(world, case):
    check = {"ACCELERATE_CHECK_REPLICAS_STEPS": "1"}  # an error names the first one that differs
    results = world.run(run, drop_out, case, size=TENSOR[case].size, env=check, timeout_s=60)
    assert all(isinstance(result, dict) for result in results), results


@pytest.mark.parametrize("case", TENSOR)
def test_dropout_that_is_switched_on_where_generators_differ_is_an_error(world, case):
    for result in world.run(run, switch_on_dropout, case, size=TENSOR[case].size, timeout_s=60):
        assert isinstance(result, str)
        for words in ("Net drew random numbers", "(tp)", "set_seed()"):
            assert words in result


LAYOUTS = {
    "0 in bf16": ("bf16", {"stage": 0}),
    "1 in bf16": ("bf16", {"stage": 1}),
    "1 in bf16 with fp32 gradients": ("bf16", {"stage": 1, "fp32": True}),
    "2 in bf16": ("bf16", {"stage": 2}),
    "2 offloaded": ("no", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "3 in bf16": ("bf16", {"stage": 3, "stage3_param_persistence_threshold": 0}),
    "3 with small parameters whole": ("no", {"stage": 3, "stage3_param_persistence_threshold": 100}),
    "3 offloaded": ("no", {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
}
"""Where DeepSpeed has copies of the weights in other places, by its precision and settings."""


def change_and_step(layout: str, folder: str) -> None:
    precision, zero = LAYOUTS[layout]
    zero = dict(zero)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    if zero.pop("fp32", False):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    plugin = DeepSpeedPlugin(config, zero3_save_16bit_model=True)
    accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=plugin)
    loop = Loop(accelerator, 2, accelerator.process_index)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
    loop.prepare()
    loop.steps(1)
    before = {name: value.clone() for name, value in accelerator.get_state_dict(loop.model).items()}
    # Between steps stage 3 shows the small parameters alone; the others a context gathers.
    shown = {name: item for name, item in loop.net.named_parameters() if item.numel()}
    expected = {*shown, "head.weight", "head.bias"}
    with GatheredParameters([*loop.net.head.parameters()], modifier_rank=0), torch.no_grad():
        for parameter in loop.net.head.parameters():
            parameter.data.fill_(0.5)
        for parameter in shown.values():
            parameter.fill_(0.5)
    accelerator.save_state(folder)
    for _ in range(2):
        loop.steps(1)
        after = accelerator.get_state_dict(loop.model)
        if accelerator.is_main_process:
            changed = {name for name, value in after.items() if (value == 0.5).all()}
            assert changed == expected
            assert ("parts.0.up.weight" in shown) == ("threshold" not in str(zero))
            for name in before.keys() - expected:
                assert torch.equal(after[name], before[name])
        accelerator.load_state(folder)
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:`torch.distributed.*deprecated:FutureWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changed_weights_count_wherever_deepspeed_has_copies_of_them(world, layout, tmp_path):
    world.run(change_and_step, layout, str(tmp_path / "saved"), size=2, timeout_s=60)


def train_in_small_steps(changes: bool) -> torch.Tensor:
    """Train by steps that are smaller than what bfloat16 can tell apart."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(config))
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(20):
        accelerator.backward(model(torch.full((2, WIDTH), 0.3)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if changes:
            accelerator.unwrap_model(model).bias.data.fill_(0.5)
    weight = accelerator.get_state_dict(model)["weight"].clone()
    accelerator.end_training()
    return weight


@pytest.mark.filterwarnings("ignore:`torch.distributed.*deprecated:FutureWarning")
def test_a_changed_weight_takes_no_digits_of_the_others(world):
    plain, changed = (world.run(train_in_small_steps, changes)[0] for changes in (False, True))
    torch.manual_seed(0)
    assert not torch.equal(plain, torch.nn.Linear(WIDTH, 3).weight.to(plain.dtype))
    assert torch.equal(changed, plain)
