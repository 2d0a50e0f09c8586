"""The guard: what it finds, what all processes do about it, and that nothing of it stays."""

from __future__ import annotations

import gc
import math
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.observe.guard import GuardError, GuardKwargs
from accel.observe.guard.report import Spikes
from accel_optim.handlers import GradScalerKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        # Registered in another order than they run in.
        self.last, self.first = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def make(*handlers: Any, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=list(handlers), **options)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def one_step(parts: tuple[Any, ...], factor: float = 1.0, clip: bool = False) -> None:
    accelerator, model, optimizer, schedule = parts
    with accelerator.accumulate(model):
        loss = model(torch.ones(4, 2)).square().mean() * factor
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def weights(model: torch.nn.Module) -> list[float]:
    return [value for item in model.parameters() for value in item.detach().flatten().tolist()]


def test_a_loss_that_is_not_finite_is_warned_of_and_training_continues():
    parts = make(GuardKwargs())
    one_step(parts)
    with pytest.warns(UserWarning, match=r"Step 2: the loss is nan on rank 0; the gradients of 4 of 4 para"):
        one_step(parts, math.nan)
    assert any(map(math.isnan, weights(parts[1])))  # it stepped


def test_a_step_is_skipped_with_its_schedule_and_gradients():
    parts = accelerator, model, _, schedule = make(GuardKwargs(action="skip"))
    one_step(parts)
    before, rate = weights(model), schedule.get_last_lr()
    with pytest.warns(UserWarning, match=r"the loss is inf on rank 0.* skip the step \(1 so far\)\."):
        one_step(parts, math.inf)
    assert weights(model) == before
    assert schedule.get_last_lr() == rate
    assert accelerator.optimizer_step_was_skipped
    assert all(item.grad is None for item in model.parameters())
    one_step(parts)
    assert weights(model) != before
    assert not accelerator.optimizer_step_was_skipped


def test_stop_raises_before_the_step():
    parts = make(GuardKwargs(action="stop"))
    before = weights(parts[1])
    with pytest.raises(GuardError, match=r"Step 1: the loss is nan on rank 0"):
        one_step(parts, math.nan)
    assert weights(parts[1]) == before


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["first.weight", "last.bias"])
def test_the_parameter_whose_gradient_is_not_finite_is_named(name: str, clip: bool):
    parts = make(GuardKwargs(action="skip"))
    one_step(parts)
    parts[1].get_parameter(name).register_hook(lambda gradient: gradient * math.inf)
    with pytest.warns(UserWarning, match=rf"of 1 of 4 parameters are not finite.* first that of {name}"):
        one_step(parts, clip=clip)


def spoil(module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient * math.nan)


def test_a_large_gradient_that_is_finite_is_left_alone():
    parts = make(GuardKwargs(action="stop"))
    parts[1].last.bias.register_hook(lambda gradient: torch.full_like(gradient, 1e30))  # its square is not
    one_step(parts)


@pytest.mark.parametrize("broken", [0, 1])
def test_the_first_parameter_is_the_one_that_backward_reaches_first(broken: int):
    parts = make(GuardKwargs(action="skip"))
    one_step(parts)
    if broken == 0:  # from the end on: the last layer in backward's order, not in the model's
        first = "last"
    else:
        first = "first"
        parts[1].first.register_forward_hook(spoil)
    with pytest.warns(UserWarning, match=rf"first that of {first}\.(weight|bias)\.") as seen:
        one_step(parts, math.nan if broken == 0 else 1.0)
    assert len(seen) == 1


def test_without_a_prepared_optimizer_it_says_so_once_and_keeps_nothing(tmp_path: Any):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs(bundle=tmp_path)])
    model, loader = accelerator.prepare(Net(), torch.utils.data.DataLoader(torch.ones(6, 2)))
    batches = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch).sum())
            batches.append(weakref.ref(batch))
            del batch
    (warning,) = seen
    assert "looks at the steps of prepared optimizers, and none is prepared" in str(warning.message)
    gc.collect()
    assert sum(item() is not None for item in batches) <= 1  # the loader's last one
    accelerator.end_training()


