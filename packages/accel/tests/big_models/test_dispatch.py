"""Models dispatched by a device map, and loaded on the way, next to the plain model."""

from __future__ import annotations

import copy
import json
import os
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import (
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_ckpt.errors import CheckpointError
from accel_ckpt.weights import mapped
from accel_ckpt.weights.files import save_weights
from accel_world.devices import needs_cuda


class Tied(nn.Module):
    """An embedding that is the head too, blocks between them, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.tensor([1, 2, 3, 10])
MAPS = {
    "memory": {"": "cpu"},
    "disk": {"embedding": "cpu", "head": "cpu", "shift": "cpu", "blocks": "disk"},
    "mixed": {
        "embedding": "cpu",
        "shift": "cpu",
        "blocks.0": "disk",
        "blocks.1": "cpu",
        "blocks.2": "disk",
        "head": "cpu",
    },
    "all": {"": "disk"},
    "all, by its parts": {"embedding": "disk", "head": "disk", "shift": "disk", "blocks": "disk"},
    "a tied head on the disk": {"embedding": "cpu", "shift": "cpu", "blocks": "disk", "head": "disk"},
}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Make the system refuse files larger than some bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Tied().eval()


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_a_dispatched_model_computes_the_same(net, device_map, tmp_path: Path):
    plain = copy.deepcopy(net)

    model = dispatch_model(net, device_map, offload_dir=tmp_path, force_hooks=True)

    assert model.hf_device_map == device_map
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), plain(IDS))
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_what_is_on_the_disk_takes_no_memory(net, tmp_path: Path):
    dispatch_model(net, MAPS["disk"], offload_dir=tmp_path)

    assert all(weight.is_meta for weight in net.blocks.parameters())
    assert not net.embedding.weight.is_meta


WRONG = {
    "names no module": ({"nothing": "cpu"}, {}, ValueError, r"no device for embedding\.weight.*'nothing'"),
    "misses modules": ({"blocks": "cpu", "shift": "cpu"}, {}, ValueError, r"no device for embedding\.weight"),
    "is no map": ("auto", {}, TypeError, "device_map must be a dict .* not 'auto'"),
    "a number of an accelerator": ({"": 99}, {}, ValueError, "puts '' on 99, which does not exist"),
    "a device that is not there": (
        {"": "cpu", "head": "cuda:99"}, {}, ValueError, "puts 'head' on 'cuda:99', which does not exist",
    ),
    "no device": ({"": "cpu", "head": "gpu"}, {}, ValueError, "puts 'head' on 'gpu', which does not exist"),
    "a main device that is not there": (
        MAPS["disk"],
        {"main_device": "cuda:99"},
        ValueError,
        "^main_device is 'cuda:99', which does not exist",
    ),
    "all on the disk, no folder": ({"": "disk"}, {}, ValueError, "to be on the disk.*offload_dir="),
    "no folder": (MAPS["disk"], {}, ValueError, r"blocks\.0\.0\.weight.* to be on the disk.*offload_dir="),
    "a folder that cannot be made": (
        MAPS["disk"], {"offload_dir": "FILE"}, OSError, r"folder for offloaded weights cannot be made.*FILE",
    ),
    "a folder on a file system that takes none": (
        MAPS["disk"], {"offload_dir": "/proc/offload"}, OSError, "cannot be made.*/proc/offload",
    ),
    "a damaged index": (
        MAPS["disk"], {"offload_dir": "DAMAGED"}, CheckpointError, r"json is not an index of offloaded",
    ),
}  # fmt: skip


def picture(model: nn.Module) -> list:
    """Take down all that a dispatch may change: tensors, methods and hooks."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [
        [(name, id(tensor)) for name, tensor in tensors],
        [(name, sorted(vars(module))) for name, module in model.named_modules()],
        [(len(module._state_dict_hooks), module.forward) for module in model.modules()],
    ]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_and_the_model_is_as_before(net, tmp_path: Path, wrong: str, monkeypatch):
    device_map, options, kind, message = WRONG[wrong]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    (tmp_path / "DAMAGED").mkdir()
    (tmp_path / "DAMAGED" / "index.json").write_text("{")
    before = picture(net)

    with pytest.raises(kind, match=message):
        dispatch_model(net, device_map, **options)

    assert picture(net) == before
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["DAMAGED", "FILE", "index.json"]


