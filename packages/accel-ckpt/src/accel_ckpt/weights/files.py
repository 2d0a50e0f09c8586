"""Weight files: one file, or shards with an index.

    model.safetensors                                              (pytorch_model.bin without safetensors)
    model-00001-of-00002.safetensors ... model.safetensors.index.json
    model_extra_state.bin                                          modules' extra state, next to safetensors

The index has `metadata.total_size` (bytes) and `weight_map` (file by name).
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_ckpt import file_names
from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.files.digests import regular_file
from accel_ckpt.files.disk import flush, replacing
from accel_ckpt.files.paths import listed_file
from accel_ckpt.weights.model_tensors import is_extra_state
from accel_state.logging.warning import warn

SAFE_NAME, TORCH_NAME, EXTRA_NAME = "model.safetensors", "pytorch_model.bin", file_names.extra_state_file()
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)(I?)(B)", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class WeightFile:
    """A file of weights of a model.

    Args:
        path: Its path.
        name: Its name in the index.
        weight_map: The index: file by name of the weight; None without an index.
    """

    path: Path
    name: str
    weight_map: Mapping[str, str] | None = None

    def select(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of the file without those that the index assigns to another file.

        Args:
            content: The content of the file, by name.
        """
        weight_map = self.weight_map or {}
        in_other_files = {name for name in content if weight_map.get(name, self.name) != self.name}
        copies = {id(content[name]) for name in in_other_files}
        # An index of safetensors lists a tied weight under only one of its names.
        return {
            name: value
            for name, value in content.items()
            if name not in in_other_files and (name in weight_map or id(value) not in copies)
        }


def convert_file_size_to_int(size: int | str) -> int:
    """Read a size in bytes.

    Args:
        size: A number of bytes, or text such as "10GB" (powers of 1000) or "1MiB" (powers of 1024). A
            lower-case b at its end means bits.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ValueError(f"a size is a number of bytes, or text such as '5GB' or '200MiB', not {size!r}.")
    number, unit, binary, ending = match.groups()
    count = float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()]
    return int(count / 8 if ending == "b" else count)


def split_by_size(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Split weights into shards, in order; a weight that is larger than a shard gets its own.

    Args:
        sizes: Size of each weight, in bytes.
        max_bytes: The maximum size of a shard.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def save_weights(
    state_dict: Mapping[str, Any],
    folder: Folder,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> list[str]:
    """Write weights into a folder, on this process. Weights of a previous save are replaced; other files
    are not changed.

    All files are on the disk before the first is renamed, and the index is written last, so that an index
    never refers to files of different saves.

    Args:
        state_dict: Tensors by name. Of tied ones safetensors store the first, and the names of the others.
            Extra state (`get_extra_state`) may be of any type that states may have.
        folder: The folder; created if it does not exist.
        max_shard_size: The maximum size of a file, as for `convert_file_size_to_int`.
        safe_serialization: Whether to write safetensors, or torch files.

    Returns:
        The names of the files.

    Raises:
        ValueError: If safetensors cannot store a weight, no load would accept a value, or the size is
            invalid.
    """
    max_bytes = convert_file_size_to_int(max_shard_size)
    if max_bytes < 1:
        raise ValueError(f"max_shard_size must be at least one byte, not {max_shard_size!r}.")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    if not safe_serialization and any(
        (root / name).exists() for name in (SAFE_NAME, f"{SAFE_NAME}.index.json")
    ):
        warn(
            f"{root} has {SAFE_NAME} of a previous save, which is read instead of {TORCH_NAME}. Delete "
            "the one that you do not want.",
        )
    unencoded = {name: value for name, value in state_dict.items() if is_extra_state(name, value)}
    extra: dict[str, Any] = values.encode(unencoded, "the model")
    weights = {name: value for name, value in state_dict.items() if name not in extra}
    kept, tied = _split(weights, safe_serialization)
    sizes = {name: value.numel() * value.element_size() for name, value in kept.items()}
    extra_files = [EXTRA_NAME] if extra and safe_serialization else []
    if not safe_serialization:
        kept, sizes = {**kept, **extra}, {**sizes, **dict.fromkeys(extra, 0)}
    shards = split_by_size(sizes, max_bytes)
    stem, _, suffix = (SAFE_NAME if safe_serialization else TORCH_NAME).rpartition(".")
    files = [
        f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        for number in range(1, len(shards) + 1)
    ]
    # Unique, so that concurrent saves do not use the same temporary files.
    token = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
    weight_map: dict[str, str] = {}
    try:
        for name, shard in zip(files, shards, strict=True):
            tied_names = {other: first for other, first in tied.items() if first in shard}
            _write_shard(kept, tied_names, shard, root / f".{name}.{token}", safe_serialization)
            # An index of safetensors has no tied names, as the files' metadata has them.
            weight_map |= dict.fromkeys([*shard, *([] if safe_serialization else tied_names)], name)
        for name in extra_files:
            tensors.write(extra, root / f".{name}.{token}")
            flush(root / f".{name}.{token}")
        files += extra_files
        _replace(root, files, token, stem, suffix)
    finally:
        for name in {*files, *extra_files}:
            (root / f".{name}.{token}").unlink(missing_ok=True)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        files.append(f"{stem}.{suffix}.index.json")
        with replacing(root / files[-1]) as draft:
            draft.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    flush(root)
    return files


def find_weight_files(checkpoint: Folder) -> list[WeightFile]:
    """Find the weight files of a model.

    Args:
        checkpoint: A file of weights, an index of any name, or a folder with either (an index there ends in
            `.index.json`); safetensors are preferred to torch files.

    Returns:
        The files.

    Raises:
        FileNotFoundError: If there are none; or the index names files that do not exist.
        ValueError: If a folder has several indexes, so that the choice is ambiguous.
        CorruptCheckpointError: If an index is damaged, or names what is not a plain file in its folder; if a
            file is a pipe, a device or a folder.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path}. Name a file of weights, an index (.index.json), or a folder with them."
        )
    if not path.is_dir():
        return _listed(path) if _is_index(regular_file(path)) else [WeightFile(path, path.name)]
    # A single file before an index: save_weights deletes the other, but another tool may leave both.
    for name in (SAFE_NAME, f"{SAFE_NAME}.index.json", TORCH_NAME, f"{TORCH_NAME}.index.json"):
        if (path / name).exists():
            file = path / name
            return _listed(file) if name.endswith(".json") else [WeightFile(regular_file(file), name)]
    indexes = sorted(path.glob("*.index.json"))
    if len(indexes) == 1:
        return _listed(indexes[0])
    if indexes:
        raise ValueError(
            f"{path} has several indexes: {', '.join(i.name for i in indexes)}. Name one of them."
        )
    existing = ", ".join(sorted(child.name for child in path.iterdir())) or "nothing"
    raise FileNotFoundError(
        f"{path} has no {SAFE_NAME}, no {TORCH_NAME} and no .index.json of several files; it has {existing}."
    )


