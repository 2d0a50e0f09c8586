from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel_ckpt import file_names


def test_names_are_the_documented_ones() -> None:
    assert [file_names.model_file(i) for i in range(3)] == [
        "model.safetensors",
        "model_1.safetensors",
        "model_2.safetensors",
    ]
    assert [file_names.model_file(i, False) for i in range(2)] == ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert [file_names.optimizer_file(i) for i in range(2)] == ["optimizer.bin", "optimizer_1.bin"]
    assert [file_names.scheduler_file(i) for i in range(2)] == ["scheduler.bin", "scheduler_1.bin"]
    assert [file_names.loader_file(i) for i in range(2)] == ["dl_state_dict.bin", "dl_state_dict_1.bin"]
    assert [file_names.sampler_file(i) for i in range(2)] == ["sampler.bin", "sampler_1.bin"]
    assert [file_names.random_states_file(i) for i in range(2)] == [
        "random_states_0.pkl",
        "random_states_1.pkl",
    ]
    assert [file_names.custom_file(i) for i in range(2)] == [
        "custom_checkpoint_0.pkl",
        "custom_checkpoint_1.pkl",
    ]
    assert file_names.SCALER == "scaler.pt"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.safetensors", "model"),
        ("model_12.safetensors", "model"),
        ("pytorch_model.bin", "model"),
        ("pytorch_model_3.bin", "model"),
        ("pytorch_model_fsdp.bin", "model"),
        ("pytorch_model_fsdp_1.bin", "model"),
        ("pytorch_model_fsdp_1/.metadata", "sharded"),
        ("model-00001-of-00002.safetensors", "model"),
        ("model.safetensors.index.json", "model"),
        ("optimizer.bin", "optimizer"),
        ("scheduler_1.bin", "scheduler"),
        ("dl_state_dict.bin", "loader"),
        ("sampler.bin", "sampler"),
        ("scaler.pt", "scaler"),
        ("random_states_7.pkl", "random"),
        ("custom_checkpoint_0.pkl", "custom"),
        ("config.json", "other"),
        ("model.safetensors.bak", "other"),
        ("sub/model.safetensors", "other"),
        ("random_states_x.pkl", "other"),
    ],
)
def test_roles(name: str, role: str) -> None:
    assert file_names.role_of(name) == role


def test_automatic_names() -> None:
    assert file_names.checkpoint_dir("project", 4) == Path("project/checkpoints/checkpoint_4")
    assert file_names.iteration_of("checkpoint_12") == 12
    assert [
        file_names.iteration_of(name) for name in ("checkpoint_", "checkpoint_1.tmp", "best", "checkpoint_a")
    ] == [None] * 4


def test_names_need_no_torch() -> None:
    source = Path(file_names.__file__)
    code = f"import runpy, sys; runpy.run_path({str(source)!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
