"""backward(loss, weight=...): the gradient of one big batch, however it is split."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel import Accelerator
from accel_optim.handlers import DistributedDataParallelKwargs, GradScalerKwargs
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("fresh_state")]

CLOSE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-12}


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(dtype)


def items(count: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The items of one micro-batch: as many as it has, always the same."""
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 0.5).square().sum()


def big_batch(counts: list[int], seeds: list[int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The gradient of the mean over all items at once, by plain PyTorch."""
    model = make_model(dtype)
    batches = [items(count, seed, dtype) for count, seed in zip(counts, seeds, strict=True)]
    total = sum(counts)
    (loss_of(model, torch.cat(batches)) / (total or 1)).backward()
    return [parameter.grad for parameter in model.parameters()]


class Loader:
    """As much of a prepared loader as a window sees."""

    remainder = -1

    def __init__(self, accelerator: Accelerator, counts: list[int]) -> None:
        self.state, self.counts, self.end_of_dataloader = accelerator.gradient_state, counts, False

    def __iter__(self):
        self.end_of_dataloader = False
        self.state._add_dataloader(self)
        try:
            for number, count in enumerate(self.counts):
                self.end_of_dataloader = number == len(self.counts) - 1
                yield number, count
        finally:
            self.state._remove_dataloader(self)


def gradients_of_windows(
    counts: list[list[int]], steps: int, options: dict[str, Any] | None = None, as_tensor: bool = False
) -> list[list[torch.Tensor]]:
    """Go through this rank's row of micro-batches, and return the gradient at each window's end."""
    options = options or {}
    handlers = [DistributedDataParallelKwargs(**options["ddp"])] if "ddp" in options else None
    plugin = GradientAccumulationPlugin(num_steps=steps, **options.get("plugin", {}))
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, kwargs_handlers=handlers)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, size = accelerator.process_index, accelerator.num_processes
    found = []
    for number, count in Loader(accelerator, counts[rank]):
        batch = items(count, seed=1000 * number + rank)
        listed = [] if options.get("unlisted") else [model]
        with accelerator.accumulate(*listed):
            weight: Any = torch.tensor(count) if as_tensor else count
            accelerator.backward(loss_of(model, batch), weight=weight)
            if accelerator.sync_gradients:
                found.append([parameter.grad.clone() for parameter in model.parameters()])
            optimizer.zero_grad()
    assert size == len(counts)
    return found


def expected_windows(counts: list[list[int]], steps: int) -> list[list[torch.Tensor]]:
    length = len(counts[0])
    windows = [range(start, min(start + steps, length)) for start in range(0, length, steps)]
    return [
        big_batch(
            [row[number] for row in counts for number in window],
            [1000 * number + rank for rank in range(len(counts)) for number in window],
        )
        for window in windows
    ]


def assert_windows(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert len(found) == len(expected)
    for window, wanted in zip(found, expected, strict=True):
        for actual, gradient in zip(window, wanted, strict=True):
            torch.testing.assert_close(actual, gradient, **CLOSE)


@st.composite
def ragged(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[list[list[int]], int]:
    """Counts of items per rank and micro-batch, zero among them, and the number of accumulation steps."""
    length, size = draw(st.integers(1, 7)), draw(st.sampled_from(sizes))
    count = st.integers(0, 9)
    rows = draw(st.lists(st.lists(count, min_size=length, max_size=length), min_size=size, max_size=size))
    return rows, draw(st.integers(1, 5))


QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=40, **QUIET)
@given(ragged((1,)), st.booleans())
def test_one_process_has_the_gradient_of_the_big_batch(case: Any, as_tensor: bool) -> None:
    counts, steps = case

    assert_windows(gradients_of_windows(counts, steps, as_tensor=as_tensor), expected_windows(counts, steps))


@settings(max_examples=12, **QUIET)
@given(ragged((2, 3, 4)))
def test_processes_have_the_gradient_of_the_big_batch(world: Any, case: Any) -> None:
    counts, steps = case
    expected = expected_windows(counts, steps)

    for found in world.run(gradients_of_windows, counts, steps, size=len(counts)):
        assert_windows(found, expected)


RAGGED = [[3, 0, 5, 1, 4], [1, 7, 0, 2, 2]]

WAYS = {
    "sync_each_batch": {"plugin": {"sync_each_batch": True}},
    "static_graph": {"ddp": {"static_graph": True}},
    "bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
    "find_unused": {"ddp": {"find_unused_parameters": True}},
    # A model that accumulate() was not told of has its gradients reduced at each micro-batch.
    "unlisted": {"unlisted": True},
    "several": {"ddp": {"gradient_as_bucket_view": True}, "plugin": {"sync_each_batch": True}},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_does_not_matter_when_gradients_are_reduced(world: Any, way: str) -> None:
    for found in world.run(gradients_of_windows, RAGGED, 3, WAYS[way]):
        assert_windows(found, expected_windows(RAGGED, 3))


def test_a_mean_loss_of_weight_one_counts_the_tail_by_its_real_size() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    found: dict[str, list[float]] = {"weighted": [], "plain": []}
    for kind, weight in (("weighted", 1), ("plain", None)):
        for number, _ in Loader(accelerator, [0] * 5):
            with accelerator.accumulate():
                accelerator.backward((parameter * (number + 1)).sum(), weight=weight)
                if accelerator.sync_gradients:
                    found[kind].append(parameter.grad.item())
                optimizer.zero_grad()

    assert found["weighted"] == [pytest.approx((1 + 2 + 3 + 4) / 4, rel=1e-12), 5.0]
    assert found["plain"] == [pytest.approx((1 + 2 + 3 + 4) / 4, rel=1e-12), 5.0 / 4]


def test_a_window_without_weight_has_no_gradient() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for weights in ((0, 0), (3, 2), (0, 0), (4, 1)):
        for number, count in enumerate(weights):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, items(count or 1, number)), weight=count)
        gradients = [parameter.grad for parameter in model.parameters()]
        if sum(weights):
            assert_windows([gradients], [big_batch(list(weights), [0, 1])])
        else:
            assert all(not gradient.any() for gradient in gradients)
        optimizer.zero_grad()


def weighted_step(
    accelerator: Accelerator, model: torch.nn.Module, count: int, seed: int, fail: bool = False
) -> None:
    with accelerator.accumulate(model):
        if fail:
            raise MemoryError("no memory before backward")
        accelerator.backward(loss_of(model, items(count, seed)), weight=count)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_micro_batch_that_failed_has_no_weight(failing: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = accelerator.prepare(make_model())
    for number, count in enumerate((4, 1, 2)):
        if number == failing:
            with pytest.raises(MemoryError):
                weighted_step(accelerator, model, 9, 99, fail=True)
        weighted_step(accelerator, model, count, number)

    assert_windows([[p.grad for p in model.parameters()]], [big_batch([4, 1, 2], [0, 1, 2])])


def test_failing_after_the_last_backward_leaves_gradients_that_a_retry_scales_right() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    weighted_step(accelerator, model, 4, 0)

    def fail() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, items(0, 1)), weight=6)  # no items, so no gradient
            raise MemoryError("in the optimizer")

    with pytest.raises(MemoryError):
        fail()
    weighted_step(accelerator, model, 1, 1)

    assert_windows([[p.grad for p in model.parameters()]], [big_batch([4, 1], [0, 1])])


def test_a_window_continues_after_a_break() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = accelerator.prepare(make_model())
    for number, count in Loader(accelerator, [5, 2, 8, 8]):
        weighted_step(accelerator, model, count, number)
        if number == 1:
            break
    for _ in Loader(accelerator, [1, 1]):  # an evaluation in between
        with torch.no_grad():
            model(items(2, 50))
    for _, count in Loader(accelerator, [7, 3]):
        weighted_step(accelerator, model, count, 2)
        break

    assert accelerator.sync_gradients
    assert_windows([[p.grad for p in model.parameters()]], [big_batch([5, 2, 7], [0, 1, 2])])


def windows_with_a_break(folder: str | None, counts: list[list[int]]) -> list[list[list[float]]]:
    """Windows of three micro-batches, all at once or with a new start from a checkpoint before each one."""
    found = []
    accelerator, model, optimizer = None, None, None
    for number in range(len(counts[0])):
        if accelerator is None or folder is not None:
            accelerator = Accelerator(gradient_accumulation_steps=3)
            model = make_model()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            if number:
                accelerator.load_state(folder)
        rank = accelerator.process_index
        with accelerator.accumulate(model):
            count = counts[rank][number]
            accelerator.backward(loss_of(model, items(count, 1000 * number + rank)), weight=count)
            if accelerator.sync_gradients:
                found.append([parameter.grad.flatten().tolist() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None:
            accelerator.save_state(folder)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_continues_the_open_window_bit_for_bit(world: Any, size: int, tmp_path: Any) -> None:
    counts = [[5, 0, 7, 2, 8, 1, 4, 4, 3], [1, 3, 3, 9, 0, 0, 2, 6, 5]][:size]
    whole = world.run(windows_with_a_break, None, counts, size=size)

    assert world.run(windows_with_a_break, str(tmp_path / "state"), counts, size=size) == whole


def test_several_losses_of_a_micro_batch_share_its_weight() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    a, b = accelerator.prepare(make_model(), make_model())
    for number, count in enumerate((4, 3)):
        batch = items(count, number)
        with accelerator.accumulate(a, b):
            accelerator.backward(loss_of(a, batch), weight=count)
            accelerator.backward(loss_of(b, batch), weight=torch.tensor(float(count)))

    for model in (a, b):
        assert_windows([[p.grad for p in model.parameters()]], [big_batch([4, 3], [0, 1])])


def generator_and_judge() -> list[list[float]]:
    """Two losses, two optimizers, one after the other in each micro-batch; returns what they end with."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    a, b = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (a, b)]
    a, b, *optimizers = accelerator.prepare(a, b, *optimizers)
    rank, size = accelerator.process_index, accelerator.num_processes
    for number in range(4):
        batch = items(1 + number + 2 * rank if size > 1 else 4 + 2 * number, 0)
        if size == 1:
            batch = torch.cat([items(1 + number, 0), items(3 + number, 0)])
        with accelerator.accumulate(a, b):
            for model, optimizer in zip((a, b), optimizers, strict=True):
                accelerator.backward(loss_of(model, batch), weight=len(batch))
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.flatten().tolist() for model in (a, b) for parameter in model.parameters()]


def test_models_that_step_in_turn(world: Any) -> None:
    expected = generator_and_judge()
    for found in world.run(generator_and_judge):
        for actual, wanted in zip(found, expected, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-10)


def test_a_closure_may_be_called_often() -> None:
    accelerator = Accelerator()
    plain, model = make_model(), make_model()
    batch = items(6, 0)
    expected = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=5)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5))

    def plain_closure() -> torch.Tensor:
        expected.zero_grad()
        loss = loss_of(plain, batch) / 6
        loss.backward()
        return loss

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss, weight=6)
        return loss.detach() / 6

    for inside in (True, False):
        with accelerator.accumulate(model) if inside else contextlib.nullcontext():
            optimizer.step(closure)
        expected.step(plain_closure)

    for actual, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, **CLOSE)