def test_a_full_disk_leaves_model_and_folder_as_they_were(net, tmp_path: Path):
    before = picture(net)
    with largest_file(100), pytest.raises(OSError, match=r"the weight blocks\.0\.0\.weight \(256 bytes\)"):
        dispatch_model(net, MAPS["disk"], offload_dir=tmp_path)

    assert picture(net) == before
    assert list(tmp_path.iterdir()) == []


def test_names_that_the_model_lacks_are_warned_of_and_change_nothing(net):
    plain = copy.deepcopy(net)
    device_map = {"": "cpu", "vision": "disk", "blocks.9.weight": "cpu"}
    with pytest.warns(UserWarning, match=r"names 'vision', 'blocks\.9\.weight', which Tied does not have"):
        model = dispatch_model(net, device_map)

    assert model.hf_device_map == device_map
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))


def test_a_client_may_switch_the_check_of_the_map_off(net, tmp_path: Path, monkeypatch):
    plain = copy.deepcopy(net)
    monkeypatch.setattr("accel.big_modeling.check_device_map", lambda *args: None)
    dispatch_model(
        net,
        {"blocks": "disk", "lost": "cpu", "lost.weight": "disk"},
        offload_dir=tmp_path,
        main_device="cpu",
        force_hooks=True,
    )

    assert net.embedding.weight.device.type == "cpu"
    with torch.no_grad():
        assert torch.equal(net(IDS), plain(IDS))


def test_a_model_without_tensors_needs_no_device():
    model = nn.Sequential(nn.ReLU())

    assert dispatch_model(model, {}).hf_device_map == {}
    assert model(torch.tensor([-1.0])).item() == 0


def dispatched_from_files(net: nn.Module, folder: Path) -> nn.Module:
    """Dispatch a model whose blocks are read in place, and have no values but there."""
    with init_empty_weights():
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight
    return load_checkpoint_and_dispatch(empty, _save(net, folder / "model.safetensors"), MAPS["disk"])


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_a_dispatched_model_is_dispatched_again(net, device_map, tmp_path: Path):
    model = dispatched_from_files(net, tmp_path)
    dispatch_model(model, device_map, offload_dir=tmp_path / "offloaded")
    (tmp_path / "model.safetensors").unlink()  # what it was read from before

    assert model.head.weight is model.embedding.weight
    on_disk = {name for name, p in model.named_parameters() if p.is_meta}
    assert bool(on_disk) is ("disk" in device_map.values())
    with torch.no_grad():
        assert torch.equal(model(IDS), net(IDS))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_an_index_says_where_weights_are_that_come_to_memory(net, device_map, tmp_path: Path):
    model = dispatched_from_files(net, tmp_path)
    remove_hook_from_submodules(model)  # as peft does, which keeps an index
    lost = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert lost
    index = {name: {"safetensors_file": str(tmp_path / "model.safetensors")} for name in lost}

    dispatch_model(model, device_map, offload_dir=tmp_path / "offloaded", offload_index=index)

    for number in range(3):
        place = device_map.get(f"blocks.{number}", device_map.get("blocks", device_map.get("", "cpu")))
        assert model.blocks[number][0].weight.is_meta == (place == "disk")
    with torch.no_grad():
        assert torch.equal(model(IDS), net(IDS))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("wrong", ["no folder", "a full disk", "a device that is not there"])
