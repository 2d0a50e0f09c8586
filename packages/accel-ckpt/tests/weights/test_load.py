"""load_checkpoint_in_model and load_state_dict with files that are damaged, odd, or named as one likes."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.weights.files import save_weights
from accel_ckpt.weights.load import load_checkpoint_in_model, load_state_dict

# Damaged files

KINDS = {
    "safetensors": "model.safetensors",
    "torch": "pytorch_model.bin",
    "old torch": "pytorch_model.bin",
    "index": "model.safetensors.index.json",
    "part": "model-00002-of-00002.safetensors",
    "torch part": "pytorch_model-00002-of-00002.bin",
}
# The end of a zip file that is the second of two, which zipfile raises an error about.
ZIP_END = struct.pack("<4sLQL", b"PK\6\7", 1, 0, 2) + b"PK\5\6" + bytes(18)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "begins": lambda raw: raw[: len(raw) // 8],
    "cut off": lambda raw: raw[: len(raw) - 40],
    "garbled": lambda raw: bytes(255 - byte for byte in raw[:200]) + raw[200:],
    "another disk": lambda raw: raw[: len(raw) // 8] + ZIP_END,
    "another": lambda raw: b"<html><body>404 Not Found</body></html>",
}


def written(folder: Path, kind: str) -> Path:
    """Write weights into a folder, and return the file that is to be damaged."""
    state = nn.Linear(30, 30).state_dict()
    safe = kind in ("safetensors", "index", "part")
    if kind == "old torch":
        torch.save(state, folder / KINDS[kind], _use_new_zipfile_serialization=False)
    else:
        save_weights(state, folder, 200 if kind in ("index", "part", "torch part") else "1GB", safe)
    return folder / KINDS[kind]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_with_what_was_wrong(tmp_path: Path, kind: str, damage: str) -> None:
    file = written(tmp_path, kind)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    model = nn.Linear(30, 30)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_in_model(model, tmp_path)
    message = str(error.value)

    assert message.startswith(str(file))
    assert len(message) > len(str(file)) + 40
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if kind != "index":
        with pytest.raises(CheckpointError, match=file.name):
            load_state_dict(file)
    if kind in ("safetensors", "part") and damage == "cut off":
        assert "lacks the end of " + ("bias" if kind == "part" else "weight") in message


@pytest.mark.parametrize("name", sorted({*KINDS.values()}))
@pytest.mark.timeout(100)
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    kind = next(kind for kind in KINDS if KINDS[kind] == name)
    file = written(tmp_path, kind)
    file.unlink()
    os.mkfifo(file)
    for path in (tmp_path, file):
        with pytest.raises(CorruptCheckpointError, match=rf"{name} is a pipe where a file is expected"):
            load_checkpoint_in_model(nn.Linear(30, 30), path)
    if kind != "index":
        with pytest.raises(CorruptCheckpointError, match="is a pipe"):
            load_state_dict(file)


def test_another_shape_is_told_with_its_file(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2), "bias": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"weight has the shape \[2\] in .*model\.safetensors and"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


# Weights that one side lacks, and names of indexes


def test_surplus_weights_are_logged_and_an_error_if_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {**nn.Linear(1, 1).state_dict(), "surplus": torch.ones(1)}
    save_weights(state, tmp_path)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    (record,) = caplog.records
    assert record.name == "accel_ckpt.weights.load"
    assert "in the files and not in the model: surplus" in record.getMessage()
    with pytest.raises(RuntimeError, match="in the files and not in the model: surplus"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path, strict=True)


@pytest.mark.parametrize("name", ["parts.json", "parts.index", "parts"])
@pytest.mark.parametrize("bare", [False, True])
def test_an_index_may_have_any_name(tmp_path: Path, name: str, bare: bool) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    files = {}
    for key, value in model.state_dict().items():
        files[key] = f"{key}.safetensors"
        save_file({key: value}, tmp_path / files[key])
    document: dict[str, Any] = files if bare else {"metadata": {"total_size": 8}, "weight_map": files}
    (tmp_path / name).write_text(json.dumps(document, indent=1))
    load_checkpoint_in_model(other, tmp_path / name, strict=True)
    assert other.weight.item() == model.weight.item()

    for empty in ("{}", '{"weight_map": {}}', '{"metadata": {}}', "{"):
        (tmp_path / name).write_text(empty)
        with pytest.raises(CorruptCheckpointError, match=f"{name} is no index of weights"):
            load_checkpoint_in_model(other, tmp_path / name)
