from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.file_names import MANIFEST
from accel_ckpt.files import digests
from accel_ckpt.files.digests import FileEntry
from accel_ckpt.files.writer import Writer
from accel_ckpt.folder import commit, manifest
from accel_ckpt.folder.manifest import Manifest

_KEYS = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none())
_VALUES = st.recursive(
    st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(_KEYS, inner)),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "checkpoint"
    (base / "sub").mkdir(parents=True)
    (base / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (base / "empty.bin").touch()
    (base / "sub" / "notes.txt").write_text("hello")
    commit.seal(base, {"step": 3})
    return base


def test_it_says_what_is_there(folder: Path) -> None:
    read = manifest.read(folder)

    assert read is not None
    assert [(entry.path, entry.size, entry.role) for entry in read.files] == [
        ("empty.bin", 0, "other"),
        ("model.safetensors", 10240, "model"),
        ("sub/notes.txt", 5, "other"),
    ]
    assert read.facts == {"step": 3}
    assert read.files[2].chunks == (xxhash.xxh3_128_hexdigest(b"hello"),)
    assert read.paths() == {"empty.bin", "model.safetensors", "sub/notes.txt"}
    digests.verify(folder, read.files)


@given(_VALUES)
def test_values_are_written_as_json_does(value: Any) -> None:
    # Manifests are compared with this spelling byte by byte, also those of earlier versions.
    assert manifest._to_json(value, "\n") == json.dumps(value, indent=1)


def test_it_is_plain_json(folder: Path) -> None:
    document = json.loads((folder / MANIFEST).read_text())

    assert document["manifest"]["format"] == "accel-checkpoint"
    assert document["manifest"]["version"] == 2
    assert document["manifest"]["digest"] == "xxh3_128"
    assert not list(folder.glob("*.tmp"))


def test_a_folder_of_something_else_has_none(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) is None
    assert not manifest.is_complete(tmp_path)


@given(size=st.integers(0, 70), chunk_bytes=st.integers(1, 40), flip=st.integers(0, 69))
def test_chunks_cover_every_byte(tmp_path_factory: Any, size: int, chunk_bytes: int, flip: int) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    data = random.Random(size).randbytes(size)
    (folder / "x").write_bytes(data)
    with closing(Writer(chunk_bytes=chunk_bytes)) as writer:
        writer.add_existing(folder / "x")
        entries = writer.entries(folder)
    assert entries[0].chunks == tuple(
        xxhash.xxh3_128_hexdigest(data[start : start + chunk_bytes]) for start in range(0, size, chunk_bytes)
    )
    digests.verify(folder, entries, chunk_bytes)
    if flip < size:
        changed = bytearray(data)
        changed[flip] ^= 1
        (folder / "x").write_bytes(changed)
        first = flip // chunk_bytes * chunk_bytes
        last = min(first + chunk_bytes, size) - 1
        with pytest.raises(CorruptCheckpointError, match=f"x differs in bytes {first} to {last}"):
            digests.verify(folder, entries, chunk_bytes)


def damage(folder: Path, how: str) -> str:
    file = folder / "model.safetensors"
    if how == "missing":
        file.unlink()
        return "model.safetensors is missing"
    if how == "shorter":
        os.truncate(file, 100)
        return "model.safetensors has 100 bytes and should have 10240"
    if how == "longer":
        file.write_bytes(file.read_bytes() + b"x")
        return "model.safetensors has 10241 bytes and should have 10240"
    file.rename(folder.parent / "elsewhere")
    if how == "link":
        file.symlink_to(folder.parent / "elsewhere")
        return "model.safetensors is a symbolic link where a file is expected"
    if how == "pipe":
        os.mkfifo(file)
        return "model.safetensors is a pipe where a file is expected"
    file.mkdir()
    return "model.safetensors is a folder where a file is expected"


@pytest.mark.parametrize("how", ["missing", "shorter", "longer", "link", "pipe", "folder"])
def test_a_file_that_is_not_what_it_was_is_named(folder: Path, how: str) -> None:
    read = manifest.read(folder)
    assert read is not None
    message = damage(folder, how)
    with pytest.raises(CorruptCheckpointError, match=f"is damaged: {message}. Load another checkpoint"):
        digests.verify(folder, read.files)


def test_all_damaged_files_are_named(folder: Path) -> None:
    read = manifest.read(folder)
    assert read is not None
    damage(folder, "missing")
    (folder / "sub" / "notes.txt").write_text("hellO")
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.safetensors is missing; sub/notes\.txt differs"
    ):
        digests.verify(folder, read.files)


def test_a_link_on_the_way_is_rejected(folder: Path) -> None:
    read = manifest.read(folder)
    assert read is not None
    (folder / "sub").rename(folder.parent / "away")
    (folder / "sub").symlink_to(folder.parent / "away")
    with pytest.raises(CorruptCheckpointError, match=r"sub/notes\.txt is a symbolic link"):
        digests.verify(folder, read.files)


