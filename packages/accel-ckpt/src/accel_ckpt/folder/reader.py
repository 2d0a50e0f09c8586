"""Finding, checking and reading a checkpoint folder."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import digests, tensors, values
from accel_ckpt.files.mapped_file import MappedFile
from accel_ckpt.files.progress import Progress
from accel_ckpt.folder import manifest, recovery
from accel_ckpt.folder.all_ranks import run_on_all_ranks, run_on_main
from accel_ckpt.weights.files import WeightFile, find_weight_files
from accel_ckpt.weights.read_into import read_into_model
from accel_ops.modules import extract_model_from_parallel
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo


@dataclass
class CheckpointReader:
    """Reads the files of a checkpoint folder.

    Args:
        folder: The folder.
        names: Its files.
        unlisted: Files that are not in its manifest.
        facts: The manifest's facts about the run.
        has_manifest: Whether it has a manifest; otherwise another implementation wrote the folder.
        device: The device that files are read to.
        options: Options of `tensors.load`.
        mapped: Files that are mapped and not loaded, by name.
    """

    folder: Path
    names: frozenset[str]
    unlisted: frozenset[str]
    facts: dict[str, Any]
    has_manifest: bool
    device: torch.device
    options: dict[str, Any]
    mapped: dict[str, MappedFile] = field(default_factory=dict)

    def load(self, *alternatives: str) -> Any:
        """Load the first of these files that exists; None if none does."""
        name = next((name for name in alternatives if name in self.names), None)
        if name is None:
            return None
        return self._open(name)

    def read_into_model(self, model: torch.nn.Module, *alternatives: str) -> dict[str, torch.Tensor]:
        """Read weights directly into a model's tensors, where possible.

        Args:
            model: The model, prepared or not.
            *alternatives: Names that its file or index may have, as for `load`; only safetensors are read.

        Returns:
            The model's tensors that were read, by name; see `accel_ckpt.weights.read_into.read_into_model`.

        Raises:
            CheckpointError: As `read_into_model` there.
        """
        name = next((name for name in alternatives if name in self.names), None)
        if self.device.type != "cpu" or name is None:
            return {}
        plain = digests.plain_file(self.folder, name)
        files = self._files(name) if file_names.is_index(name) else [WeightFile(plain, name)]
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        return read_into_model(inner, [file for file in files if file.name.endswith(".safetensors")])

    def listed(self, index: str) -> list[str]:
        """Return the names of the files that an index of weights names.

        Raises:
            CorruptCheckpointError: If it is damaged, or names what is not a plain file in this folder.
            FileNotFoundError: If one of them does not exist.
        """
        return [file.name for file in self._files(index)]

    def _files(self, index: str) -> list[WeightFile]:
        return find_weight_files(digests.plain_file(self.folder, index))

    def _open(self, name: str) -> Any:
        if file_names.is_index(name):
            shards = [file.select(self._open(file.name)) for file in self._files(name)]
            return {key: value for shard in shards for key, value in shard.items()}
        mapped = self.find_mapped(name)
        if mapped is None:
            return values.decode(tensors.load(self.folder / name, map_location=self.device, **self.options))
        del self.mapped[name]  # tensors may be written to: the next load maps the file again
        options = {key: value for key, value in self.options.items() if key != "mmap"}
        return values.decode(tensors.load_mapped(mapped, self.device, **options))

    def find_mapped(self, name: str) -> MappedFile | None:
        """Map a large file, so that it is not in memory twice; None if it is not mapped."""
        large = file_names.role_of(name) in ("model", "optimizer") and name.endswith(".bin")
        # Windows cannot delete a mapped file.
        if not large or os.name != "posix" or not self.options.get("mmap", True):
            return None
        path = digests.plain_file(self.folder, name)
        if name not in self.mapped:
            # If the file is damaged (its digests are not checked yet), or its file system cannot map it, it
            # is read instead.
            with suppress(Exception):
                if tensors.is_zip(path):
                    self.mapped[name] = MappedFile(path)
        return self.mapped.get(name)


def open_checkpoint(
    input_dir: Path, process: ProcessInfo, map_location: Any, options: dict[str, Any], verify: bool
) -> CheckpointReader:
    """Find a checkpoint and check its files. Every process must call it.

    Args:
        input_dir: The checkpoint folder.
        process: This process.
        map_location: "cpu", "on_device" or a device; None for "cpu".
        options: Options of `tensors.load`.
        verify: Whether to check the digests; the processes of a machine split the files among them. Otherwise
            only sizes are checked, and that all are plain files.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing or changed.
        ValueError: If `map_location` is another value.
    """
    device = _device(map_location, process)
    # One process per machine may have to finish an interrupted commit before the others read the folder.
    run_on_all_ranks(
        lambda: recovery.find(input_dir) if process.is_local_main else None, process, "opening the checkpoint"
    )

    # Runs on each process by itself; `run_on_all_ranks` makes one process's error the error of all.
    def check() -> CheckpointReader:
        folder = recovery.find(input_dir)
        described = manifest.read(folder)
        if described is None:
            names = frozenset(manifest.files_in(folder))
            _check_foreign(folder, names)
            return CheckpointReader(folder, names, frozenset(), {}, False, device, options)
        facts = dict(described.facts)
        reader = CheckpointReader(folder, described.paths(), frozenset(), facts, True, device, options)
        # The processes of a machine see one disk, and each checks some of the files.
        shard = described.files[process.local_rank :: process.local_world_size]
        total = sum(entry.size for entry in shard)
        with closing(Progress(f"Checking {folder.name}", total, shown=process.is_main)) as progress:
            digests.verify(
                folder,
                shard,
                described.chunk_bytes,
                verify,
                progress,
                described.algorithm,
                reader.find_mapped,
            )
        # A folder that was committed in place may contain other files.
        files = [] if facts.get("in_place") else manifest.files_in(folder, strict=False)
        unlisted = frozenset(name for name in files if not name.startswith(".staging-")) - reader.names
        return replace(reader, unlisted=unlisted)

    reader = run_on_all_ranks(check, process, "checking the checkpoint")
    # "save" is the token of one save; None on all machines for folders of another implementation.
    saved = run_on_main(lambda: reader.facts.get("save"), process, "checking the checkpoint")
    run_on_all_ranks(lambda: _check_same(reader, saved), process, "checking the checkpoint")
    return reader


def _check_same(reader: CheckpointReader, saved: str | None) -> None:
    # Machines with their own disks may have been interrupted between their commits.
    if reader.facts.get("save") != saved:
        raise CheckpointError(
            f"{reader.folder} is not from the same save here ({reader.facts.get('save')}) as on the main "
            f"process ({saved}). Load an older checkpoint, or copy the folder from the main machine."
        )


def _check_foreign(folder: Path, names: frozenset[str]) -> None:
    if all(file_names.role_of(name) == "other" for name in names):
        raise FileNotFoundError(
            f"{folder} is not a checkpoint: it has neither {file_names.MANIFEST} nor a checkpoint file. Pass "
            "the folder that save_state returned."
        )
    warn(
        f"{folder} has no {file_names.MANIFEST}: another implementation wrote it, and its files cannot be "
        "checked."
    )


def _device(map_location: Any, process: ProcessInfo) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if map_location == "on_device":
        return process.device
    try:
        return torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"map_location must be 'cpu', 'on_device' or a device, not {map_location!r}."
        ) from error
