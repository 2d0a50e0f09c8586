"""One contract for all engines: the same small transformer and data, and what a plain PyTorch loop gives.

An engine of accel joins by one row of `accel_world.engine_cases.CASES`, one of another package by being
installed. Every test runs real processes; the reference is a loop without accel.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_world.engine_cases import CASES, FEW, HYBRID, SHARDED_CASES, marked, over_engines

VOCAB, WIDTH, HEADS, LENGTH = 13, 8, 2, 8
STEPS, ACCUMULATION, GLOBAL_BATCH, MAX_NORM = 20, 2, 8, 0.5
FEW_STEPS = 8  # where no more is shown by more; the rates fall after the fifth
TOLERANCE = {"no": 1e-5, "bf16": 3e-2}


HALVES = [(f"deepspeed {stage}", "bf16") for stage in range(4)]
"""Cases whose weights are in half precision; the optimizer has them in fp32."""

ORDERS = {
    "together": ("model", "optimizer", "scheduler", "loader"),
    "reversed": ("loader", "scheduler", "optimizer", "model"),
    "model first": ("model", "optimizer", "scheduler", "loader"),
    "optimizer first": ("optimizer", "scheduler", "model", "loader"),
}


class Block(torch.nn.Module):
    """Causal attention and a feed-forward layer, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (layer(self.norm_1(x)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(torch.nn.Module):
    """Two blocks; the output shares the embedding's weight."""

    _no_split_modules = ("Block",)
    _tp_plan = {  # noqa: RUF012 - as transformers' models have it
        **dict.fromkeys(["blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up"], "colwise"),
        **dict.fromkeys(["blocks.*.out", "blocks.*.down"], "rowwise"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with two parameter groups; biases and norms do not decay."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def make_data(count: int = STEPS * GLOBAL_BATCH) -> TensorDataset:
    tokens = torch.randint(VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, torch.arange(count))


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten())


@contextlib.contextmanager
def pairs_of(accelerator: Accelerator, model: Any, tokens: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """Inputs and labels: this process's part of them, where sequences are split."""
    inputs, labels, positions = tokens[:, :-1], tokens[:, 1:], accelerator.unwrap_model(model).positions
    with accelerator.maybe_context_parallel([inputs, labels, positions], [1, 1, 0], {inputs, labels}):
        yield inputs, labels


@dataclass
class Run:
    """What a training run shows of itself; one entry per optimizer step."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: dict[str, torch.Tensor]


@functools.cache
def plain_run(precision: str = "no", accumulation: int = ACCUMULATION, steps: int = STEPS) -> Run:
    """The same training as a loop without accel, on one process."""
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    run = Run([], [], [], {})
    loader = iter(DataLoader(make_data(), batch_size=GLOBAL_BATCH // accumulation))
    for _ in range(steps):
        losses = []
        for _ in range(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                tokens = next(loader)[0]
                losses.append(loss_of(model, tokens[:, :-1], tokens[:, 1:]))
            (losses[-1] / accumulation).backward()
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        run.rates.append(optimizer.param_groups[0]["lr"])
        run.losses.append(sum(loss.item() for loss in losses) / accumulation)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.state = copy.deepcopy(model.state_dict())
    return run


@dataclass
class Session:
    """One prepared training."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any

    def steps(self, count: int, run: Run, batches: Iterator[Any]) -> None:
        """Train for `count` optimizer steps."""
        accelerator = self.accelerator
        for _ in range(count):
            losses = []
            for _ in range(accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(self.model):
                    with pairs_of(accelerator, self.model, next(batches)[0]) as pair:
                        loss = loss_of(self.model, *pair)
                        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                        accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                        run.norms.append(float(norm))
                        run.rates.append(self.optimizer.param_groups[0]["lr"])
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            run.losses.append(sum(losses) / len(losses))


def make_session(
    case: str, precision: str = "no", accumulation: int = ACCUMULATION, order: str = "together"
) -> Session:
    chosen = (CASES | SHARDED_CASES | FEW | HYBRID)[case]
    options = chosen.options()
    if precision == "bf16" and "deepspeed_plugin" in options:
        # Its weights are bf16, with which the CPU's layer norm takes no fp32 input: buffers follow.
        options["deepspeed_plugin"].deepspeed_config["data_types"] = {"buffer_dtype": "bf16"}
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=True,
        **options,
    )
    assert accelerator.engine.name == chosen.engine
    model = make_model(accelerator.process_index)  # the first process's weights count
    optimizer = make_optimizer(model)
    # A prepared scheduler steps once per process; written for the number of data-parallel processes.
    shards = chosen.size // chosen.replicas
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5 * shards, 0.5)
    loader = DataLoader(make_data(), batch_size=GLOBAL_BATCH // accumulation // shards)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    names = ORDERS[order]
    if order in ("together", "reversed"):
        done = accelerator.prepare(*(objects[name] for name in names))
    else:
        done = [accelerator.prepare(objects[name]) for name in names]
    prepared = dict(zip(names, done, strict=True))
    assert prepared["model"]._is_accelerate_prepared
    return Session(accelerator, **prepared)


def train(
    case: str,
    precision: str = "no",
    accumulation: int = ACCUMULATION,
    order: str = "together",
    steps: int = STEPS,
) -> Run:
    """Train under an engine; the state is the full one, of the main process."""
    session = make_session(case, precision, accumulation, order)
    run = Run([], [], [], {})
    session.steps(steps, run, iter(session.loader))
    state = session.accelerator.get_state_dict(session.model)
    run.state = {name: value.clone() for name, value in state.items()}
    session.accelerator.end_training()
    return run


def assert_same_run(run: Run, expected: Run, precision: str, steps: int = STEPS) -> None:
    tolerance = TOLERANCE[precision]
    assert len(run.losses) == steps
    assert run.losses == pytest.approx(expected.losses[:steps], rel=tolerance)
    assert run.norms == pytest.approx(expected.norms[:steps], rel=tolerance * 10)
    assert run.rates == pytest.approx(expected.rates[:steps])


def assert_same_weights(state: dict[str, torch.Tensor], expected: Run) -> None:
    assert list(state) == list(expected.state)
    for name, value in state.items():
        torch.testing.assert_close(value, expected.state[name], rtol=1e-3, atol=1e-5)


@pytest.mark.core
@over_engines
@pytest.mark.parametrize(("precision", "accumulation"), [("no", 1), ("no", 2), ("bf16", 2)])
def test_the_losses_norms_and_weights_are_those_of_one_process(world, case, precision, accumulation):
    expected = plain_run(precision, accumulation)

    runs = world.run(train, case, precision, accumulation, size=CASES[case].size, timeout_s=100)

    for run in runs:
        assert_same_run(run, expected, precision)
    assert list(runs[0].state) == list(expected.state)
    for value in runs[0].state.values():
        assert type(value) is torch.Tensor
        assert value.dtype is (torch.bfloat16 if (case, precision) in HALVES else torch.float32)
    if precision == "no":
        assert_same_weights(runs[0].state, expected)


def refused(case: str, order: str) -> bool:
    with pytest.raises(ValueError, match=r"Prepare both in one call of prepare\(\)"):
        make_session(case, order=order)
    return True


@over_engines
@pytest.mark.parametrize("order", ["reversed", "model first", "optimizer first"])
def test_the_order_of_preparing_does_not_matter(world, case, order):
    if not CASES[case].separable and order != "reversed":
        assert set(world.run(refused, case, order, size=CASES[case].size, timeout_s=100)) == {True}
        return
    for run in world.run(train, case, order=order, steps=FEW_STEPS, size=CASES[case].size, timeout_s=100):
        assert_same_run(run, plain_run(), "no", FEW_STEPS)


@pytest.mark.parametrize(("case", "precision"), [*((case, "no") for case in FEW), ("ddp x tp", "bf16")])
def test_combinations_train_as_one_process_does(world, case, precision):
    runs = world.run(train, case, precision, size=FEW[case].size, timeout_s=100)

    for run in runs:
        assert_same_run(run, plain_run(precision), precision)
    if precision == "no":
        assert_same_weights(runs[0].state, plain_run())


def resume(case: str, folder: str, before: int = 8, after: int = FEW_STEPS) -> tuple[Run, Run]:
    """Train, saving on the way; then start again and continue from there."""
    session = make_session(case)
    whole = Run([], [], [], {})
    batches = iter(session.loader)
    session.steps(before, whole, batches)
    session.accelerator.save_state(folder)
    session.steps(after, whole, batches)
    whole.state = session.accelerator.get_state_dict(session.model)
    session.accelerator.end_training()

    session = make_session(case)
    session.accelerator.load_state(folder)
    rest = Run([], [], [], {})
    session.steps(after, rest, iter(session.loader))
    session.accelerator.end_training()
    return whole, rest


def assert_the_rest(rest: Run, whole: Run, before: int, after: int) -> None:
    assert len(rest.losses) == after
    assert rest.losses == whole.losses[before:]
    assert rest.norms == whole.norms[before:]
    assert rest.rates == whole.rates[before:]


@pytest.mark.parametrize("case", marked([*CASES, *SHARDED_CASES]))
def test_a_run_is_resumed_exactly(world, case, tmp_path):
    size = (CASES | SHARDED_CASES | FEW)[case].size
    for whole, rest in world.run(resume, case, str(tmp_path / "saved"), size=size, timeout_s=100):
        assert_the_rest(rest, whole, 8, FEW_STEPS)


@pytest.mark.parametrize("case", HYBRID)
def test_replicas_of_combinations_train_as_one_process_does_and_are_resumed_exactly(world, case, tmp_path):
    expected = plain_run(steps=6)  # the rates fall before the last
    runs = world.run(resume, case, str(tmp_path / "saved"), 4, 2, size=HYBRID[case].size, timeout_s=100)

    for whole, rest in runs:
        assert_same_run(whole, expected, "no", 6)
        assert_the_rest(rest, whole, 4, 2)
    assert_same_weights(runs[0][0].state, expected)


def start(case: str, folder: str) -> list[float]:
    session = make_session(case)
    run = Run([], [], [], {})
    session.steps(8, run, iter(session.loader))
    session.accelerator.save_state(folder)
    session.accelerator.end_training()
    return run.losses


def go_on(case: str, folder: str) -> list[float]:
    session = make_session(case)
    session.accelerator.load_state(folder)
    run = Run([], [], [], {})
    session.steps(2, run, iter(session.loader))  # the schedule counts processes, and is due after these
    session.accelerator.end_training()
    return run.losses


@pytest.mark.filterwarnings("ignore:Checkpoint .* saved on")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2 sharded", "hsdp sharded"),
        ("hsdp sharded", "fsdp2"),
        ("ddp", "fsdp2"),
        ("fsdp2", "single"),
        ("fsdp2 x cp", "single"),
    ],
)
def test_a_run_is_resumed_on_another_world(world, tmp_path, before, after):
    cases = CASES | SHARDED_CASES | FEW
    world.run(start, before, str(tmp_path / "saved"), size=cases[before].size, timeout_s=100)

    for losses in world.run(go_on, after, str(tmp_path / "saved"), size=cases[after].size, timeout_s=100):
        assert losses == pytest.approx(plain_run().losses[8:10], rel=1e-5)


def save_weights(case: str, folder: str) -> bool:
    session = make_session(case)
    session.accelerator.save_model(session.model, folder)
    is_saving = session.accelerator.should_save_model
    session.accelerator.end_training()
    return is_saving


@over_engines
def test_saved_weights_open_with_safetensors_and_fit_the_plain_model(world, case, tmp_path):
    saving = world.run(save_weights, case, str(tmp_path), size=CASES[case].size, timeout_s=100)

    assert saving[0]
    (file,) = Path(tmp_path).glob("*.safetensors")
    weights = load_file(file)
    expected = make_model().state_dict()
    assert set(weights) == set(expected) - {"head.weight"}
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def evaluate(case: str) -> tuple[list[int], list[int]]:
    """Sample numbers seen in a training loop's evaluation, over data that does not divide."""
    session = make_session(case)
    accelerator = session.accelerator
    assert isinstance(accelerator.unwrap_model(session.model), Transformer)
    loader = accelerator.prepare(DataLoader(make_data(11), batch_size=2))
    session.model.eval()
    seen: list[int] = []
    with torch.no_grad():
        for tokens, numbers in loader:
            loss_of(session.model, tokens[:, :-1], tokens[:, 1:])
            seen += accelerator.gather_for_metrics(numbers).tolist()
    accelerator.end_training()
    return seen, list(range(11))


@over_engines
def test_evaluation_on_uneven_data_sees_every_sample_once_in_order(world, case):
    for seen, expected in world.run(evaluate, case, size=CASES[case].size, timeout_s=100):
        assert seen == expected


def train_beside_a_teacher(case: str) -> list[float]:
    """Train a model on the outputs of a frozen one."""
    accelerator = Accelerator(**CASES[case].options())
    student, teacher = make_model(0), make_model(1).requires_grad_(False)
    optimizer = make_optimizer(student)
    shards = CASES[case].size // CASES[case].replicas
    loader = DataLoader(make_data(FEW_STEPS * GLOBAL_BATCH), batch_size=GLOBAL_BATCH // shards)
    student, teacher, optimizer, loader = accelerator.prepare(student, teacher, optimizer, loader)
    losses = []
    for tokens, _ in loader:
        # The two have their own positions, which are not split: the teacher sees full sequences.
        with torch.no_grad():
            target = teacher(tokens[:, 1:])
        loss = F.mse_loss(student(tokens[:, 1:]), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    accelerator.end_training()
    return losses


@over_engines
def test_a_frozen_model_next_to_the_trained_one(world, case):
    student, teacher = make_model(0), make_model(1)
    optimizer = make_optimizer(student)
    expected = []
    for tokens, _ in DataLoader(make_data(FEW_STEPS * GLOBAL_BATCH), batch_size=GLOBAL_BATCH):
        loss = F.mse_loss(student(tokens[:, 1:]), teacher(tokens[:, 1:]).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    for losses in world.run(train_beside_a_teacher, case, size=CASES[case].size, timeout_s=100):
        assert losses == pytest.approx(expected, rel=1e-5)


def first_step(case: str, weighted: bool) -> dict[str, torch.Tensor]:
    """One window of two micro-batches: by `no_sync` by hand, or with ragged weights; then plain SGD."""
    accelerator = Accelerator(gradient_accumulation_steps=2 if weighted else 1, **CASES[case].options())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = make_data(8).tensors[0]
    rank, shards = accelerator.engine.data_parallel.rank_and_size
    own = tokens.chunk(2 * shards)[2 * rank : 2 * rank + 2]
    if weighted:
        for part, kept in zip(own, (1, 3), strict=True):
            part = part.clone()
            part[:, 1 + kept + rank % 2 :] = -100
            with accelerator.accumulate(model):
                with pairs_of(accelerator, model, part) as (inputs, target):
                    logits = model(inputs.clamp(min=0)).flatten(0, 1)
                    loss = F.cross_entropy(logits, target.flatten(), reduction="sum", ignore_index=-100)
                    accelerator.backward(loss, weight=(target != -100).sum())
                optimizer.step()
                optimizer.zero_grad()
    else:
        with accelerator.no_sync(model), pairs_of(accelerator, model, own[0]) as pair:
            accelerator.backward(loss_of(model, *pair) / 2)
        with pairs_of(accelerator, model, own[1]) as pair:
            accelerator.backward(loss_of(model, *pair) / 2)
        optimizer.step()
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return state


def expected_first_step(shards: int, weighted: bool) -> dict[str, torch.Tensor]:
    model = make_model()
    tokens = make_data(8).tensors[0]
    if weighted:
        for index, part in enumerate(tokens.chunk(2 * shards)):
            part[:, 1 + (1, 3)[index % 2] + index // 2 % 2 :] = -100
        logits = model(tokens[:, :-1].clamp(min=0)).flatten(0, 1)
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    else:
        loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


@over_engines
@pytest.mark.parametrize("weighted", [False, True])
def test_a_window_has_the_gradient_of_one_big_batch(world, case, weighted):
    chosen = CASES[case]
    (state, *_) = world.run(first_step, case, weighted, size=chosen.size, timeout_s=100)

    expected = expected_first_step(chosen.size // chosen.replicas, weighted)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
