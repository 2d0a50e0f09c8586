from __future__ import annotations

import torch

from accel_ops.collectives.pack_sections import as_bytes


def test_as_bytes_resolves_lazy_conjugates_and_negatives() -> None:
    number = torch.tensor([1 + 2j])

    assert as_bytes(number.conj()).view(torch.complex64).tolist() == [1 - 2j]
    assert as_bytes(number.conj().imag).view(torch.float32).tolist() == [-2]
    assert as_bytes(number).data_ptr() == number.data_ptr()
