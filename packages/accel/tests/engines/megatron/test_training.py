"""Megatron-LM training with the real megatron-core, whose CUDA calls are answered by the CPU here."""

from __future__ import annotations

import gc
import importlib.util
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.accelerator import Accelerator
from accel.engines.megatron.optimizers import MegatronLMDummyScheduler
from accel.engines.megatron.plugin import MegatronLMPlugin
from accel_ops.memory import find_executable_batch_size
from accel_ops.rng import set_seed

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.usefixtures("fresh_state"), pytest.mark.filterwarnings("ignore")]

LENGTH, VOCAB, SAMPLES, MICRO, BATCHES, STEPS = 8, 256, 32, 2, 2, 5


def shim() -> Any:
    spec = importlib.util.spec_from_file_location("on_cpu", Path(__file__).with_name("on_cpu.py"))
    module = sys.modules.setdefault("on_cpu", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module.cuda_calls_answered_by_the_cpu()


class GPT2(torch.nn.Module):
    """Only described: Megatron-LM builds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(
            model_type="gpt2",
            n_layer=4,
            n_embd=16,
            n_head=2,
            n_inner=None,
            n_positions=LENGTH,
            vocab_size=VOCAB,
            layer_norm_epsilon=1e-5,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            initializer_range=0.02,
            tie_word_embeddings=True,
        )


OTHER = {
    "use_cpu_initialization": True,  # the same weights for every tp_degree
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}


def make(total_num_steps: int = 100, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    options = {"num_micro_batches": BATCHES, "other_megatron_args": OTHER} | options
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))
    return (accelerator, *prepare(accelerator, total_num_steps))


def prepare(accelerator: Accelerator, total_num_steps: int, micro: int = MICRO) -> tuple[Any, ...]:
    model = GPT2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    shards = accelerator.engine.data_parallel.size
    # Schedules count the steps that one process would need.
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps * shards, warmup_num_steps=2 * shards)
    tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    # Processes with their own data have fewer samples of each step.
    loader = DataLoader([{"input_ids": row} for row in tokens], batch_size=micro // shards)
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, scheduler, loader)
    return prepared


Steps = dict[str, list[float]]


def steps_of(prepared: tuple[Any, ...], first: int, last: int) -> Steps:
    accelerator, model, optimizer, scheduler, loader = prepared
    found: Steps = {"losses": [], "norms": [], "rates": []}
    for _, batch in zip(range(last - first), accelerator.skip_first_batches(loader, first), strict=False):
        output = model(**batch)
        optimizer.zero_grad()
        accelerator.backward(output.loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        found["losses"].append(output.loss.item())
        found["norms"].append(float(optimizer.grad_norm))
        found["rates"].append(scheduler.get_last_lr()[0])
    return found


def train(folder: str | None = None, **options: Any) -> Steps:
    """Train, and save after two steps."""
    with shim():
        prepared = make(**options)
        before = steps_of(prepared, 0, 2)
        if folder is not None:
            prepared[0].save_state(folder)
        after = steps_of(prepared, 2, STEPS)
        prepared[0].end_training()
    return {name: before[name] + after[name] for name in before}


def go_on(folder: str, **options: Any) -> tuple[Steps, list[str]]:
    """Go on after two steps, perhaps in another arrangement; the warnings, too."""
    with shim():
        prepared = make(**options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            prepared[0].load_state(folder)
        after = steps_of(prepared, 2, STEPS)
        prepared[0].end_training()
    return after, [str(warning.message) for warning in told]


def assert_same(steps: Steps, expected: Steps) -> None:
    assert steps["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert steps["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert steps["rates"] == pytest.approx(expected["rates"])


@pytest.mark.parametrize(
    "options",
    [
        {"tp_degree": 2},
        {},
        {"use_distributed_optimizer": True},
    ],
    ids=str,
)
def test_two_processes_train_as_one_does(world, options):
    (one,) = world.run(train, size=1, timeout_s=90)
    assert one["losses"][-1] < one["losses"][0]

    for each in world.run(train, size=2, timeout_s=90, **options):
        assert_same(each, one)


def test_recomputed_activations_give_the_same_losses(world):
    (one,) = world.run(train, size=1, timeout_s=90)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for options in (full, {"recompute_activations": True}):
        assert_same(world.run(train, size=1, timeout_s=90, **options)[0], one)


def prepare_anew() -> tuple[bool, Steps, Steps]:
    """Whether free_memory() frees the first model, the steps of a second one, and of one like it alone."""
    with shim():
        accelerator, *first = make()
        steps_of((accelerator, *first), 0, 1)
        left = weakref.ref(first[0])
        first.clear()
        accelerator.free_memory()
        gc.collect()
        second = steps_of((accelerator, *prepare(accelerator, total_num_steps=10)), 0, STEPS)
        is_freed = left() is None
        accelerator.end_training()
        alone = steps_of(make(total_num_steps=10), 0, STEPS)
    return is_freed, second, alone


def test_what_is_prepared_after_free_memory_has_a_schedule_of_its_own(world):
    ((is_freed, second, alone),) = world.run(prepare_anew, size=1, timeout_s=90)

    assert is_freed
    assert second["losses"][-1] < second["losses"][0]
    assert second["rates"] == pytest.approx(alone["rates"])


def retry(start: int, **options: Any) -> tuple[int, Steps, int]:
    """The size that fits of a training whose batches are too large at first, its steps, and models left."""
    made: list[weakref.ref[Any]] = []

    @find_executable_batch_size(starting_batch_size=start, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> tuple[int, Steps]:
        accelerator.free_memory()
        torch.manual_seed(0)
        prepared = (accelerator, *prepare(accelerator, 100, batch_size))
        made.append(weakref.ref(prepared[1]))
        first = steps_of(prepared, 0, 1)
        if batch_size > MICRO:
            raise RuntimeError("CUDA out of memory.")
        rest = steps_of(prepared, 1, STEPS)
        return batch_size, {name: first[name] + rest[name] for name in first}

    with shim():
        options = {"num_micro_batches": BATCHES, "other_megatron_args": OTHER} | options
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))
        sizes = iter([start // 2, start // 4])
        size, steps = train()
        accelerator.free_memory()
        gc.collect()
        left = sum(reference() is not None for reference in made)
        accelerator.end_training()
    return size, steps, left


@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {}), (2, {"tp_degree": 2})], ids=str)
def test_a_loop_begins_again_with_batches_that_fit(world, size, options):
    (one,) = world.run(train, size=1, timeout_s=90)

    for batch_size, steps, left in world.run(retry, 4 * MICRO, size=size, timeout_s=90, **options):
        assert batch_size == MICRO
        assert_same(steps, one)
        assert left == 0


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"tp_degree": 2}),
        (2, {"pp_degree": 2}),
        (2, {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1}),
        (4, {"tp_degree": 2, "pp_degree": 2}),
    ],
    ids=str,
)
def test_a_checkpoint_continues_in_another_arrangement(world, tmp_path, size, options):
    (one,) = world.run(train, str(tmp_path / "saved"), size=1, timeout_s=90)
    expected = {name: values[2:] for name, values in one.items()}

    results = world.run(go_on, str(tmp_path / "saved"), size=size, timeout_s=90, **options)
    for rank, (steps, told) in enumerate(results):
        assert_same(steps, expected)
        begins_anew = any("dropout starts with new random numbers" in text for text in told)
        assert begins_anew == (size > 1 and rank == 0)


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(16))


def read_in_groups(**options: Any) -> tuple[tuple[int, int], list[int], list[int]]:
    """What this process reads of a stream and of a shuffled dataset, where each is seeded by its rank."""
    with shim():
        plugin = MegatronLMPlugin(other_megatron_args=OTHER, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        set_seed(7, device_specific=True)
        loaders = accelerator.prepare(DataLoader(Stream(), 2), DataLoader(range(16), 2, shuffle=True))
        stream, shuffled = ([index for batch in loader for index in batch.tolist()] for loader in loaders)
        place = accelerator.engine.data_parallel.rank_and_size
        accelerator.end_training()
    return place, stream, shuffled


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {"tp_degree": 2}), (4, {"tp_degree": 2}), (4, {"pp_degree": 2})],
    ids=str,
)
def test_processes_that_share_a_model_read_the_same(world, size, options):
    results = world.run(read_in_groups, size=size, timeout_s=90, **options)

    shares = {place: (stream, shuffled) for place, stream, shuffled in results}
    assert [(place, *shares[place]) for place, _, _ in results] == results
    for number in range(2):
        assert sorted(index for share in shares.values() for index in share[number]) == list(range(16))