def test_every_flipped_bit_of_the_manifest_is_noticed(folder: Path) -> None:
    path = folder / MANIFEST
    raw = path.read_bytes()
    places = random.Random(0).sample(range(len(raw) * 8), 400)
    for place in places:
        changed = bytearray(raw)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST} is damaged"):
            manifest.read(folder)


def test_a_manifest_that_was_edited_or_reformatted_is_noticed(folder: Path) -> None:
    path = folder / MANIFEST
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST} is damaged"):
        manifest.read(folder)
    document["manifest"]["facts"]["step"] = 4
    path.write_text(json.dumps(document, indent=1) + "\n")
    with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST} is damaged"):
        manifest.read(folder)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"null", b"\xff", b'{"manifest": {}, "sha256": 1}', b"[" * 100000]
)
def test_something_else_in_its_place_is_noticed(folder: Path, raw: bytes) -> None:
    (folder / MANIFEST).write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST} is damaged"):
        manifest.read(folder)


def rewrite(folder: Path, **changes: Any) -> None:
    """Make a manifest whose own digest is right."""
    body = {**json.loads((folder / MANIFEST).read_text())["manifest"], **changes}
    digest = hashlib.sha256(f"{json.dumps(body, indent=1)}\n".encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"manifest": body, "sha256": digest}, indent=1) + "\n")


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/etc/passwd",
        "sub/../../secret",
        "..",
        ".",
        "",
        "sub/",
        "sub//x",
        "./x",
        "a\\..\\b",
        "C:/x",
        "x\0y",
        3,
        None,
    ],
)
def test_a_manifest_cannot_point_outside(folder: Path, name: Any) -> None:
    rewrite(folder, files=[{"path": name, "size": 0, "role": "other", "chunks": []}])
    with pytest.raises(CorruptCheckpointError, match="is not inside its folder"):
        manifest.read(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": 3},
        {"chunk_bytes": 0},
        {"chunk_bytes": "x"},
        {"digest": "md5"},
        {"digest": []},
        {"files": [{}]},
    ],
)
def test_a_manifest_of_the_wrong_shape_is_rejected(folder: Path, changes: dict[str, Any]) -> None:
    rewrite(folder, **changes)
    with pytest.raises(CorruptCheckpointError, match=f"{MANIFEST} is damaged"):
        manifest.read(folder)


def test_a_later_version_is_reported(folder: Path) -> None:
    rewrite(folder, version=3, digest="one of the future")
    with pytest.raises(CheckpointError, match="has version 3, and accel-ckpt here reads up to 2: update it"):
        manifest.read(folder)


def test_the_first_version_is_read_and_its_digests_are_checked(folder: Path) -> None:
    names = manifest.files_in(folder)
    contents = {name: (folder / name).read_bytes() for name in names}
    rewrite(
        folder,
        version=1,
        digest="sha256",
        files=[
            {
                "path": name,
                "size": len(data),
                "role": "other",
                "chunks": [hashlib.sha256(data).hexdigest()] if data else [],
            }
            for name, data in contents.items()
        ],
    )
    read = manifest.read(folder)
    assert read is not None
    digests.verify(folder, read.files, read.chunk_bytes, algorithm=read.algorithm)
    (folder / "sub" / "notes.txt").write_text("hellO")
    with pytest.raises(CorruptCheckpointError, match=r"sub/notes\.txt differs in bytes 0 to 4"):
        digests.verify(folder, read.files, read.chunk_bytes, algorithm=read.algorithm)


def test_what_the_disk_does_not_give_back_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *args: Any) -> str:
        if path.name == "model.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return digest_chunk(path, *args)

    digest_chunk = digests.digest_chunk
    monkeypatch.setattr(digests, "digest_chunk", fail)
    read = manifest.read(folder)
    assert read is not None
    message = r"is damaged: model\.safetensors cannot be read in bytes 0 to 10239: Input/output error\. Load"
    with pytest.raises(CorruptCheckpointError, match=message):
        digests.verify(folder, read.files)


def test_a_manifest_that_is_a_link_is_rejected(folder: Path) -> None:
    (folder / MANIFEST).rename(folder.parent / "m")
    (folder / MANIFEST).symlink_to(folder.parent / "m")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        manifest.read(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to(folder.parent / "nowhere")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        manifest.read(folder)


def test_links_and_pipes_are_not_put_into_a_checkpoint(folder: Path) -> None:
    (folder / "latest").symlink_to("sub")
    with pytest.raises(
        CheckpointError, match=r"latest is a symbolic link; a checkpoint contains only files and folders"
    ):
        manifest.files_in(folder)


def test_an_entry_is_a_value() -> None:
    assert FileEntry("a", 1, "other", ("x",)) == FileEntry("a", 1, "other", ("x",))
    assert Manifest(()).paths() == frozenset()