def find_extra_state(checkpoint: Folder, files: Iterable[WeightFile]) -> list[WeightFile]:
    """Find the extra state that `save_weights` wrote next to safetensors, or `save_state` for model 0.

    Args:
        checkpoint: As for `find_weight_files`.
        files: The files that it returned.

    Returns:
        One file at most.

    Raises:
        CorruptCheckpointError: If it is a pipe, a device or a folder.
    """
    path = Path(checkpoint)
    file = (path if path.is_dir() else path.parent) / EXTRA_NAME
    pattern = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
    if not (file.exists() and all(pattern.fullmatch(item.name) for item in files)):
        return []
    return [WeightFile(regular_file(file), EXTRA_NAME)]


def read_index(path: Path) -> dict[str, str]:
    """Read an index of weights.

    Args:
        path: The index.

    Returns:
        File by name of the weight; `find_weight_files` checks their paths.

    Raises:
        CorruptCheckpointError: If it is damaged, or not a regular file.
    """
    try:
        document = json.loads(regular_file(path).read_bytes())
        weight_map = document.get("weight_map", document)  # or only the mapping
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("it does not map names of weights to names of files")
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path} is not an index of weights: {error}. Download or copy the folder again."
        ) from error
    return dict(weight_map)


def _is_index(path: Path) -> bool:
    """Whether a file is an index, by its name or because it begins like JSON, as no weight file does."""
    if path.name.endswith((".json", ".safetensors")):
        return path.name.endswith(".json")
    with open(path, "rb") as file:
        # torch files begin with "PK" (zip) or a pickle's 0x80.
        return file.read(64).lstrip().startswith(b"{")


def _listed(index: Path) -> list[WeightFile]:
    weight_map = read_index(index)
    names = dict.fromkeys(weight_map.values())
    return [WeightFile(listed_file(index.parent, name, index), name, weight_map) for name in names]


def _split(
    state_dict: Mapping[str, torch.Tensor], safe_serialization: bool
) -> tuple[Mapping[str, Any], dict[str, str]]:
    if safe_serialization:
        return tensors.split_tied(state_dict)
    tied = {name: names[0] for names in tensors.tied_groups(state_dict) for name in names[1:]}
    # torch.save writes the full storage of a view.
    return {name: _compact_storage(value) for name, value in state_dict.items() if name not in tied}, tied


def _compact_storage(value: torch.Tensor) -> torch.Tensor:
    if value.layout != torch.strided or value.is_meta:
        return value
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _write_shard(
    kept: Mapping[str, Any], tied: dict[str, str], names: Iterable[str], draft: Path, safe: bool
) -> None:
    chosen: dict[str, Any] = {name: kept[name] for name in names}
    if safe:
        tensors.write_tensors(chosen, tied, draft)
    else:
        tensors.write({**chosen, **{name: kept[first] for name, first in tied.items()}}, draft)
    flush(draft)


def _replace(root: Path, files: list[str], token: str, stem: str, suffix: str) -> None:
    """Rename finished files to their names, after the old index was deleted."""
    # The old index is deleted first: a reader finds no weights rather than an index of files of two saves.
    (root / f"{stem}.{suffix}.index.json").unlink(missing_ok=True)
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}")
    for child in root.iterdir():
        if pattern.fullmatch(child.name) and child.name not in files:
            child.unlink()
    if f"{stem}.{suffix}" == SAFE_NAME:  # likewise: never that of another save
        (root / EXTRA_NAME).unlink(missing_ok=True)
    for name in files:
        os.replace(root / f".{name}.{token}", root / name)
