"""Copies of objects, next to what torch.save writes of the objects themselves."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from accel_ckpt.background.buffers import SnapshotBuffer
from accel_ckpt.background.snapshot import freeze
from accel_state.process.state import current_process
from accel_world.devices import needs_cuda

pytestmark = pytest.mark.core  # it stands on what is private in torch


def saved(obj: Any) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


def saved_later(obj: Any) -> bytes:
    buffer = SnapshotBuffer(current_process())
    write = freeze(obj, False, buffer)
    buffer.synchronize()
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def storages() -> dict[str, Any]:
    whole = torch.arange(6.0)
    return {
        "whole": whole,
        "part": whole[2:4],
        "bytes": torch.arange(5.0).untyped_storage(),
        "empty": [torch.empty(0), torch.empty(0, dtype=torch.int8)],
    }


def test_every_kind_of_storage_is_written_as_torch_does() -> None:
    obj = storages()
    assert saved_later(obj) == saved(obj)


def test_a_copy_says_where_its_original_was(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = torch.ones(3), torch.full((3,), 2.0)

    def tag(storage: Any) -> str | None:
        return "far:1" if storage.data_ptr() == far.data_ptr() else None

    monkeypatch.setattr(torch.serialization, "_package_registry", [*torch.serialization._package_registry])
    torch.serialization.register_package(0, tag, lambda storage, location: None)
    expected = saved([near, far, far])
    assert b"far:1" in expected
    assert saved_later([near, far, far]) == expected


def test_a_storage_under_two_dtypes_is_an_error_as_it_is_for_torch() -> None:
    obj = [torch.zeros(4), torch.zeros(4)]
    obj[1] = obj[0].view(torch.int32)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        saved(obj)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        saved_later(obj)


def test_two_storages_of_the_same_bytes_are_an_error_too() -> None:
    array = np.zeros(4, np.float32)
    obj = [torch.from_numpy(array), torch.from_numpy(array.view(np.int32))]
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        saved(obj)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        saved_later(obj)


@pytest.mark.parametrize("last", [0, lambda: None], ids=["saved", "not to be pickled"])
def test_copies_are_freed_with_the_memory(last: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        buffer = SnapshotBuffer(current_process())
        with contextlib.suppress(AttributeError, pickle.PicklingError):
            freeze([torch.ones(3), last], False, buffer)
        buffer.synchronize()
        slab = weakref.ref(buffer._slabs[0].obj)
        del buffer
        assert slab() is None
    finally:
        gc.enable()


def test_large_and_small_tensors_are_copied_by_threads_that_end() -> None:
    obj = [torch.arange(3 * 2**20), *(torch.full((7,), value) for value in range(50)), torch.ones(2**21)]
    buffer = SnapshotBuffer(current_process())
    write = freeze(obj, False, buffer)
    assert any(thread.name.startswith("accel-copy") for thread in threading.enumerate())
    expected = saved(obj)
    buffer.wait_for_cpu()
    for tensor in obj:
        tensor.zero_()
    buffer.synchronize()
    assert not any(thread.name.startswith("accel-copy") for thread in threading.enumerate())
    file = io.BytesIO()
    write(file)
    assert file.getvalue() == expected


@pytest.mark.gpu
@needs_cuda
def test_a_device_is_not_waited_for_before_the_end() -> None:
    obj = {index: torch.full((2**20,), float(index), device="cuda") for index in range(8)}
    expected = saved(obj)
    buffer = SnapshotBuffer(current_process())
    freeze(obj, False, buffer)  # takes the memory
    buffer.synchronize()
    buffer.reset()
    torch.cuda._sleep(1_000_000_000)  # so that the copies are late on the device
    write = freeze(obj, False, buffer)
    late = torch.cuda.Event()
    late.record()
    assert not late.query()
    for tensor in obj.values():
        tensor.zero_()  # behind the copies
    buffer.synchronize()
    file = io.BytesIO()
    write(file)
    assert file.getvalue() == expected
