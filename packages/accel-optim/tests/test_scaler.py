from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from accel_optim import scaler as scaling
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scaler import get_grad_scaler
from accel_state.gradient import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")

INF = float("inf")
KINDS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    # Without momentum: torch leaves the buffer of a skipped first fused step uninitialised.
    "SGD-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def make_scaler(**options: Any) -> GradScaler:
    return get_grad_scaler(device_type="cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})


class Waits(TorchDispatchMode):
    """Counts the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
        return func(*args, **(kwargs or {}))


def losses(parameter: nn.Parameter, bad: set[int], steps: int):  # type: ignore[no-untyped-def]
    for index in range(steps):
        yield (parameter * (INF if index in bad else float(index + 1))).sum()


def run(kind: str, wrap: bool, bad: set[int], clip: bool = False) -> tuple[list[Any], list[bool], int]:
    parameter = nn.Parameter(torch.full((3,), 2.0))
    inner = KINDS[kind]([parameter])
    scaler = make_scaler()
    optimizer = AcceleratedOptimizer(inner, scaler=scaler) if wrap else inner
    seen, skipped, waits = [], [], 0
    for loss in losses(parameter, bad, 8):
        scaler.scale(loss).backward()
        before = parameter.detach().clone()
        with Waits() as count:
            if wrap:
                if clip:
                    optimizer.unscale_gradients()
                    optimizer.unscale_gradients()
                    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
                optimizer.step()
            else:
                if clip:
                    scaler.unscale_(inner)
                    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
                scaler.step(inner)
                scaler.update()
        waits += count.count
        skipped.append(optimizer.step_was_skipped if wrap else torch.equal(before, parameter))
        optimizer.zero_grad()
        seen.append((parameter.tolist(), scaler.get_scale(), scaler._get_growth_tracker()))
    return seen, skipped, waits


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [set(), {0}, {2, 3}, {7}])
def test_equals_the_plain_loop_and_knows_what_was_skipped(kind: str, bad: set[int], clip: bool) -> None:
    plain, plain_skipped, plain_waits = run(kind, False, bad, clip)
    seen, skipped, waits = run(kind, True, bad, clip)

    assert seen == plain
    assert skipped == plain_skipped == [index in bad for index in range(8)]
    assert waits <= plain_waits


def test_a_fused_step_waits_only_on_request() -> None:
    parameter = nn.Parameter(torch.ones(3))
    scaler = make_scaler()
    optimizer = AcceleratedOptimizer(torch.optim.AdamW([parameter], fused=True), scaler=scaler)
    scaler.scale(parameter.sum() * INF).backward()
    with Waits() as count:
        optimizer.step()
    assert count.count == 0
    with Waits() as count:
        assert optimizer.step_was_skipped
        assert optimizer.step_was_skipped
    assert count.count == 1


def test_skipping_is_seen_under_a_scheduler_made_before_and_after_the_wrapper() -> None:
    for make_early in (True, False):
        parameter = nn.Parameter(torch.ones(3))
        scaler = make_scaler()
        inner = torch.optim.SGD([parameter], lr=0.1)
        if make_early:
            torch.optim.lr_scheduler.StepLR(inner, 1)
        optimizer = AcceleratedOptimizer(inner, scaler=scaler)
        if not make_early:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        own = inner.__dict__.get("step")
        scaler.scale(parameter.sum() * INF).backward()
        optimizer.step()

        assert optimizer.step_was_skipped
        assert inner.__dict__.get("step") is own


def test_nothing_is_left_behind_when_the_step_fails() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("disk on fire")

    parameter = nn.Parameter(torch.ones(3))
    scaler = make_scaler()
    optimizer = AcceleratedOptimizer(Failing([parameter], lr=0.1), scaler=scaler)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(RuntimeError, match="disk on fire"):
        optimizer.step()
    assert "step" not in optimizer.optimizer.__dict__


def test_a_step_without_gradients_is_the_plain_no_op() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.1), scaler=make_scaler())
    optimizer.unscale_gradients()
    optimizer.step()

    assert not optimizer.step_was_skipped
    assert parameter.tolist() == [1, 1, 1]


def test_inside_a_window_the_scaler_rests() -> None:
    parameter = nn.Parameter(torch.ones(1))
    scaler = make_scaler()
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=scaler)
    state = GradientState()
    for index in range(4):
        state._set_sync_gradients(index == 3)
        scaler.scale(parameter.sum() * 0.25).backward()
        optimizer.step()

    assert parameter.item() == 0.0
    assert scaler._get_growth_tracker() == 1


def test_a_closure_with_a_scaler_is_rejected() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.LBFGS([parameter]), scaler=make_scaler())
    with pytest.raises(
        ValueError, match=r"step\(closure\) of LBFGS cannot run with an fp16 .*'bf16' or 'no'"
    ):
        optimizer.step(lambda: parameter.sum())


def test_a_disabled_scaler_passes_through() -> None:
    parameter = nn.Parameter(torch.ones(1))
    scaler = make_scaler(enabled=False)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=scaler)
    scaler.scale(parameter.sum()).backward()
    optimizer.unscale_gradients()
    optimizer.step()

    assert parameter.item() == 0.0


def test_the_wrapper_pickles_with_its_scaler() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=make_scaler())
    again = pickle.loads(pickle.dumps(optimizer))

    assert again.scaler.get_scale() == 1024.0
    assert not again.step_was_skipped


# Several optimizers, one scaler


class Pair:
    def __init__(self, wrap: bool, **options: Any) -> None:
        self.scaler = make_scaler(**options)
        self.parameters = [nn.Parameter(torch.full((2,), float(i + 1))) for i in range(2)]
        self.inner = [torch.optim.SGD([p], lr=0.125) for p in self.parameters]
        self.optimizers = [
            AcceleratedOptimizer(inner, scaler=self.scaler) if wrap else inner for inner in self.inner
        ]

    def record(self) -> Any:
        return (
            [p.tolist() for p in self.parameters],
            self.scaler.get_scale(),
            self.scaler._get_growth_tracker(),
        )


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [set(), {1}, {1, 2}, {3}])
def test_two_optimizers_of_one_loss_are_torchs_recipe(bad: set[int], clip: bool) -> None:
    ours, plain = Pair(True), Pair(False)
    for index in range(5):
        # inf reaches the first optimizer alone; the second one steps, and the scale backs off once
        factors = [INF if index in bad else 1.0, 2.0]
        for pair in (ours, plain):
            loss = sum((p * f).sum() for p, f in zip(pair.parameters, factors, strict=True))
            pair.scaler.scale(loss).backward()
        if clip:
            for o in ours.optimizers:
                o.unscale_gradients()
            for o in plain.inner:
                plain.scaler.unscale_(o)
        for o in ours.optimizers:
            o.step()
        for o in plain.inner:
            plain.scaler.step(o)
        plain.scaler.update()
        for o in (*ours.optimizers, *plain.inner):
            o.zero_grad()

        assert ours.record() == plain.record()
        assert [o.step_was_skipped for o in ours.optimizers] == [index in bad, False]


def test_two_losses_in_turn_are_torchs_recipe() -> None:
    # As a GAN is trained: the second loss also writes gradients of the first model, which has stepped.
    ours, plain = Pair(True), Pair(False)
    for index in range(6):
        for pair in (ours, plain):
            first, second = pair.parameters
            pair.optimizers[0].zero_grad()
            pair.scaler.scale((first * (INF if index == 2 else 1.0)).sum()).backward()
            pair.optimizers[0].step() if pair is ours else pair.scaler.step(pair.inner[0])
            pair.optimizers[1].zero_grad()
            pair.scaler.scale((first.abs() * second).sum()).backward()
            if pair is ours:
                pair.optimizers[1].step()
            else:
                pair.scaler.step(pair.inner[1])
                pair.scaler.update()

        assert ours.record() == plain.record()


@pytest.mark.parametrize("unscaled", [False, True])
def test_one_optimizer_may_step_while_another_gathers(unscaled: bool) -> None:
    # The second one gathers 4 micro-batches while the first steps at each and the scale changes.
    pair = Pair(True, growth_interval=1)
    first, second = pair.parameters
    for index in range(4):
        pair.scaler.scale((first * (INF if index == 1 else 1.0)).sum() + second.sum()).backward()
        if unscaled and index == 3:
            pair.optimizers[1].unscale_gradients()
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
    assert second.grad is not None
    pair.optimizers[1].unscale_gradients()
    assert second.grad.tolist() == [4, 4]
    pair.optimizers[1].step()

    assert first.tolist() == [1 - 3 * 0.125] * 2
    assert second.tolist() == [2 - 4 * 0.125] * 2
    assert not pair.optimizers[1].step_was_skipped


def test_the_scale_follows_when_only_one_of_two_trains() -> None:
    pair = Pair(True, growth_interval=1)
    first, _ = pair.parameters
    for scale in (2048.0, 4096.0):
        pair.scaler.scale(first.sum()).backward()
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
        assert pair.scaler.get_scale() == scale


def test_a_forgotten_optimizer_does_not_hold_the_scale() -> None:
    pair = Pair(True, growth_interval=1)
    first, second = pair.parameters
    pair.scaler.scale(second.sum()).backward()
    pair.optimizers[1].step()
    second.grad = torch.ones(2)
    watch = weakref.ref(pair.optimizers.pop())
    assert watch() is None  # nothing that a step leaves behind keeps the wrapper

    pair.scaler.scale(first.sum()).backward()
    pair.optimizers[0].step()
    assert pair.scaler.get_scale() == 4096.0


def test_the_scaler_is_forgotten_with_its_optimizers() -> None:
    gc.collect()
    before = len(scaling._OPTIMIZERS_OF)
    pair = Pair(True)
    assert len(scaling._OPTIMIZERS_OF) == before + 1
    del pair
    gc.collect()
    assert len(scaling._OPTIMIZERS_OF) == before


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_that_are_dropped_after_clipping_count_as_in_torchs_recipe(bad: bool) -> None:
    # "if norm < limit: optimizer.step()": torch's recipe updates the scale all the same.
    ours, plain = Pair(True), Pair(False)
    for index in range(4):
        for pair in (ours, plain):
            loss = (pair.parameters[0] * (INF if bad and index == 1 else 3.0)).sum()
            pair.scaler.scale(loss).backward()
        ours.optimizers[0].unscale_gradients()
        plain.scaler.unscale_(plain.inner[0])
        assert torch.equal(ours.parameters[0].grad, plain.parameters[0].grad)
        if index != 1:
            ours.optimizers[0].step()
            plain.scaler.step(plain.inner[0])
        plain.scaler.update()
        ours.optimizers[0].zero_grad()
        plain.inner[0].zero_grad()

        assert ours.record() == plain.record()


def steps_of_one_of_two(pair: Pair, *factors: float) -> None:
    """The second optimizer holds gradients meanwhile, which keeps the round open."""
    first, second = pair.parameters
    for factor in factors:
        pair.scaler.scale((first * factor).sum() + second.sum()).backward()
        pair.optimizers[0].step()


def test_the_end_of_a_round_counts_what_its_steps_found() -> None:
    pair = Pair(True)
    scaling.end_round(pair.scaler)  # nothing has happened yet
    steps_of_one_of_two(pair, INF)
    assert pair.scaler.get_scale() == 1024.0
    scaling.end_round(pair.scaler)
    scaling.end_round(pair.scaler)

    assert pair.scaler.get_scale() == 512.0
    pair.optimizers[1].step()
    assert pair.parameters[1].tolist() == [2 - 0.125] * 2  # its gradients followed the scale


def test_a_round_that_is_forgotten_does_not_change_the_scale() -> None:
    pair = Pair(True)
    steps_of_one_of_two(pair, INF)
    pair.optimizers[1].unscale_gradients()
    scaling.forget_round(pair.scaler)
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.scaler.scale(pair.parameters[1].sum()).backward()
    pair.optimizers[1].step()

    assert (pair.scaler.get_scale(), pair.scaler._get_growth_tracker()) == (1024.0, 1)
    assert pair.parameters[1].tolist() == [2 - 0.125] * 2


@pytest.mark.parametrize("scaler", [None, get_grad_scaler(device_type="cpu", enabled=False)], ids=type)
def test_there_are_no_rounds_without_a_scaler(scaler: GradScaler | None) -> None:
    scaling.end_round(scaler)
    scaling.forget_round(scaler)


# Making a scaler


def test_options_reach_torch() -> None:
    scaler = get_grad_scaler(
        "MULTI_CPU",
        device_type="cpu",
        init_scale=8.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=7,
    )
    expected = {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }

    assert type(scaler) is GradScaler
    assert scaler.state_dict() == expected
    assert copy.copy(scaler)._device == "cpu"


def test_the_scaler_is_that_of_the_devices_type() -> None:
    from accel_state.process.state import current_process

    here = current_process().device.type
    scaler = get_grad_scaler()

    assert scaler.is_enabled()
    assert scaler.scale(torch.ones((), device=here)).item() == 65536.0


def test_fsdp_gets_the_scaler_that_agrees_over_shards() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    assert isinstance(get_grad_scaler("FSDP", device_type="cpu"), ShardedGradScaler)


@pytest.mark.skipif("torch_xla" in sys.modules, reason="tests the error without torch_xla")
def test_xla_names_what_to_install() -> None:
    with pytest.raises(ImportError, match="torch_xla"):
        get_grad_scaler("XLA")


def test_an_unknown_way_of_training_is_rejected() -> None:
    with pytest.raises(ValueError, match="MULTI_TOASTER"):
        get_grad_scaler("MULTI_TOASTER")


class Unhooked:
    """An optimizer that is none of torch's: without its hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class LooksAtItself(torch.optim.SGD):
    """Keeps the names of what is set on it during its steps."""

    seen: set[str]

    def step(self, closure: Any = None) -> Any:
        self.seen = set(vars(self))
        return super().step(closure)


def test_a_step_replaces_nothing_of_the_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(3))
    inner = LooksAtItself([parameter], lr=0.1)
    scaler = make_scaler()
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    hooks = dict(inner._optimizer_step_pre_hooks)
    for loss in losses(parameter, {1}, 3):
        scaler.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert "step" not in inner.seen
    assert inner._optimizer_step_pre_hooks == hooks


@pytest.mark.parametrize("bad", [set(), {1, 2}])
def test_skipping_is_seen_without_torchs_hooks(bad: set[int]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    scaler = make_scaler()
    optimizer = AcceleratedOptimizer(Unhooked(torch.optim.SGD([parameter], lr=0.1)), scaler=scaler)  # type: ignore[arg-type]
    skipped = []
    for loss in losses(parameter, bad, 4):
        scaler.scale(loss).backward()
        before = parameter.detach().clone()
        optimizer.step()
        skipped.append((optimizer.step_was_skipped, torch.equal(before, parameter)))
        optimizer.zero_grad()

    assert skipped == [(index in bad, index in bad) for index in range(4)]


def test_another_scaler_is_followed_and_registered_once() -> None:
    parameter = nn.Parameter(torch.ones(3))
    first, second = make_scaler(), make_scaler(init_scale=8.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.1), scaler=first)
    for scaler in (second, first):
        optimizer.set_scaler(scaler)
    second.scale(parameter.sum()).backward()
    optimizer.set_scaler(second)
    optimizer.step()

    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9))
    assert len(scaling._OPTIMIZERS_OF[first]) == len(scaling._OPTIMIZERS_OF[second]) == 1
