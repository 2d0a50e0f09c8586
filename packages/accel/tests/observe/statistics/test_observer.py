"""Statistics of real runs: whole times, exact samples, the slow process named, and nothing left behind."""

import copy
import functools
import gc
import inspect
import json
import pickle
import sys
import time
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from accel import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.observe.statistics import StatisticsKwargs
from accel.observe.statistics.clock import SECTIONS
from accel.utils import DistributedDataParallelKwargs
from accel_data import DataLoaderConfiguration
from accel_data.loader.shard import DataLoaderShard
from accel_state.devices.spec import DeviceSpec

pytestmark = pytest.mark.usefixtures("fresh_state")


class Numbers(Dataset):
    """So many samples, read in no time."""

    def __init__(self, count, pause_s=0.0):
        self.count, self.pause_s = count, pause_s

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return torch.full((4,), float(index))


class Model(torch.nn.Module):
    """A model that takes its time."""

    def __init__(self, pause_s=0.0):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.pause_s = pause_s

    def forward(self, inputs):
        time.sleep(self.pause_s)
        return self.layers(inputs)


class Slow(torch.autograd.Function):
    """Changes nothing, and takes time in backward."""

    @staticmethod
    def forward(ctx, inputs, pause_s):
        ctx.pause_s = pause_s
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.pause_s)
        return gradient, None


