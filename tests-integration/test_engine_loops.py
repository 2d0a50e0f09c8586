"""Programs that are not the usual loop, under all engines: the weights of one process, or an error."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accel.accelerator import Accelerator
from accel.engines import entry_point_engines
from accel_optim.handlers import DistributedDataParallelKwargs
from accel_world.engine_cases import CASES, marked, over_engines

WIDTH, STEPS = 8, 3

pytestmark = pytest.mark.filterwarnings(  # of torch, about tensor parallelism under FSDP2
    "ignore:FSDP2-wrapped module .* returned a view tensor"
)


class Expert(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, hidden), torch.nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(torch.nn.Module):
    """Experts, of which each call uses one, and a layer that all use."""

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
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(hidden), Block(hidden)])
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        x = self.first(x)
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


def refused(message: str, train: Any, *args: Any) -> bool:
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(*args)
    return True


def assert_refused(world: Any, message: str, train: Any, case: str, *args: Any) -> None:
    """On all processes, by an error that names the engine."""
    chosen = CASES[case]
    message = f"(?=.*({chosen.engine.replace(' x ', '|')})).*{message}"
    assert world.run(refused, message, train, case, *args, size=chosen.size) == [True] * chosen.size


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
    shard, shards = accelerator.engine.data_parallel.rank_and_size
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
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


REFUSED = {
    "deepspeed 2": "experts.0.* has a gradient on processes .* zero_stage=1",
    "deepspeed 3": "at blocks.0.experts.0.up and others .*transformer_moe_cls_names",
}


@over_engines
@pytest.mark.parametrize("hidden", [(6, 6, 4), (6, 10, 4)], ids=["same sizes", "different sizes"])
def test_processes_that_use_other_parameters(world, case, hidden):
    if case in REFUSED:
        assert_refused(world, REFUSED[case], route, case, hidden)
        return
    (state, *_) = world.run(route, case, hidden, size=CASES[case].size, timeout_s=60)

    assert_same_weights(state, expected_routes(case, hidden))


class Depth(torch.nn.Module):
    """Blocks that may hand on their input."""

    _no_split_modules = ("Skipped",)
    _tp_plan = {"blocks.*.own.up": "colwise", "blocks.*.own.down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.blocks = torch.nn.ModuleList([Skipped(), Skipped()])

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, number == left_out)
        return self.head(x)


class Skipped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Expert(6)

    def forward(self, x: torch.Tensor, is_left_out: bool) -> torch.Tensor:
        return x if is_left_out else x + self.own(x)


def skip(case: str) -> dict[str, torch.Tensor]:
    options = CASES[case].options()
    if case == "ddp":
        options["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(**options)
    torch.manual_seed(0)
    model = Depth()
    model, optimizer = accelerator.prepare(model, make_optimizer(case, model.parameters()))
    shard, _ = accelerator.engine.data_parallel.rank_and_size
    for step in range(STEPS):
        accelerator.backward(model(own_rows(accelerator, case, step), choice(step, shard)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return state_of(accelerator, model)


@over_engines
def test_processes_that_leave_out_other_blocks(world, case):
    """Stochastic depth: a whole group is used by some processes and not by others."""
    if case in ("deepspeed 2", "deepspeed 3"):
        message = {"deepspeed 2": "has a gradient on processes", "deepspeed 3": "some processes are at"}[case]
        assert_refused(world, message, skip, case)
        return
    (state, *_) = world.run(skip, case, size=CASES[case].size, timeout_s=60)

    torch.manual_seed(0)
    model = Depth()
    optimizer = make_optimizer(case, model.parameters())
    shards = CASES[case].size // CASES[case].replicas
    for step in range(STEPS):
        for shard, x in enumerate(rows(case, step).chunk(shards)):
            (model(x, choice(step, shard)).square().mean() / shards).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(state, model.state_dict())


IN_GROUPS = ("fsdp1", "fsdp2", "hsdp", "fsdp2 x tp")


@pytest.mark.parametrize("case", IN_GROUPS)
@pytest.mark.parametrize("hidden", [(6, 6, 4), (6, 10, 4)], ids=["same sizes", "different sizes"])
def test_processes_that_run_other_groups(world, case, hidden):
    message = "at blocks.0.experts.0 and others at blocks.0.experts.1 .* larger groups"
    assert_refused(world, message, route, case, hidden, "Expert")


@pytest.mark.parametrize("case", IN_GROUPS)
def test_processes_whose_losses_use_other_groups(world, case):
    message = "in backward, some processes are at heads.0 and others at heads.1 "
    assert_refused(world, message, route, case)


def change_groups(case: str, *second: int) -> None:
    """All processes run the first group in the first step, and their own of `second` in the second step."""
    accelerator = Accelerator(**CASES[case].options())
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=3))
    model = Routed((6, 6, 6), "Expert")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, WIDTH), 0).sum().backward()
    optimizer.step()
    group = second[accelerator.process_index]
    if set(second) == {group}:
        with pytest.warns(UserWarning, match=f"is at blocks.0.experts.{group} on process ., where the first"):
            model(torch.ones(2, WIDTH), group).sum().backward()
    elif group == 0:
        # Does not begin the collective of its group, as it would wait for the other process in it.
        expert = accelerator.unwrap_model(model).blocks[0].experts[0]
        expert.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, WIDTH), group)
    else:
        message = "processes came there within 3 s" if 0 in second else "at blocks.0.experts.1 and others at"
        with pytest.raises(RuntimeError, match=message), pytest.warns(UserWarning, match="where the first"):
            model(torch.ones(2, WIDTH), group).sum().backward()
    accelerator.end_training()


@pytest.mark.parametrize("case", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("second", [(1, 1), (1, 2), (1, 0)], ids=str)
def test_another_order_than_in_the_first_step(world, case, second):
    world.run(change_groups, case, *second, size=2, timeout_s=60)


@pytest.mark.filterwarnings("ignore:.* where the first one was not")
def test_groups_that_all_processes_run_together(world):
    hidden = (6, 6, 4)
    (state, *_) = world.run(route, "cp", hidden, "Expert", size=2, timeout_s=60)
    assert_same_weights(state, expected_routes("cp", hidden))


@pytest.mark.parametrize("case", marked(["deepspeed 3"]))
def test_zero_3_gathers_the_classes_of_its_plugin_with_all_branches(world, case):
    hidden = (6, 10, 4)
    (state, *_) = world.run(route, case, hidden, "Block", "Block", size=2, timeout_s=60)
    assert_same_weights(state, expected_routes(case, hidden))


class Layers(torch.nn.Module):
    _no_split_modules = ("Expert",)
    _tp_plan = {"middle.up": "colwise", "middle.down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = torch.nn.Linear(WIDTH, WIDTH), Expert(6)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make_layers() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Layers()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows(case: str, step: int) -> torch.Tensor:
    """The data of a step, of all processes."""
    shards = CASES[case].size // CASES[case].replicas
    return torch.randn(4 * shards, WIDTH, generator=torch.Generator().manual_seed(step))


def own_rows(accelerator: Accelerator, case: str, step: int) -> torch.Tensor:
    shard, shards = accelerator.engine.data_parallel.rank_and_size
    return rows(case, step).chunk(shards)[shard]


def state_of(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return state


def freeze_row(gradient: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(len(gradient), 1)
    mask[0] = 0
    return gradient * mask


def train_hooked(case: str, hooked: str, is_late: bool = False) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=2, **CASES[case].options())
    model, optimizer = make_layers()
    if not is_late:
        model.get_parameter(hooked).register_hook(freeze_row)
    model, optimizer = accelerator.prepare(model, optimizer)
    if is_late:
        accelerator.unwrap_model(model).get_parameter(hooked).register_hook(freeze_row)
    for step in range(STEPS * 2):
        with accelerator.accumulate(model):
            accelerator.backward(model(own_rows(accelerator, case, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return state_of(accelerator, model)


@over_engines
@pytest.mark.parametrize(
    ("hooked", "is_late"),
    [("first.weight", False), ("middle.up.weight", False), ("first.weight", True)],
    ids=["outer", "inner", "after prepare"],
)
def test_hooks_on_parameters(world, case, hooked, is_late):
    message = f"{hooked} has a hook"
    if case == "fsdp1" or ("tp" in case and hooked.startswith("middle")):
        assert_refused(world, message, train_hooked, case, hooked, is_late)
        return
    (state, *_) = world.run(train_hooked, case, hooked, is_late, size=CASES[case].size, timeout_s=60)

    model, optimizer = make_layers()
    model.get_parameter(hooked).register_hook(freeze_row)
    for step in range(STEPS * 2):
        (model(rows(case, step)).square().mean() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(state, model.state_dict())


def prepare_with_late_hook(case: str) -> None:
    accelerator = Accelerator(**CASES[case].options())
    model, _ = make_layers()
    model.middle.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    accelerator.prepare(model)


@pytest.mark.parametrize("case", ["fsdp1", "fsdp2", "tp"])
def test_hooks_after_the_accumulation_are_refused(world, case):
    assert_refused(world, "middle.up.weight has a hook", prepare_with_late_hook, case)


def swap_average(case: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train, and evaluate in between with other weights, which are put in and out in place."""
    accelerator = Accelerator(**CASES[case].options())
    model, optimizer = make_layers()
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []

    @torch.no_grad()
    def evaluate() -> None:
        loss = model(own_rows(accelerator, case, 9)).square().mean()
        losses.append(float(accelerator.reduce(loss, "mean")))

    for step in range(STEPS):
        accelerator.backward(model(own_rows(accelerator, case, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            evaluate()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        evaluate()
        with torch.no_grad():
            for parameter, own in zip(model.parameters(), kept, strict=True):
                parameter.copy_(own)
    evaluate()
    return state_of(accelerator, model), losses


@pytest.mark.parametrize("case", marked(case for case in CASES if case != "deepspeed 3"))
def test_weights_that_are_swapped_for_an_evaluation(world, case):
    """Under ZeRO 3 a script sees empty parameters, unless it gathers them."""
    ((state, losses), *_) = world.run(swap_average, case, size=CASES[case].size, timeout_s=60)

    model, optimizer = make_layers()
    expected = []
    for step in range(STEPS):
        model(rows(case, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        halved = {name: value * 0.5 for name, value in model.state_dict().items()}
        with torch.no_grad():
            if step % 2:
                expected.append(float(model(rows(case, 9)).square().mean()))
            expected.append(float(torch.func.functional_call(model, halved, rows(case, 9)).square().mean()))
    with torch.no_grad():
        expected.append(float(model(rows(case, 9)).square().mean()))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_same_weights(state, model.state_dict())


def train_with_penalty(case: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(**CASES[case].options())
    model, optimizer = make_layers()
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        x = own_rows(accelerator, case, step).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        accelerator.backward(output.square().mean() + slope.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return state_of(accelerator, model)


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
@over_engines
def test_a_penalty_on_gradients(world, case):
    if case not in (
        "single",
        "ddp",
        *entry_point_engines(),
        *(f"{name} alone" for name in entry_point_engines()),
    ):
        assert_refused(world, "create_graph=True.*DDP or on one process", train_with_penalty, case)
        return
    (state, *_) = world.run(train_with_penalty, case, size=CASES[case].size, timeout_s=60)

    model, optimizer = make_layers()
    for step in range(STEPS):
        x = rows(case, step).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.square().mean() + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(state, model.state_dict())


class Forces(Layers):
    """An energy and its slope, which a model may compute in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "own class":
            return Energy(super().forward(x))
        x = x.clone().requires_grad_()
        energy = super().forward(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + slope.square().mean()


class Energy:
    """An output of a class whose tensors nobody finds."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def train_forces(case: str | None, kind: str) -> dict[str, torch.Tensor]:
    accelerator = None if case is None else Accelerator(**CASES[case].options())
    torch.manual_seed(0)
    model = Forces(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        x = rows("ddp", step) if case is None else own_rows(accelerator, case, step)
        loss = model(x.requires_grad_())
        if kind == "own class":
            (slope,) = torch.autograd.grad(loss.value.sum(), x, create_graph=True)
            loss = loss.value.square().mean() + slope.square().mean()
        loss.backward() if case is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if case is None else state_of(accelerator, model)


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
@pytest.mark.parametrize("case", marked(["ddp", "fsdp2", "tp", "fsdp2 x tp", "deepspeed 3"]))
@pytest.mark.parametrize("kind", ["in forward", "own class"])
def test_a_penalty_on_gradients_that_the_output_does_not_show(world, case, kind):
    if case != "ddp":
        assert_refused(world, "create_graph=True.*DDP or on one process", train_forces, case, kind)
        return
    (state, *_) = world.run(train_forces, case, kind, size=2, timeout_s=60)
    assert_same_weights(state, train_forces(None, kind))


def train_values(case: str) -> None:
    accelerator = Accelerator(**CASES[case].options())
    model = accelerator.prepare(Forces("own class"))
    accelerator.backward(model(own_rows(accelerator, case, 0)).value.square().mean())


@pytest.mark.parametrize("penalty", [False, True])
def test_an_output_that_fsdp1_does_not_look_into_is_an_error(world, penalty):
    train, args = (train_forces, ("own class",)) if penalty else (train_values, ())
    assert_refused(world, "did not find in the output of the model's forward.*DDP", train, "fsdp1", *args)


def penalty(model: torch.nn.Module, start: list[torch.Tensor], kind: str) -> torch.Tensor:
    parameters = [*model.parameters()]
    if kind == "whole":  # as the error says
        parameters = [item.full_tensor() if isinstance(item, DTensor) else item for item in parameters]
    if kind != "distances":
        return sum(item.square().sum() for item in parameters)
    return sum((item - other).square().sum() for item, other in zip(parameters, start, strict=True))


def train_with_decay(case: str, kind: str) -> dict[str, torch.Tensor]:
    """Train with a penalty on weights in the loss; "distances" are those from other, full weights."""
    accelerator = Accelerator(**CASES[case].options())
    model, optimizer = make_layers()
    start = [item.detach() * 0.5 for item in model.parameters()]
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        loss = model(own_rows(accelerator, case, step)).square().mean()
        accelerator.backward(loss + 0.1 * penalty(model, start, kind))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(accelerator, model)


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")
@over_engines
@pytest.mark.parametrize("kind", ["whole", "norms", "distances"])
def test_a_penalty_on_weights(world, case, kind):
    size = CASES[case].size
    fails = None
    if case == "deepspeed 3" or (case, kind) == ("fsdp1", "distances"):
        fails = "size of tensor|invalid gradient"  # torch's: these show empty parameters, and vectors
    elif kind != "whole" and ("fsdp2" in CASES[case].engine or case == "tp"):
        # In backward the error says what to write; in the script's own operation it is torch's.
        fails = "mixed torch.Tensor and DTensor" + (".*full_tensor" if kind == "norms" else "")
    if fails is not None:
        assert world.run(refused, f"(?s){fails}", train_with_decay, case, kind, size=size) == [True] * size
        return
    (state, *_) = world.run(train_with_decay, case, kind, size=CASES[case].size, timeout_s=60)

    model, optimizer = make_layers()
    start = [item.detach() * 0.5 for item in model.parameters()]
    for step in range(STEPS):
        loss = model(rows(case, step)).square().mean()
        (loss + 0.1 * penalty(model, start, kind)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(state, model.state_dict())


BUILT_IN = [case for case in CASES if CASES[case].size > 1 and case not in entry_point_engines()]


def train_split(case: str, names: tuple[str, ...] | None, own: bool) -> dict[str, torch.Tensor]:
    """Train a model whose weights the script has split."""
    accelerator = Accelerator(**CASES[case].options())
    model, _ = make_layers()
    size = accelerator.num_processes
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=names)
    if own:
        mesh = accelerator.torch_device_mesh["tp"]
    parallelize_module(model.middle, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        accelerator.backward(model(own_rows(accelerator, case, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return state_of(accelerator, model)


@pytest.mark.parametrize("names", [("tp",), None], ids=["named", "without names"])
@pytest.mark.parametrize("case", marked(BUILT_IN))
def test_a_model_that_the_script_has_split(world, case, names):
    own = case == "fsdp2 x tp" and names is not None
    if case != "tp" and not own:
        assert_refused(world, "split over .*prepare", train_split, case, names, own)
        return
    (state, *_) = world.run(train_split, case, names, own, size=CASES[case].size, timeout_s=60)

    model, optimizer = make_layers()
    for step in range(STEPS):
        model(rows(case, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(state, model.state_dict())
