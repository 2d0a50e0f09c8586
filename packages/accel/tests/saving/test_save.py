"""save_state and load_state through the Accelerator."""

from __future__ import annotations

import datetime
import enum
import gc
import random
import warnings
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ckpt.config import ProjectConfiguration
from accel_ckpt.errors import CheckpointError
from accel_ckpt.folder import manifest
from accel_ckpt.weights.files import save_weights
from accel_ckpt.weights.load import load_checkpoint_in_model

pytestmark = pytest.mark.usefixtures("fresh_state")


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


def make_run(**options):
    torch.manual_seed(0)
    accelerator = Accelerator(**options)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    data = TensorDataset(torch.arange(60.0).reshape(20, 3), torch.arange(20.0).reshape(20, 1))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler), counter


def train(run, steps: int, save_at: int | None = None, folder: str = "") -> list[float]:
    accelerator, model, optimizer, loader, scheduler, counter = run
    losses: list[float] = []
    while len(losses) < steps:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.count += 1
            losses.append(loss.item())
            if len(losses) == save_at:
                accelerator.save_state(folder)
            if len(losses) == steps:
                break
    return losses


def straight_and_resumed(folder: str, precision: str) -> tuple[list, list]:
    run = make_run(mixed_precision=precision)
    rest = train(run, 15, save_at=7, folder=folder)[7:]
    parameters = [p.detach().clone() for p in run[1].parameters()]

    torch.manual_seed(99)
    again = make_run(mixed_precision=precision)
    again[0].load_state(folder)
    assert again[5].count == 7
    resumed = train(again, 8)
    for a, b in zip(parameters, again[1].parameters(), strict=True):
        assert torch.equal(a, b)
    return rest, resumed


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, precision):
    rest, resumed = straight_and_resumed(str(tmp_path / "state"), precision)

    assert resumed == rest


def test_also_on_two_processes(world, tmp_path):
    for rest, resumed in world.run(straight_and_resumed, str(tmp_path / "state"), "no"):
        assert resumed == rest


def test_the_place_in_the_accumulation_window_is_restored(tmp_path):
    saved = make_run(gradient_accumulation_steps=3)
    with saved[0].accumulate():
        pass
    saved[0].save_state(str(tmp_path / "state"))

    resumed = make_run(gradient_accumulation_steps=3)[0]
    resumed.load_state(str(tmp_path / "state"))

    assert resumed.step == 1
    ends = []
    for _ in range(3):
        with resumed.accumulate():
            ends.append(resumed.sync_gradients)
    assert ends == [False, True, False]


def test_the_files_have_their_documented_names_and_open_without_accel(tmp_path):
    run = make_run(mixed_precision="fp16")
    folder = Path(run[0].save_state(str(tmp_path / "state")))

    names = {path.name for path in folder.iterdir()}
    expected = {"model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"}
    assert expected | {"custom_checkpoint_0.pkl"} <= names
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(weights["0.weight"], run[1].state_dict()["0.weight"])


