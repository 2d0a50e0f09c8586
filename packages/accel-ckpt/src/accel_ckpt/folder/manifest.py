"""The manifest of a checkpoint folder: its files, with their sizes and digests.

A folder with a readable manifest is complete, because the manifest is written when everything else is on the
disk. Each chunk of 16 MiB has a digest, so that several threads check a large file, and damage is located to
a chunk. Version 1 had only sha256; version 2 names its digest algorithm.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.file_names import MANIFEST, role_of
from accel_ckpt.files.digests import CHUNK_BYTES, FileEntry, kind_of, plain_file
from accel_ckpt.files.disk import replacing
from accel_ckpt.files.hashing import ALGORITHM, ALGORITHMS
from accel_ckpt.files.paths import check_inside

FORMAT = "accel-checkpoint"
# Increased when an older reader would misread a manifest; facts and the body may gain keys without that. In
# every version the document has only the body and its digest.
VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint folder.

    Args:
        files: Its files, sorted by path.
        facts: What the run was when it was saved: world_size, step ...
        chunk_bytes: Size of a digested chunk.
        algorithm: The algorithm of the digests, one of `hashing.ALGORITHMS`.
        version: Version of this format.
    """

    files: tuple[FileEntry, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    chunk_bytes: int = CHUNK_BYTES
    algorithm: str = ALGORITHM
    version: int = VERSION

    def paths(self) -> frozenset[str]:
        """Return the paths of all files."""
        return frozenset(entry.path for entry in self.files)


def files_in(folder: Path, *, strict: bool = True) -> list[str]:
    """List the files of a folder, as a manifest names them.

    Args:
        folder: The folder.
        strict: False to skip anything that is neither a file nor a folder, such as a link.

    Returns:
        Paths inside the folder, sorted, without the manifest.

    Raises:
        CheckpointError: If a strict listing finds anything but files and folders.
    """
    names = []
    for base, folders, files in os.walk(folder):
        inside = Path(base).relative_to(folder).as_posix() + "/"
        for name in (*folders, *files):
            # No Path for each, as there may be tens of thousands.
            path = os.path.join(base, name)
            # lstat: a link is reported as one, wherever it leads.
            mode = os.lstat(path).st_mode
            if strict and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(
                    f"{path} is {kind_of(mode)}; a checkpoint contains only files and folders. Write the "
                    "file itself."
                )
            if stat.S_ISREG(mode):
                names.append(f"{inside}{name}".removeprefix("./"))
    return sorted(name for name in names if name != MANIFEST)


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into its folder atomically, flushed to the disk.

    Args:
        folder: The folder.
        manifest: Its manifest.
    """
    # Its presence says "complete", so it is written last and atomically.
    with replacing(folder / MANIFEST) as draft, open(draft, "wb") as file:
        file.write(_encode(manifest))


def is_complete(folder: Path) -> bool:
    """Return whether a folder has a manifest, and so was written to the end."""
    return (folder / MANIFEST).is_file()


def is_checkpoint(folder: Path) -> bool:
    """Return whether a path is a folder that has a manifest, or files of another implementation."""
    if not folder.is_dir():
        return False
    names = (f"{child.name}/file" if child.is_dir() else child.name for child in folder.iterdir())
    return is_complete(folder) or any(role_of(name) != "other" for name in names)


def read(folder: Path) -> Manifest | None:
    """Read the manifest of a folder.

    Args:
        folder: The folder.

    Returns:
        The manifest; None if there is none, because another implementation wrote the folder.

    Raises:
        CorruptCheckpointError: If it was damaged, or names a file outside of the folder.
        CheckpointError: If a later version wrote it.
    """
    path = folder / MANIFEST
    # A dangling link does not "exist": plain_file raises for it, rather than taking it for a missing
    # manifest.
    if not path.exists() and not path.is_symlink():
        return None
    with open(plain_file(folder, MANIFEST), "rb") as file:
        raw = file.read()
    manifest = _decode(raw, path)
    for entry in manifest.files:
        check_inside(entry.path, path)
    return manifest


def _encode(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "version": manifest.version,
        "facts": dict(manifest.facts),
        "digest": manifest.algorithm,
        "chunk_bytes": manifest.chunk_bytes,
        "files": [
            {"path": entry.path, "size": entry.size, "role": entry.role, "chunks": list(entry.chunks)}
            for entry in manifest.files
        ],
    }
    return _document(_to_json(body, "\n "))


def _document(body: str) -> bytes:
    """Return the full text of a manifest.

    Args:
        body: Its body, indented as it is inside the document.
    """
    # The digest covers only the body, as a text cannot contain its own digest, and with one space less on
    # each line. JSON strings have no new lines, so this only affects the indentation.
    # Fixed spacing and ASCII: `_decode` compares the file with this text byte by byte.
    dedented = body.replace("\n ", "\n").encode("ascii") + b"\n"
    text = f'{{\n "manifest": {body},\n "sha256": "{hashlib.sha256(dedented).hexdigest()}"\n}}\n'
    return text.encode("ascii")


def _to_json(value: Any, line: str) -> str:
    """Return what json.dumps(value, indent=1) does, without leaving reference cycles.

    Args:
        value: A JSON value.
        line: A newline, with the indentation of the value.
    """
    inner = f"{line} "
    if not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    children = value.values() if isinstance(value, dict) else value
    if not any(isinstance(child, dict | list | tuple) for child in children):
        text = json.dumps(value, separators=(f",{inner}", ": "))
        return f"{text[0]}{inner}{text[1:-1]}{line}{text[-1]}"
    if isinstance(value, dict):
        # json writes the keys too, as it has rules for keys that are not strings.
        items = [json.dumps({key: 0})[1:-2] + _to_json(child, inner) for key, child in value.items()]
        return f"{{{inner}{f',{inner}'.join(items)}{line}}}"
    return f"[{inner}{f',{inner}'.join(_to_json(child, inner) for child in value)}{line}]"


def _decode(raw: bytes, path: Path) -> Manifest:
    damaged = f"{path} is damaged. Load another checkpoint, or copy this one again."
    try:
        document = json.loads(raw)
        body = document["manifest"]
        # Byte by byte, not only the digest: JSON can write one value in several ways.
        if _document(_to_json(body, "\n ")) != raw:
            raise ValueError("digest")
        if body["format"] == FORMAT and body["version"] > VERSION:
            raise CheckpointError(
                f"{path} has version {body['version']}, and accel-ckpt here reads up to {VERSION}: update it."
            )
        is_known = body["digest"] in (*ALGORITHMS,)  # also if it is not a string
        if not (isinstance(body["facts"], dict) and body["chunk_bytes"] > 0 and is_known):
            raise ValueError("facts, chunk_bytes or digest")
        files = tuple(FileEntry(f["path"], f["size"], f["role"], tuple(f["chunks"])) for f in body["files"])
        return Manifest(files, body["facts"], body["chunk_bytes"], body["digest"], body["version"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(damaged) from error
