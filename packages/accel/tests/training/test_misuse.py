"""Loops that silently train wrongly give one warning, and correct ones none."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.training import misuse
from accel.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from accel_optim.optimizer import AcceleratedOptimizer

pytestmark = pytest.mark.usefixtures("fresh_state")

STEPS = 6
PARAMETERS = "4 parameter(s) of shape (4, 3), (4,), (1, 4), (1,)"  # of a Net
LEFT_OUT = "save_state leaves out what is trained and not prepared"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(data).tanh())


def batch() -> torch.Tensor:
    """The process's own data."""
    return torch.randn(2, 3) + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


def sgd(*models: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([item for model in models for item in model.parameters()], lr=0.01, **options)


def train(accelerator: Accelerator, model: torch.nn.Module, *optimizers: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        accelerator.backward(model(batch()).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(item.message) for item in seen]
    assert all(item.filename == __file__ for item in seen), [item.filename for item in seen]


# Wrong


def unprepared_model(accelerator: Accelerator) -> None:
    model = Net()
    train(accelerator, model, accelerator.prepare(sgd(model)))


def nothing_prepared(accelerator: Accelerator) -> None:
    model = Net()
    train(accelerator, model, sgd(model))


def a_frozen_model_is_prepared_and_the_trained_one_is_not(accelerator: Accelerator) -> None:
    reference, model = accelerator.prepare(Net().requires_grad_(False)), Net()
    train(accelerator, lambda data: model(data) - reference(data), sgd(model))  # type: ignore[arg-type]


def train_plainly(model: Any, *optimizers: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        model(batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain_and_unprepared_model(accelerator: Accelerator) -> None:
    model = Net()
    train_plainly(model, accelerator.prepare(sgd(model)))


def plain_and_a_loader_alone_is_prepared(accelerator: Accelerator) -> None:
    model, loader = Net(), accelerator.prepare(DataLoader(torch.zeros(2 * STEPS, 3)))
    optimizer = sgd(model)
    for _ in loader:  # which alone publishes anything
        train_plainly(model, optimizer, steps=1)


WRONG: dict[str, Callable[[Accelerator], None]] = {
    function.__name__: function
    for function in (
        unprepared_model,
        nothing_prepared,
        a_frozen_model_is_prepared_and_the_trained_one_is_not,
        plain_and_unprepared_model,
        plain_and_a_loader_alone_is_prepared,
    )
}


# Lawful


def as_it_should_be(accelerator: Accelerator) -> None:
    model = Net()
    model, optimizer, _ = accelerator.prepare(model, sgd(model, momentum=0.9), DataLoader(batch()))
    train(accelerator, model, optimizer)


def a_reference_model_for_inference(accelerator: Accelerator) -> None:
    """It is not even frozen, and gets gradients that nobody uses."""
    reference, model = Net(), Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, lambda data: model(data) - reference(data), optimizer)  # type: ignore[arg-type]


def a_prepared_reference_model(accelerator: Accelerator) -> None:
    reference, model = Net(), Net()
    reference, model, optimizer = accelerator.prepare(reference, model, sgd(model))
    train(accelerator, lambda data: model(data) - reference(data).detach(), optimizer)  # type: ignore[arg-type]


def an_adversarial_pair(accelerator: Accelerator) -> None:
    generator, critic = torch.nn.Linear(3, 3), Net()
    generator, critic, *optimizers = accelerator.prepare(generator, critic, sgd(generator), sgd(critic))
    for _ in range(STEPS):
        train(accelerator, lambda data: critic(generator(data).detach()), optimizers[1], steps=5)  # type: ignore[arg-type]
        train(accelerator, lambda data: critic(generator(data)), optimizers[0], steps=1)  # type: ignore[arg-type]


def a_model_that_is_prepared_after_its_optimizer(accelerator: Accelerator) -> None:
    model = Net()
    optimizer = accelerator.prepare(sgd(model))
    model = accelerator.prepare(model)
    train(accelerator, model, optimizer)


def parameters_of_no_model(accelerator: Accelerator) -> None:
    """As the temperature of a policy, whose gradient the loop averages itself."""
    model, temperature = Net(), torch.nn.Parameter(torch.zeros(()))
    model, optimizer, other = accelerator.prepare(model, sgd(model), torch.optim.SGD([temperature], 0.1))
    train(accelerator, lambda data: model(data) * temperature.exp(), optimizer, other)  # type: ignore[arg-type]


def an_optimizer_of_something_else(accelerator: Accelerator) -> None:
    model, probe = Net(), Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    of_probe = sgd(probe)
    for _ in range(STEPS):
        probe(batch()).square().mean().backward()
        of_probe.step()
        train(accelerator, model, optimizer, steps=1)


def averaged_by_its_own_wrapper(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(Net()) if accelerator.use_distributed else Net()
    train(accelerator, model, sgd(model))


def averaged_by_hooks(accelerator: Accelerator) -> None:
    model = Net()
    for item in model.parameters():
        item.register_hook(lambda gradient: accelerator.reduce(gradient, "mean"))
    train(accelerator, model, sgd(model))


def averaged_by_the_loop(accelerator: Accelerator) -> None:
    model = Net()
    optimizer = sgd(model)
    for _ in range(STEPS):
        accelerator.backward(model(batch()).square().mean())
        for item in model.parameters():
            item.grad = accelerator.reduce(item.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()


def sharded_by_its_own_wrapper(accelerator: Accelerator) -> None:
    model: torch.nn.Module = Net()
    if accelerator.use_distributed:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    train(accelerator, model, sgd(model))


def gradients_without_an_optimizer(accelerator: Accelerator) -> None:
    train(accelerator, accelerator.prepare(Net()))


def an_optimizer_that_follows_the_window(accelerator: Accelerator) -> None:
    model, optimizer = Net(), None
    model = accelerator.prepare(model)
    optimizer = sgd(model)
    for _ in range(STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch()).square().mean())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


def plain_as_it_should_be(accelerator: Accelerator) -> None:
    model = Net()
    model, optimizer, _ = accelerator.prepare(model, sgd(model), DataLoader(batch()))
    train_plainly(model, optimizer)


def plain_with_an_optimizer_of_something_else(accelerator: Accelerator) -> None:
    model, probe = Net(), Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train_plainly(probe, sgd(probe))
    train_plainly(model, optimizer)


def plain_and_averaged_by_its_own_wrapper(accelerator: Accelerator) -> None:
    model = DistributedDataParallel(Net()) if accelerator.use_distributed else Net()
    accelerator.prepare(DataLoader(batch()))
    train_plainly(model, sgd(model))


def plain_with_an_optimizer_alone(accelerator: Accelerator) -> None:
    model = Net()
    model = accelerator.prepare(model)
    train_plainly(model, sgd(model))


# Prepared optimizers average the gradients of what is in no prepared model.


def the_head_alone_is_not_prepared(accelerator: Accelerator) -> None:
    whole = Net()
    optimizer = accelerator.prepare(sgd(whole))
    first = accelerator.prepare(whole.first)
    train(accelerator, lambda data: whole.last(first(data)), optimizer)  # type: ignore[arg-type]


def a_late_generator(accelerator: Accelerator) -> None:
    """The critic steps five times before the generator, which is not prepared, steps once."""
    generator, critic = torch.nn.Linear(3, 3), Net()
    critic, of_critic, of_generator = accelerator.prepare(critic, sgd(critic), sgd(generator))
    train(accelerator, critic, of_critic, steps=5)
    train(accelerator, lambda data: critic(generator(data)), of_generator, of_critic)  # type: ignore[arg-type]


def a_part_is_prepared_later(accelerator: Accelerator) -> None:
    model, encoder = Net(), torch.nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, model, optimizer)
    beside = accelerator.prepare(sgd(encoder))
    train(accelerator, lambda data: model(encoder(data)), optimizer, beside)  # type: ignore[arg-type]


LAWFUL: dict[str, Callable[[Accelerator], None]] = {
    function.__name__: function
    for function in (
        as_it_should_be,
        a_reference_model_for_inference,
        a_prepared_reference_model,
        an_adversarial_pair,
        a_model_that_is_prepared_after_its_optimizer,
        parameters_of_no_model,
        an_optimizer_of_something_else,
        averaged_by_its_own_wrapper,
        averaged_by_hooks,
        averaged_by_the_loop,
        sharded_by_its_own_wrapper,
        gradients_without_an_optimizer,
        an_optimizer_that_follows_the_window,
        plain_as_it_should_be,
        plain_with_an_optimizer_of_something_else,
        plain_and_averaged_by_its_own_wrapper,
        plain_with_an_optimizer_alone,
        the_head_alone_is_not_prepared,
        a_late_generator,
        a_part_is_prepared_later,
    )
}


def on_several(fsdp: bool = False) -> dict[str, list[str]]:
    """The warning of each case."""
    found = {}
    # In debug mode what is wrong is an error.
    for case, function in {**LAWFUL, **({} if os.environ.get("ACCELERATE_DEBUG_MODE") else WRONG)}.items():
        if fsdp and ("averaged" in case or "wrapper" in case or case == "an_adversarial_pair"):
            continue
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
        accelerator = Accelerator(fsdp_plugin=plugin)
        torch.manual_seed(0)
        with told() as found[case]:
            function(accelerator)
    return found


@pytest.mark.parametrize(("fsdp", "debug"), [(False, False), (False, True), (True, False)])
def test_a_model_that_is_not_prepared_is_reported_on_several_processes(world, fsdp, debug):
    first, second = world.run(on_several, fsdp, env={"ACCELERATE_DEBUG_MODE": "1"} if debug else {})

    found = {case: [*first[case], *second[case]] for case in first}  # one process tells it
    assert not any(found[case] for case in LAWFUL if case in found)
    for case in () if debug else WRONG:
        (message,) = found[case]
        assert message.startswith(f"SGD steps {PARAMETERS}, which are in no prepared model, and their")
        assert "their gradients differ between the 2 processes" in message


@pytest.mark.parametrize("case", [*LAWFUL, *WRONG])
def test_one_process_may_do_all_of_this(case):
    accelerator = Accelerator()
    with told() as found:
        {**LAWFUL, **WRONG}[case](accelerator)
    assert found == []


class SelfSharded(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randn(8, 3)[torch.distributed.get_rank() :: 2])


def over(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=2, **options)


def data_of(kind: str, accelerator: Accelerator) -> Any:
    """Return the batches of a loop."""
    data = TensorDataset(torch.zeros(8, 3))
    rank = accelerator.process_index
    return {
        "plain": lambda: over(data),
        "shuffled, with workers": lambda: over(data, shuffle=True, num_workers=1),
        "by next": lambda: (lambda batches: (next(batches) for _ in range(4)))(iter(over(data))),
        "the same part": lambda: over(Subset(data, [0, 1, 2])),
        "prepared": lambda: accelerator.prepare(over(data)),
        "prepared, by next": lambda: iter(accelerator.prepare(over(data, num_workers=1))),
        "divided by a sampler": lambda: over(data, sampler=DistributedSampler(data)),
        "divided by hand": lambda: over(Subset(data, range(rank, 8, 2))),
        "rows divided by hand": lambda: over(TensorDataset(torch.eye(8, 3)[rank::2])),
        "said to be a part": lambda: over(data),
        "divided by itself": lambda: ((batch,) for batch in over(SelfSharded())),
        "no loader": lambda: [(torch.zeros(2, 3),)],
    }[kind]()


TOLD = ["plain", "shuffled, with workers", "by next", "the same part"]
NOT_TOLD = [
    "prepared",
    "prepared, by next",
    "divided by a sampler",
    "divided by hand",
    "rows divided by hand",
    "said to be a part",
    "divided by itself",
    "no loader",
]


def train_on(kinds: list[str]) -> dict[str, list[str]]:
    found = {}
    for kind in kinds:
        config = DataLoaderConfiguration(presharded=kind == "said to be a part")
        accelerator = Accelerator(dataloader_config=config)
        model = Net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        with told() as found[kind]:
            for (inputs,) in data_of(kind, accelerator):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("debug", [False, True])
def test_a_loader_that_is_not_prepared_is_reported_on_several_processes(world, debug):
    env = {"ACCELERATE_DEBUG_MODE": "1"} if debug else {}
    first, second = world.run(train_on, TOLD + NOT_TOLD, env=env, size=2)

    assert not any(first[kind] for kind in NOT_TOLD)
    for kind in TOLD:
        (message,) = first[kind]
        assert "is not prepared, and each of 2 processes trains on all of its data" in message
    assert not any(second.values())  # the main process speaks for all


def search_on_several() -> list[tuple[str, bool]]:
    """Each search for loaders: the loop's backward, and whether a prepared optimizer was in its step."""
    found: list[tuple[str, bool]] = []
    search, step = misuse._plain_iterations, AcceleratedOptimizer.step
    in_step = False

    def watched_step(optimizer: Any, *args: Any) -> Any:
        nonlocal in_step
        in_step = True
        result = step(optimizer, *args)
        in_step = False
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratedOptimizer, "step", watched_step)
        for kind, loop in {"accelerator's": train, "own": train_plainly}.items():
            note = functools.partial(lambda kind: (found.append((kind, in_step)), search())[1], kind)
            patch.setattr(misuse, "_plain_iterations", note)
            accelerator, model = Accelerator(), Net()
            model, optimizer = accelerator.prepare(model, sgd(model))
            loop(*([accelerator] if loop is train else []), model, optimizer)
    return found


def test_a_loader_is_searched_for_once_and_outside_of_steps_where_the_accelerator_runs_backward(world):
    # A loop that calls loss.backward() itself shows nothing but its steps.
    assert world.run(search_on_several, size=2) == [[("accelerator's", False), ("own", True)]] * 2


def test_one_process_may_read_a_loader_that_is_not_prepared():
    assert not any(train_on(["plain", "prepared", "no loader"]).values())


def raw_optimizer_of_old_parameters(version: int) -> list[str]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))
    model = Net()
    optimizer = sgd(model)
    model = accelerator.prepare(model)
    with told() as found:
        train(accelerator, model, optimizer)
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_an_optimizer_whose_model_was_sharded_without_it_is_reported(version, world):
    (message,) = world.run(raw_optimizer_of_old_parameters, version)[0]
    assert message.startswith("SGD is not prepared, and steps parameters that its model no longer has")


