"""DeepSpeed's files are read without running what they name."""

from __future__ import annotations

import subprocess
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.engines.deepspeed import checkpoint
from accel_ckpt.errors import CheckpointError

# Here, as its import sets an environment variable for good.
pytest.importorskip("deepspeed", reason="the alone environment has no DeepSpeed")


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", "trapped"],)


def test_a_file_that_names_code_is_rejected_and_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"module": Trap()}, "file.pt")
    reader = SimpleNamespace()
    engine = SimpleNamespace(
        module=torch.nn.Module(),
        checkpoint_engine=reader,
        load_checkpoint=lambda folder, tag: reader.load("file.pt"),
    )

    with pytest.raises(CheckpointError, match="has more than tensors"):
        checkpoint.load(engine, tmp_path, {})

    assert not (tmp_path / "trapped").exists()
    assert not hasattr(reader, "load")  # DeepSpeed's own is in its place again


def test_sparse_tensors_are_read_without_an_announcement(tmp_path, monkeypatch):
    read = torch.load

    def announcing(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("Validating sparse tensor invariants upon loading.", UserWarning, stacklevel=2)
        return read(*args, **kwargs)

    torch.save(torch.ones(2).to_sparse(), tmp_path / "file.pt")
    monkeypatch.setattr(torch, "load", announcing)
    found, reader = [], SimpleNamespace()
    engine = SimpleNamespace(
        module=torch.nn.Module(),
        checkpoint_engine=reader,
        load_checkpoint=lambda folder, tag: found.append(reader.load(str(tmp_path / "file.pt"))),
    )
    checkpoint.load(engine, tmp_path, {})

    assert found[0].is_sparse


FILES = {
    0: ["mp_rank_00_model_states.pt"],
    2: ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{i}_mp_rank_00_optim_states.pt" for i in range(2))],
    3: [f"zero_pp_rank_{i}_mp_rank_00_{kind}_states.pt" for i in range(2) for kind in ("model", "optim")],
}


@pytest.mark.parametrize(
    ("saved", "stage", "size", "text"),
    [
        (0, 0, 5, None),
        (2, 1, 2, None),
        (2, 2, 2, None),
        (3, 3, 2, None),
        (2, 2, 4, "is of 2 processes, but there are 4"),
        (3, 3, 1, "is of 2 processes, but there are 1"),
        (2, 3, 2, "is of ZeRO stage 1 or 2, but zero_stage=3 here"),
        (3, 0, 2, "is of ZeRO stage 3, but zero_stage=0 here"),
        (None, 2, 2, "was not written under DeepSpeed"),
    ],
)
def test_what_deepspeed_cannot_continue_from_is_rejected(saved, stage, size, text):
    names = ["latest", "scheduler.bin", *(f"pytorch_model/{name}" for name in FILES.get(saved, []))]
    engine = SimpleNamespace(zero_optimization_stage=lambda: stage, seq_dp_world_size=size)

    if text is None:
        checkpoint.check(engine, names)
    else:
        with pytest.raises(CheckpointError, match=text):
            checkpoint.check(engine, names)
