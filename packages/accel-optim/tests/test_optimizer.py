from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from accel_optim.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step
from accel_optim.scaler import get_grad_scaler
from accel_optim.window import Window
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "Adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "LBFGS-wolfe": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


def test_every_optimizer_of_torch_is_in_the_list() -> None:
    named = {key.partition("-")[0] for key in OPTIMIZERS}
    there = {
        name
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
    }

    assert named == there


def model_for(name: str) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(1)
    if name == "SparseAdam":
        return nn.Embedding(6, 3, sparse=True), [
            torch.tensor([1, 4, 1]),
            torch.tensor([0, 2]),
            torch.tensor([5]),
        ]
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), list(torch.randn(3, 5, 4))


def train(name: str, wrap: bool, steps: int = 6) -> tuple[nn.Module, Optimizer]:
    model, batches = model_for(name)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    if wrap:
        optimizer = AcceleratedOptimizer(optimizer)
    for index in range(steps):
        batch = batches[index % len(batches)]

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        if name.startswith("LBFGS"):
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
    return model, optimizer


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, NaN included."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert a == b


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_plain_optimizer_bit_for_bit(name: str) -> None:
    plain_model, plain = train(name, wrap=False)
    model, wrapped = train(name, wrap=True)

    assert_same(model.state_dict(), plain_model.state_dict())
    assert_same(wrapped.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dict_continues_bit_for_bit(name: str) -> None:
    model, first = train(name, wrap=True, steps=3)
    again = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = AcceleratedOptimizer(OPTIMIZERS[name](list(again.parameters())))
    second.load_state_dict(torch.load(buffer, weights_only=True))
    _, batches = model_for(name)
    for part, optimizer in ((model, first), (again, second)):

        def closure(part: nn.Module = part, optimizer: Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = part(batches[0]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("LBFGS")])
def test_in_windows_it_equals_the_plain_optimizer_bit_for_bit(name: str) -> None:
    def run(window: Window | None) -> tuple[nn.Module, Optimizer]:
        model, batches = model_for(name)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        if window is not None:
            optimizer = AcceleratedOptimizer(optimizer, gradient_state=window.gradient_state)
        for index in range(9):
            with window or contextlib.nullcontext():
                (model(batches[index % 3]).square().mean() / 3).backward()
                if window is not None or index % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return model, optimizer

    plain_model, plain = run(None)
    model, wrapped = run(Window(GradientState.new(GradientAccumulationPlugin(num_steps=3))))

    assert_same(model.state_dict(), plain_model.state_dict())
    assert_same(wrapped.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("LBFGS")])
def test_with_a_scaler_it_equals_torchs_recipe_bit_for_bit(name: str) -> None:
    def run(wrap: bool) -> tuple[nn.Module, Optimizer, torch.amp.GradScaler, list[bool]]:
        model, batches = model_for(name)
        scaler = get_grad_scaler(device_type="cpu", init_scale=256.0, growth_interval=2)
        inner = OPTIMIZERS[name](list(model.parameters()))
        optimizer = AcceleratedOptimizer(inner, scaler=scaler) if wrap else inner
        skipped = []
        for index in range(6):
            factor = float("inf") if index == 3 else 1.0
            scaler.scale(model(batches[index % 3]).square().mean() * factor).backward()
            if isinstance(optimizer, AcceleratedOptimizer):
                optimizer.step()
                skipped.append(optimizer.step_was_skipped)
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return model, optimizer, scaler, skipped

    plain_model, plain, recipe, _ = run(False)
    model, wrapped, scaler, skipped = run(True)

    assert_same(model.state_dict(), plain_model.state_dict())
    assert_same(wrapped.state_dict(), plain.state_dict())
    assert scaler.state_dict() == recipe.state_dict()
    assert skipped == [False, False, False, True, False, False]


def simple() -> tuple[nn.Parameter, AcceleratedOptimizer, GradientState]:
    parameter = nn.Parameter(torch.ones(2))
    return parameter, AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0)), GradientState()


def test_it_is_a_torch_optimizer() -> None:
    _, optimizer, _ = simple()

    assert isinstance(optimizer, Optimizer)
    assert not optimizer.step_was_skipped


