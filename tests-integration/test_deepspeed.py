"""DeepSpeed on two gloo workers; what all engines share is in test_engine_contract.py."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import logging
import logging.handlers
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.engines.deepspeed.placeholders import DummyOptim, DummyScheduler
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.deepspeed.runtime import GatheredParameters
from accel.engines.deepspeed.wrappers import DeepSpeedSchedulerWrapper
from accel.observe.guard import GuardKwargs
from accel_ckpt.errors import CheckpointError
from accel_ops.memory import find_executable_batch_size
from accel_ops.modules import has_compiled_regions
from accel_state.handlers import TorchDynamoPlugin
from accel_world.warned import warns_once

pytestmark = [
    pytest.mark.timeout(400),  # importing DeepSpeed on a busy machine
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(  # of torch's newer names, in DeepSpeed's collectives
        "ignore:`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is dep:FutureWarning"
    ),
]

SHARDED = (1, 2, 3)


def warm() -> None:
    # Each takes seconds, once in each worker; ZeRO imports the second one, whatever the optimizer.
    import deepspeed  # noqa: F401
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def _imported(world) -> None:
    world.run(warm, timeout_s=300, env={"DS_ACCELERATOR": "cpu"}, init=False)


class Net(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 5, generator=generator), torch.randn(count, 3, generator=generator)
    )


def settings(stage: int, **others: Any) -> dict[str, Any]:
    """A configuration; at stage 3 small parameters are split too."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
    return {
        "zero_optimization": zero | others.pop("zero", {}),
        "train_micro_batch_size_per_gpu": "auto",
        **others,
    }


def make(stage: int, steps: int = 1, precision: str = "no", **others: Any) -> Accelerator:
    plugin = DeepSpeedPlugin(settings(stage, **others), zero3_save_16bit_model=True)
    return Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=steps, mixed_precision=precision)


def prepared(accelerator: Accelerator, batch_size: int = 2) -> tuple[Any, Any, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=batch_size))