def test_outside_of_accumulate_each_loss_is_a_window() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    for count in (3, 5):
        accelerator.backward(loss_of(model, items(count, 0)), weight=count)
        assert_windows([[p.grad for p in model.parameters()]], [big_batch([count], [0])])
        model.zero_grad()
    accelerator.backward(loss_of(model, items(3, 0)) / 3)  # a mean
    assert_windows([[p.grad for p in model.parameters()]], [big_batch([3], [0])])


def test_clipping_sees_the_whole_gradient() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    for number, count in enumerate((4, 3)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, items(count, number)), weight=count)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)

    expected = torch.nn.utils.get_total_norm(big_batch([4, 3], [0, 1]))
    torch.testing.assert_close(norm, expected, **CLOSE)


def norms(norm_type: float, of: list[list[int]]) -> list[float]:
    """What clipping returns, and the norm that it leaves, at the end of one window over all of these."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    for number, count in enumerate(of[accelerator.process_index]):
        with accelerator.accumulate(model):
            batch = items(count, 1000 * number + accelerator.process_index)
            accelerator.backward(loss_of(model, batch), weight=count)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.25, norm_type)
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    return [float(norm), float(after)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_is_that_of_the_big_batch_on_every_process(world: Any, size: int, norm_type: float) -> None:
    counts = [[rank + 1, 3 * rank] for rank in range(size)]
    seeds = [1000 * number + rank for rank in range(size) for number in (0, 1)]
    gradients = big_batch([count for row in counts for count in row], seeds)
    norm = float(torch.nn.utils.get_total_norm(gradients, norm_type))
    assert norm > 0.25

    for found in world.run(norms, norm_type, counts, size=size):
        assert found[0] == pytest.approx(norm, rel=1e-10)
        assert found[1] == pytest.approx(0.25, rel=1e-5)  # torch adds 1e-6 to what it divides by


def test_sparse_gradients_are_corrected_too() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    table = torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
    table = accelerator.prepare(table)
    for rows in ([0, 1, 1], [2], [1, 0]):
        with accelerator.accumulate(table):
            accelerator.backward(table(torch.tensor(rows)).sum(), weight=len(rows))

    expected = torch.tensor([2.0, 3.0, 1.0, 0.0], dtype=torch.float64)[:, None].expand(4, 2) / 6
    torch.testing.assert_close(table.weight.grad.to_dense(), expected, **CLOSE)


def fp16_windows(bad: int | None, clip: bool) -> dict[str, Any]:
    """Three windows of two micro-batches in fp16, a loss of one of them overflowing on the last rank."""
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**14, growth_interval=2)],
    )
    model = make_model(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen: dict[str, Any] = {"skipped": [], "scales": [], "gradients": [], "largest": []}
    for number in range(6):
        count = 200 + 100 * number + 50 * accelerator.process_index
        batch = items(count, number, torch.float32)
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            if number == bad and accelerator.is_last_process:
                loss = loss * float("inf")
            accelerator.backward(loss, weight=count)
            seen["largest"].append(max(float(p.grad.abs().max()) for p in model.parameters()))
            if accelerator.sync_gradients:
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1e9)
                else:
                    accelerator.unscale_gradients()
                seen["gradients"].append([parameter.grad.tolist() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                seen["skipped"].append(accelerator.optimizer_step_was_skipped)
                seen["scales"].append(accelerator.scaler.get_scale())
    return seen


@pytest.mark.parametrize("clip", [False, True])
def test_fp16_gradients_have_their_final_size_from_the_first_micro_batch(world: Any, clip: bool) -> None:
    first, second = world.run(fp16_windows, None, clip)

    assert first["gradients"] == second["gradients"]
    assert first["skipped"] == [False] * 3  # hundreds of items times 2 ** 14 would have overflowed
    assert first["scales"] == [2.0**14, 2.0**15, 2.0**15]
    for window, numbers in enumerate(((0, 1), (2, 3), (4, 5))):
        counts = [200 + 100 * number + 50 * rank for number in numbers for rank in (0, 1)]
        wanted = big_batch(counts, [number for number in numbers for _ in (0, 1)], torch.float32)
        for actual, gradient in zip(first["gradients"][window], wanted, strict=True):
            torch.testing.assert_close(torch.tensor(actual), gradient, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("bad", [0, 3])
def test_an_overflow_in_a_weighted_window_skips_it_on_all_processes(world: Any, bad: int) -> None:
    first, second = world.run(fp16_windows, bad, True)

    assert first["skipped"] == second["skipped"] == [window == bad // 2 for window in range(3)]
    assert first["scales"] == second["scales"]
    assert first["scales"][bad // 2] == 2.0**13


def collectives_of_windows(counts: list[list[int]]) -> list[int]:
    """How many times the processes add up weights in each window."""
    from accel_ops.collectives import operations

    calls, original = [], operations.reduce
    found = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    operations.reduce = counting
    try:
        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = accelerator.prepare(make_model())
        calls.clear()  # prepare has its own
        for number, count in Loader(accelerator, counts[accelerator.process_index]):
            with accelerator.accumulate(model):
                half = items(count, number)
                accelerator.backward(loss_of(model, half), weight=count)
                accelerator.backward(loss_of(model, half), weight=count)
                if accelerator.sync_gradients:
                    found.append(len(calls))
                    calls.clear()
    finally:
        operations.reduce = original
    return found


def test_processes_add_up_weights_once_per_window(world: Any) -> None:
    counts = [[2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 1, 1, 1, 1]]

    assert world.run(collectives_of_windows, counts) == [[2, 1, 1]] * 2  # the first one expects something


# What is rejected


def test_both_kinds_of_losses_in_a_window_are_rejected() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    for first, second in ((None, 2), (2, None)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, items(2, 0)), weight=first)
        with (
            pytest.raises(ValueError, match=r"with and without a weight.*weight=1"),
            accelerator.accumulate(model),
        ):
            accelerator.backward(loss_of(model, items(2, 1)), weight=second)
        with accelerator.accumulate(model):  # the window continues as it began
            accelerator.backward(loss_of(model, items(2, 1)), weight=first)
        assert accelerator.sync_gradients


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (-1, ValueError, r"weight=-1\.0.*at least 0"),
        (float("nan"), ValueError, "weight=nan"),
        (float("inf"), ValueError, "weight=inf"),
        (10**400, ValueError, r"beyond 1\.8e\+308"),
        (torch.ones(2), ValueError, r"shape \(2,\).*the sum"),
        ("many", TypeError, "weight='many'"),
        (1j, TypeError, "1j"),
    ],
)
def test_what_is_no_weight_is_rejected(weight: Any, error: type[Exception], message: str) -> None:
    accelerator = Accelerator()
    with pytest.raises(error, match=message):
        accelerator.backward(torch.ones(1, requires_grad=True).sum(), weight=weight)


def test_two_weights_for_one_micro_batch_are_rejected() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, items(2, 0)), weight=2)
        with pytest.raises(ValueError, match=r"weight=3\.0 in a micro-batch with weight=2\.0"):
            accelerator.backward(loss_of(model, items(3, 0)), weight=3)


def weight_while_joining() -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(make_model())
    with accelerator.join_uneven_inputs([model]):
        loss = loss_of(model, items(2, 0))
        with pytest.raises(RuntimeError) as caught:
            accelerator.backward(loss, weight=2)
        accelerator.backward(loss)
    return str(caught.value)


def test_a_weight_is_rejected_where_a_process_may_be_out_of_data(world: Any) -> None:
    for message in world.run(weight_while_joining):
        assert "inside join_uneven_inputs" in message
