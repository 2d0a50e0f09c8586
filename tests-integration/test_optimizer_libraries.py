"""Optimizers of other libraries, the real ones: schedulefree, bitsandbytes and lomo-optim, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.utils import GradScalerKwargs

# The first use of a library imports it, and with it others, which takes seconds.
pytestmark = [pytest.mark.usefixtures("fresh_state"), pytest.mark.timeout(300)]
SLOW_S = 250


def library(name: str) -> Any:
    """Import it, without the warnings that its own imports may give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    # More than 4096 weights in the first layer: below that, bitsandbytes keeps states in 32 bits.
    return torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Tanh(), torch.nn.Linear(80, 1)).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 4, 64, dtype=dtype, generator=torch.Generator().manual_seed(1))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_equal(left, right)
    else:
        assert a == b


Make = Callable[[Any], Any]

SCHEDULE_FREE: dict[str, Make] = {
    "AdamW": lambda p: library("schedulefree").AdamWScheduleFree(p, lr=0.01, warmup_steps=2),
    "AdamW-foreach": lambda p: library("schedulefree").AdamWScheduleFree(p, lr=0.01, foreach=True),
    "AdamW-reference": lambda p: library("schedulefree").AdamWScheduleFreeReference(p, lr=0.01),
    "AdamW-paper": lambda p: library("schedulefree").AdamWScheduleFreePaper(p, lr=0.01),
    "RAdam": lambda p: library("schedulefree").RAdamScheduleFree(p, lr=0.01),
    "SGD": lambda p: library("schedulefree").SGDScheduleFree(p, lr=0.1),
    "SGD-reference": lambda p: library("schedulefree").SGDScheduleFreeReference(p, lr=0.1),
    "Wrapper": lambda p: library("schedulefree").ScheduleFreeWrapper(torch.optim.SGD(p, lr=0.1)),
    "Wrapper-reference": lambda p: library("schedulefree").ScheduleFreeWrapperReference(
        torch.optim.SGD(p, lr=0.1)
    ),
}
CLOSURES = ("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure")


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_schedule_free(
    model: torch.nn.Module, optimizer: Any, accelerator: Accelerator | None, accumulation: int = 1
) -> list[dict[str, torch.Tensor]]:
    """Two epochs; the weights to evaluate with after each, and those to train on with after the last."""
    seen = []
    for _ in range(2):
        optimizer.train()
        for index, batch in enumerate(batches(12)):
            window = accelerator.accumulate(model) if accelerator else contextlib.nullcontext()
            with window:
                loss = loss_of(model, batch)
                if accelerator:
                    accelerator.backward(loss)
                else:
                    (loss / accumulation).backward()
                if accelerator or (index + 1) % accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.eval()
        seen.append(weights(model))
    optimizer.train()
    return [*seen, weights(model)]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_trains_and_evaluates_as_alone(name, accumulation):
    plain = make_model()
    alone = train_schedule_free(plain, SCHEDULE_FREE[name](plain.parameters()), None, accumulation)

    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = make_model()
    model, optimizer = accelerator.prepare(model, SCHEDULE_FREE[name](model.parameters()))
    through = train_schedule_free(model, optimizer, accelerator)

    assert_equal(through, alone)
    assert not torch.equal(through[1]["0.weight"], through[2]["0.weight"])  # the modes differ


@pytest.mark.parametrize("name", CLOSURES)
def test_schedule_free_with_a_closure(name):
    def run(through_accel: bool) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = getattr(library("schedulefree"), name)(model.parameters(), lr=0.01)
        accelerator = Accelerator()
        if through_accel:
            model, optimizer = accelerator.prepare(model, optimizer)
        for batch in batches(5):

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                return loss

            assert optimizer.step(closure) is not None
        return weights(model)

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Wrapper"])
def test_a_schedule_free_run_resumes_where_it_was(name, tmp_path):
    def make() -> tuple[Accelerator, torch.nn.Module, Any]:
        accelerator, model = Accelerator(), make_model()
        return accelerator, *accelerator.prepare(model, SCHEDULE_FREE[name](model.parameters()))

    def steps(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, data: torch.Tensor) -> None:
        for batch in data:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

    first = make()
    first[2].train()
    steps(*first, batches(6)[:3])
    first[0].save_state(str(tmp_path))
    steps(*first, batches(6)[3:])
    second = make()
    second[2].train()
    second[0].load_state(str(tmp_path))
    steps(*second, batches(6)[3:])

    assert_equal(weights(second[1]), weights(first[1]))
    for _, _, optimizer in (first, second):
        optimizer.eval()
    assert_equal(weights(second[1]), weights(first[1]))


def test_a_schedule_free_step_in_evaluation_mode_is_rejected_by_the_library():
    accelerator, model = Accelerator(), make_model()
    model, optimizer = accelerator.prepare(model, SCHEDULE_FREE["AdamW"](model.parameters()))
    optimizer.eval()
    accelerator.backward(loss_of(model, batches(1)[0]))
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()