class InBackward(torch.optim.SGD):
    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()


def test_an_optimizer_that_steps_in_backward_is_said_not_to_be_looked_at():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs()])
    with pytest.warns(UserWarning, match="does not look at the steps of InBackward, which steps in backward"):
        optimizer = accelerator.prepare(InBackward(Net().parameters(), 0.1))
    accelerator.backward(optimizer.param_groups[0]["params"][0].sum() * math.nan)
    optimizer.step()  # a warning would be an error here


def test_only_losses_are_looked_at_on_request():
    parts = make(GuardKwargs(action="stop", check_gradients=False))
    parts[1].last.bias.register_hook(lambda gradient: gradient * math.inf)
    one_step(parts)
    with pytest.raises(GuardError):
        one_step(parts, math.nan)


def test_a_window_is_judged_at_its_end_and_the_micro_batch_is_named():
    parts = make(GuardKwargs(action="skip"), gradient_accumulation_steps=3)
    model, before = parts[1], weights(parts[1])
    one_step(parts)
    one_step(parts, math.nan)
    with pytest.warns(UserWarning, match=r"Step 1: the loss of backward pass 2 of 3 is nan on rank 0"):
        one_step(parts)
    assert weights(model) == before
    for _ in range(3):
        one_step(parts)
    assert weights(model) != before


def test_a_spike_is_a_multiple_of_the_median():
    parts = make(GuardKwargs(action="skip", spike=5.0), gradient_accumulation_steps=2)
    parts[2].optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2 * 10):
        one_step(parts)
    one_step(parts, 2.0)
    one_step(parts, 2.0)
    one_step(parts, 20.0)
    with pytest.warns(
        UserWarning, match=r"Step 12: the loss is 0\.936\d+ on rank 0, with a median of 0\.0891\d+"
    ):
        one_step(parts, 1.0)


def test_what_counts_in_the_median():
    spikes = Spikes(3.0, 12)
    for _ in range(9):
        assert spikes.find([1.0, 1.0]) == [False, False]
    assert spikes.find([100.0, 1.0]) == [False, False]  # too few before
    assert spikes.find([3.5, math.nan]) == [True, False]
    assert spikes.find([-50.0, 2.9]) == [False, False]
    around_zero = Spikes(3.0, 12)
    for _ in range(12):
        around_zero.find([-1.0])
    assert around_zero.find([5.0]) == [False]


def test_fp16_overflow_is_left_to_the_scaler_until_the_scale_is_1():
    scaler = GradScalerKwargs(init_scale=4.0, growth_interval=1000)
    parts = accelerator, model, *_ = make(GuardKwargs(action="stop"), scaler, mixed_precision="fp16")
    model.last.bias.register_hook(lambda gradient: gradient * math.inf)
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(parts)
        assert accelerator.optimizer_step_was_skipped
        one_step(parts)
    assert accelerator.scaler.get_scale() == 1.0
    with pytest.raises(GuardError, match=r"not finite at a loss scale of 1, .* first that of last\.bias"):
        one_step(parts)
    assert weights(model) == before


def test_fp16_loss_that_is_not_finite_is_reported_and_the_scale_stays():
    scaler = GradScalerKwargs(init_scale=4.0)
    parts = accelerator, *_ = make(GuardKwargs(action="skip"), scaler, mixed_precision="fp16")
    with pytest.warns(UserWarning, match="the loss is nan"):
        one_step(parts, math.nan)
    assert accelerator.scaler.get_scale() == 4.0
    one_step(parts)
    assert not accelerator.optimizer_step_was_skipped