def test_an_unprepared_optimizer_is_reported_where_its_steps_are_wrong():
    accelerator = Accelerator(mixed_precision="fp16")
    model = accelerator.prepare(Net())
    with told() as found:
        train(accelerator, model, sgd(model))
    (message,) = found
    assert message.startswith("SGD is not prepared, and steps with gradients that are multiplied by the")

    accelerator = Accelerator(mixed_precision="fp16")  # through the scaler, by hand
    model = accelerator.prepare(Net())
    optimizer, scaler = sgd(model), accelerator.scaler
    with told() as found:
        for _ in range(STEPS):
            accelerator.backward(model(batch()).square().mean())
            scaler.step(optimizer)
            scaler.update()
    assert found == []

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(Net())
    optimizer = sgd(model)
    with told() as found:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                train(accelerator, model, optimizer, steps=1)
    (message,) = found
    assert message.startswith("SGD is not prepared, and steps in the middle of an accumulation window")


@pytest.mark.parametrize("prepared", [True, False])
def test_steps_without_accumulate_are_reported(prepared):
    accelerator, model = Accelerator(gradient_accumulation_steps=2), Net()
    optimizer = sgd(model)
    if prepared:
        model, optimizer = accelerator.prepare(model, optimizer)
    with told() as found:
        train(accelerator, model, optimizer)
    (message,) = found
    assert message.startswith("gradient_accumulation_steps=2, and an optimizer steps after 1 backward pass")
    assert "accelerator.accumulate(model)" in message