def trained(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    batches: Iterator[Any],
    count: int,
    scheduler: Any = None,
) -> list[float]:
    losses = []
    for x, y in itertools.islice(batches, count):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def plain(batch_size: int = 4, count: int = 6, rates: list[float] | None = None) -> list[float]:
    """The same training without accel, on one process."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step, (x, y) in enumerate(itertools.islice(DataLoader(data(), batch_size=batch_size), count)):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Optimizers and schedules


def with_stand_ins(stage: int) -> tuple[list[float], list[float], dict[str, Any], list[str]]:
    config = settings(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
        train_batch_size="auto",
        gradient_accumulation_steps="auto",
    )
    config["scheduler"]["params"] |= {"warmup_min_lr": "auto", "warmup_type": "linear"}
    plugin = DeepSpeedPlugin(config)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = Net()
    optimizer = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.01)
    # In the steps of one process, as all schedules are: here 6 steps of 2 processes.
    scheduler = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=4)
    loader = DataLoader(data(), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rates, losses = [], []
    batches = iter(loader)
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        losses += trained(accelerator, model, optimizer, batches, 1, scheduler)
    kinds = [type(item).__name__ for item in (optimizer, scheduler)]
    filled = plugin.deepspeed_config
    accelerator.end_training()
    return losses, rates, filled, kinds


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeeds_own_optimizer_and_schedule(world, stage):
    for losses, rates, filled, kinds in world.run(with_stand_ins, stage, timeout_s=100):
        assert kinds == ["DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"]
        assert filled["optimizer"]["params"] == {"lr": 0.02, "weight_decay": 0.01}
        assert filled["scheduler"]["params"] == {
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.02,
            "warmup_num_steps": 2,
            "total_num_steps": 6,
            "warmup_type": "linear",
        }
        assert filled["train_batch_size"] == 4
        assert filled["gradient_accumulation_steps"] == 1
        # DeepSpeed's schedules give the first step twice.
        assert rates == pytest.approx([0, 0, 0.01, 0.02, 0.015, 0.01])
        assert losses == pytest.approx(plain(rates=rates), rel=1e-5)


def with_a_callable() -> tuple[list[float], int]:
    accelerator = make(2, optimizer={"type": "AdamW", "params": {"lr": 0.02}})
    model = Net()
    optimizer = DummyOptim(model.parameters())
    scheduler = DummyScheduler(
        optimizer,
        lr_scheduler_callable=lambda real: torch.optim.lr_scheduler.LambdaLR(real, lambda step: 0.5**step),
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(scheduler, DeepSpeedSchedulerWrapper)
    assert accelerator.prepare_scheduler(scheduler) is scheduler
    x, y = data(4).tensors
    rates = []
    for _ in range(3):
        rates.append(scheduler.get_last_lr()[0])
        trained(accelerator, model, optimizer, iter([(x, y)]), 1, scheduler)
    return rates, len(accelerator.run.prepared.schedulers)


def test_a_stand_in_can_bring_the_schedule(world):
    assert world.run(with_a_callable, timeout_s=100) == [([0.02, 0.01, 0.005], 1)] * 2


# Gradients


def windows(stage: int, offload: dict[str, Any], own_norm: float | None) -> tuple[list[float], list[float]]:
    """Windows of 3 and then 1 micro-batches (the loader ends), clipped."""
    accelerator = make(
        stage, steps=3, zero=offload, **({} if own_norm is None else {"gradient_clipping": own_norm})
    )
    # SGD, as Adam's first step does not depend on the size of gradients, and so not on clipping.
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=3))
    norms, losses = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return losses, norms


def plain_windows(max_norm: float) -> tuple[list[float], list[float]]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for step, (x, y) in enumerate(DataLoader(data(), batch_size=6), 1):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        (loss / 3).backward()
        if step in (3, 4):
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS = {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "offload", "own_norm"),
    [(1, {}, 0.1), (2, OFFLOADED, None), (3, OFFLOADED | PARAMETERS, None), (3, OFFLOADED, 0.1)],
)
def test_windows_and_clipping_with_offloaded_states_and_a_smaller_norm_of_the_configuration(
    world, stage, offload, own_norm
):
    expected = plain_windows(0.3 if own_norm is None else own_norm)

    for losses, norms in world.run(windows, stage, offload, own_norm, timeout_s=100):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=1e-4)


def weighted(
    stage: int, others: dict[str, Any], precision: str, zeros: bool
) -> tuple[float, list[torch.Tensor]]:
    """One window of two micro-batches with different weights on each process, then plain SGD."""
    accelerator = make(stage, steps=2, precision=precision, **others)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x, y = (part.chunk(4) for part in data(12).tensors)
    norm = 0.0
    for step in range(2):
        index = 2 * accelerator.process_index + step
        weight = 0 if zeros else index + 1
        with accelerator.accumulate(model):
            loss = weight * F.mse_loss(model(x[index]), y[index])
            accelerator.backward(loss, weight=weight)
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), float("inf")))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return norm, [value.float() for value in state.values()]


def plain_weighted(zeros: bool) -> tuple[float, list[torch.Tensor]]:
    model = Net()
    x, y = (part.chunk(4) for part in data(12).tensors)
    for index in range(0 if zeros else 4):
        ((index + 1) / 10 * F.mse_loss(model(x[index]), y[index])).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return float(norm), list(model.state_dict().values())


HIGH = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("stage", "others", "precision", "zeros"),
    [
        *((stage, {}, "no", False) for stage in range(4)),
        *((stage, {}, "no", True) for stage in (0, 1, 3)),
        (2, {"zero": OFFLOADED}, "no", False),
        (1, HIGH, "bf16", False),  # DeepSpeed has its own optimizer for it
        (2, HIGH, "bf16", False),
    ],
)
def test_a_weighted_window_is_exact(world, stage, others, precision, zeros):
    norm, state = plain_weighted(zeros)
    tolerance = 1e-5 if precision == "no" else 2e-2

    own = world.run(weighted, stage, others, precision, zeros, timeout_s=100)

    assert [found for found, _ in own] == pytest.approx([norm, norm], rel=tolerance)
    for value, expected in zip(own[0][1], state, strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


def discarded(stage: int, at_end: bool, offload: bool) -> list[torch.Tensor]:
    """Gradients that are thrown away, at the window's end or inside of it, leave nothing behind."""
    accelerator = make(stage, zero=OFFLOADED if offload else {})
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x, y = (part.chunk(3) for part in data(12).tensors)
    for index in range(2):
        if at_end:
            accelerator.backward(F.mse_loss(model(x[index]), y[index]))
            optimizer.zero_grad()
        else:
            with accelerator.no_sync(model):
                accelerator.backward(F.mse_loss(model(x[index]), y[index]))
    if not at_end:
        with warns_once(UserWarning, match="discards the gradients"):
            optimizer.zero_grad()
    for _ in range(2):
        accelerator.backward(F.mse_loss(model(x[2]), y[2]))
        optimizer.step()
    return [value.clone() for value in accelerator.get_state_dict(model).values()]


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(("stage", "offload"), [*((stage, False) for stage in range(4)), (2, True)])
def test_gradients_that_are_thrown_away_leave_nothing_behind(world, stage, offload, at_end):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = (part.chunk(3)[2] for part in data(12).tensors)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    (state, *_) = world.run(discarded, stage, at_end, offload, timeout_s=100)

    for value, expected in zip(state, model.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def guarded(stage: int) -> tuple[list[bool], list[bool], list[str]]:
    """Whether each of four steps changed weights, and was skipped, and the warnings; one loss is NaN."""
    guard = GuardKwargs(action="skip", check_gradients=False)
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage)), kwargs_handlers=[guard]
    )
    model, optimizer, loader = prepared(accelerator)
    changed, skipped = [], []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step, (inputs, targets) in enumerate(itertools.islice(loader, 4)):
            before = copy.deepcopy(accelerator.get_state_dict(model))
            is_bad = step == 2 and accelerator.is_last_process
            loss = F.mse_loss(model(inputs), targets) * (float("nan") if is_bad else 1.0)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            after = accelerator.get_state_dict(model)
            changed.append(any(not torch.equal(after[name], before[name]) for name in before))
            skipped.append(accelerator.optimizer_step_was_skipped)
    accelerator.end_training()
    return changed, skipped, [str(item.message) for item in seen if str(item.message).startswith("Step")]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_with_a_loss_that_is_not_finite_is_skipped(world, stage):
    for rank, (changed, skipped, said) in enumerate(
        world.run(guarded, stage, env={"DS_ACCELERATOR": "cpu"}, init=False)
    ):
        assert changed == [True, True, False, True]
        assert skipped == [False, False, True, False]
        expected = "Step 3: the loss is nan on rank 1. All processes skip the step (1 so far)."
        assert said == ([expected] if rank == 0 else [])