def skip(folder: str) -> tuple[list[str], float]:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    seen = []

    def save(models, weights, path):
        seen.extend(type(item).__name__ for item in models)
        weights.clear()
        if accelerator.is_main_process:
            torch.save(models[0].state_dict(), f"{path}/own.pt")

    def load(models, path):
        seen.append(type(models[0]).__name__)
        models.pop().load_state_dict(torch.load(f"{path}/own.pt"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(folder)
    saved = accelerator.unwrap_model(model).weight.item()
    torch.nn.init.zeros_(next(model.parameters()))
    accelerator.load_state(folder)
    return seen, accelerator.unwrap_model(model).weight.item() - saved


def test_hooks_of_replicas_see_the_users_models(world, tmp_path):
    # As those of diffusers do, which call models[0].save_pretrained.
    assert world.run(skip, str(tmp_path / "state")) == [(["Linear", "Linear"], 0.0)] * 2


def test_hooks_see_models_weights_and_the_folder(tmp_path):
    run = make_run()
    accelerator = run[0]
    seen = []

    def save_hook(models, weights, output_dir):
        seen.append((models[0] is run[1], next(iter(weights[0]))))
        Path(output_dir, "extra.json").write_text("{}")

    def load_hook(models, input_dir):
        seen.append(Path(input_dir, "extra.json").exists())
        models.clear()

    save_handle = accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    folder = accelerator.save_state(str(tmp_path / "a"))
    with torch.no_grad():
        next(run[1].parameters()).zero_()
    with pytest.warns(UserWarning, match="model.safetensors"):
        accelerator.load_state(folder)
    save_handle.remove()
    accelerator.save_state(str(tmp_path / "b"))

    assert seen == [(True, "0.weight"), True]
    assert next(run[1].parameters()).abs().sum() == 0  # the hook had taken the model out
    assert (tmp_path / "a" / "extra.json").exists()
    assert not (tmp_path / "b" / "extra.json").exists()


def test_weights_in_several_files_that_hooks_write_are_left_to_them(tmp_path):
    accelerator, model, *_ = make_run()

    def save_hook(models, weights, output_dir):
        save_weights(weights.pop(), output_dir, 80)

    def load_hook(models, input_dir):
        load_checkpoint_in_model(models.pop(), input_dir)

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    folder = Path(accelerator.save_state(str(tmp_path / "state")))
    assert len(list(folder.glob("model-0000*.safetensors"))) > 1
    saved = [value.clone() for value in model.parameters()]
    with torch.no_grad():
        next(model.parameters()).zero_()
    with pytest.warns(UserWarning, match="model.safetensors.index.json is not loaded: a hook has removed"):
        accelerator.load_state(str(folder))
    assert all(map(torch.equal, saved, model.parameters()))


def test_a_failing_hook_leaves_the_old_checkpoint(tmp_path):
    run = make_run()
    folder = run[0].save_state(str(tmp_path / "state"))
    before = load_file(Path(folder) / "model.safetensors")
    train(run, 1)

    def fail(models, weights, output_dir):
        raise RuntimeError("planted")

    run[0].register_save_state_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        run[0].save_state(str(tmp_path / "state"))
    after = load_file(Path(folder) / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_folder_that_is_not_used_is_reported_once(tmp_path):
    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=naming)
    with pytest.warns(UserWarning, match="save_state ignores output_dir='mine'"):
        accelerator.save_state("mine")
    accelerator.save_state("mine")  # another warning would be an error


def test_automatic_names_count_up_prune_and_resume_behind_the_newest(tmp_path):
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}
    run = make_run(project_config=ProjectConfiguration(**config))
    for _ in range(3):
        run[0].save_state()
    message = r"ignores output_dir.*this one is .*/checkpoints/checkpoint_3\."
    with pytest.warns(UserWarning, match=message) as told:
        run[0].save_state(str(tmp_path / "elsewhere"))
    assert told[0].filename == __file__
    assert run[0].save_iteration == 4
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]

    again = make_run(project_config=ProjectConfiguration(**config))
    again[0].load_state()
    assert again[0].save_iteration == 4
    assert again[0].save_state().endswith("checkpoint_4")
    again[0].load_state(str(tmp_path / "checkpoints" / "checkpoint_3"))
    assert again[0].save_state().endswith("checkpoint_5")


def test_misspelt_options_are_errors_and_others_go_on(tmp_path):
    accelerator, *_ = make_run(cpu=True)
    with pytest.raises(TypeError, match=r"save_state\(\) has no argument 'blockng'. Did you mean 'blocking'"):
        accelerator.save_state(tmp_path / "a", blockng=False)
    assert not (tmp_path / "a").exists()
    with pytest.warns(UserWarning, match="save_state ignores tag"):  # an option of DeepSpeed
        accelerator.save_state(tmp_path / "a", tag="step_1")
    with pytest.warns(UserWarning, match="save_state ignores runs"):  # `run` is not public
        accelerator.save_state(tmp_path / "a", runs=1)
    with pytest.raises(TypeError, match=r"load_state\(\) has no argument 'missing_okay'.*'missing_ok'"):
        accelerator.load_state(tmp_path / "b", missing_okay=True)
    assert accelerator.load_state(tmp_path / "a", assign=False)  # an option of load_state_dict
    with pytest.raises(TypeError, match="weights_first"):
        accelerator.load_state(tmp_path / "a", weights_first=True)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_new_run_next_to_older_checkpoints_continues_above_them_and_keeps_its_own(tmp_path, blocking):
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 3}
    old = make_run(project_config=ProjectConfiguration(**config, iteration=7))[0]
    for _ in range(3):
        old.save_state()
    new, *_, counter = make_run(project_config=ProjectConfiguration(**{**config, "total_limit": 1}))
    message = r"nor loaded, up to checkpoint_9: this one is checkpoint_10\. total_limit=1 counts"
    with pytest.warns(UserWarning, match=message) as told:
        first = new.save_state(blocking=blocking)
    assert told[0].filename == __file__
    new.wait_for_save()
    assert Path(first).is_dir()
    counter.count = 12
    second = new.save_state(blocking=blocking)
    new.wait_for_save()

    assert [second] == [str(path) for path in (tmp_path / "checkpoints").iterdir()]
    assert second.endswith("checkpoint_11")
    counter.count = 0
    new.load_state()
    assert counter.count == 12