def test_a_model_that_cannot_be_dispatched_again_runs_as_before(net, wrong: str, tmp_path: Path):
    model = dispatched_from_files(net, tmp_path)
    before = picture(model)
    folder = tmp_path / "offloaded"

    if wrong == "a full disk":
        with largest_file(100), pytest.raises(OSError, match="cannot be offloaded"):
            dispatch_model(model, MAPS["mixed"], offload_dir=folder)
    else:
        device_map = MAPS["mixed"] if wrong == "no folder" else {"": "cuda:99"}
        with pytest.raises(ValueError, match="offload_dir=" if wrong == "no folder" else "cuda:99"):
            dispatch_model(model, device_map)

    assert picture(model) == before
    assert model.hf_device_map == MAPS["disk"]
    with torch.no_grad():
        assert torch.equal(model(IDS), net(IDS))


def test_other_hooks_stay_when_a_model_is_dispatched_again(net, tmp_path: Path):
    mine = ModelHook()
    add_hook_to_module(net.blocks[0], mine)
    dispatch_model(net, MAPS["disk"], offload_dir=tmp_path)
    dispatch_model(net, {"": "cpu"})

    assert net.blocks[0]._hf_hook is mine
    assert [name for name, module in net.named_modules() if hasattr(module, "_hf_hook")] == ["blocks.0"]


def test_a_file_that_is_gone_is_named_where_it_is_read_in_place(net, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(mapped, "_KEPT_OPEN", False)  # on Linux it is kept open
    model = dispatched_from_files(net, tmp_path)
    (tmp_path / "model.safetensors").unlink()

    for _ in range(2):
        with pytest.raises(
            FileNotFoundError, match=r"model\.safetensors, where the weight blocks\.0\.0\.weight"
        ):
            model(IDS)
        assert all(weight.is_meta for weight in model.blocks.parameters())


def test_a_module_that_is_deleted_goes_with_its_hook(net, tmp_path: Path):
    model = dispatch_model(net, MAPS["mixed"], offload_dir=tmp_path)
    with torch.no_grad():
        model(IDS)
        forward, gone = model.blocks[2].forward, weakref.ref(model.blocks[2])
        del model.blocks[2]
        expected = model(IDS)
        assert torch.equal(model(IDS), expected)
        assert gone() is None
        with pytest.raises(ReferenceError, match="the Sequential of this hook has been freed"):
            forward(torch.ones(1, 8))
        remove_hook_from_submodules(model)
        assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "device_map", [*MAPS.values(), "auto", "sequential"], ids=[*MAPS, "auto", "sequential"]
)
def test_a_checkpoint_is_loaded_to_its_places(net, device_map, suffix, tmp_path: Path):
    file = _save(net, tmp_path / f"model.{suffix}")
    with init_empty_weights():
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight

    model = load_checkpoint_and_dispatch(empty, file, device_map, offload_folder=tmp_path / "offloaded")

    with torch.no_grad():
        assert torch.equal(model(IDS), net(IDS))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in net.state_dict().items())


def test_safetensors_on_the_disk_are_read_where_they_are(net, tmp_path: Path):
    file = _save(net, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight
    offloaded = tmp_path / "offloaded"

    load_checkpoint_and_dispatch(empty, file, MAPS["disk"], offload_folder=offloaded)

    assert not list(offloaded.rglob("*.dat"))


def test_safetensors_on_the_cpu_stay_mapped_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    plain[1].weight = plain[0].weight
    save_weights(plain.state_dict(), tmp_path)
    file = tmp_path / "model.safetensors"
    before = file.read_bytes()
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"})

    if Path("/proc/self/maps").exists():
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if line.endswith(str(file))]
        assert any(int(a, 16) <= model[0].weight.data_ptr() < int(b, 16) for a, b in spans)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1].weight, plain[1].weight)  # one in the file, and not tied in this model
    assert file.read_bytes() == before