def accelerator_with(folder=None, **options):
    beside = {
        name: options.pop(name)
        for name in ("gradient_accumulation_steps", "mixed_precision")
        if name in options
    }
    if options.pop("sharded", False):
        beside["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    handlers = []
    if options.pop("find_unused", False):
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    config = DataLoaderConfiguration(**options.pop("loaders", {}))
    settings = StatisticsKwargs(folder=None if folder is None else str(folder), **options)
    return Accelerator(cpu=True, dataloader_config=config, kwargs_handlers=[settings, *handlers], **beside)


def train(accelerator, model, loader, pause_in_backward_s=0.0, epochs=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = Slow.apply(model(batch), pause_in_backward_s).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer, loader


def uneven_run(folder, slow_part, slow):
    """12 steps of some milliseconds, in which process 1 takes more time in one part."""
    accelerator = accelerator_with(folder, every=4, slow=slow)
    late_s = {
        name: 0.06 if accelerator.process_index == 1 and name == slow_part else 0.004 for name in SECTIONS
    }
    loader = DataLoader(Numbers(24 * accelerator.num_processes, late_s["data"] / 2), batch_size=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(accelerator, Model(late_s["forward"]), loader, late_s["backward"])
        accelerator.end_training()
    return [str(warning.message) for warning in said if "is slow" in str(warning.message)]


@pytest.mark.parametrize("part", ["data", "forward", "backward"])
def test_a_slow_process_is_named_with_the_part(world, tmp_path, part, capfd):
    said = world.run(uneven_run, tmp_path, part, 1.5, size=3 if part == "data" else 2)
    assert len(said[0]) == 1
    assert said[0][0].startswith("Process 1 is slow: in steps ")
    assert f"Most of it is {part}: " in said[0][0]
    assert not any(said[1:])  # the main process alone
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(slow["rank"], slow["part"], slow["steps"][1]) for slow in summary["slow"]] == [(1, part, 12)]
    assert summary["slow"][0]["ratio"] > 2
    waits = [own["seconds"]["collectives"] for own in summary["ranks"]]
    assert waits[0] > waits[1]  # the other one waits
    lines = [json.loads(line) for line in (tmp_path / "statistics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines[-1]["slow"][0]["rank"] == 1
    values = lines[-1]["values"]
    assert values["statistics/own_ms/slowest"] > 2 * values["statistics/own_ms/fastest"]
    assert values["statistics/step_ms"] >= values["statistics/own_ms/slowest"]


class InBackward(torch.optim.SGD):
    """Steps in backward, as LOMO does."""

    def fused_backward(self, loss, lr):
        loss.backward()


def test_samples_and_time_of_an_optimizer_that_steps_in_backward_count(tmp_path):
    accelerator = accelerator_with(tmp_path)
    model = Model()
    loader = DataLoader(Numbers(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, InBackward(model.parameters(), 0.001), loader)
    for batch in loader:
        accelerator.backward(Slow.apply(model(batch), 0.01).square().mean())
        optimizer.step()
    accelerator.end_training()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (4, 8)
    assert summary["ranks"][0]["seconds"]["backward"] >= 0.04


def held_up_once(folder):
    """12 steps, in one of which process 1 is held up."""
    accelerator = accelerator_with(folder, every=4, slow=5.0)
    model, loader = accelerator.prepare(Model(0.004), DataLoader(Numbers(48), batch_size=2))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.001))
    for number, batch in enumerate(loader):
        time.sleep(0.8 if number == 5 and accelerator.process_index == 1 else 0)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    accelerator.end_training()


def test_a_process_that_is_held_up_once_is_not_called_slow(world, tmp_path):
    world.run(held_up_once, tmp_path, size=2)
    lines = [json.loads(line) for line in (tmp_path / "statistics.jsonl").read_text().splitlines()]
    assert [slow["rank"] for slow in lines[1]["slow"]] == [1]
    assert json.loads((tmp_path / "summary.json").read_text())["slow"] == []


def test_nothing_is_named_where_all_are_equal(world, tmp_path):
    assert world.run(uneven_run, tmp_path, "nothing", 8.0) == [[], []]
    assert json.loads((tmp_path / "summary.json").read_text())["slow"] == []


def whole_run(folder):
    accelerator = accelerator_with(folder, every=0, gradient_accumulation_steps=2)
    started = time.perf_counter()
    loader = DataLoader(Numbers(23, 0.001), batch_size=4)
    model, _, loader = train(accelerator, Model(0.002), loader, 0.002, epochs=2)
    with torch.no_grad():  # read, and not trained on
        for batch in loader:
            model(batch)
    accelerator.gather(torch.ones(3))
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    time.sleep(0.05)
    accelerator.end_training()
    return time.perf_counter() - started


@pytest.mark.parametrize("size", [1, 2])
def test_the_summary_adds_up(world, tmp_path, size):
    took = world.run(whole_run, tmp_path, size=size)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["samples"] == 2 * 23  # nothing that pads the last batch
    assert summary["steps"] == {1: 6, 2: 4}[size]  # windows of two micro-batches, cut short by the end
    assert summary["processes"] == size
    assert summary["missing"] == []
    assert summary["version"] == 1
    assert summary["samples_per_second"] == pytest.approx(46 / summary["seconds"], rel=0.01)
    assert [own["rank"] for own in summary["ranks"]] == list(range(size))
    for own, whole in zip(summary["ranks"], took, strict=True):
        seconds = own["seconds"]
        assert list(seconds) == list(SECTIONS)
        assert 0.7 * whole < sum(seconds.values()) <= whole  # all but making the Accelerator
        assert seconds["data"] >= 3 * 0.001 * (23 // size)
        assert seconds["forward"] >= 3 * 0.002 * (6 // size)
        # The wait in a backward pass is estimated from the passes that DDP times.
        assert seconds["backward"] + seconds["collectives"] >= 2 * 0.002 * (6 // size)
        assert min(seconds["optimizer"], seconds["checkpoint"]) > 0
        assert seconds["other"] >= 0.05
        assert own["peak_memory"]["host"] > 50 * 2**20
        assert own["peak_memory"]["device"] == 0
        assert (seconds["collectives"] > 0) == (size > 1)


def uneven_batches(folder, loaders):
    accelerator = accelerator_with(folder, every=2, slow=1e9, loaders=loaders)
    train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(22), batch_size=3))
    accelerator.end_training()


@pytest.mark.parametrize("loaders", [{}, {"split_batches": True}, {"dispatch_batches": True}])
def test_samples_are_counted_once(world, tmp_path, loaders):
    world.run(uneven_batches, tmp_path, loaders, size=3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["samples"] == 22


def test_skipped_batches_are_not_counted_and_those_left_are(tmp_path):
    accelerator = accelerator_with(tmp_path)
    loader, model = accelerator.prepare(DataLoader(Numbers(10), batch_size=3), torch.nn.Linear(4, 1))
    for batch in accelerator.skip_first_batches(loader, 2):
        accelerator.backward(model(batch).sum())
    accelerator.end_training()
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 4


def test_batches_that_are_read_before_the_passes_of_their_window_all_count(tmp_path):
    accelerator = accelerator_with(tmp_path, gradient_accumulation_steps=3)
    loader, model = accelerator.prepare(DataLoader(Numbers(18), batch_size=3), torch.nn.Linear(4, 1))
    batches = iter(loader)
    for _ in range(2):
        for batch in [next(batches) for _ in range(3)]:
            accelerator.backward(model(batch).sum())
            accelerator.backward(model(batch).sum())  # a second loss of the window's batches adds none
    accelerator.end_training()
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 18


def test_the_batch_that_a_loop_has_read_ahead_at_the_end_counts(tmp_path):
    accelerator = accelerator_with(tmp_path)
    loader, model = accelerator.prepare(DataLoader(Numbers(11), batch_size=3), torch.nn.Linear(4, 1))
    for _ in range(2):
        batches = iter(loader)
        following = next(batches)
        while following is not None:
            batch, following = following, next(batches, None)
            accelerator.backward(model(batch).sum())
    for batch in loader:  # evaluated
        model(batch)
    accelerator.end_training()
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 22


def test_files_that_cannot_be_written_do_not_stop_training(tmp_path):
    (tmp_path / "file").touch()
    accelerator = accelerator_with(tmp_path / "file" / "folder", every=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(accelerator, Model(), DataLoader(Numbers(24), batch_size=3))
        accelerator.end_training()
    texts = [str(item.message) for item in said]
    assert sum("Statistics cannot write" in text and "Training goes on" in text for text in texts) == 1


def test_what_is_evaluated_between_two_steps_is_not_counted(tmp_path):
    accelerator = accelerator_with(tmp_path)
    model, loader, other = accelerator.prepare(
        torch.nn.Linear(4, 1), DataLoader(Numbers(6), batch_size=2), DataLoader(Numbers(5), batch_size=4)
    )
    for batch in loader:
        accelerator.backward(model(batch).sum())
        for evaluated in other:
            model(evaluated)
        next(iter(other))
    accelerator.end_training()
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 6


def test_the_table_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_STATISTICS", "3")
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator, Model(0.001), DataLoader(Numbers(8), batch_size=2))
    accelerator.end_training()
    head, names, own = capsys.readouterr().out.splitlines()
    assert head.startswith("4 steps and 8 samples in ")
    assert " on 1 process: " in head
    assert names.split() == ["process", "seconds", *SECTIONS, "memory"]
    assert own.split()[0] == "0"
    shares = [int(cell) for cell, sign in zip(own.split()[2:], own.split()[3:], strict=False) if sign == "%"]
    assert sum(shares) == pytest.approx(100, abs=4)
    assert [
        json.loads(line)["step"] for line in (tmp_path / "statistics.jsonl").read_text().splitlines()
    ] == [3]
    assert json.loads((tmp_path / "summary.json").read_text())["every"] == 3


def traces(accelerator, model, optimizer, loader):
    """What is attached to the parts of a run."""
    hooks = model._forward_hooks or model._forward_pre_hooks
    replaced = {"backward", "step", "forward", "__iter__"} & {
        *vars(accelerator.run.engine),
        *vars(optimizer),
        *vars(model),
    }
    return [
        bool(accelerator.gradient_state.events),
        bool(hooks),
        bool(replaced),
        type(loader) is not DataLoaderShard,
    ]


def test_nothing_is_attached_when_off_and_nothing_stays():
    functions = [getattr(dist, name) for name in ("all_reduce", "barrier", "all_gather")]
    off = Accelerator(cpu=True)
    parts = train(off, torch.nn.Linear(4, 1), DataLoader(Numbers(4)))
    on = accelerator_with()
    parts_on = train(on, torch.nn.Linear(4, 1), DataLoader(Numbers(4)))
    assert traces(off, *parts) == [False] * 4
    assert traces(on, *parts_on) == [True, True, False, False]
    assert functions == [getattr(dist, name) for name in ("all_reduce", "barrier", "all_gather")]
    on.end_training()
    assert traces(on, *parts_on) == [False] * 4
    assert list(parts_on[2]) != []


def test_an_accelerator_is_awaited_where_that_is_requested(monkeypatch):
    waits = []
    monkeypatch.setattr(DeviceSpec, "synchronize", lambda *_: waits.append(1))
    for synchronize in (False, True):
        accelerator = accelerator_with(synchronize=synchronize)
        train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(1)))
        assert bool(waits) == synchronize
        accelerator.end_training()


def test_two_accelerators_count_their_own_steps(tmp_path):
    first, second = accelerator_with(tmp_path / "first"), accelerator_with(tmp_path / "second")
    train(first, torch.nn.Linear(4, 1), DataLoader(Numbers(6), batch_size=2))
    train(second, torch.nn.Linear(4, 1), DataLoader(Numbers(5)))
    first.end_training()
    second.end_training()
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second")]
    assert [(summary["steps"], summary["samples"]) for summary in found] == [(3, 6), (5, 5)]


def two_runs(folder):
    for name, count in (("first", 4), ("second", 6)):
        accelerator = accelerator_with(folder / name)
        train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(2 * count)))
        if not accelerator.is_main_process:
            time.sleep(0.3)  # the main process must not take the numbers of the run before
        accelerator.run.observers[0].stop()


def test_each_run_has_numbers_of_its_own(world, tmp_path):
    world.run(two_runs, tmp_path)
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second")]
    assert [summary["samples"] for summary in found] == [8, 12]


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])  # whose forward method is the model's own
def test_models_and_schedules_are_used_as_without_statistics(mixed_precision):
    accelerator = accelerator_with(mixed_precision=mixed_precision)
    model, optimizer, _ = train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(4)))
    expected = model(torch.ones(1, 4))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(torch.ones(1, 4)), expected)
        with torch.no_grad():
            other.weight.zero_()
            other.bias.fill_(0.5)
        assert other(torch.ones(1, 4)).tolist() == [[0.5]]  # its own weights, not the model's
    assert torch.equal(model(torch.ones(1, 4)), expected)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert model(torch.ones(1, 4)).item() == pytest.approx(expected.item(), abs=0.05)  # bf16, or fp32
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule whose optimizer did not step
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    clock = accelerator.run.observers[0].clock
    assert current(clock) == "other"  # also after a forward pass that raised
    accelerator.end_training()


