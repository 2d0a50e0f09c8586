from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch

from accel_optim.weight import WindowWeight, check_weight, positive, ratio
from accel_optim.window import Window
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")


@dataclass
class Gathered:
    """The gradient of one number on this process; a second one always has three times the weight."""

    divisor: int = 2
    gradient: float | torch.Tensor = 0.0
    asked: list[object] = field(default_factory=list)

    def total_weight(self, weight):
        self.asked.append(weight)
        return weight * 4

    def scale(self, factor) -> None:
        self.gradient = self.gradient * factor


def make(num_steps: int) -> Window:
    return Window(GradientState.new(GradientAccumulationPlugin(num_steps=num_steps)))


def test_a_window_sums_weights_and_asks_the_others_once() -> None:
    window, gathered = make(3), Gathered()
    for _ in range(2):
        gathered.gradient = 0.0
        for weight in (1.0, 0.0, 4.0):
            with window:
                factor = window.weigh(weight, gathered)
                gathered.gradient += 10 * factor
                assert window.weigh(weight, gathered) == factor
        assert gathered.gradient == pytest.approx(3 * 10 * 2 / 20, rel=1e-12)

    assert gathered.asked == [1.0, 5.0, 5.0]


def test_losses_are_expected_to_weigh_what_the_last_window_did() -> None:
    window, gathered = make(2), Gathered()
    factors = []
    for weight in (8.0, 2.0, 1.0, 1.0, 0.0, 0.0, 1.0):
        with window:
            factors.append(window.weigh(weight, gathered))

    assert factors == pytest.approx([2 / 64, 2 / 40, 2 / 40, 2 / 8, 2 / 8, 0.0, 2 / 8])


def test_tensors_of_an_accelerator_are_never_read() -> None:
    window = make(2)  # reading a tensor on the meta device is an error
    gathered = Gathered(gradient=torch.ones((), device="meta"))
    weight = torch.ones((), device="meta", dtype=torch.int64)
    for _ in range(4):
        with window:
            factor = window.weigh(weight, gathered)
            assert window.weigh(weight, gathered) is not None
            assert factor.is_meta
            assert factor.dtype.is_floating_point

    assert len(gathered.asked) == 3


def test_tensors_compute_what_numbers_do() -> None:
    for zero in (0.0, torch.tensor(0.0)):
        assert float(ratio(3.0, zero)) == 0.0
        assert float(positive(zero, 7.0)) == 7.0
    for four in (4.0, torch.tensor(4.0)):
        assert float(ratio(3.0, four)) == 0.75
        assert float(positive(four, 7.0)) == 4.0


def test_weights_are_numbers_where_the_host_knows_them() -> None:
    for weight in (3, 3.0, torch.tensor(3), torch.tensor([[3.0]], requires_grad=True)):
        assert type(check_weight(weight)) is float
        assert check_weight(weight) == 3.0
    there = check_weight(torch.ones(1, 1, device="meta", requires_grad=True))
    assert there.shape == ()
    assert not there.requires_grad


def test_a_micro_batch_has_one_weight() -> None:
    weight = WindowWeight()
    weight.count(2)
    weight.count(torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"weight=5\.0 in a micro-batch with weight=2\.0.*Accelerator each"):
        weight.count(5)
    weight.next_micro_batch()
    weight.count(5)
    weight.forget_micro_batch()
    weight.count(1)
    weight.next_micro_batch()

    assert weight.gathered == 3.0


def test_both_kinds_of_losses_are_rejected_in_one_window_only() -> None:
    window, gathered = make(2), Gathered()
    with window:
        window.weigh(1, gathered)
    with pytest.raises(ValueError, match=r"weight=1 for one that is a mean"), window:
        window.loss_scale()
    with window:
        window.weigh(1, gathered)
    for _ in range(2):
        with window:
            assert window.loss_scale() == 0.5
    with window:
        window.loss_scale()
    with pytest.raises(ValueError, match="with and without a weight"), window:
        window.weigh(1, gathered)
    window.reset()
    assert window.weigh(4, gathered) == 2 / 16
    assert window.loss_scale() == 0.5  # outside of micro-batches each loss is a window


@pytest.mark.parametrize("saved", range(7))
def test_a_window_continues_from_its_state_bit_for_bit(saved: int) -> None:
    weights = (3.0, 0.7, 1.9, 0.3, 2.2, 5.1, 0.9)

    def run(window: Window, gradient: float, part: range) -> tuple[list[float], float]:
        factors = []
        for number in part:
            if number % 3 == 0:
                gradient = 0.0
            gathered = Gathered(gradient=gradient)
            with window:
                factors.append(window.weigh(weights[number], gathered))
                gradient = gathered.gradient + factors[-1]
        return factors, gradient

    whole, expected = run(make(3), 0.0, range(7))
    first, second = make(3), make(3)
    before, gradient = run(first, 0.0, range(saved))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.step, second.gradient_state.sync_gradients) == (saved % 3, saved % 3 == 0)
    after, gradient = run(second, gradient, range(saved, 7))

    assert before + after == whole
    assert gradient == expected


def test_means_and_sums_are_distinguished_after_loading() -> None:
    first, second, gathered = make(3), make(3), Gathered()
    with first:
        first.loss_divisor()
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="with and without a weight"), second:
        second.weigh(1, gathered)


def test_a_step_from_a_checkpoint_opens_a_window_without_weight() -> None:
    window, gathered = make(3), Gathered()
    with window:
        window.weigh(100, gathered)
    window.step = 1
    for weight in (2, 3):
        with window:
            factor = window.weigh(weight, gathered)

    assert factor == 2 / 20