def refusals(stage: int) -> list[str]:
    accelerator = make(stage)
    model, optimizer, _ = prepared(accelerator)
    x, y = data(4).tensors
    said = []

    def refused(kind: type[Exception], function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as error:
            function(*args, **kwargs)
        said.append(str(error.value))

    accelerator.backward(F.mse_loss(model(x), y))
    refused(ValueError, accelerator.clip_grad_value_, model.parameters(), 0.1)
    refused(ValueError, accelerator.clip_grad_norm_, model.parameters(), 1.0, norm_type=1)
    refused(ValueError, accelerator.clip_grad_norm_, model.module.first.parameters(), 1.0)
    refused(RuntimeError, accelerator.backward, F.mse_loss(model(x), y))
    refused(ValueError, optimizer.step, lambda: None)
    optimizer.step()
    refused(ValueError, accelerator.backward, F.mse_loss(model(x), y), scale_wrt_gas=True)
    other = Net()
    refused(ValueError, accelerator.prepare, other, torch.optim.SGD(other.parameters(), lr=0.1))
    return said


@pytest.mark.parametrize("stage", SHARDED)
def test_what_deepspeed_cannot_do_is_rejected_with_the_alternative(world, stage):
    for said in world.run(refusals, stage, timeout_s=100):
        for text, hint in zip(
            said,
            (
                "Use clip_grad_norm_, or zero_stage=0",
                "clips by the 2-norm",
                r"got 2 of the 4 parameters that are trained (not second.weight)",
                "under accelerator.no_sync(model)",
                "that needs no closure",
                "the Accelerator divides it",
                "Make an Accelerator with the same plugin(s) for each pair",
            ),
            strict=True,
        ):
            assert hint in text


class Odd(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "scalar":
            self.gain = torch.nn.Parameter(torch.tensor(1.5))
        else:
            self.table = torch.nn.Embedding(4, 4, sparse=True)


def refused_before_anything_starts(stage: int) -> list[str]:
    said = []
    for make_optimizer in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SGD):
        for kind in ("scalar", "sparse") if make_optimizer is torch.optim.SGD else (None,):
            model = Net() if kind is None else Odd(kind)
            accelerator = make(stage)
            with pytest.raises(ValueError) as error:
                accelerator.prepare(
                    model, make_optimizer(model.parameters()), DataLoader(data(4), batch_size=2)
                )
            said.append(str(error.value))
    return said


def test_what_deepspeed_would_train_wrongly_or_fail_on_is_rejected(world):
    for adafactor, lbfgs, scalar, sparse in world.run(refused_before_anything_starts, 2, timeout_s=100):
        assert "a step of Adafactor needs full" in adafactor
        assert "a step of LBFGS needs full" in lbfgs
        assert "Odd.gain cannot be prepared under deepspeed zero 2" in scalar
        assert "table of Odd has sparse=True" in sparse


def twice_after_one_forward() -> bool:
    accelerator = make(3)
    model, _, _ = prepared(accelerator)
    x, y = data(4).tensors
    out = model(x)
    with accelerator.no_sync(model):
        accelerator.backward(F.mse_loss(out, y), retain_graph=True)
    with pytest.raises(RuntimeError, match="run the model once for each of them"):
        accelerator.backward(out.sum())
    return True


def test_two_backward_passes_of_one_forward_are_rejected_where_deepspeed_would_lose_one(world):
    assert world.run(twice_after_one_forward, timeout_s=100) == [True, True]


# Configuration


def mismatched() -> str:
    config = settings(
        2,
        train_batch_size=16,
        gradient_accumulation_steps=4,
        optimizer={"type": "AdamW", "params": {"lr": 0.1, "eps": "auto"}},
        scheduler={"type": "WarmupLR", "params": {}},
    )
    config["train_micro_batch_size_per_gpu"] = 8
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config), gradient_accumulation_steps=2)
    model = Net()
    optimizer = DummyOptim(model.parameters(), lr=0.2)
    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda real: real)
    with pytest.raises(ValueError, match="does not fit") as error:
        accelerator.prepare(model, optimizer, scheduler, DataLoader(data(), batch_size=2))
    return str(error.value)