def resumed(folder: str | None, project: str) -> list[bool | int]:
    """Start twice as a script does that may be preempted; return whether something was loaded, and what."""
    naming = ProjectConfiguration(project, automatic_checkpoint_naming=folder is None)
    found: list[bool | int] = []
    for _ in range(2):
        accelerator, counter = Accelerator(project_config=naming), Counter()
        accelerator.register_for_checkpointing(counter)
        found += [accelerator.load_state(folder, missing_ok=True), counter.count]
        counter.count = 5
        accelerator.save_state(folder)
    return found


@pytest.mark.parametrize("folder", [None, "state", "made before"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_script_resumes_if_there_is_something(world, tmp_path, folder, size):
    if folder == "made before":  # a disk that is mounted there, say
        (tmp_path / folder).mkdir()
    path = None if folder is None else str(tmp_path / folder)
    assert world.run(resumed, path, str(tmp_path), size=size) == [[False, 0, True, 5]] * size


def test_resuming_passes_over_what_is_missing_and_not_over_damage(tmp_path):
    accelerator = Accelerator()
    state, model = tmp_path / "state", torch.nn.Linear(2, 1)
    accelerator.prepare(model)
    accelerator.save_state(str(state))
    (state / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 0 bytes"):
        accelerator.load_state(str(state), missing_ok=True)
    with pytest.raises(ValueError, match="needs input_dir"):
        accelerator.load_state(missing_ok=True)
    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(FileNotFoundError, match=r"call load_state\(missing_ok=True\)"):
        Accelerator(project_config=naming).load_state()


def test_what_is_wrong_is_named(tmp_path):
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="needs output_dir"):
        accelerator.save_state()
    with pytest.raises(ValueError, match="needs input_dir"):
        accelerator.load_state()
    with pytest.raises(FileNotFoundError):
        accelerator.load_state(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"int \(1\)"):
        accelerator.register_for_checkpointing(Counter(), 3)
    assert accelerator.run.registered == []
    with pytest.warns(UserWarning, match="ignores exclude_frozen_parameters"):
        accelerator.save_state(str(tmp_path / "a"), exclude_frozen_parameters=True)
    naming = ProjectConfiguration(automatic_checkpoint_naming=True)
    with pytest.raises(ValueError, match="project_dir"):
        Accelerator(project_config=naming).save_state()
    naming.project_dir = str(tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        Accelerator(project_config=naming).load_state()


def test_save_writes_one_object(tmp_path):
    accelerator = Accelerator()
    accelerator.save({"w": torch.ones(2)}, tmp_path / "a.bin")
    accelerator.save({"w": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)

    assert torch.equal(torch.load(tmp_path / "a.bin")["w"], torch.ones(2))
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w"], torch.ones(2))


class Clock(Counter):
    def state_dict(self) -> dict:
        return {"count": (datetime.date(2000, 1, 1), Path("a"), {Own.ONE: deque([1])})}


class Own(enum.Enum):
    ONE = 1


class Odd(Counter):
    def state_dict(self) -> dict:
        return {"count": {"inner": [self]}}


def test_registered_objects_of_common_types_are_restored_and_others_rejected_by_the_save(tmp_path):
    accelerator = Accelerator()
    clock = Clock()
    accelerator.register_for_checkpointing(clock)
    accelerator.load_state(accelerator.save_state(str(tmp_path / "state")))
    assert clock.count == (datetime.date(2000, 1, 1), Path("a"), {Own.ONE: deque([1])})

    accelerator.register_for_checkpointing(Odd())
    message = (
        r"registered object 1 \(Odd\) cannot be saved: its state\['count'\]\['inner'\]\[0\] is of type .*Odd"
    )
    with pytest.raises(ValueError, match=message):
        accelerator.save_state(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_load_kwargs_reach_registered_objects(tmp_path):
    accelerator = Accelerator()
    odd = Odd()
    accelerator.register_for_checkpointing(odd)
    with torch.serialization.safe_globals([Odd]):
        folder = accelerator.save_state(str(tmp_path / "state"))

    with pytest.raises(CheckpointError, match="weights_only=False"):
        accelerator.load_state(folder)
    accelerator.load_state(folder, load_kwargs={"weights_only": False})
    assert isinstance(odd.count["inner"][0], Odd)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.a.weight


def save_a_wrapped_model(folder):
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = Tied()
    accelerator.save_model(accelerator.prepare(model), folder, max_shard_size=400)
    other = Tied()
    load_checkpoint_in_model(other, folder, strict=True)
    return [torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items()]


@pytest.mark.parametrize("size", [1, 2])
def test_save_model_writes_what_load_checkpoint_in_model_reads(world, tmp_path, size):
    results = world.run(save_a_wrapped_model, str(tmp_path / "m"), size=size, timeout_s=100)

    assert results == [[True] * 6] * size
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    assert "a.weight" in load_file(tmp_path / "m" / files[0])


def fail_to_save_a_model(folder):
    accelerator = Accelerator()
    try:
        accelerator.save_model(accelerator.prepare(torch.nn.Linear(1, 1)), folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_save_model_fails_on_all_or_on_none(world, tmp_path):
    (tmp_path / "file").touch()
    first, second = world.run(fail_to_save_a_model, str(tmp_path / "file"), size=2, timeout_s=100)

    assert first.startswith("FileExistsError")
    assert second.startswith(
        "CheckpointError: saving the model failed on another process. process 0: FileExists"
    )


def fail_in_a_hook_before_the_parts(folder):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    accelerator.prepare(torch.nn.Linear(4, 4))

    def fail_on_main(models, weights, path):
        if accelerator.is_main_process:
            raise OSError("the hook has failed")

    accelerator.register_save_state_pre_hook(fail_on_main)
    try:
        accelerator.save_state(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_save_state_in_parts_fails_on_all_if_a_hook_fails_on_one(world, tmp_path):
    first, second = world.run(fail_in_a_hook_before_the_parts, str(tmp_path / "m"), size=2, timeout_s=100)

    assert first == "OSError: the hook has failed"
    assert second.startswith(
        "CheckpointError: writing the checkpoint failed on another process. process 0: OSE"
    )
    assert list(tmp_path.iterdir()) == []


def fail_in_a_load_hook(folder):
    run = make_run()
    train(run, 1)
    accelerator = run[0]
    accelerator.save_state(folder)

    def fail_on_main(models, path):
        if accelerator.is_main_process:
            raise OSError("the hook has failed")

    accelerator.register_load_state_pre_hook(fail_on_main)
    try:
        accelerator.load_state(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_load_state_fails_on_all_if_a_hook_fails_on_one(world, tmp_path):
    first, second = world.run(fail_in_a_load_hook, str(tmp_path / "m"), size=2, timeout_s=100)

    assert first == "OSError: the hook has failed"
    assert second == (
        "CheckpointError: calling the hooks of load_state failed on another process. process 0: OSError: the "
        "hook has failed"
    )


# Damage, and what differs


def fall_back(folder, damaged):
    """Three checkpoints, of which the newest is damaged in one file; return what a new run says and has."""
    config = {"project_dir": folder, "automatic_checkpoint_naming": True}
    run = make_run(project_config=ProjectConfiguration(**config))
    for _ in range(3):
        train(run, 1)
        run[0].save_state()
    run[0].wait_for_everyone()
    if run[0].is_main_process:
        for number, name in damaged:
            file = Path(folder, "checkpoints", f"checkpoint_{number}", name)
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 16
            file.write_bytes(raw)
    run[0].wait_for_everyone()
    again = make_run(project_config=ProjectConfiguration(**config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            again[0].load_state()
        except CheckpointError as error:
            return str(error)
    told = [str(entry.message) for entry in caught if "Resuming from" in str(entry.message)]
    return told, again[5].count, Path(again[0].save_state()).name


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl", "accel_manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_on_all_processes(world, tmp_path, size, name):
    if size == 2 and name == "random_states_0.pkl":
        name = "random_states_1.pkl"
    results = world.run(fall_back, str(tmp_path), [(2, name)], size=size, timeout_s=100)

    told = results[0][0]
    assert len(told) == 1
    assert "Resuming from" in told[0]
    assert "checkpoint_1. " in told[0]
    assert (
        f"checkpoint_2/{name} is damaged" in told[0] or f"checkpoint_2 is damaged: {name} differs" in told[0]
    )
    assert [result[1:] for result in results] == [(2, "checkpoint_3")] * size


def test_without_a_sound_checkpoint_all_damage_is_named(tmp_path):
    damaged = [(number, "model.safetensors") for number in range(3)]
    told = fall_back(str(tmp_path), damaged)

    for number in range(3):
        assert f"checkpoint_{number} is damaged: model.safetensors differs" in told


def test_differences_are_errors_unless_requested_otherwise(tmp_path):
    run = make_run()
    folder = run[0].save_state(str(tmp_path / "state"))
    again = make_run()
    again[0]._schedulers.clear()
    with pytest.raises(CheckpointError, match=r"scheduler\.bin is not loaded: there is no scheduler"):
        again[0].load_state(folder)
    with pytest.warns(UserWarning, match=r"scheduler\.bin is not loaded"):
        again[0].load_state(folder, strict=False)


def resharded(folder, save, sharded=False):
    """Train on all data as one batch over the processes, so that losses do not depend on their number."""
    torch.manual_seed(0)
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if sharded else {}
    accelerator = Accelerator(split_batches=True, **plugin)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    data = TensorDataset(
        torch.arange(144.0).reshape(48, 3).double() / 144, torch.arange(48.0).reshape(48, 1).double()
    )
    loader = DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    if not save:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*saved on")
            accelerator.load_state(folder)
    drawn = [] if save else [torch.rand(()).item()]
    while len(losses) < (9 if save else 6):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if save and len(losses) == 3:
                torch.manual_seed(accelerator.process_index)
                accelerator.save_state(folder, blocking=not sharded)
                drawn.append(torch.rand(()).item())
            if len(losses) == (9 if save else 6):
                break
    accelerator.wait_for_save()
    return losses[3:] if save else losses, drawn


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_a_run_continues_on_another_number_of_processes(world, tmp_path, saved):
    folder = str(tmp_path / "state")
    goes_on(world, folder, saved, (1, 2, 3, 4), sharded=False)


# Weights and optimizer sharded, under one process, replicas and other numbers of shards.
@pytest.mark.parametrize(("saved", "loaded"), [(2, (1, 3)), (4, (2,))])
def test_a_sharded_run_continues_on_another_number_of_processes(world, tmp_path, saved, loaded):
    folder = tmp_path / "state"
    goes_on(world, str(folder), saved, loaded, sharded=True)
    # The weights have one row, so that the other processes have nothing to write.
    assert [path.name for path in (folder / "pytorch_model_fsdp_0").glob("*.distcp")] == ["__0_0.distcp"]


def goes_on(world, folder, saved, others, sharded):
    straight = world.run(resharded, folder, True, sharded, size=saved, timeout_s=100)
    for loaded in others:
        runs = world.run(resharded, folder, False, sharded, size=loaded, timeout_s=100)
        for losses, _ in runs:
            assert losses == pytest.approx(straight[0][0], rel=1e-9), (saved, loaded)
        # Ranks that were there continue with their random numbers; new ones have others.
        assert [drawn for _, drawn in runs[:saved]] == [drawn for _, drawn in straight[:loaded]]
        if saved > 1:
            assert len({drawn[0] for _, drawn in runs}) == loaded


def test_the_manifest_says_what_the_run_was(tmp_path):
    run = make_run()
    train(run, 13)
    folder = Path(run[0].save_state(str(tmp_path / "state")))
    facts = manifest.read(folder).facts

    assert facts["world_size"] == 1
    topology = {"machines": 1, "processes_per_machine": 1, "distributed_type": "NO", "device": "cpu"}
    assert facts["topology"] == topology
    assert facts["step"] == 0
    assert facts["loaders"] == [{"seed": run[3].state_dict()["seed"], "epoch": 1}]


def test_a_save_in_the_background_counts_names_and_prunes_after_its_commit(tmp_path):
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 1}
    run = make_run(project_config=ProjectConfiguration(**config))
    folders = [Path(run[0].save_state(blocking=False)) for _ in range(3)]
    run[0].wait_for_save()

    assert [folder.name for folder in folders] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_2"]
    assert run[0].save_iteration == 3


def test_end_training_waits_for_the_save_and_raises_its_error(tmp_path):
    run = make_run()
    run[0].save_state(str(tmp_path / "a"), blocking=False)
    run[0].end_training()
    assert (tmp_path / "a").is_dir()

    handle = run[0].register_save_state_pre_hook(lambda models, weights, folder: Path(folder).rmdir())
    run[0].save_state(str(tmp_path / "b"), blocking=False)
    handle.remove()
    with pytest.raises(FileNotFoundError):
        run[0].end_training()
    run[0].end_training()
    assert not (tmp_path / "b").exists()


def in_parts(count):
    """Models that are sharded, each with its optimizer."""
    torch.manual_seed(0)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    models = [torch.nn.Linear(3, 2) for _ in range(count)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    return accelerator, prepared[:count], prepared[count:]


def other_parts(folder):
    accelerator, models, _ = in_parts(2)
    saved = models[1].weight.full_tensor()
    accelerator.save_state(folder)
    fewer, _, _ = in_parts(1)
    extra = "the folder optimizer_1 is not loaded: .* the folder pytorch_model_fsdp_1 is not loaded"
    with pytest.raises(CheckpointError, match=extra):
        fewer.load_state(folder)
    with pytest.warns(UserWarning, match=extra):
        fewer.load_state(folder, strict=False)

    more, others, _ = in_parts(3)
    for model in others:
        torch.nn.init.zeros_(model.weight)
    missing = "there is no pytorch_model_fsdp_2 for model 2; there is no optimizer_2 for optimizer 2"
    with pytest.raises(CheckpointError, match=missing):
        more.load_state(folder)
    assert not any(model.weight.full_tensor().any() for model in others)  # nothing is changed
    with pytest.warns(UserWarning, match=missing):
        more.load_state(folder, strict=False)
    assert torch.equal(others[1].weight.full_tensor(), saved)
    assert not others[2].weight.full_tensor().any()


def test_parts_that_are_missing_or_that_nobody_requested_are_reported(world, tmp_path):
    world.run(other_parts, str(tmp_path / "state"), size=1)


def foreign_parts(folder):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    states = {
        "pytorch_model_fsdp_0": {"model": get_model_state_dict(model)},
        "optimizer_0": {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    for name, state in states.items():
        dcp.save(state, checkpoint_id=f"{folder}/{name}", no_dist=True)
    drawn = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    torch.save({"step": 0, **drawn}, f"{folder}/random_states_0.pkl")
    accelerator, (loaded,), (own,) = in_parts(1)
    with pytest.warns(UserWarning, match="another implementation wrote it"):
        accelerator.load_state(folder)
    assert torch.equal(loaded.weight.full_tensor(), model.weight)
    moments = own.state_dict()["state"][0]["exp_avg"].full_tensor()
    assert torch.equal(moments, optimizer.state_dict()["state"][0]["exp_avg"])


def test_parts_that_another_implementation_wrote_are_loaded(world, tmp_path):
    world.run(foreign_parts, str(tmp_path), size=1)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("incremental", [True, False])
def test_a_save_leaves_nothing_to_the_garbage_collector(tmp_path, blocking, incremental):
    # It looks at old objects only when a quarter of all are new: cycles would pile up for many saves.
    config = ProjectConfiguration(
        tmp_path, automatic_checkpoint_naming=True, total_limit=2, incremental_saves=incremental
    )
    run = make_run(project_config=config)
    train(run, 1)

    def save():
        run[0].save_state(blocking=blocking)
        run[0].wait_for_save()

    for _ in range(4):  # until the first are pruned
        save()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        save()
        gc.collect()
        left = {getattr(item, "__module__", None) or type(item).__module__ for item in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()

    # torch.save makes a class of its own for each file, and numpy's ctypes one for the page cache's answer.
    assert not {name for name in left if name.startswith(("accel", "json", "threading", "concurrent"))}, left
