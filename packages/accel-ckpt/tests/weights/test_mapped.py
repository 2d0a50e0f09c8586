"""Tensors that are read where they lie in a file."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.weights import mapped
from accel_ckpt.weights.mapped import SafetensorsFiles, converted, map_tensor, read_pages

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([True, False]),
    "c": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(WEIGHTS, path)
    return path


def entry(file: Path, **more: str) -> dict[str, str]:
    return {"safetensors_file": str(file), **more}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_read_as_they_are(file: Path, name: str) -> None:
    found = SafetensorsFiles().load(name, entry(file))

    assert found.dtype is WEIGHTS[name].dtype
    assert found.shape == WEIGHTS[name].shape
    assert torch.equal(found, WEIGHTS[name])


def test_an_entry_may_have_another_name_and_another_dtype(file: Path) -> None:
    found = SafetensorsFiles().load("model.a", entry(file, weight_name="a", dtype="float16"))

    assert torch.equal(found, WEIGHTS["a"].half())


@given(st.integers(0, 9000), st.sampled_from([torch.uint8, torch.float16, torch.float64]), st.integers(0, 5))
def test_a_tensor_may_begin_at_any_byte(
    tmp_path_factory: Any, begin: int, dtype: torch.dtype, count: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.bin"
    expected = torch.arange(1, count + 1).to(dtype)
    file.write_bytes(b"x" * begin + expected.numpy().tobytes() + b"yz")

    assert torch.equal(map_tensor(file, begin, [count], dtype), expected)


def test_what_is_written_to_a_tensor_never_reaches_the_file(file: Path) -> None:
    before = file.read_bytes()
    found = SafetensorsFiles().load("a", entry(file))
    found.fill_(9)

    assert found.eq(9).all()
    assert file.read_bytes() == before
    assert torch.equal(SafetensorsFiles().load("a", entry(file)), WEIGHTS["a"])


def test_a_tensor_outlives_the_name_of_its_file(file: Path) -> None:
    found = SafetensorsFiles().load("a", entry(file))
    file.unlink()

    assert torch.equal(found, WEIGHTS["a"])


def test_a_file_that_is_cut_off_is_named_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"0" * 20)
    with pytest.raises(
        CorruptCheckpointError, match=r"w\.bin has 20 bytes and is cut off: .*ends at byte 24"
    ):
        map_tensor(tmp_path / "w.bin", 8, [4], torch.float32)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w.safetensors"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(CorruptCheckpointError, match=rf"w\.safetensors is a {kind}"):
        map_tensor(path, 0, [1], torch.float32)
    with pytest.raises(CorruptCheckpointError, match=rf"w\.safetensors is a {kind}"):
        SafetensorsFiles().load("a", entry(path))


def test_a_file_that_is_gone_is_named_with_the_weight(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"gone\.safetensors, where the weight model\.a is read in place"
    ):
        SafetensorsFiles().load("model.a", entry(tmp_path / "gone.safetensors", weight_name="a"))


def test_a_weight_that_the_file_lacks_is_named(file: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"does not have 'z' \(weight model\.z\)"):
        SafetensorsFiles().load("model.z", entry(file, weight_name="z"))


@pytest.mark.parametrize("length", [0, 7, 30])
def test_a_damaged_header_is_named_with_the_weight(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(
        CorruptCheckpointError, match=rf"weight a: .*{re.escape(str(file))}.*Download or copy"
    ):
        SafetensorsFiles().load("a", entry(file))


def test_a_file_that_is_cut_off_later_is_named(file: Path) -> None:
    files = SafetensorsFiles()
    files.load("a", entry(file))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - len(WEIGHTS["a"].numpy().tobytes())])

    def load_all() -> None:
        for name in WEIGHTS:
            files.load(name, entry(file))

    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        load_all()


def test_headers_are_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, count = mapped.read_header, []
    monkeypatch.setattr(mapped, "read_header", lambda path: count.append(path) or read(path))
    files = SafetensorsFiles()
    for name in WEIGHTS:
        files.load(name, entry(file))
    assert len(count) == 1


@on_linux
@pytest.mark.parametrize("twin", [lambda it: it, copy.deepcopy])
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_file_that_another_replaces_is_read_as_before(
    file: Path, change: str, twin: Callable[[SafetensorsFiles], SafetensorsFiles]
) -> None:
    files = SafetensorsFiles()
    files.open_all([str(file)])
    if change == "deleted":
        file.unlink()
    else:
        newer = file.with_name("newer")
        safetensors.torch.save_file({"extra": torch.ones(7), "a": WEIGHTS["a"] + 1}, newer)
        newer.replace(file)

    files = twin(files)
    for name, value in WEIGHTS.items():
        assert torch.equal(files.load(name, entry(file)), value)
    restored = pickle.loads(pickle.dumps(files))  # which opens what has the name now
    with pytest.raises((CorruptCheckpointError, FileNotFoundError), match=r"model\.safetensors.* weight a "):
        restored.load("a", entry(file))


@on_linux
def test_files_are_closed_with_the_last_copy(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = SafetensorsFiles()
    files.open_all([str(file)])
    other = copy.deepcopy(files)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del files
    assert torch.equal(other.load("a", entry(file)), WEIGHTS["a"])
    del other
    assert len(os.listdir("/proc/self/fd")) == before


@on_linux
def test_without_numbers_for_open_files_the_name_is_read(file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = SafetensorsFiles()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        files.open_all([str(file)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert torch.equal(files.load("a", entry(file)), WEIGHTS["a"])
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors, where the weight a .*is gone"):
        files.load("a", entry(file))


@pytest.mark.parametrize("known", ["read", "noted"])
@pytest.mark.parametrize("kept_open", [True, False])
def test_a_file_that_changes_is_named_and_not_mixed_with_what_was_read(
    file: Path, known: str, kept_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept_open:
        monkeypatch.setattr(mapped, "_KEPT_OPEN", False)
    files = SafetensorsFiles()
    if known == "read":
        files.load("a", entry(file))
    else:
        files.open_all([str(file), str(file.with_name("gone.safetensors"))])

    newer = file.with_name("newer")
    safetensors.torch.save_file({"extra": torch.ones(7), "a": WEIGHTS["a"] + 1}, newer)
    if kept_open:
        file.write_bytes(newer.read_bytes())
    else:
        newer.replace(file)

    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors, .* weight a .*has changed"):
            files.load("a", entry(file))


def mapped_kb(file: Path, key: str) -> int:
    """Sum what this process has of a file in its memory map, in kB."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith(f"{key}:"):
            total += int(line.split()[1])
    return total