def schedule_free_share() -> dict[str, torch.Tensor]:
    accelerator, plain = Accelerator(), make_model(torch.float64)
    optimizer = SCHEDULE_FREE["AdamW"](plain.parameters())
    model, optimizer = accelerator.prepare(plain, optimizer)
    optimizer.train()
    rank, size = accelerator.process_index, accelerator.num_processes
    for batch in batches(4, torch.float64):
        accelerator.backward(loss_of(model, batch[rank::size]))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    return weights(plain)


def test_schedule_free_does_not_depend_on_the_number_of_processes(world):
    alone = schedule_free_share()
    for rank in world.run(schedule_free_share, timeout_s=SLOW_S):
        for name, value in alone.items():
            torch.testing.assert_close(rank[name], value, rtol=0, atol=1e-10)


SHARDED: list[dict[str, Any]] = [
    {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT"},
    {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT", "use_orig_params": False},
]


def schedule_free_in_shards(name: str, options: dict[str, Any] | None, folder: str) -> list[float]:
    """The losses of evaluations: in training, and continuing twice from what was saved in evaluation mode."""
    plugin = None if options is None else FullyShardedDataParallelPlugin(**options)
    accelerator, model = Accelerator(fsdp_plugin=plugin), make_model(torch.float64)
    model, optimizer = accelerator.prepare(model, SCHEDULE_FREE[name](model.parameters()))
    rank, size = accelerator.process_index, accelerator.num_processes
    losses = []

    def evaluate() -> None:
        optimizer.eval()
        with torch.no_grad():
            loss = loss_of(model, batches(5, torch.float64)[4, rank::size])
        losses.append(accelerator.reduce(loss, "mean").item())

    def train() -> None:
        optimizer.train()
        for batch in batches(4, torch.float64):
            accelerator.backward(loss_of(model, batch[rank::size]))
            optimizer.step()
            optimizer.zero_grad()
        evaluate()

    train()
    train()
    accelerator.save_state(folder)
    train()
    optimizer.eval()
    accelerator.load_state(folder)
    evaluate()
    train()
    return losses


@pytest.mark.parametrize("name", ["AdamW", "Wrapper", "Wrapper-reference"])
def test_schedule_free_in_shards_is_as_alone(name, world, tmp_path):
    alone = schedule_free_in_shards(name, None, str(tmp_path / "alone"))
    assert alone[3:] == [alone[1], alone[2]]
    assert len(set(alone)) == 3
    for number, options in enumerate(SHARDED):
        folder = str(tmp_path / str(number))
        ranks = world.run(schedule_free_in_shards, name, options, folder, timeout_s=SLOW_S)
        for losses in ranks:
            assert losses == pytest.approx(alone, rel=1e-9), options


def bnb(name: str, **options: Any) -> Make:
    return lambda p: getattr(library("bitsandbytes").optim, name)(p, lr=0.01, **options)


BITSANDBYTES: dict[str, Make] = {
    "Adagrad8bit": bnb("Adagrad8bit"),
    "Adam8bit": bnb("Adam8bit"),
    "AdamW": bnb("AdamW"),
    "AdamW32bit": bnb("AdamW32bit"),
    "AdamW8bit": bnb("AdamW8bit"),
    "AdEMAMix8bit": bnb("AdEMAMix8bit"),
    "LAMB8bit": bnb("LAMB8bit"),
    "LARS8bit": bnb("LARS8bit", momentum=0.9),
    "Lion8bit": bnb("Lion8bit"),
    "RMSprop8bit": bnb("RMSprop8bit"),
    "SGD8bit": bnb("SGD8bit", momentum=0.9),
}


def train_bitsandbytes(name: str, accelerator: Accelerator | None, accumulation: int = 1) -> tuple[Any, Any]:
    model = make_model()
    optimizer = BITSANDBYTES[name](model.parameters())
    if accelerator:
        model, optimizer = accelerator.prepare(model, optimizer)
    for index, batch in enumerate(batches(6)):
        if accelerator:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            continue
        (loss_of(model, batch) / accumulation).backward()
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes_trains_as_alone(name, accumulation):
    plain, alone = train_bitsandbytes(name, None, accumulation)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer = train_bitsandbytes(name, accelerator)

    assert_equal(weights(model), weights(plain))
    assert_equal(optimizer.state_dict(), alone.state_dict())
    if name.endswith("8bit"):
        assert optimizer.state[model[0].weight]["state1"].dtype is torch.uint8


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_a_bitsandbytes_run_resumes_where_it_was(name, tmp_path):
    accelerator = Accelerator()
    model, optimizer = train_bitsandbytes(name, accelerator)
    accelerator.save_state(str(tmp_path))
    other = Accelerator()
    again = make_model()
    again, resumed = other.prepare(again, BITSANDBYTES[name](again.parameters()))
    other.load_state(str(tmp_path))
    for owner, part, stepper in ((accelerator, model, optimizer), (other, again, resumed)):
        owner.backward(loss_of(part, batches(7)[6]))
        stepper.step()

    assert_equal(weights(again), weights(model))
    assert_equal(resumed.state_dict(), optimizer.state_dict())


def test_an_overflow_leaves_an_8_bit_optimizer_as_it_was():
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=100)]
    )
    model, optimizer = train_bitsandbytes("AdamW8bit", accelerator)
    assert not accelerator.optimizer_step_was_skipped
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    accelerator.backward(loss_of(model, batches(1)[0]) * math.inf)
    optimizer.step()
    optimizer.zero_grad()

    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler.get_scale() == 512.0
    assert_equal((weights(model), optimizer.state_dict()), before)