def current(clock):
    """The part that time goes to."""
    clock.add_up()
    return clock._open[-1]


def ddp_with_statistics():
    accelerator = accelerator_with(every=0)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    clock, inputs = accelerator.run.observers[0].clock, torch.ones(2, 4)
    for _ in range(3):
        accelerator.backward(model(inputs).sum())
    times = clock.read()
    assert min(times["forward"], times["backward"]) > 0
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    assert current(clock) == "other"
    expected = model(inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.module.weight.zero_()
            assert torch.equal(other(inputs), other.module.bias.expand(2, 1))  # its own, not the model's
    assert torch.equal(model(inputs), expected)
    accelerator.end_training()
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
    assert not any(isinstance(hook, functools.partial) for hook in hooks)  # the engine has its own
    assert torch.equal(model(inputs), expected)
    del accelerator, other
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


def test_models_under_ddp_are_used_as_without_statistics(world):
    world.run(ddp_with_statistics)


class WithSignature(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, inputs, labels=None):
        return torch.relu(self.layer(inputs)) + 1


def compiled_in_calls():
    """Return how many frames a compiler compiled in 20 calls, and the signatures that programs look at."""
    accelerator = accelerator_with(every=0)
    model = WithSignature()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    counted = CompileCounter()
    compiled = torch.compile(model, backend=counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of each kind of call that ends a graph
        for _ in range(20):
            compiled(torch.ones(2, 4))
    accelerator.end_training()
    inner = getattr(model, "module", model)
    forward, step = str(inspect.signature(inner.forward)), inspect.signature(optimizer.step)
    return counted.frame_count, forward, step == inspect.signature(type(optimizer).step.__get__(optimizer))


@pytest.mark.parametrize("size", [1, 2])
def test_models_are_compiled_once_and_signatures_stay(world, size):
    for frames, forward, step_is_same in world.run(compiled_in_calls, size=size):
        assert 1 <= frames <= 3  # not once in each call
        assert forward == "(inputs, labels=None)"
        assert step_is_same


@pytest.mark.parametrize(("options", "said"), [({"every": -1}, "every=-1"), ({"slow": 1.0}, "slow=1.0")])
def test_settings_are_checked(options, said):
    with pytest.raises(ValueError, match=said):
        StatisticsKwargs(**options)


def one_stays_away(folder):
    accelerator = accelerator_with(folder, every=2, slow=1e9)
    train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(8), batch_size=2))
    if accelerator.is_main_process:
        from accel.observe.statistics import observer

        observer.ANSWER_S = 0.2
        accelerator.run.observers.pop(0).stop()
    dist.barrier()
    accelerator.end_training()


