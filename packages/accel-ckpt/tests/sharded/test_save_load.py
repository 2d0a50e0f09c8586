"""Models that are sharded with FSDP2, saved on N processes and loaded on M."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_ckpt.background import thread
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.folder.all_ranks import run_on_all_ranks
from accel_ckpt.folder.reader import CheckpointReader, open_checkpoint
from accel_ckpt.folder.staging import release_buffer, staged
from accel_ckpt.sharded import dcp_reader, save_load
from accel_ckpt.sharded import optimizer as optimizer_state
from accel_ckpt.sharded.save_load import (
    ShardedObjects,
    compare_sharded,
    load_sharded,
    load_sharded_state,
    save_sharded_state,
    write_sharded,
)
from accel_state.process.state import current_process

pytestmark = pytest.mark.core


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)).double()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).double()
        loss = model(data).square().mean()  # the same batch everywhere, so that N does not matter
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load_what_fits(reader: CheckpointReader, objects: ShardedObjects) -> None:
    process = current_process()
    compared = compare_sharded(reader.folder, reader.names, objects, process)
    load_sharded(reader.folder, objects, process, compared, strict=False)


def save_after_three(folder: str) -> list[float]:
    model, optimizer = make(0)
    train(model, optimizer, range(3))
    save_sharded_state(folder, [model], [optimizer])
    return train(model, optimizer, range(3, 7))


def load_and_go_on(folder: str) -> list[float]:
    model, optimizer = make(1)
    optimizer.param_groups[0]["lr"] = 9.0  # the saved one counts
    load_sharded_state(folder, [model], [optimizer])
    return train(model, optimizer, range(3, 7))


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_losses_continue_on_any_number_of_processes(world: Any, tmp_path: Path, saved: int) -> None:
    folder = tmp_path / "c"
    straight = world.run(save_after_three, str(folder), size=saved, timeout_s=100)[0]
    # Nothing was gathered; of four processes the last one has no rows of this model.
    assert len(list(folder.glob("pytorch_model_fsdp_0/*.distcp"))) == min(saved, 3)
    for loaded in (1, 2, 3, 4):
        for losses in world.run(load_and_go_on, str(folder), size=loaded, timeout_s=100):
            assert losses == pytest.approx(straight, rel=1e-9), (saved, loaded)


def told(folder: str) -> str:
    try:
        load_and_go_on(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_damage_is_named_on_all(world: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    world.run(save_after_three, str(folder), size=2, timeout_s=100)
    shutil.rmtree(shutil.copytree(folder, tmp_path / "d") / "optimizer_0")
    file = folder / "pytorch_model_fsdp_0" / "__1_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    for message in world.run(told, str(folder), size=2, timeout_s=100):
        assert "pytorch_model_fsdp_0/__1_0.distcp differs" in message
    assert "optimizer_0/.metadata is missing" in told(str(tmp_path / "d"))
    (tmp_path / "d" / "accel_manifest.json").unlink()
    with pytest.warns(UserWarning, match="another implementation"):
        assert "there is no optimizer_0 for optimizer 0" in told(str(tmp_path / "d"))


def load_damaged(folder: str, damage: str) -> str:
    """Damage one process's part where nothing has a digest of it, and load."""
    file = Path(folder, "pytorch_model_fsdp_0", "__1_0.distcp")
    if process_rank() == 0:
        raw = file.read_bytes()
        file.write_bytes({"cut off": raw[:-100], "garbled": bytes(len(raw))}[damage])
    dist.barrier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*another implementation wrote it")
        return told(folder)


@pytest.mark.parametrize("damage", ["cut off", "garbled"])
def test_damage_is_named_also_without_digests(world: Any, tmp_path: Path, damage: str) -> None:
    world.run(save_after_three, str(tmp_path / "c"), size=2, timeout_s=100)
    (tmp_path / "c" / "accel_manifest.json").unlink()
    problem = {"cut off": r"is cut off: it has \d+ bytes", "garbled": "cannot be read"}[damage]
    for message in world.run(load_damaged, str(tmp_path / "c"), damage, size=2, timeout_s=100):
        assert re.search(rf"pytorch_model_fsdp_0/__1_0\.distcp {problem}", message), message