def test_an_error_lists_every_difference_at_once(world):
    lines = world.run(mismatched, timeout_s=100)[0].splitlines()

    assert [line.partition("=")[0].partition(" is ")[0].partition(":")[0] for line in lines[1:-1]] == [
        "- scheduler",
        "- train_micro_batch_size_per_gpu",
        "- train_batch_size",
        "- gradient_accumulation_steps",
        "- optimizer.params.lr",
        "- optimizer.params.eps",
    ]


def from_environment(file: str) -> tuple[int, int, str, dict[str, Any], list[float]]:
    accelerator = Accelerator()
    model, optimizer, loader = prepared(accelerator, batch_size=1)
    losses = trained(accelerator, model, optimizer, iter(loader), 8)
    plugin = accelerator.deepspeed_plugin
    found = (plugin.zero_stage, accelerator.gradient_accumulation_steps, accelerator.mixed_precision)
    filled = plugin.deepspeed_config
    accelerator.end_training()
    return *found, filled, losses


def test_flags_and_files_that_the_launcher_hands_on(world, tmp_path):
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}))
    common = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    flags = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }

    for stage, steps, precision, filled, losses in world.run(
        from_environment, "", env=common | flags, timeout_s=100
    ):
        assert (stage, steps, precision) == (3, 2, "no")
        assert filled["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
        assert filled["gradient_clipping"] == 0.5
        assert filled["train_batch_size"] == 4
        assert sum(losses[:2]) / 2 == pytest.approx(plain()[0], rel=1e-5)
    path = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    for stage, _, _, filled, losses in world.run(from_environment, "", env=common | path, timeout_s=100):
        assert stage == 1
        assert filled["train_batch_size"] == 4
        assert [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)] == pytest.approx(
            plain()[:4], rel=1e-5
        )


def refused_in_fp16() -> str:
    """As on a processor without fp16."""
    import deepspeed

    with (
        mock.patch.object(deepspeed.get_accelerator(), "is_fp16_supported", return_value=False),
        pytest.raises(ValueError, match="Type fp16 is not supported on your device") as error,
    ):
        make(2, precision="fp16")
    return str(error.value)


def test_fp16_is_rejected_in_deepspeeds_words_where_the_processor_has_none(world):
    assert "Use mixed_precision='bf16'" in world.run(refused_in_fp16, timeout_s=100)[0]


