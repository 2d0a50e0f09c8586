from __future__ import annotations

import io
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.files.safetensors_writer import DTYPES, dump

SHAPES = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=6), st.tuples(st.sampled_from(sorted(DTYPES, key=str)), SHAPES)))
def test_the_bytes_are_those_of_the_library(entries: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    entries.pop("__metadata__", None)
    tensors = {
        name: torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype)
        for name, (dtype, shape) in entries.items()
    }
    file = io.BytesIO()
    dump(tensors, {"format": "pt"}, file)

    assert file.getvalue() == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_the_metadata_has_one_order(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3)}
    texts = {str(number): str(number) for number in range(20)}
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        dump(tensors, texts, file)
    assert files[0].getvalue() == files[1].getvalue()
    (tmp_path / "x").write_bytes(files[0].getvalue())
    with safetensors.safe_open(tmp_path / "x", framework="pt") as opened:
        assert opened.metadata() == texts
        assert torch.equal(opened.get_tensor("w"), tensors["w"])
