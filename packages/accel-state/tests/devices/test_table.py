from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from accel_state.devices import table
from accel_state.devices.spec import DeviceSpec
from accel_state.devices.table import (
    DEVICES,
    default_device,
    detect,
    device_spec,
    existing_device,
    get_current_device_type,
)
from accel_state.enums import DistributedType, RNGType


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)


def _fake(kind: str, count: int = 2) -> DeviceSpec:
    return DeviceSpec(
        kind,
        DistributedType.MULTI_GPU,
        "nccl",
        RNGType.CUDA,
        frozenset({"bf16"}),
        lambda: True,
        calls={"device_count": lambda: count, "has_fp16": lambda: True},
    )


@pytest.fixture
def machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the table a row that says it has two CUDA devices: for choosing, which touches none."""
    monkeypatch.setattr(table, "DEVICES", {"cuda": _fake("cuda"), "cpu": DEVICES["cpu"]})


def test_table_is_consistent() -> None:
    assert list(DEVICES)[-1] == "cpu"
    for name, entry in DEVICES.items():
        assert name == entry.type
        assert entry.autocast_dtypes <= {"bf16", "fp16"}
        assert (entry.backend is None) == (entry.distributed_type == DistributedType.NO)
        assert entry.rng_type is None or entry.rng_type in (name, RNGType.TORCH)
    kinds = [entry.distributed_type for entry in DEVICES.values()]
    assert len(set(kinds)) == len(kinds)


def test_every_distributed_type_of_hardware_has_a_row() -> None:
    engines = {DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM}

    assert {entry.distributed_type for entry in DEVICES.values()} == set(DistributedType) - engines


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_row_of_a_device(device: torch.device | str) -> None:
    assert device_spec(device) is DEVICES["cpu"]


def test_row_of_an_unknown_device_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"Device 'abacus:1' is not known; allowed types: xla.*cpu"):
        device_spec("abacus:1")


def test_detection_takes_the_first_hardware(machine_with_cuda: None) -> None:
    assert detect().type == "cuda"
    assert default_device() == torch.device("cuda")


def test_cpu_can_be_requested(machine_with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect(cpu=True).type == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert detect().type == "cpu"
    assert default_device() == torch.device("cpu")


def test_torch_device_is_honoured(machine_with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    assert default_device() == torch.device("cuda", 1)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert default_device() == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:64")
    assert default_device() == torch.device("cpu", 64)


def test_torch_device_next_to_cpu_is_not_ignored_in_silence(
    machine_with_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    with pytest.warns(UserWarning, match="ACCELERATE_TORCH_DEVICE=cuda is ignored.*Unset one"):
        assert detect(cpu=True).type == "cpu"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abacus", "ACCELERATE_TORCH_DEVICE=abacus is not a device; give one of cuda, cpu"),
        ("cuda:first", "ACCELERATE_TORCH_DEVICE=cuda:first is not a device"),
        ("cuda:2", r"ACCELERATE_TORCH_DEVICE=cuda:2, but this process sees 2 cuda device\(s\)"),
    ],
)
def test_bad_torch_device_is_rejected(
    value: str, message: str, machine_with_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", value)
    with pytest.raises(ValueError, match=message):
        detect()


def test_absent_hardware_is_rejected_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "npu")
    with pytest.raises(ValueError, match=r"no npu device \(it needs .* torch_npu\); available: .*cpu"):
        detect()


def test_cpu_row_runs() -> None:
    cpu = DEVICES["cpu"]
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)

    assert torch.equal(torch.rand(3), first)
    assert (cpu.count(), cpu.is_available(), cpu.device()) == (1, True, torch.device("cpu"))
    assert (cpu.memory_allocated(), cpu.max_memory_allocated(), cpu.pci_address(0)) == (0, 0, None)
    cpu.set_device(None)
    cpu.synchronize()
    cpu.empty_cache()
    cpu.reset_peak_memory_stats()


def test_autocast_asks_the_hardware_too() -> None:
    entry = _fake("cuda")

    assert entry.has_autocast("bf16")
    assert not entry.has_autocast("fp16")  # not in the row, whatever the hardware says
    assert DEVICES["cpu"].has_autocast("bf16")
    assert DEVICES["cpu"].has_autocast("fp16")


def test_call_without_a_stand_in_goes_to_torch() -> None:
    entry = DeviceSpec("cpu", DistributedType.MULTI_CPU, "gloo", None, frozenset(), lambda: True)

    assert entry.count() == torch.cpu.device_count()


def test_calls_name_what_the_row_or_torch_calls() -> None:
    known = {
        *vars(DeviceSpec),
        *("device_count", "has_bf16", "has_fp16", "barrier"),
    }
    for entry in DEVICES.values():
        assert set(entry.calls) <= known, entry.type


PROBE = """
import sys
from dataclasses import replace
import torch
from accel_state.devices.table import DEVICES, default_device, detect
detect()
default_device()
assert not torch.cuda.is_initialized()
vendors = {entry.extension.partition(".")[0] for entry in DEVICES.values() if entry.extension}
assert not vendors & set(sys.modules), vendors & set(sys.modules)
"""


def test_detection_initialises_nothing_and_imports_no_absent_vendor() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True, timeout=180)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_row_runs() -> None:
    cuda = DEVICES["cuda"]
    cuda.set_device(0)
    state = cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    cuda.set_rng_state(state)

    assert torch.equal(torch.rand(3, device="cuda"), first)
    cuda.synchronize()
    assert cuda.memory_allocated() > 0
    assert cuda.max_memory_allocated() >= cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    cuda.empty_cache()
    assert len(cuda.pci_address(0)) == len("0000:1b:00.0")


def test_a_device_that_is_here_is_found_and_another_is_named():
    assert existing_device("cpu") == torch.device("cpu")
    assert existing_device(torch.device("meta")) == torch.device("meta")
    for absent in ("disk", "cuda:99", 99, torch.device("xpu", 77)):
        with pytest.raises(ValueError, match=f"no device {absent} here.*cpu \\(1\\)"):
            existing_device(absent)


def test_the_kind_of_accelerator_is_reported_without_one(monkeypatch):
    expected = next((e for e in DEVICES.values() if e.is_available() and e.type not in ("cpu", "mps")), None)
    kind = expected.type if expected else "cuda"

    assert get_current_device_type() == (kind, DEVICES[kind].distributed_type.value)
    npu = replace(DEVICES["npu"], is_available=lambda: True)
    monkeypatch.setattr(table, "DEVICES", {**DEVICES, "npu": npu})
    assert get_current_device_type() == ("npu", "MULTI_NPU")


def test_a_device_without_an_index_gets_that_of_the_current_one() -> None:
    cuda = replace(DEVICES["cuda"], calls={"current_device": lambda: 3})

    assert cuda.with_index(torch.device("cuda")) == torch.device("cuda", 3)
    assert cuda.with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert DEVICES["cpu"].with_index(torch.device("cpu")) == torch.device("cpu")