@on_linux
def test_pages_come_when_they_are_used_and_go_with_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(2**23))
    value = map_tensor(file, 2**22, [2**20], torch.float32)
    # The kernel brings pages in by several at once, up to 2 MB for a large page.
    assert mapped_kb(file, "Size") <= 2**12 + 4
    assert mapped_kb(file, "Rss") == 0
    read_pages(value)
    assert mapped_kb(file, "Rss") >= 2**12
    del value
    gc.collect()
    assert mapped_kb(file, "Size") == 0


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.empty(0), torch.tensor(1.0), torch.ones(2, dtype=torch.bool)]
)
def test_pages_of_any_tensor_can_be_read(value: torch.Tensor) -> None:
    read_pages(value)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_converted_is_what_to_gives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.nn.Parameter(torch.randn(shape))

    found = converted(value, dtype)

    assert found.dtype == dtype
    assert not found.requires_grad
    assert torch.equal(found, value.detach().to(dtype))


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


@on_linux
def test_what_is_converted_one_after_the_other_takes_the_memory_of_one() -> None:
    value = torch.ones(2**20)
    kept = []  # what stands for each weight in a model, in the same heap
    converted(value, torch.bfloat16)
    before = anonymous_bytes()
    for _ in range(50):
        found = converted(value, torch.bfloat16)
        kept.append(torch.nn.Parameter(torch.empty_like(found, device="meta")))
        del found

    assert anonymous_bytes() - before < 5 * value.numel() * 2
