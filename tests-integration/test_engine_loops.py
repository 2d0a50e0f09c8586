"""Training programs that are not the usual loop, under all engines: the weights of one process, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel_optim.handlers import DistributedDataParallelKwargs
from accel_world.engine_cases import CASES, over_engines

WIDTH, STEPS = 8, 3


class Expert(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, hidden), torch.nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(torch.nn.Module):
    """Experts, of which each call uses one, beside a layer that all use."""

    def __init__(self, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.all = torch.nn.Linear(WIDTH, WIDTH)
        self.experts = torch.nn.ModuleList(map(Expert, hidden))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.all(x) + self.experts[chosen](x)


class Routed(torch.nn.Module):
    _tp_plan = {  # noqa: RUF012 - as transformers' models have it
        "blocks.*.experts.*.up": "colwise",
        "blocks.*.experts.*.down": "rowwise",
    }

    def __init__(self, hidden: tuple[int, ...], groups: str = "Block") -> None:
        super().__init__()
        self._no_split_modules = (groups,)
        self.blocks = torch.nn.ModuleList([Block(hidden), Block(hidden)])
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x)


class Heads(torch.nn.Module):
    """Runs all heads; the loss takes the output of one."""

    _no_split_modules = ("Expert",)
    _tp_plan = {"heads.*.up": "colwise", "heads.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.heads = torch.nn.ModuleList([Expert(6), Expert(6)])

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return [head(self.first(x)) for head in self.heads][chosen]


def choice(step: int, shard: int) -> int:
    """The expert of a data shard: others than those of its neighbours, in the last step the same for all."""
    return 0 if step == STEPS - 1 else (step + shard) % 2


def make_optimizer(case: str, parameters: Any) -> torch.optim.Optimizer:
    # These step all parameters of a group as one: decay and momentum move those without gradients too.
    if case.startswith(("deepspeed", "fsdp1", "late")):
        return torch.optim.SGD(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def route(
    case: str, hidden: tuple[int, ...] = (), groups: str = "Block", moe: str | None = None
) -> dict[str, torch.Tensor]:
    options = CASES[case].options()
    if case == "ddp":
        options["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    if moe is not None:
        options["deepspeed_plugin"].transformer_moe_cls_names = moe
    accelerator = Accelerator(**options)
    torch.manual_seed(0)
    model = Routed(hidden, groups) if hidden else Heads()
    model, optimizer = accelerator.prepare(model, make_optimizer(case, model.parameters()))
    shard, shards = accelerator.engine.loaders.data_shard
    x = torch.randn(4 * shards, WIDTH, generator=torch.Generator().manual_seed(1)).chunk(shards)[shard]
    for step in range(STEPS):
        accelerator.backward(model(x, choice(step, shard)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {name: value.clone() for name, value in state.items()}


def expected_routes(case: str, hidden: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Routed(hidden)
    optimizer = make_optimizer(case, model.parameters())
    shards = CASES[case].size // CASES[case].replicas
    parts = torch.randn(4 * shards, WIDTH, generator=torch.Generator().manual_seed(1)).chunk(shards)
    for step in range(STEPS):
        for shard, x in enumerate(parts):
            (model(x, choice(step, shard)).square().mean() / shards).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


def assert_same_weights(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


REFUSED = {
    "deepspeed 2": "experts.0.* has a gradient on processes .* zero_stage=1",
    "deepspeed 3": "at blocks.0.experts.0.up and others .*transformer_moe_cls_names",
}


@over_engines
@pytest.mark.parametrize("hidden", [(6, 6, 4), (6, 10, 4)], ids=["same sizes", "different sizes"])
def test_processes_that_use_other_parameters(world, case, hidden):
    chosen = CASES[case]
    if case in REFUSED:
        assert world.run(refused, route, REFUSED[case], case, hidden, size=chosen.size) == [True, True]
        return
    (state, *_) = world.run(route, case, hidden, size=chosen.size, timeout_s=60)

    assert_same_weights(state, expected_routes(case, hidden))


def refused(train: Any, message: str, *args: Any) -> bool:
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(*args)
    return True


IN_GROUPS = ("fsdp1", "fsdp2", "hsdp", "fsdp2 x tp")


@pytest.mark.parametrize("case", IN_GROUPS)
@pytest.mark.parametrize("hidden", [(6, 6, 4), (6, 10, 4)], ids=["same sizes", "different sizes"])
def test_processes_that_run_other_groups(world, case, hidden):
    chosen = CASES[case]
    message = f"{chosen.engine}: .* at blocks.0.experts.0 and others at blocks.0.experts.1 .* larger groups"
    assert world.run(refused, route, message, case, hidden, "Expert", size=chosen.size) == [True] * chosen.size


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("case", IN_GROUPS)
def test_processes_whose_losses_use_other_groups(world, case):
    chosen = CASES[case]
    message = f"{chosen.engine}: in backward, some processes are at heads.0 and others at heads.1 "
    assert world.run(refused, route, message, case, size=chosen.size) == [True] * chosen.size


@pytest.mark.filterwarnings("ignore:.* otherwise than the first one did")
def test_groups_that_all_processes_run_together(world):
    hidden = (6, 6, 4)
    (state, *_) = world.run(route, "cp", hidden, "Expert", size=2, timeout_s=60)
    assert_same_weights(state, expected_routes("cp", hidden))


def test_zero_3_gathers_the_classes_of_its_plugin_with_all_branches(world):
    hidden = (6, 10, 4)
    (state, *_) = world.run(route, "deepspeed 3", hidden, "Block", "Block", size=2, timeout_s=60)
    assert_same_weights(state, expected_routes("deepspeed 3", hidden))