def in_fp16(stage: int, power: int) -> tuple[list[float], list[float], list[bool], list[float]] | None:
    """Train with a loss scale of 2**power; None where the processor has no fp16."""
    import deepspeed

    if not deepspeed.get_accelerator().is_fp16_supported():
        return None
    fp16 = {"enabled": True, "initial_scale_power": power, "hysteresis": 1}
    accelerator = make(stage, precision="fp16", fp16=fp16)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(data(), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.scaler is None
    losses, norms, skipped, rates = [], [], [], []
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e3)))
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return losses, norms, skipped, rates


def at_stage_0() -> bool:
    import deepspeed

    with (
        mock.patch.object(deepspeed.get_accelerator(), "is_fp16_supported", return_value=True),
        pytest.raises(ValueError, match="Use zero_stage=1"),
    ):
        make(0, precision="fp16")
    return True


def test_fp16_is_rejected_at_stage_0_where_deepspeed_scales_no_loss(world):
    assert world.run(at_stage_0, timeout_s=100) == [True, True]


@pytest.mark.parametrize("stage", SHARDED)
def test_fp16_scales_by_itself_and_tells_of_skipped_steps(world, stage):
    for found in world.run(in_fp16, stage, 8, timeout_s=100):
        if found is None:
            pytest.skip("this processor has no fp16 (AVX512-FP16 or AMX-FP16), which DeepSpeed asks for")
        losses, norms, skipped, rates = found
        assert losses == pytest.approx(plain(rates=[0.02] * 2 + [0.01] * 2 + [0.005] * 2), rel=1e-2)
        assert 0 < norms[0] < 10
        assert not any(skipped)
        assert rates == [0.02, 0.01, 0.01, 0.005, 0.005, 0.0025]
    for found in world.run(in_fp16, stage, 24, timeout_s=100):
        if found is None:
            pytest.skip("this processor has no fp16 (AVX512-FP16 or AMX-FP16), which DeepSpeed asks for")
        losses, norms, skipped, rates = found
        assert skipped[0]
        assert rates[0] == 0.02
        assert losses[0] == pytest.approx(plain()[0], rel=1e-2)


# Several engines, full parameters, compilation