def test_a_process_that_does_not_answer_is_left_out(world, tmp_path):
    world.run(one_stays_away, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["missing"] == [1]
    assert [own["rank"] for own in summary["ranks"]] == [0]


def other_numbers_of_steps(folder):
    accelerator = accelerator_with(folder, every=2, slow=1e9)
    optimizer = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1))
    loader = accelerator.prepare(DataLoader(Numbers(28), batch_size=2))
    for step, _ in enumerate(loader):
        if step < 3 or accelerator.is_main_process:
            optimizer.step()
    accelerator.end_training()


def test_a_process_with_fewer_steps_stops_nothing(world, tmp_path):
    world.run(other_numbers_of_steps, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [own["steps"] for own in summary["ranks"]] == [7, 3]
    assert [
        json.loads(line)["step"] for line in (tmp_path / "statistics.jsonl").read_text().splitlines()
    ] == [2]


class Branches(torch.nn.Module):
    """Two layers: used in turn, or the first behind a reentrant checkpoint after the second."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 4)])
        self.is_checkpointed, self.count = is_checkpointed, 0

    def forward(self, inputs):
        self.count += 1
        if self.is_checkpointed:  # what is slow comes after the checkpoint's own pass in backward
            return checkpoint(self.layers[0], Slow.apply(self.layers[1](inputs), 0.03), use_reentrant=True)
        return self.layers[self.count % 2](inputs)


def waiting_run(folder, model, late_s):
    """12 steps, in which process 1 takes so much longer in backward."""
    accelerator = accelerator_with(folder, every=0, find_unused=not getattr(model, "is_checkpointed", True))
    loader = DataLoader(Numbers(48), batch_size=2)
    train(accelerator, model, loader, late_s[accelerator.process_index])
    accelerator.end_training()


@pytest.mark.parametrize(
    "model",
    [torch.nn.Linear(4, 1), Branches(is_checkpointed=False), Branches(is_checkpointed=True)],
    ids=["one layer", "not always reached", "reached in its own pass"],
)
@pytest.mark.core
def test_waits_are_those_after_the_last_own_gradient(world, tmp_path, model):
    world.run(waiting_run, tmp_path, model, (0.0, 0.04))
    waits, late = [own["seconds"] for own in json.loads((tmp_path / "summary.json").read_text())["ranks"]]
    # Half of the waits of all passes but two; what follows a checkpoint's own pass is none.
    assert waits["collectives"] > 10 * 0.02
    assert late["backward"] > 12 * 0.04
    assert late["collectives"] < 12 * 0.015


def sharded_run(folder):
    accelerator = accelerator_with(folder, every=4, slow=1.2, sharded=True)
    late_s = 0.06 if accelerator.process_index else 0.004
    model = torch.nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(accelerator, model, DataLoader(Numbers(48, late_s / 2), batch_size=2))
        accelerator.end_training()


def test_a_sharded_model_is_measured_too(world, tmp_path):
    world.run(sharded_run, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["samples"] == 48
    assert [(slow["rank"], slow["part"]) for slow in summary["slow"]] == [(1, "data")]


def test_what_is_freed_does_not_live_on():
    accelerator = accelerator_with()
    parts = train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(4)))
    left = [weakref.ref(part) for part in parts]
    accelerator.free_memory()
    del parts
    gc.collect()
    assert [part() for part in left] == [None] * 3
    accelerator.end_training()


def calls_into(folder, step):
    """Count the calls of a step into files of a folder, by name."""
    calls = Counter()

    def profile(frame, event, argument):
        if event == "call" and folder in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls


# A call in Python costs up to two microseconds of a step, as the work around it has emptied the caches.
CALLS = {
    "before_batch": 1,
    "after_batch": 1,
    "add": 1,  # its samples
    "note_hook": 2,  # the model's hooks
    "before_backward": 1,
    "use": 1,
    "after_backward": 1,
    "before_step": 1,
    "after_step": 1,
}


def calls_of_a_step():
    """Count with statistics off and on, in a step that is neither the first one nor followed by a gather."""
    counts = []
    for accelerator in (Accelerator(cpu=True), accelerator_with()):
        model, optimizer, loader = train(accelerator, torch.nn.Linear(4, 1), DataLoader(Numbers(8)))
        batches = iter(loader)

        def step(accelerator=accelerator, model=model, optimizer=optimizer, batches=batches):
            accelerator.backward(model(next(batches)).sum())
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        counts.append(calls_into("accel/observe/", step))
        batches.close()
    accelerator.end_training()  # the one with statistics; that would end the group of both
    return counts


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_requests_nothing_when_off_and_little_when_on(world, size):
    for off, on in world.run(calls_of_a_step, size=size):
        assert off == {}
        on.pop("count_pass", None)  # of several processes
        on.pop("_sample", None)  # in the first passes
        assert on == CALLS