def lomo(model: torch.nn.Module, **options: Any) -> Any:
    return library("lomo_optim").Lomo(model, lr=0.1, **options)


def plain_sgd(rates: list[float], max_norm: float | None = None) -> dict[str, torch.Tensor]:
    """What LOMO computes: gradient descent."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rate, batch in zip(rates, batches(len(rates)), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss_of(model, batch).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("way", ["lomo_backward", "backward with learning_rate", "the scheduler's rate"])
def test_lomo_steps_in_backward_with_the_learning_rate(way):
    accelerator, model = Accelerator(), make_model()
    optimizer = lomo(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for batch in batches(4):
        rates.append(scheduler.get_last_lr()[0])
        loss = loss_of(model, batch)
        if way == "lomo_backward":
            accelerator.lomo_backward(loss, rates[-1])
        elif way == "backward with learning_rate":
            accelerator.backward(loss, learning_rate=rates[-1])
        else:
            accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())

    assert rates == [0.1, 0.05, 0.025, 0.0125]
    for name, value in plain_sgd(rates).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-6, atol=1e-7)


def test_lomo_clips_by_its_own_norm():
    accelerator, model = Accelerator(), make_model()
    model, optimizer = accelerator.prepare(model, lomo(model, clip_grad_norm=0.5))
    for batch in batches(3):
        loss = loss_of(model, batch)
        optimizer.grad_norm(loss)
        accelerator.lomo_backward(loss, 0.1)

    for name, value in plain_sgd([0.1] * 3, max_norm=0.5).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-5, atol=1e-6)


def test_clipping_what_lomo_has_used_up_already_is_reported():
    accelerator, model = Accelerator(), make_model()
    model, _ = accelerator.prepare(model, lomo(model))
    accelerator.backward(loss_of(model, batches(1)[0]))
    with pytest.warns(UserWarning, match=r"Clipping is ignored: Lomo steps .*clip_grad_norm=") as told:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="Clipping is ignored: Lomo"):
        accelerator.clip_grad_value_(next(model.parameters()), 1.0)

    other = torch.nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    assert accelerator.clip_grad_norm_(other.parameters(), 1.0) > 1


def test_lomo_in_bf16_trains():
    accelerator, model = Accelerator(mixed_precision="bf16"), make_model()
    model, _ = accelerator.prepare(model, lomo(model))
    losses = []
    for _ in range(8):
        loss = loss_of(model, batches(1)[0])
        losses.append(loss.item())
        accelerator.lomo_backward(loss, 0.003)
    assert losses[-1] < 0.8 * losses[0]


def test_lomo_is_rejected_where_its_steps_would_be_wrong():
    model = make_model()
    with pytest.raises(ValueError, match=r"Lomo steps during .* Use mixed_precision='bf16' or 'no'"):
        Accelerator(mixed_precision="fp16").prepare(model, lomo(model))

    accelerator, model = Accelerator(gradient_accumulation_steps=4), make_model()
    model, _ = accelerator.prepare(model, lomo(model))
    before = weights(model)
    with accelerator.accumulate(model), pytest.raises(ValueError, match="accumulates no gradients"):
        accelerator.backward(loss_of(model, batches(1)[0]))
    assert_equal(weights(model), before)

    accelerator, model = Accelerator(), make_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="No prepared optimizer steps during the backward pass"):
        accelerator.lomo_backward(loss_of(model, batches(1)[0]), 0.1)

    accelerator, model = Accelerator(), make_model()
    model, _ = accelerator.prepare(model, lomo(model))
    with pytest.raises(TypeError, match="backward got retain_graph=True"):
        accelerator.backward(loss_of(model, batches(1)[0]), retain_graph=True)


def lomo_on_two() -> str:
    model = make_model()
    with pytest.raises(ValueError, match="Lomo") as error:
        Accelerator().prepare(model, lomo(model))
    return str(error.value)


def test_lomo_on_several_processes_is_rejected(world):
    assert "before the gradients of 2 processes are averaged" in world.run(lomo_on_two, timeout_s=SLOW_S)[0]


def ada_lomo(model: torch.nn.Module) -> Any:
    return library("lomo_optim").AdaLomo(model, lr=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="AdaLomo puts its state on CUDA, wherever the model is"
)
def test_ada_lomo_trains():
    accelerator, model = Accelerator(), make_model().cuda()
    plain = copy.deepcopy(model)
    alone = ada_lomo(plain)
    model, optimizer = accelerator.prepare(model, ada_lomo(model))
    for batch in batches(4).cuda():
        accelerator.lomo_backward(loss_of(model, batch), 0.01)
        alone.fused_backward(loss_of(plain, batch), 0.01)
        optimizer.step()
    assert_equal(weights(model), weights(plain))
