"""Saving and loading single files: safetensors for tensors, torch's format for the rest; no code is run."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.files.array_types import arrays_allowed
from accel_ckpt.files.digests import regular_file
from accel_ckpt.files.disk import replacing
from accel_ckpt.files.mapped_file import MappedFile
from accel_ckpt.files.safetensors_header import shortened, tensors_between
from accel_ckpt.files.safetensors_writer import DTYPES, dump
from accel_state.process.state import current_process
from accel_state.verify import output_path

# The framework of the tensors: transformers writes the same, and older versions of it reject other files.
_FORMAT = {"format": "pt"}

_logger = logging.getLogger(__name__)


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object to a file, on one process. Use it instead of `torch.save`.

    An existing file is replaced atomically, when the new one is on the disk.

    Args:
        obj: The object to save; a dict of tensors for safetensors.
        f: Path of the file, or an open file.
        save_on_each_node: Whether one process per machine saves, instead of only the main process.
        safe_serialization: Whether to write safetensors.

    Raises:
        ValueError: If safetensors cannot store the object; it names the entry.
    """
    process = current_process()
    if not (process.is_local_main if save_on_each_node else process.is_main):
        return
    if not isinstance(f, str | os.PathLike):
        write_to(obj, f, safe_serialization)
        return
    # A link stays a link: its target is replaced.
    path = Path(os.path.realpath(output_path(f)))
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        write(obj, path, safe_serialization)
        return
    with replacing(path) as draft:
        write(obj, draft, safe_serialization)


def write(obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False) -> None:
    """Write an object to a file on this process, as `save` does, but not atomically.

    Args:
        obj: The object to write.
        path: Path of the file.
        safe_serialization: Whether to write safetensors.

    Raises:
        ValueError: If safetensors cannot store the object; it names the entry.
    """
    with open(path, "wb") as file:
        write_to(obj, file, safe_serialization)


def write_to(obj: Any, file: IO[bytes], safe_serialization: bool = False) -> None:
    """Write an object into an open file, as `write` does.

    Args:
        obj: The object to write.
        file: The file to write to.
        safe_serialization: Whether to write safetensors.

    Raises:
        ValueError: If safetensors cannot store the object; it names the entry.
    """
    make_writer(obj, safe_serialization)(file)


def make_writer(obj: Any, safe_serialization: bool = False) -> Callable[[IO[bytes]], None]:
    """Return a function that writes an object into an open file, as `write` does, any number of times.

    Args:
        obj: The object to write.
        safe_serialization: Whether to write safetensors.

    Raises:
        ValueError: If safetensors cannot store the object; it names the entry.
    """
    if safe_serialization:
        return partial(write_safe, *split_tied(obj))
    return partial(torch.save, obj)


def write_safe(tensors: dict[str, torch.Tensor], tied: dict[str, str], file: IO[bytes]) -> None:
    """Write the result of `split_tied` as safetensors.

    Args:
        tensors: The clean state dict.
        tied: The stored name of each omitted tied name.
        file: The file to write to.
    """
    dump(tensors, {**tied, **_FORMAT}, file)


def write_tensors(
    tensors: dict[str, torch.Tensor], tied: dict[str, str], path: str | os.PathLike[str]
) -> None:
    """Write the result of `split_tied` to a file, as safetensors.

    Args:
        tensors: The clean state dict.
        tied: The stored name of each omitted tied name.
        path: Path of the file.
    """
    with open(path, "wb") as file:
        write_safe(tensors, tied, file)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load a file that `save` (or torch.save, or safetensors) has written. Use it instead of
    `torch.load`.

    Only tensors, arrays, numbers, strings and plain containers are loaded, so that no code in the file can
    run.

    Args:
        f: Path of the file, or an open file. A path that ends in ".safetensors" is read as safetensors.
        map_location: Where the tensors go, as in `torch.load`.
        **kwargs: Options of `torch.load`. `weights_only=False` loads any object, and runs code that the file
            names: only for files that you trust like a program.

    Returns:
        The saved object. Tied entries of a safetensors file have all their names.

    Raises:
        CheckpointError: If the file contains other objects, or cannot be read; it says what was wrong.
        CorruptCheckpointError: If it is not a regular file, or damaged safetensors.
    """
    if isinstance(f, str | os.PathLike):
        regular_file(f)
        if str(f).endswith(".safetensors"):
            return _load_safetensors(f, map_location)
    # torch's default; set here so that it is in the message too.
    kwargs.setdefault("weights_only", True)
    try:
        with arrays_allowed():
            return torch_load(f, map_location, **kwargs)
    # Warnings are raised if the user's filters turn them into errors: the file is not at fault.
    except (torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:  # a damaged file can raise any exception
        raise CheckpointError(_why_unreadable(f, error, kwargs["weights_only"])) from error


def load_mapped(mapped: MappedFile, map_location: Any = None, **kwargs: Any) -> Any:
    """Load a mapped file, as `load` does: its tensors use the mapping.

    Args:
        mapped: The file.
        map_location: As for `load`.
        **kwargs: As for `load`, without `mmap`.

    Returns:
        The saved object.

    Raises:
        CheckpointError: As `load`.
    """
    if kwargs.get("weights_only", True) and kwargs.keys() <= {"weights_only"}:
        try:
            with arrays_allowed(), _without_sparse_warning():
                return mapped.load(map_location)
        except (torch.OutOfMemoryError, MemoryError, Warning):
            raise
        except Exception:  # torch.load has a better error message
            pass
    return load(mapped.path, map_location, mmap=True, **kwargs)


def torch_load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Call `torch.load` without its warning that it validates sparse tensors.

    torch 2.15 also warns for tensors that were unpickled elsewhere before.

    Args:
        f: As for `torch.load`.
        map_location: As for `torch.load`.
        **kwargs: As for `torch.load`.
    """
    with _without_sparse_warning():
        return torch.load(f, map_location=map_location, **kwargs)