def test_two_optimizers_are_judged_by_their_own_gradients_and_the_common_loss():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs(action="skip")])
    model = Net()
    one, two = (torch.optim.SGD(part.parameters(), 0.1) for part in (model.first, model.last))
    model, one, two = accelerator.prepare(model, one, two)
    model.first.bias.register_hook(lambda gradient: gradient * math.inf)
    before = weights(model.first), weights(model.last)

    def both(factor: float) -> None:
        accelerator.backward(model(torch.ones(4, 2)).mean() * factor)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="of 1 of 2 parameters"):
        both(1.0)
    assert weights(model.first) == before[0]
    assert weights(model.last) != before[1]
    before = weights(model.first), weights(model.last)
    with pytest.warns(UserWarning, match="the loss is nan"):
        both(math.nan)
    assert (weights(model.first), weights(model.last)) == before


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_closure_is_judged_before_a_parameter_changes(kind: Any, action: str):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs(action=action)])
    model = Net()
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1))
    factors: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean() * (factors.pop(0) if factors else 1.0)
        accelerator.backward(loss)
        return loss.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
    before, factors = weights(model), [math.nan]
    said = "Step 2: the loss is nan on rank 0; the gradients of 4 of 4 parameters"
    told = (
        pytest.raises(GuardError, match=said) if action == "stop" else pytest.warns(UserWarning, match=said)
    )
    with told:
        optimizer.step(closure)
    assert weights(model) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
    assert weights(model) != before
    assert all(map(math.isfinite, weights(model)))


def test_what_a_closure_computes_later_in_a_step_counts_in_none():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GuardKwargs(action="stop")])
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2))
    factors = [1.0, math.inf]  # the second is that of weights which the optimizer tries
    kept = [item.detach().clone() for item in model.parameters()]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean() * (factors.pop(0) if factors else 1.0)
        accelerator.backward(loss)
        return loss.detach()

    optimizer.step(closure)
    assert not factors
    with torch.no_grad():
        for item, value in zip(model.parameters(), kept, strict=True):
            item.copy_(value)
    optimizer.state.clear()
    optimizer.step(closure)


def test_a_step_without_a_new_backward_pass_is_not_judged_again():
    parts = accelerator, model, optimizer, _ = make(GuardKwargs(action="skip"))
    with pytest.warns(UserWarning, match="skip the step"):
        one_step(parts, math.nan)
    before = weights(model)
    for item in model.parameters():
        item.grad = torch.ones_like(item)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert weights(model) != before
    assert not accelerator.optimizer_step_was_skipped