def with_accumulate(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for data in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(data).square().mean())
        optimizer.step()  # outside of the context, where the window's decision still holds
        optimizer.zero_grad()


def by_hand(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for number, data in enumerate(loader, 1):
        accelerator.backward(model(data).square().mean())
        if number % 3 == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def as_trainers_do(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for number, data in enumerate(loader, 1):
        accelerator.gradient_state._set_sync_gradients(number % 3 == 0 or number == len(loader))
        accelerator.backward(model(data).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def with_weights(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for data in loader:
        accelerator.backward(model(data).square().sum(), weight=len(data))
        optimizer.step()
        optimizer.zero_grad()


def without_the_accelerator(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for data in loader:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [2, 10])
@pytest.mark.parametrize(
    "loop", [with_accumulate, by_hand, as_trainers_do, with_weights, without_the_accelerator]
)
def test_windows_may_be_made_in_many_ways(loop, size):
    plugin = GradientAccumulationPlugin(num_steps=3)
    accelerator, model = Accelerator(gradient_accumulation_plugin=plugin), Net()
    loader = DataLoader(torch.randn(size, 3), 1)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    with told() as found:
        loop(accelerator, model, optimizer, loader)
    assert found == []


# Saving


def saved(accelerator: Accelerator, folder: Any) -> list[str]:
    with told() as found:
        accelerator.save_state(str(folder / "first"))
        accelerator.save_state(str(folder / "second"))  # told once
    return found


class Keeps:
    def __call__(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("way", ["left out", "registered", "hooked", "prepared later"])
def test_an_optimizer_that_a_checkpoint_leaves_out_is_reported(way, plain, tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    optimizer = sgd(model, momentum=0.9)
    with told() as found:
        train_plainly(model, optimizer) if plain else train(accelerator, model, optimizer)
        if way == "registered":
            accelerator.register_for_checkpointing(optimizer)
        if way == "hooked":
            accelerator.register_save_state_pre_hook(Keeps())
        if way == "prepared later":
            accelerator.prepare(optimizer)
    assert found == []

    found = saved(accelerator, tmp_path)
    assert len(found) == (way == "left out")
    if found:
        assert found[0].startswith(f"{LEFT_OUT}: SGD. ")


def test_a_model_that_a_checkpoint_leaves_out_is_reported(tmp_path):
    accelerator, model = Accelerator(), Net()
    optimizer = sgd(model)
    train(accelerator, model, optimizer)
    (message,) = saved(accelerator, tmp_path / "a")
    assert message.startswith(f"{LEFT_OUT}: SGD and {PARAMETERS}. ")

    accelerator, model = Accelerator(), Net()
    optimizer = accelerator.prepare(sgd(model))
    train(accelerator, model, optimizer)
    (message,) = saved(accelerator, tmp_path / "b")
    assert message.startswith(f"{LEFT_OUT}: {PARAMETERS}. ")

    accelerator, model = Accelerator(), Net()
    train(accelerator, model, accelerator.prepare(sgd(model)))
    accelerator.register_for_checkpointing(model)
    assert saved(accelerator, tmp_path / "c") == []

    for is_saved in (False, True):  # a parameter of no model
        accelerator, loose = Accelerator(), torch.nn.Parameter(torch.ones(3))
        optimizer = accelerator.prepare(torch.optim.SGD([loose], 0.1))
        train(accelerator, lambda data, loose=loose: data * loose, optimizer)
        if is_saved:
            accelerator.register_for_checkpointing(Holder(loose))
        assert len(saved(accelerator, tmp_path / f"d{is_saved}")) == (not is_saved)


class Holder:
    """Saves a parameter by itself."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"parameter": self.parameter.detach()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.parameter.data.copy_(state["parameter"])


# The cost


def is_observed(accelerator: Accelerator) -> bool:
    return accelerator.gradient_state.events is not None


def hooks_of(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The classes whose instances are searched for."""
    found: list[type] = []
    search = misuse._instances
    monkeypatch.setattr(misuse, "_instances", lambda base: (found.append(base), search(base))[1])
    return found


def test_nothing_is_left_of_it_after_the_first_steps(searches):
    accelerator, model = Accelerator(), Net()
    assert is_observed(accelerator)
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, model, optimizer, steps=1)
    assert not is_observed(accelerator)

    other = accelerator.prepare(Net())  # which never steps
    train(accelerator, model, optimizer, steps=99)
    assert is_observed(accelerator)
    train(accelerator, model, optimizer, steps=2)
    assert not is_observed(accelerator)
    assert other is not None
    assert searches == []  # a correct loop is never searched


@pytest.mark.parametrize("steps", [1, 101])
def test_nothing_is_left_of_it_after_the_first_steps_of_a_plain_loop(steps, searches):
    accelerator, model = Accelerator(), Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    other = accelerator.prepare(Net()) if steps > 100 else None  # which never steps
    train_plainly(model, optimizer, steps=steps)
    assert not is_observed(accelerator)
    assert searches == []
    del other


def test_an_evaluation_is_not_observed_for_long():
    accelerator = Accelerator()
    model, loader = accelerator.prepare(Net(), DataLoader(torch.randn(103, 3)))
    for number, data in enumerate(loader):
        model(data)
        events = accelerator.gradient_state.events
        assert bool(events.after_batch) == (number < 100)


def test_an_unprepared_optimizer_has_a_hook_in_the_first_steps_alone(searches):
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    optimizer = sgd(model)
    train(accelerator, model, optimizer, steps=2)
    assert hooks_of(optimizer) == 1
    train(accelerator, model, optimizer, steps=2)
    assert hooks_of(optimizer) == 0
    assert not is_observed(accelerator)
    assert searches == [torch.optim.Optimizer]


def test_an_accelerator_that_is_gone_is_not_checked():
    accelerator, model = Accelerator(), Net()
    state = accelerator.gradient_state
    model, optimizer = accelerator.prepare(model, sgd(model))
    left = weakref.ref(accelerator.run)
    del accelerator
    assert left() is None
    optimizer.step()
    assert state.events is None or not state.events.observers


def test_a_copy_of_an_accelerator_is_checked_again():
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    other = copy.deepcopy(accelerator)
    assert not other.gradient_state.events.observers
    other.prepare(Net())
    assert other.gradient_state.events.observers[0] is other.run.misuse
    assert model is not None