@contextmanager
def _without_sparse_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        yield


def is_zip(path: Path) -> bool:
    """Return whether a file is a zip file, as `torch.save` writes them: only these can be mapped.

    Args:
        path: A regular file, damaged or not.
    """
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it claims to be split over several disks
        return False


def _why_unreadable(f: str | os.PathLike[str] | IO[bytes], error: Exception, weights_only: bool) -> str:
    # torch has another message if the type's module is blocked (os, sys and similar).
    begin = r"(?:WeightsUnpickler error:\s*|(?=Trying to load unsupported))"
    match = re.search(begin + r"(.+?)(?:\. Please use|\n|$)", str(error))
    reason = (match.group(1) if match else str(error).partition("\n")[0]).rstrip(". ")
    if weights_only and match and not reason.startswith("Unsupported operand"):
        return (
            f"{f} holds more than tensors, arrays and plain containers, or is damaged: {reason}. If you "
            "trust the file, allow the types that it names with torch.serialization.add_safe_globals([...]), "
            "or load it with weights_only=False, which runs code that the file contains."
        )
    if isinstance(f, str | os.PathLike) and not os.path.getsize(f):
        reason = "it is empty"
    return (
        f"{f} cannot be read ({type(error).__name__}: {reason}). Unless that names another cause, it is "
        "truncated, damaged, or was not written by torch.save. Download or copy the file again."
    )


def clean_state_dict_for_safetensors(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a state dict that safetensors can write: contiguous tensors, of which no two share memory.

    Of identical tensors, the first name is kept; `split_tied` also returns the other names.

    Args:
        state_dict: Tensors by name.

    Returns:
        A new dict; tensors that were fine are the same objects.

    Raises:
        ValueError: If an entry is not a tensor, or one that safetensors cannot store.
    """
    return split_tied(state_dict)[0]


def split_tied(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a state dict into tensors that safetensors can write, and the omitted tied names.

    One log record lists the omitted names.

    Args:
        state_dict: Tensors by name.

    Returns:
        (tensors, tied): the clean state dict, and the stored name of each omitted tied name.

    Raises:
        ValueError: If an entry is not a tensor, or one that safetensors cannot store.
    """
    first = {name: names[0] for names in tied_groups(state_dict) for name in names[1:]}
    seen: set[tuple[torch.device, int, int]] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state_dict.items():
        tensor = _checked(name, value)
        if name in first:
            continue
        storage = id_tensor_storage(tensor)
        # Another view of memory that is already written is copied, as safetensors does not support views.
        tensors[name] = tensor.clone() if tensor.numel() and storage in seen else tensor.contiguous()
        seen.add(storage)
    if first:
        omitted = ", ".join(f"{name} (the same as {kept})" for name, kept in first.items())
        _logger.warning(
            "safetensors store a tensor under one name. Omitted: %s. accel restores all names when loading.",
            omitted,
        )
    return tensors, first


def tied_groups(state_dict: Mapping[str, Any]) -> list[list[str]]:
    """Find the entries that are the same tensor.

    Args:
        state_dict: Tensors by name; other entries are skipped.

    Returns:
        The names of each such tensor, two or more, in the order of the dict.
    """
    groups: dict[Any, list[str]] = {}
    for name, value in state_dict.items():
        if (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and value.numel()
            and not value.is_meta
        ):
            key = (
                *id_tensor_storage(value),
                value.storage_offset(),
                value.dtype,
                value.shape,
                value.stride(),
            )
            groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Identify the memory of a tensor.

    Args:
        tensor: A dense tensor.

    Returns:
        (device, address, size in bytes) of its storage; equal for tensors that share it.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _checked(name: str, value: Any) -> torch.Tensor:
    hint = "Leave it out, or save with safe_serialization=False."
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"safetensors stores only tensors, and {name!r} is of type {type(value).__name__}. {hint}"
        )
    if value.layout != torch.strided or value.is_meta:
        kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
        raise ValueError(f"safetensors stores only dense tensors, and {name!r} is {kind}. {hint}")
    if value.dtype not in DTYPES:
        raise ValueError(f"safetensors does not support {value.dtype}, the dtype of {name!r}. {hint}")
    return value


def _load_safetensors(path: str | os.PathLike[str], map_location: Any) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    device = "cpu" if map_location is None else str(map_location)
    try:
        with safe_open(path, framework="pt", device=device) as file:
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in list(file.keys())}
            # Names that split_tied omitted are stored as {omitted name: kept name}, next to "format".
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read: {error}{_cut_off(Path(path))}. Download or copy the file again."
        ) from error
    for name, kept in metadata.items():
        # Metadata is free-form: other tools write theirs there.
        if name not in tensors and kept in tensors:
            tensors[name] = tensors[kept]
    return tensors


def _cut_off(path: Path) -> str:
    """Describe the weights that a truncated file lacks, if its header is readable."""
    size = path.stat().st_size
    try:
        names = tensors_between(path, size, sys.maxsize)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f" (it has {size} bytes, and lacks the end of {shortened(names)})" if names else ""