def test_a_row_of_bad_steps_warns_of_the_first_ones_and_each_hundredth():
    parts = make(GuardKwargs(action="skip"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(100):
            one_step(parts, math.nan)
    assert len(seen) == 11
    assert "(100 so far). It is number 100 in a row." in str(seen[-1].message)


def test_a_schedule_of_the_prepared_optimizer_can_be_made():
    accelerator, _, optimizer, _ = make(GuardKwargs())
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize(
    "given",
    [
        {"action": "ignore"},
        {"spike": 0.5},
        {"spike": "10"},
        {"max_bundles": 0},
        {"max_bundles": True},
        {"spike_window": 2},
        {"bundle": 3},
    ],
)
def test_settings_out_of_range_are_errors(given: dict[str, Any]):
    with pytest.raises(ValueError, match=f"GuardKwargs got {next(iter(given))}="):
        GuardKwargs(**given)


def test_the_environment_turns_it_on_and_arguments_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_GUARD", "skip")
    observers = [type(item).__name__ for item in make()[0].run.observers]
    assert [name for name in observers if name != "TrackerSession"] == ["Guard"]
    assert GuardKwargs().action == "skip"
    assert GuardKwargs(action="stop").action == "stop"


def test_nothing_is_attached_when_it_is_off_or_has_stopped():
    accelerator, *_ = off = make()
    one_step(off)
    assert accelerator.gradient_state.events is None
    parts = accelerator, model, optimizer, _ = make(GuardKwargs(action="stop"))
    assert model.first.weight._post_accumulate_grad_hooks
    one_step(parts)
    assert not model.first.weight._post_accumulate_grad_hooks
    assert "step" not in vars(optimizer)
    assert "reduce_accumulated" not in vars(accelerator.engine)
    accelerator.end_training()
    assert accelerator.gradient_state.events is None
    one_step(parts, math.nan)


def on_ranks(action: str, where: str, engine: str) -> Any:
    """Four steps; in the third, something is wrong on the last process alone."""
    plugin: dict[str, Any] = {}
    if engine == "fsdp2":
        plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    parts = accelerator, model, optimizer, _ = make(GuardKwargs(action=action), **plugin)
    kept = [item.detach().clone() for item in optimizer.param_groups[0]["params"]]
    error, changed = "", []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            for step in range(4):
                is_bad = step == 2 and accelerator.is_last_process
                if step == 2 and where == "gradient":
                    name = "last.bias"
                    parameter = accelerator.unwrap_model(model).get_parameter(name)
                    if engine == "ddp" and is_bad:
                        parameter.register_hook(lambda gradient: gradient * math.inf)
                one_step(parts, math.nan if is_bad and where == "loss" else 1.0)
                now = [item.detach().clone() for item in optimizer.param_groups[0]["params"]]
                changed.append(any(not torch.equal(a, b) for a, b in zip(kept, now, strict=True)))
                kept = now
        except GuardError as raised:
            error = str(raised)
    finite = all(bool(torch.isfinite(getattr(item, "_local_tensor", item)).all()) for item in kept)
    accelerator.end_training()
    texts = [str(item.message) for item in seen if "Step" in str(item.message)]
    return changed, texts, error, finite


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_all_processes_skip_what_is_wrong_on_one(world: Any, engine: str):
    first, last = world.run(on_ranks, "skip", "loss", engine)
    assert first[0] == last[0] == [True, True, False, True]
    assert first[3]
    assert last[3]
    assert len(first[1]) == 1
    assert "Step 3: the loss is nan on rank 1; the gradients of 4 of 4 para" in first[1][0]
    assert not last[1]  # the main process speaks for all


def test_all_processes_skip_a_gradient_of_one(world: Any):
    found = world.run(on_ranks, "skip", "gradient", "ddp")
    assert [item[0][:3] for item in found] == [[True, True, False]] * 2
    assert (
        "of 1 of 4 parameters are not finite, in the order of backward first that of last.b" in found[0][1][0]
    )


def test_all_processes_stop(world: Any):
    for changed, _, error, finite in world.run(on_ranks, "stop", "loss", "ddp"):
        assert changed == [True, True]
        assert error.startswith("Step 3: the loss is nan on rank 1;")
        assert finite


def test_all_processes_continue_with_a_warning(world: Any):
    first, last = world.run(on_ranks, "warn", "loss", "ddp")
    assert "the loss is nan on rank 1" in first[1][0]
    assert not first[3]
    assert not last[3]


def test_no_code_of_observers_runs_in_a_step_when_all_are_off():
    parts = make()
    one_step(parts)
    calls: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "accel/observe" in frame.f_code.co_filename.replace("\\", "/"):
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        one_step(parts, clip=True)
        off = len(calls)
        one_step(make(GuardKwargs()))
    finally:
        sys.setprofile(before)
    assert off == 0
    assert "before_step" in calls


def uneven(num_steps: list[int]) -> tuple[list[str], list[float]]:
    """Steps until this process is out of data; in the first one, all losses are NaN."""
    accelerator, model, *_ = parts = make(GuardKwargs(action="skip", bundle="never"))
    with warnings.catch_warnings(record=True) as seen, accelerator.join_uneven_inputs([model]):
        warnings.simplefilter("always")
        for step in range(num_steps[accelerator.process_index]):
            one_step(parts, math.nan if step == 0 else 1.0)
    accelerator.end_training()
    return [str(item.message) for item in seen if "Step" in str(item.message)], weights(model)


def test_processes_that_are_out_of_data_are_not_waited_for(world: Any):
    (texts, here), (_, there) = world.run(uneven, [4, 2])
    assert len(texts) == 1
    assert "the loss is nan on rank 0" in texts[0]
    assert "No bundle is written inside join_uneven_inputs" in texts[0]
    assert here == there
    assert all(map(math.isfinite, here))
