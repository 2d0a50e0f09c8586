from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.file_names import model_file, optimizer_file
from accel_ckpt.files import mapped_file
from accel_ckpt.files.mapped_file import MappedFile
from accel_ckpt.folder import reader
from accel_ckpt.folder.reader import CheckpointReader, open_checkpoint
from accel_ckpt.training_state.save import save_accelerator_state
from accel_state.process.state import current_process


def saved(tmp_path: Path) -> tuple[Path, torch.optim.Optimizer]:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    folder = tmp_path / "c"
    save_accelerator_state(folder, [model.state_dict()], [optimizer], [], [], 0, 0)
    return folder, optimizer


def opened(folder: Path, verify: bool = True, **options: Any) -> CheckpointReader:
    return open_checkpoint(folder, current_process(), None, options, verify)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_the_state_of_an_optimizer_is_in_memory_once_and_outlives_its_file(tmp_path: Path) -> None:
    folder, optimizer = saved(tmp_path)
    state = opened(folder).load(optimizer_file())
    assert mapped(folder / optimizer_file())
    shutil.rmtree(folder)
    expected = optimizer.state_dict()["state"]
    assert all(torch.equal(state["state"][0][name], value) for name, value in expected[0].items())
    state["state"][0]["exp_avg"].add_(1)  # its own
    del state
    assert not mapped(folder / optimizer_file())


def test_the_state_stays_where_its_digest_was_taken_and_another_load_has_its_own(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    found = opened(folder)
    (checked,) = found.mapped.values()
    first, second = (found.load(optimizer_file())["state"][0]["exp_avg"] for _ in range(2))
    begin, size = checked._storage.data_ptr(), checked._storage.nbytes()
    assert begin <= first.data_ptr() < begin + size
    assert not begin <= second.data_ptr() < begin + size
    first.fill_(7)
    assert not torch.equal(first, second)


def test_options_and_other_objects_are_for_torch_itself(tmp_path: Path) -> None:
    folder, optimizer = saved(tmp_path)
    assert not opened(folder, mmap=False).mapped
    assert not opened(folder, verify=False).mapped
    for options in ({"mmap": False}, {"weights_only": True}):
        state = opened(folder, **options).load(optimizer_file())
        assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    torch.save({"state": {}, "folder": folder}, folder / optimizer_file())
    (folder / "accel_manifest.json").unlink()
    with pytest.warns(UserWarning, match="another implementation wrote it"):
        found = opened(folder)
    with pytest.raises(CheckpointError, match="holds more than tensors, arrays and plain containers"):
        found.load(optimizer_file())
    assert replace(found, options={"weights_only": False}).load(optimizer_file())["folder"] == folder


@pytest.mark.parametrize("missing", ["_load", "from_file", "is_zip"])
def test_what_cannot_be_mapped_or_unpickled_there_is_loaded_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    folder, optimizer = saved(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("it has other arguments by now")

    with monkeypatch.context() as patch:
        if missing == "_load":
            patch.setattr(MappedFile, "load", fail)
        elif missing == "is_zip":
            patch.setattr(reader.tensors, "is_zip", fail)
        else:
            patch.setattr(mapped_file.torch, "UntypedStorage", SimpleNamespace(from_file=fail))
        found = opened(folder)
        assert bool(found.mapped) == (missing == "_load")
    if missing == "_load":
        monkeypatch.setattr(MappedFile, "load", fail)
    else:
        monkeypatch.setattr(reader, "MappedFile", fail)
    state = found.load(optimizer_file())
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_file_of_old_torch_is_read(tmp_path: Path) -> None:
    folder, optimizer = saved(tmp_path)
    torch.save(optimizer.state_dict(), folder / optimizer_file(), _use_new_zipfile_serialization=False)
    (folder / "accel_manifest.json").unlink()
    with pytest.warns(UserWarning, match="another implementation wrote it"):
        state = opened(folder).load(optimizer_file())
    assert state["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_file_with_the_end_of_a_second_disk_is_named(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    file = folder / optimizer_file()
    end = struct.pack("<4sLQL", b"PK\6\7", 1, 0, 2) + b"PK\5\6" + bytes(18)
    file.write_bytes(file.read_bytes()[:200] + end)
    (folder / "accel_manifest.json").unlink()
    with (
        pytest.warns(UserWarning, match="another implementation wrote it"),
        pytest.raises(CheckpointError, match=rf"{file} cannot be read"),
    ):
        opened(folder).load(optimizer_file())


@pytest.mark.parametrize("place", [None, "cpu", "on_device", torch.device("cpu")], ids=str)
def test_on_the_cpu_weights_are_filled_however_it_is_requested(tmp_path: Path, place: Any) -> None:
    folder, _ = saved(tmp_path)
    cpu = replace(current_process(), device=torch.device("cpu"))
    found = open_checkpoint(folder, cpu, place, {}, verify=True)
    assert found.read_into_model(torch.nn.Linear(300, 300), model_file()).keys() == {"weight", "bias"}


def test_nothing_is_opened_before_all_digests_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved(tmp_path)
    for owner, name in ((reader.tensors, "load"), (reader.tensors, "load_mapped"), (MappedFile, "load")):
        monkeypatch.setattr(owner, name, lambda file, *args, **kw: pytest.fail(f"{file} was opened"))
    opened(folder)
    size = (folder / optimizer_file()).stat().st_size
    (folder / optimizer_file()).write_bytes(b"PK" + bytes(size - 2))
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.bin differs in bytes 0 to"):
        opened(folder)