def test_a_checkpoint_that_is_damaged_or_cut_off_leaves_the_model_empty(net, tmp_path: Path):
    file = _save(net, tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-50])
    with init_empty_weights():
        empty = Tied().eval()

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint_and_dispatch(empty, file, {"": "cpu"})
    assert all(weight.is_meta for weight in empty.parameters())


def _index(file: str) -> str:
    return json.dumps({"metadata": {}, "weight_map": dict.fromkeys(Tied().state_dict(), file)})


def _link_outside(folder: Path) -> None:
    (folder / "part.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "part.safetensors").symlink_to(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(_index("part.safetensors"))


BAD_FILES = {
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors cannot"),
    "a pipe": (lambda folder: os.mkfifo(folder / "model.safetensors"), r"model\.safetensors is a pipe"),
    "an index out of the folder": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(_index("../part.safetensors")),
        r"names the file '\.\./part\.safetensors', which is not inside",
    ),
    "a link out of the folder": (_link_outside, r"part\.safetensors is a symbolic link"),
    "an index of a file that is not there": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(_index("lost.safetensors")),
        r"names lost\.safetensors, and .* has no such file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_checkpoint_is_named_and_nothing_is_placed(net, kind: str, tmp_path: Path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    _save(net, folder / "part.safetensors")
    damage, message = BAD_FILES[kind]
    damage(folder)
    with init_empty_weights():
        empty = Tied().eval()
    before = picture(empty)

    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        load_checkpoint_and_dispatch(empty, folder, MAPS["disk"], offload_folder=tmp_path / "offloaded")

    assert picture(empty) == before
    assert not (tmp_path / "offloaded").exists()


def test_a_map_of_an_unknown_kind_is_named(net, tmp_path: Path):
    file = _save(net, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=r"balanced_low_0.*'best'"):
        load_checkpoint_and_dispatch(net, file, "best")


GPU_MAP = {
    "embedding": 0,
    "shift": 0,
    "blocks.0": 0,
    "blocks.1": "cpu",
    "blocks.2": "disk",
    "head": 0,
}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    "device_map", [GPU_MAP, {**GPU_MAP, "head": "cpu"}, {"": 0}], ids=["", "ties", "gpu"]
)
def test_a_model_over_gpu_memory_and_disk_computes_as_on_the_gpu(net, device_map, tmp_path: Path):
    plain = copy.deepcopy(net).to("cuda:0")
    model = dispatch_model(net, device_map, offload_dir=tmp_path, force_hooks=True)

    assert model.embedding.weight.device == model.shift.device == torch.device("cuda:0")
    assert model.head.weight is model.embedding.weight
    assert model.blocks[2][0].weight.is_meta is (device_map != {"": 0})
    with torch.no_grad():
        for ids in (IDS, IDS.cuda(), IDS):
            found = model(ids)
            assert found.device == ids.device  # comes back to where its inputs were
            assert torch.equal(found.cpu(), plain(IDS.cuda()).cpu())
    assert all(
        torch.equal(model.state_dict()[name].cpu(), value.cpu()) for name, value in plain.state_dict().items()
    )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("device_map", [{"": 0}, GPU_MAP, "auto"], ids=["gpu", "all", "auto"])
def test_a_checkpoint_is_loaded_to_the_gpu(net, device_map, suffix, tmp_path: Path):
    file = _save(net, tmp_path / f"model.{suffix}")
    with init_empty_weights():
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight
    model = load_checkpoint_and_dispatch(empty, file, device_map, offload_folder=tmp_path / "offloaded")

    assert model.embedding.weight.device == torch.device("cuda:0")
    with torch.no_grad():
        assert torch.equal(model(IDS.cuda()), net.to("cuda:0")(IDS.cuda()))


def _save(net: nn.Module, file: Path) -> Path:
    if file.suffix == ".bin":
        torch.save(net.state_dict(), file)
    else:
        from safetensors.torch import save_model

        save_model(net, str(file))
    return file
