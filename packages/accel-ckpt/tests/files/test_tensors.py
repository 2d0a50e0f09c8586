from __future__ import annotations

import io
import os
import pickle
import random
import warnings
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors
from accel_ckpt.weights.files import save_weights


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b) and type(a) is type(b)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("safe", [True, False])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, safe: bool) -> None:
    state = {f"{dtype}": torch.randint(0, 2, (3, 2)).to(dtype) for dtype in DTYPES}
    state |= {"zero-d": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 3).t()}
    file = tmp_path / ("x.safetensors" if safe else "x.bin")
    tensors.save(state, file, safe_serialization=safe)
    again = tensors.load(file)

    assert set(again) == set(state)
    for name, value in state.items():
        assert again[name].dtype == value.dtype
        assert again[name].shape == value.shape
        assert torch.equal(again[name].float(), value.float())


def test_other_tools_open_the_files(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    tensors.save(model.state_dict(), tmp_path / "m.safetensors", safe_serialization=True)
    tensors.save(model.state_dict(), tmp_path / "m.bin")

    opened = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert same(dict(sorted(opened.items())), dict(sorted(model.state_dict().items())))
    assert same(torch.load(tmp_path / "m.bin", weights_only=True), model.state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_open_files(safe: bool) -> None:
    state = {"a": torch.ones(2)}
    buffer = io.BytesIO()
    tensors.save(state, buffer, safe_serialization=safe)
    buffer.seek(0)

    assert same(safetensors.torch.load(buffer.read()) if safe else tensors.load(buffer), state)


def test_map_location(tmp_path: Path) -> None:
    for name in ("x.safetensors", "x.bin"):
        tensors.save({"a": torch.ones(2)}, tmp_path / name, safe_serialization=name.endswith("safetensors"))
        assert tensors.load(tmp_path / name, map_location="cpu")["a"].device.type == "cpu"
    assert tensors.load(tmp_path / "x.bin", map_location="meta")["a"].is_meta


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    tensors.save({"a": torch.ones(2)}, file)
    before = file.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError)):  # by the version of Python
        tensors.save({"a": torch.zeros(2), "b": lambda: None}, file)

    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.bin"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to("real")
    tensors.save({"a": torch.ones(2)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same(tensors.load(tmp_path / "real"), {"a": torch.ones(2)})

    tensors.save({"a": torch.ones(2)}, os.devnull)
    assert not Path(os.devnull).is_file()


def _save_as_rank(folder: str, per_node: bool) -> list[str]:
    rank = torch.distributed.get_rank()
    tensors.save(rank, Path(folder) / f"{rank}.bin", save_on_each_node=per_node)
    torch.distributed.barrier()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("per_node", [True, False])
def test_one_process_saves(world: Any, tmp_path: Path, per_node: bool) -> None:
    assert world.run(_save_as_rank, str(tmp_path), per_node) == [["0.bin"]] * 2


# Tied and shared tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_kept_once_and_come_back_under_all_names(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    clean = tensors.clean_state_dict_for_safetensors(state)
    kept, tied = tensors.split_tied(state)

    assert list(clean) == list(kept) == ["embed.weight", "body.weight", "body.bias"]
    assert all(clean[name] is state[name] for name in clean)
    assert tied == {"head.weight": "embed.weight"}
    assert tensors.tied_groups(state) == [["embed.weight", "head.weight"]]

    file = tmp_path / "m.safetensors"
    tensors.save(state, file, safe_serialization=True)
    again = tensors.load(file)
    assert set(again) == set(state)
    assert again["head.weight"] is again["embed.weight"]
    assert os.path.getsize(file) < 1000
    assert set(safetensors.torch.load_file(file)) == set(kept)


def test_views_of_one_memory_are_written_in_full(tmp_path: Path) -> None:
    # Parts of one buffer (as flattened parameters have) are different tensors and must all be there.
    buffer = torch.arange(12.0)
    state = {"all": buffer, "left": buffer[:6], "end": buffer[6:], "every": buffer[::2]}
    state["right"] = buffer[6:].view(2, 3)
    clean = tensors.clean_state_dict_for_safetensors(state)
    assert list(clean) == list(state)
    assert len({value.data_ptr() for value in clean.values()}) == 5

    tensors.save(state, tmp_path / "m.safetensors", safe_serialization=True)
    again = tensors.load(tmp_path / "m.safetensors")
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_same_memory_as_another_type_or_shape_is_no_tie() -> None:
    buffer = torch.ones(4)
    state = {"a": buffer, "b": buffer.view(2, 2), "c": buffer.view(torch.int32)}

    assert tensors.tied_groups(state) == []
    assert list(tensors.clean_state_dict_for_safetensors(state)) == ["a", "b", "c"]


def test_one_log_record_names_what_safetensors_leave_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = torch.ones(2)
    state = {"a": shared, "b": shared, "c": shared, "d": torch.ones(1)}
    for act in (
        lambda: tensors.clean_state_dict_for_safetensors(state),
        lambda: tensors.save(state, tmp_path / "x.safetensors", safe_serialization=True),
        lambda: save_weights(state, tmp_path, 4),
    ):
        caplog.clear()
        act()
        (record,) = caplog.records
        assert record.name == "accel_ckpt.files.tensors"
        assert "Omitted: b (the same as a), c (the same as a)." in record.getMessage()
    caplog.clear()
    tensors.save({"a": shared, "d": torch.ones(1)}, tmp_path / "y", safe_serialization=True)
    tensors.save(state, tmp_path / "z")
    assert not caplog.records


def test_empty_tensors_are_not_tied() -> None:
    state = {"a": torch.empty(0), "b": torch.empty(0)}

    assert list(tensors.clean_state_dict_for_safetensors(state)) == ["a", "b"]


def test_storage_identity() -> None:
    tensor = torch.ones(4)

    assert tensors.id_tensor_storage(tensor) == tensors.id_tensor_storage(tensor[1:])
    assert tensors.id_tensor_storage(tensor) != tensors.id_tensor_storage(tensor.clone())
    assert tensors.id_tensor_storage(tensor)[2] == 16


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": 1}, "'extra' is of type dict.*safe_serialization=False"),
        (torch.ones(2).to_sparse(), "'extra' is of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "'extra' is on the meta device"),
    ],
)
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensors.save(
            {"a": torch.ones(1), "extra": value}, tmp_path / "m.safetensors", safe_serialization=True
        )
    assert os.listdir(tmp_path) == []


# Loading runs no code


class Payload:
    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Any, ...]:
        return (Payload.ran.append, ("ran",))