def test_a_flipped_bit_anywhere_is_noticed_and_its_file_is_named(tmp_path: Path) -> None:
    model, optimizer = make(0)
    train(model, optimizer, range(2))
    save_sharded_state(tmp_path / "c", [model], [optimizer])
    files = sorted(path for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert len(files) == 5
    before = [item.detach().clone() for item in model.parameters()]
    generator = random.Random(0)
    for _ in range(100):
        file = generator.choice(files)
        good = file.read_bytes()
        place = generator.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match=str(file.relative_to(tmp_path / "c"))):
            load_sharded_state(tmp_path / "c", [model], [optimizer])
        file.write_bytes(good)
    assert all(map(torch.equal, before, model.parameters()))
    load_sharded_state(tmp_path / "c", [model], [optimizer])


def save_in_the_background(folder: str, failing: int | None) -> list[float] | str:
    model, optimizer = make(0)
    train(model, optimizer, range(3))
    with staged(folder, blocking=False) as staging:
        save_sharded_state(staging.path, [model], [optimizer])
        act = fail if process_rank() == failing else nothing
        staging.write_collectively(lambda group: run_on_all_ranks(act, current_process(), "failing", group))
        own = staging.writer
    losses = train(model, optimizer, range(3, 7))  # changes what is being saved
    try:
        thread.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        release_buffer()
    digested = sorted(path.name for path in own._files)
    # Each process has digested what it wrote; the first one does the rest.
    assert [name for name in digested if name.endswith(".distcp")] == [f"__{process_rank()}_0.distcp"] * 2
    return losses


def process_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def nothing() -> None:
    pass


def fail() -> None:
    raise OSError(28, "disk full")


@pytest.mark.parametrize("size", [1, 2])
def test_the_state_is_that_of_the_call_when_it_is_saved_in_the_background(
    world: Any, tmp_path: Path, size: int
) -> None:
    folder = str(tmp_path / "c")
    straight = world.run(save_in_the_background, folder, None, size=size, timeout_s=100)
    for losses in world.run(load_and_go_on, folder, size=size, timeout_s=100):
        assert losses == straight[0]


def test_when_one_fails_to_save_in_the_background_all_do(world: Any, tmp_path: Path) -> None:
    first, second = world.run(save_in_the_background, str(tmp_path / "c"), 1, size=2, timeout_s=100)
    assert second == "OSError: [Errno 28] disk full"
    assert "failing failed on another process. process 1: OSError" in first
    assert os.listdir(tmp_path) == []


def test_state_of_no_parameter_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = make(0)
    train(model, optimizer, range(1))
    optimizer.state["total"] = torch.ones(3)  # type: ignore[index]  # torch would pass over it
    with pytest.raises(ValueError, match=r"AdamW\.state has \['total'\]"):
        save_sharded_state(tmp_path / "c", [model], [optimizer])
    assert not (tmp_path / "c").exists()


def test_weights_that_differ_are_itemised_and_what_fits_is_restored(tmp_path: Path) -> None:
    save_after_three(str(tmp_path / "c"))
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4)).double()
    model.extra = nn.Linear(1, 1)
    model[0].register_parameter("bias", None)
    before = model[2].weight.clone(), model[0].weight.clone()
    with pytest.raises(CheckpointError) as error:
        load_sharded_state(tmp_path / "c", [model])
    for line in (
        "pytorch_model_fsdp_0 has 0.bias, which is not in model 0",
        "pytorch_model_fsdp_0 has no extra.weight for model 0",
        "2.weight has the shape [3, 5] in pytorch_model_fsdp_0 and [4, 5] in model 0",
    ):
        assert line in str(error.value)
    assert torch.equal(model[0].weight, before[1])
    reader = open_checkpoint(tmp_path / "c", current_process(), None, {}, True)
    load_what_fits(reader, ShardedObjects.of([model], []))
    assert torch.equal(model[2].weight, before[0])
    assert not torch.equal(model[0].weight, before[1])