def test_step_and_zero_grad_wait_for_the_boundary() -> None:
    parameter, optimizer, state = simple()
    state._set_sync_gradients(False)
    parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()

    assert parameter.tolist() == [1, 1]
    assert parameter.grad.tolist() == [1, 1]

    state._set_sync_gradients(True)
    optimizer.step()
    assert parameter.tolist() == [0, 0]
    optimizer.zero_grad()
    assert parameter.grad is None


def test_zero_grad_fills_with_zeros_on_demand() -> None:
    parameter, optimizer, _ = simple()
    parameter.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)

    assert parameter.grad.tolist() == [0, 0]


def test_it_follows_the_state_it_was_given() -> None:
    parameter = nn.Parameter(torch.ones(1))
    older = GradientState.new()
    GradientState.new()
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), gradient_state=older)
    parameter.grad = torch.ones(1)
    GradientState()._set_sync_gradients(False)
    optimizer.step()
    assert parameter.item() == 0

    older._set_sync_gradients(False)
    optimizer.step()
    assert parameter.item() == 0


def test_discarding_a_gathered_window_is_reported() -> None:
    parameter, optimizer, state = simple()
    parameter.grad = torch.ones(2)
    state._set_sync_gradients(False)
    optimizer.step()
    state._set_sync_gradients(True)
    with pytest.warns(UserWarning, match=r"Call zero_grad\(\) after step\(\)"):
        optimizer.zero_grad()
    optimizer.zero_grad()  # told once


def test_a_closure_is_not_called_inside_a_window() -> None:
    _, optimizer, state = simple()
    state._set_sync_gradients(False)
    with pytest.warns(UserWarning, match="does not call the closure"):
        assert optimizer.step(lambda: pytest.fail("called")) is None


def test_settable_properties_reach_the_wrapped_optimizer() -> None:
    parameter, optimizer, _ = simple()
    inner = optimizer.optimizer
    optimizer.param_groups = [{**inner.param_groups[0], "lr": 0.25}]
    optimizer.state = {parameter: {"momentum_buffer": torch.ones(2)}}
    optimizer.defaults = {**inner.defaults, "lr": 0.25}

    assert inner.param_groups[0]["lr"] == 0.25
    assert inner.state[parameter]["momentum_buffer"].tolist() == [1, 1]
    assert inner.defaults["lr"] == 0.25
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults


def test_a_parameter_group_added_later_is_trained() -> None:
    _, optimizer, _ = simple()
    late = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(1)
    optimizer.step()

    assert late.item() == 0.5
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [1.0, 0.5]


def test_unknown_attributes_are_the_wrapped_optimizers() -> None:
    _, optimizer, _ = simple()
    optimizer.optimizer.flavour = "vanilla"  # type: ignore[attr-defined]

    assert optimizer.flavour == "vanilla"
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'missing'"):
        _ = optimizer.missing
    assert "SGD" in repr(optimizer)


def test_hooks_run_once_at_the_real_step() -> None:
    parameter, optimizer, state = simple()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("state"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    parameter.grad = torch.ones(2)
    optimizer.step()
    state._set_sync_gradients(False)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())

    assert calls == ["pre", "post", "state", "load"]