class Plain:
    """A class that does nothing, and yet is not on the list."""


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
@pytest.mark.parametrize("kind", [Payload, Plain])
def test_a_file_that_names_other_types_is_rejected(tmp_path: Path, kind: type, protocol: str) -> None:
    file = tmp_path / "x.pkl"
    if protocol == "torch":
        torch.save({"a": kind()}, file)
    else:
        file.write_bytes(pickle.dumps({"a": kind()}, protocol=2))
    with pytest.raises(
        CheckpointError, match=r"x\.pkl holds more than .*GLOBAL .*add_safe_globals.*weights_only=False"
    ):
        tensors.load(file)
    assert Payload.ran == []


def test_any_type_loads_when_requested_by_name(tmp_path: Path) -> None:
    torch.save({"a": Plain()}, tmp_path / "x.pkl")

    assert isinstance(tensors.load(tmp_path / "x.pkl", weights_only=False)["a"], Plain)


@pytest.mark.parametrize(
    "value",
    [
        random.Random(1).getstate(),
        np.random.RandomState(1).get_state(),
        {
            "f": np.float32(1.5),
            "i": np.int64(3),
            "b": np.bool_(True),
            "c": np.arange(3),
            "s": np.array(["ab"]),
        },
        OrderedDict(a=[1, 2.5, "x", None, True, (1, 2)], b={1, 2}),
        torch.float16,
        torch.device("cpu"),
        torch.Size([1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_and_arrays_load(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "x.pkl")

    assert same(tensors.load(tmp_path / "x.pkl"), value)


def test_arrays_of_objects_do_not(tmp_path: Path) -> None:
    torch.save(np.array([Plain()], dtype=object), tmp_path / "x.pkl")
    with pytest.raises(CheckpointError, match="holds more than"):
        tensors.load(tmp_path / "x.pkl")


def test_what_was_allowed_before_stays_allowed_and_nothing_else(tmp_path: Path) -> None:
    torch.save(np.arange(2), tmp_path / "x.pkl")
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([np.ndarray, defaultdict])
    try:
        allowed = set(torch.serialization.get_safe_globals())
        tensors.load(tmp_path / "x.pkl")
        assert set(torch.serialization.get_safe_globals()) == allowed
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    tensors.load(tmp_path / "x.pkl")
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_sparse_tensors_are_read_without_an_announcement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = torch.load

    def announcing(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("Validating sparse tensor invariants upon loading.", UserWarning, stacklevel=2)
        return read(*args, **kwargs)

    torch.save(torch.ones(2).to_sparse(), tmp_path / "x.bin")
    monkeypatch.setattr(torch, "load", announcing)

    assert tensors.load(tmp_path / "x.bin").is_sparse