def test_optimizers_whose_state_differs_are_itemised_before_anything_is_changed(tmp_path: Path) -> None:
    model, _ = make(0)
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, heavy, range(2))
    save_sharded_state(tmp_path / "heavy", [model], [heavy])
    save_after_three(str(tmp_path / "c"))
    model, _ = make(1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.clone()
    surplus = r"optimizer_0 has optimizer\.state\.0\.weight\.exp_avg, which is not in optimizer 0"
    with pytest.raises(CheckpointError, match=surplus):
        load_sharded_state(tmp_path / "c", [model], [plain])
    adam = torch.optim.AdamW(model.parameters())
    missing = r"optimizer_0 has no optimizer\.state\.0\.weight\.exp_avg for optimizer 0"
    with pytest.raises(CheckpointError, match=missing):
        load_sharded_state(tmp_path / "heavy", [model], [adam])
    assert torch.equal(model[0].weight, before)
    assert not adam.state

    reader = open_checkpoint(tmp_path / "heavy", current_process(), None, {}, True)
    load_what_fits(reader, ShardedObjects.of([model], [adam]))
    assert not torch.equal(model[0].weight, before)
    assert not adam.state


def test_gradients_at_hand_keep_no_state_from_being_loaded(tmp_path: Path) -> None:
    straight = save_after_three(str(tmp_path / "c"))
    model, optimizer = make(1)
    model(torch.ones(1, 6).double()).sum().backward()
    gradient = model[0].weight.grad
    load_sharded_state(tmp_path / "c", [model], [optimizer])
    assert model[0].weight.grad is gradient
    optimizer.zero_grad()
    assert train(model, optimizer, range(3, 7)) == straight


def save_before_the_first_step(folder: str) -> list[list[float]]:
    straight = train(*make(0), range(3))
    model, optimizer = make(0)
    save_sharded_state(folder, [model], [optimizer])
    assert not optimizer.state
    losses = [straight, train(model, optimizer, range(3))]
    for seed in (1, 2):  # into an optimizer without state, and into one that has some
        model, optimizer = make(seed)
        train(model, optimizer, range(seed - 1))
        load_sharded_state(folder, [model], [optimizer])
        assert not optimizer.state
        losses.append(train(model, optimizer, range(3)))
    return losses


def test_saving_before_the_first_step_changes_nothing(world: Any, tmp_path: Path) -> None:
    for losses in world.run(save_before_the_first_step, str(tmp_path / "c"), size=2, timeout_s=100):
        assert losses == [losses[0]] * 4


def make_with_unused(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(seed)
    model.unused = nn.Linear(5, 3).double()
    model.forward = lambda data: model[2](model[0](data))  # type: ignore[method-assign]
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


@pytest.mark.parametrize("steps", [2, 0])
def test_parameters_that_had_no_step_are_restored_without_state(tmp_path: Path, steps: int) -> None:
    model, optimizer = make_with_unused(0)
    train(model, optimizer, range(steps))
    model(torch.ones(1, 6).double()).sum().backward()  # it is saved before the next step
    save_sharded_state(tmp_path / "c", [model], [optimizer])
    optimizer.zero_grad()
    straight = train(model, optimizer, range(3, 6))

    fresh, begun, whole = (make_with_unused(seed) for seed in (1, 2, 3))
    train(*begun, range(1))
    sum(item.sum() for item in whole[0].parameters()).backward()
    whole[1].step()
    whole[1].zero_grad()
    assert [len(item.state) for _, item in (fresh, begun, whole)] == [0, 4, 6]
    for model, optimizer in (fresh, begun, whole):
        load_sharded_state(tmp_path / "c", [model], [optimizer])
        assert len(optimizer.state) == (4 if steps else 0)
        assert train(model, optimizer, range(3, 6)) == straight


def test_parameters_that_the_optimizer_did_not_have_are_a_difference(tmp_path: Path) -> None:
    model, optimizer = make(0)
    part = torch.optim.AdamW(model[0].parameters())
    save_sharded_state(tmp_path / "c", [model], [part])
    missing = r"optimizer_0 has no optimizer\.state\.2\.bias\.exp_avg for optimizer 0"
    with pytest.raises(CheckpointError, match=missing):
        load_sharded_state(tmp_path / "c", [model], [optimizer])


def test_the_groups_of_another_optimizer_are_a_difference_also_without_state(tmp_path: Path) -> None:
    model, optimizer = make(0)
    save_sharded_state(tmp_path / "c", [model], [torch.optim.SGD(model.parameters())])
    with pytest.raises(CheckpointError, match=r"has no optimizer\.param_groups\.0\.betas for optimizer 0"):
        load_sharded_state(tmp_path / "c", [model], [optimizer])


class Payload:
    place = ""

    def __reduce__(self) -> Any:
        return os.mkdir, (Payload.place,)


def test_no_index_runs_code_or_leads_out(tmp_path: Path) -> None:
    save_after_three(str(tmp_path / "c"))
    part = tmp_path / "c" / "pytorch_model_fsdp_0"
    index = part / dcp_reader.METADATA
    good = index.read_bytes()
    Payload.place = str(tmp_path / "ran")
    index.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(
        CorruptCheckpointError, match=r"not the index of sharded weights: it names posix\.mkdir"
    ):
        dcp_reader.read_metadata(part)
    assert not (tmp_path / "ran").exists()
    for place in ("../__0_0.distcp", "/__0_0.distcp"):
        metadata = pickle.loads(good)
        for info in metadata.storage_data.values():
            info.relative_path = place
        index.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptCheckpointError, match="not inside its folder"):
            dcp_reader.read_metadata(part)
    index.write_bytes(good)
    (part / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (part / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        dcp_reader.read_metadata(part)
    with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
        dcp_reader.read_metadata(tmp_path)


class Odd:
    """A type that is not allowed."""


def test_values_of_other_types_are_rejected_by_the_save(tmp_path: Path) -> None:
    model, optimizer = make(0)
    optimizer.param_groups[0]["odd"] = Odd()
    message = r"optimizer_0 cannot be saved: its state.*\['param_groups'\]\[0\]\['odd'\] is of type .*Odd"
    with pytest.raises(ValueError, match=message):
        save_sharded_state(tmp_path / "c", [model], [optimizer])
    assert not (tmp_path / "c").exists()


def test_values_of_common_types_come_back(tmp_path: Path) -> None:
    model, optimizer = make(0)
    optimizer.param_groups[0]["folder"] = Path("a")
    save_sharded_state(tmp_path / "c", [model], [optimizer])
    model, optimizer = make(1)
    optimizer.param_groups[0]["folder"] = None
    load_sharded_state(tmp_path / "c", [model], [optimizer])
    assert optimizer.param_groups[0]["folder"] == Path("a")


class Noted(nn.Linear):
    """A layer with a state next to its tensors."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@pytest.mark.parametrize("load", [load_sharded_state, None], ids=["strict", "what fits"])
@pytest.mark.parametrize(
    ("note", "before"),
    [({"a": 1, "b": {"c": torch.ones(2)}}, {"a": 2, "b": {"c": torch.zeros(2)}}), (b"a", b"b"), (3, None)],
)
def test_extra_state_as_accel_0_2_wrote_it_loads(tmp_path: Path, note: Any, before: Any, load: Any) -> None:
    model, other = Noted(2, 2), Noted(2, 2)
    model.note, other.note = note, before
    state = {"model": get_model_state_dict(model)}
    with staged(tmp_path / "c") as staging:  # DCP takes dicts apart
        write_sharded(state, "pytorch_model_fsdp_0", staging, current_process())
    if load is None:
        reader = open_checkpoint(tmp_path / "c", current_process(), None, {}, True)
        load_what_fits(reader, ShardedObjects.of([other], []))
    else:
        load(tmp_path / "c", [other])
    assert repr(other.note) == repr(note)
    assert torch.equal(other.weight, model.weight)


def test_optimizers_need_their_models(tmp_path: Path) -> None:
    model, optimizer = make(0)
    with pytest.raises(ValueError, match="2 optimizers for 1 models"):
        save_sharded_state(tmp_path / "c", [model], [optimizer] * 2)
    with pytest.raises(ValueError, match="1 optimizers for 0 models"):
        load_sharded_state(tmp_path / "c", [], [optimizer])


class Decaying(torch.optim.SGD):
    """Decays what has no gradient too, counts in a tensor, and makes state in its first step alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first = "begun" not in group
            group["begun"] = True
            group["count"] += 1
            for item in group["params"]:
                item.mul_(0.9)
                if first:
                    self.state[item]["mean"] = torch.zeros_like(item)
                self.state[item]["mean"] += 1


def load_into_decaying(folder: str, failing: int | None) -> str:
    model, _ = make(0)
    optimizer, fresh = (
        Decaying([{"params": list(model.parameters()), "count": torch.zeros(())}]) for _ in range(2)
    )
    count = fresh.param_groups[0]["count"]
    model(torch.ones(2, 6).double())  # gathers what the optimizer has sharded
    save_sharded_state(folder, [model], [optimizer])
    before = [item.detach().to_local().clone() for item in model.parameters()]
    optimizer.step()
    save_sharded_state(folder + "-begun", [model], [optimizer])
    weights = [item.detach().to_local().clone() for item in model.parameters()]
    if process_rank() == failing:
        Decaying.step = lambda *_: fail()  # type: ignore[method-assign]
    try:
        load_sharded_state(folder + "-begun", [model], [fresh])
    except Exception as error:
        assert fresh.param_groups[0]["count"] is count
        assert count.item() == 0
        return f"{type(error).__name__}: {error}"
    after = [item.detach().to_local().clone() for item in model.parameters()]
    assert not all(map(torch.equal, before, weights))
    assert all(map(torch.equal, weights, after))
    assert count.item() == 0  # the loaded one is another tensor
    assert fresh.param_groups[0]["count"].item() == 1
    assert all(state["mean"].to_local().eq(1).all() for state in fresh.state.values())
    return "loaded"


def test_a_load_leaves_weights_and_counts_of_any_optimizer(world: Any, tmp_path: Path) -> None:
    assert world.run(load_into_decaying, str(tmp_path / "c"), None, size=2, timeout_s=100) == ["loaded"] * 2


def test_when_one_cannot_make_state_all_fail(world: Any, tmp_path: Path) -> None:
    first, second = world.run(load_into_decaying, str(tmp_path / "c"), 1, size=2, timeout_s=100)
    assert second == "OSError: [Errno 28] disk full"
    assert "creating the state of an optimizer failed on another process. process 1: OSError" in first


def test_an_optimizer_of_nothing_is_saved(tmp_path: Path) -> None:
    model, _ = make(0)
    save_sharded_state(tmp_path / "c", [model], [torch.optim.AdamW([{"params": []}])])


def reads_of_one_load(folder: str) -> tuple[dict[str, int], int]:
    model, optimizer = make(1)
    indexes: dict[str, int] = {}
    read, made = dcp_reader.read_metadata, mock.Mock(wraps=optimizer_state._new_state)

    def counted(place: Path) -> Any:
        indexes[place.name] = indexes.get(place.name, 0) + 1
        return read(place)

    with (
        mock.patch.object(dcp_reader, "read_metadata", counted),
        mock.patch.object(save_load, "read_metadata", counted),
        mock.patch.object(optimizer_state, "_new_state", made),
    ):
        load_sharded_state(folder, [model], [optimizer])
    return indexes, made.call_count


def test_a_load_reads_each_index_once_and_makes_an_optimizers_state_once(world, tmp_path):
    folder = str(tmp_path / "run")
    world.run(save_after_three, folder)
    expected = {"pytorch_model_fsdp_0": 1, "optimizer_0": 1}
    assert world.run(reads_of_one_load, folder) == [(expected, 1)] * 2