def test_it_pickles_and_copies() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AcceleratedOptimizer(torch.optim.Adam([parameter], lr=0.5), device_placement=False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # puts a function into the instance
    parameter.grad = torch.ones(2)
    optimizer.step()
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert isinstance(again, AcceleratedOptimizer)
        assert again.device_placement is False
        assert_same(again.state_dict(), optimizer.state_dict())
        copied = again.param_groups[0]["params"][0]
        assert copied is not parameter
        copied.grad = torch.ones(2)
        again.step()
        assert not torch.equal(copied, parameter)


class ScheduleFree(torch.optim.SGD):
    mode = "train"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_train_and_eval_reach_schedule_free_optimizers() -> None:
    optimizer = AcceleratedOptimizer(ScheduleFree([nn.Parameter(torch.ones(1))], lr=0.1))
    optimizer.eval()
    assert optimizer.mode == "eval"
    optimizer.train()
    assert optimizer.mode == "train"


def test_train_and_eval_do_nothing_for_others() -> None:
    _, optimizer, _ = simple()
    optimizer.train()
    optimizer.eval()


def test_state_is_placed_with_its_parameter() -> None:
    # Stands for a model that moved to a device after its optimizer had a state.
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    state = {"exp_avg": torch.zeros(3), "step": torch.tensor(4.0), "history": [torch.zeros(1)], "name": "x"}
    inner = torch.optim.Adam([parameter])
    inner.state[parameter] = state
    AcceleratedOptimizer(inner, device_placement=False)
    assert inner.state[parameter]["exp_avg"].device.type == "cpu"

    AcceleratedOptimizer(inner)
    placed = inner.state[parameter]

    assert placed["exp_avg"].device.type == "meta"
    assert placed["history"][0].device.type == "meta"
    assert placed["step"].item() == 4  # torch reads the count on the host
    assert placed["name"] == "x"


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_the_step_count_follows_kernels_that_read_it(option: str) -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    inner = torch.optim.Adam([parameter])
    inner.param_groups[0][option] = True
    inner.state[parameter] = {"step": torch.tensor(4.0)}
    AcceleratedOptimizer(inner)

    assert inner.state[parameter]["step"].device.type == "meta"


ON_DEVICE = {
    "Adam": {},
    "Adam-foreach": {"foreach": True},
    "Adam-fused": {"fused": True},
    "Adam-capturable": {"capturable": True},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("moved_after", [False, True])
def test_a_state_dict_from_the_host_continues_on_the_device(name: str, moved_after: bool) -> None:
    """As plain torch does on the device, also for a model that moves there after its optimizer was loaded."""

    def step(parameter: nn.Parameter, optimizer: Optimizer) -> None:
        parameter.grad = torch.arange(4.0, device=parameter.device)
        optimizer.step()

    plain = nn.Parameter(torch.ones(4, device="cuda"))
    alone = torch.optim.Adam([plain], lr=0.1, **ON_DEVICE[name])
    step(plain, alone)
    # Copied: torch's optimizers take over step counts that are on the host already, and continue counting.
    saved = copy.deepcopy(move_to_device(alone.state_dict(), "cpu"))
    again = nn.Parameter(plain.detach().cpu() if moved_after else plain.detach().clone())
    inner = torch.optim.Adam([again], lr=0.1)
    if moved_after:
        inner.load_state_dict(saved)
        again.data = again.data.cuda()
        optimizer = AcceleratedOptimizer(inner)
    else:
        optimizer = AcceleratedOptimizer(inner)
        optimizer.load_state_dict(saved)
    placed = optimizer.state[again]

    assert placed["exp_avg"].device == again.device
    assert placed["step"].device == alone.state[plain]["step"].device
    step(plain, alone)
    step(again, optimizer)
    assert_same(again.detach(), plain.detach())


def test_move_to_device() -> None:
    state = {"a": torch.ones(2), "b": [torch.ones(1), (torch.ones(1), 3)], "c": "text"}
    moved = move_to_device(state, torch.device("meta"))

    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1][0].is_meta
    assert (moved["b"][1][1], moved["c"], list(moved)) == (3, "text", ["a", "b", "c"])


def test_patch_optimizer_step_notes_the_call() -> None:
    _, optimizer, _ = simple()
    step = patch_optimizer_step(optimizer, optimizer.optimizer.step)
    assert not optimizer._step_called
    step()
    assert optimizer._step_called
    assert step.__name__ == "step"


def test_wrapping_twice_is_rejected() -> None:
    _, optimizer, _ = simple()
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer already.*wrap its \.optimizer"):
        AcceleratedOptimizer(optimizer)


def test_wrapping_something_else_is_rejected() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        AcceleratedOptimizer(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_skipped_step_drops_gradients_and_shows_until_the_next_step() -> None:
    model = nn.Linear(2, 1)
    state = GradientState.new(GradientAccumulationPlugin(num_steps=2))
    optimizer = AcceleratedOptimizer(torch.optim.Adam(model.parameters()), gradient_state=state)
    before = copy.deepcopy(model.state_dict())
    window = Window(state)
    for _ in range(2):
        with window:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.skip_step()
            if not state.sync_gradients:
                assert model.weight.grad is not None
                assert not optimizer.step_was_skipped
    assert model.weight.grad is None
    assert optimizer.step_was_skipped
    assert not optimizer.state
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    window.reset()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