def two_plugins() -> tuple[list[float], float, int, tuple[int, ...]]:
    """Train with one plugin, and evaluate a second model, split, with another."""
    plugins = {
        "train": DeepSpeedPlugin(settings(2)),
        "judge": DeepSpeedPlugin(
            settings(3, optimizer={"type": "AdamW", "params": {"lr": "auto"}}), zero3_save_16bit_model=True
        ),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    model, optimizer, loader = prepared(accelerator)
    accelerator.state.select_deepspeed_plugin("judge")
    assert plugins["judge"].selected
    assert not plugins["train"].selected
    assert accelerator.deepspeed_plugin is accelerator.state.get_deepspeed_plugin("judge")
    judge = accelerator.prepare(Net(3))
    assert judge.basic_optimizer is None
    shape = tuple(judge.module.first.weight.shape)  # nothing is left of it between uses
    with GatheredParameters(judge.module.first.weight):
        gathered = judge.module.first.weight.numel()
    losses = trained(accelerator, model, optimizer, iter(loader), 6)
    judge.eval()
    with torch.no_grad():
        judged = float(judge(data(4).tensors[0]).sum())
    state = accelerator.get_state_dict(judge)
    assert set(state) == (set(Net().state_dict()) if accelerator.is_main_process else set())
    accelerator.end_training()
    return losses, judged, gathered, shape


def test_one_engine_trains_and_another_evaluates(world):
    with torch.no_grad():
        expected = float(Net(3)(data(4).tensors[0]).sum())

    for losses, judged, gathered, shape in world.run(two_plugins, timeout_s=100):
        assert losses == pytest.approx(plain(), rel=1e-5)
        assert judged == pytest.approx(expected, rel=1e-5)
        assert (gathered, shape) == (35, (0,))


def two_trainings() -> list[list[float]]:
    """Two Accelerators with the same plugin, each with a model that it trains, step by step in turns."""
    plugin = DeepSpeedPlugin(settings(2))
    accelerators = [Accelerator(deepspeed_plugin=plugin) for _ in range(2)]
    parts = [(accelerator, *prepared(accelerator)) for accelerator in accelerators]
    losses: list[list[float]] = [[], []]
    batches = [iter(loader) for *_, loader in parts]
    for _ in range(6):
        for own, source, (accelerator, model, optimizer, _) in zip(losses, batches, parts, strict=True):
            own += trained(accelerator, model, optimizer, source, 1)
    accelerators[0].end_training()
    return losses


def test_each_accelerator_trains_a_model_of_its_own(world):
    for losses in world.run(two_trainings, timeout_s=100):
        assert losses == [pytest.approx(plain(), rel=1e-5)] * 2


def compiled(regional: bool) -> tuple[list[float], bool, bool]:
    plugin = DeepSpeedPlugin(settings(2))
    dynamo = TorchDynamoPlugin(backend="eager", dynamic=True, use_regional_compilation=regional)
    accelerator = Accelerator(deepspeed_plugin=plugin, dynamo_plugin=dynamo)
    model, optimizer, loader = prepared(accelerator)
    losses = trained(accelerator, model, optimizer, iter(loader), 6)
    assert regional or model._compile_kwargs["dynamic"]
    return losses, bool(model.is_compiled), has_compiled_regions(model.module)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated", "ignore:The .grad attribute")
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_train(world, regional):
    for losses, is_compiled, has_regions in world.run(compiled, regional, timeout_s=100):
        assert (is_compiled, has_regions) == (not regional, True)
        assert losses == pytest.approx(plain(), rel=1e-5)


def again_in_another_precision() -> tuple[list[Any], list[str]]:
    logger, handler = logging.getLogger("accel.engines"), logging.handlers.BufferingHandler(9)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    plugin, found = DeepSpeedPlugin(settings(2)), []
    for precision in ("bf16", "no"):
        Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
        found.append(plugin.get_value("bf16.enabled"))
    logger.setLevel(before)
    logger.removeHandler(handler)
    with pytest.raises(ValueError, match="mixed_precision='fp8' is not supported under DeepSpeed"):
        Accelerator(deepspeed_plugin=plugin, mixed_precision="fp8")
    return found, [record.getMessage().split(";")[0] for record in handler.buffer]


def test_what_was_filled_in_is_forgotten_and_the_log_names_the_plugin(world):
    found, lines = world.run(again_in_another_precision, timeout_s=100)[0]
    assert found == [True, False]
    assert lines == ["engine deepspeed zero 2, because of deepspeed_plugin"] * 2


def with_experts() -> list[bool]:
    plugin = DeepSpeedPlugin(settings(3), transformer_moe_cls_names="Expert")
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = torch.nn.Sequential(Net(), Expert())
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    leaf = importlib.import_module("deepspeed.utils").z3_leaf_module
    found = [leaf(part) for part in model.module]
    accelerator.end_training()
    return found


class Expert(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)


def test_layers_of_experts_are_leaves_of_what_is_trained(world):
    assert world.run(with_experts, timeout_s=100) == [[False, True]] * 2


def alone() -> list[float]:
    accelerator = make(2)
    model, optimizer, loader = prepared(accelerator, batch_size=4)
    # ZeRO-3 reads it in its first steps. Without a second process it would count parameters here alone, and
    # disagree with the others of this world from then on.
    assert os.environ["LOCAL_RANK"] == "0"
    losses = trained(accelerator, model, optimizer, iter(loader), 6)
    accelerator.end_training()
    return losses


NO_LAUNCHER = dict.fromkeys(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


def test_one_process_that_no_launcher_started(world):
    (losses,) = world.run(alone, size=1, init=False, env=NO_LAUNCHER, timeout_s=100)

    assert losses == pytest.approx(plain(), rel=1e-5)


def linear_of_stage(stage: int) -> tuple[str, str]:
    before = F.linear.__module__
    accelerator = make(stage)
    prepared(accelerator)
    accelerator.end_training()
    return before, F.linear.__module__


def test_what_one_stage_replaces_in_torch_is_not_there_in_the_next_run_of_a_rank(world):
    # Ranks with other functions would add up the gradients of different parameters, at stage 2.
    ((own, replaced),) = world.run(linear_of_stage, 3, size=1, timeout_s=100)
    assert own != replaced

    assert world.run(linear_of_stage, 2, timeout_s=100) == [(own, own)] * 2


def retry(stage: int) -> tuple[list[float], int]:
    """A training that ends in its first step as long as batches are too large."""
    accelerator = make(stage)

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> tuple[list[float], int]:
        accelerator.free_memory()
        model, optimizer, loader = prepared(accelerator, batch_size)
        batches = iter(loader)
        if batch_size > 2:
            x, y = next(batches)
            accelerator.backward(F.mse_loss(model(x), y))
            raise RuntimeError("CUDA out of memory.")
        return trained(accelerator, model, optimizer, batches, 6), batch_size

    sizes = iter([4, 2])
    found = train()
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_a_loop_begins_again_with_batches_that_fit(world, stage):
    for losses, batch_size in world.run(retry, stage, timeout_s=100):
        assert batch_size == 2
        assert losses == pytest.approx(plain(), rel=1e-5)


def with_an_old_state() -> bool:
    accelerator = make(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(data(2).tensors[0]).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has state already"):
        accelerator.prepare(model, optimizer)
    return True


def test_an_optimizer_that_has_stepped_is_rejected(world):
    assert world.run(with_an_old_state, timeout_s=100) == [True, True]


# Checkpoints


def saved(stage: int, folder: str) -> tuple[list[float], list[float]]:
    """Save in the middle, continue, and load it with the same objects; a frozen model is prepared too."""
    accelerator = make(stage)
    model, optimizer, loader = prepared(accelerator)
    judge = accelerator.prepare(Net(5).requires_grad_(False))
    batches = iter(loader)
    trained(accelerator, model, optimizer, batches, 2)
    accelerator.save_state(folder)
    after = trained(accelerator, model, optimizer, batches, 3)
    with torch.no_grad(), GatheredParameters(list(judge.parameters()), modifier_rank=0):
        for parameter in judge.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    again = trained(accelerator, model, optimizer, iter(loader), 3)
    with torch.no_grad():
        expected = Net(5)(data(4).tensors[0])
        torch.testing.assert_close(judge(data(4).tensors[0]), expected)
    accelerator.end_training()
    return after, again


def loaded(stage: int | None, folder: str) -> str:
    accelerator = Accelerator() if stage is None else make(stage)
    model, _, _ = prepared(accelerator)
    before = model.state_dict() if stage != 3 else {}
    with pytest.raises(CheckpointError) as error:
        accelerator.load_state(folder)
    for name, value in (model.state_dict() if stage != 3 else {}).items():
        torch.testing.assert_close(value, before[name])
    accelerator.end_training()
    return str(error.value)


@pytest.mark.filterwarnings("ignore:Checkpoint .* saved on")
@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_restores_the_same_objects_and_is_rejected_where_it_does_not_fit(world, stage, tmp_path):
    folder = str(tmp_path / "saved")
    for after, again in world.run(saved, stage, folder, timeout_s=100):
        assert again == after
    assert (tmp_path / "saved" / "pytorch_model" / "mp_rank_00_model_states.pt").is_file() is (stage < 3)

    other = world.run(loaded, 0 if stage else 2, folder, timeout_s=100)[0]
    assert f"zero_stage={0 if stage else 2} here" in other
    if stage == 2:
        assert "is of 2 processes, but there are 1" in world.run(loaded, 2, folder, size=1, timeout_s=100)[0]
        assert "written under DeepSpeed" in world.run(loaded, None, folder, timeout_s=100)[0]


def saved_by_ddp(folder: str) -> None:
    accelerator = Accelerator()
    prepared(accelerator)
    accelerator.save_state(folder)
    accelerator.end_training()


def test_another_engines_checkpoint_is_rejected(world, tmp_path):
    world.run(saved_by_ddp, str(tmp_path / "saved"), timeout_s=100)

    assert "load_checkpoint_in_model" in world.run(loaded, 2, str(tmp_path / "saved"), timeout_s=100)[0]


def without_gathering(folder: str) -> str:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(settings(3)))
    model, _, _ = prepared(accelerator)
    with pytest.raises(ValueError, match="zero3_save_16bit_model=True") as error:
        accelerator.save_model(model, folder)
    assert isinstance(accelerator.unwrap_model(model), Net)
    return str(error.value)


def test_gathering_all_weights_under_zero3_has_to_be_requested(world, tmp_path):
    assert "zero_to_fp32.py" in world.run(without_gathering, str(tmp_path), timeout_s=100)[0]
