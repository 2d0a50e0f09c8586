"""Copies of tensors on other devices than the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_ckpt.background import buffers
from accel_ckpt.background.buffers import SnapshotBuffer
from accel_state.process.state import current_process


class Elsewhere(torch.Tensor):
    """A tensor on the CPU that says it is on another device."""

    said = torch.device("cuda", 0)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.said


def test_each_device_that_was_copied_from_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    class Row:
        def synchronize(self, device: torch.device) -> None:
            waited.append(device)

    monkeypatch.setattr(buffers, "device_spec", lambda device: Row())
    copies = SnapshotBuffer(current_process())
    devices = [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)]
    for value, device in enumerate(devices):
        data: Any = torch.full((3,), float(value)).as_subclass(Elsewhere)
        data.said = device
        assert copies.copy(data).tolist() == [value] * 3
    copies.copy(torch.ones(2))
    copies.synchronize()
    assert sorted(waited, key=str) == [torch.device("cuda", 0), torch.device("cuda", 1)]

    waited.clear()
    copies.reset()
    copies.copy(torch.ones(2))
    copies.synchronize()
    assert waited == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies_of_all_devices_are_there_after_finish() -> None:
    copies = SnapshotBuffer(current_process())
    taken = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            data = torch.zeros(2**22, device=f"cuda:{index}")
            torch.cuda._sleep(500_000_000)  # so that what follows is late on the device
            data += index + 1
            taken.append(copies.copy(data))
    copies.synchronize()

    assert all(copy.is_pinned() for copy in taken)  # otherwise `copy` has waited for the device
    assert [copy.unique().tolist() for copy in taken] == [[index + 1] for index in range(len(taken))]
