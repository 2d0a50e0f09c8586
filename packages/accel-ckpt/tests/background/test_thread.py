from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_ckpt.background import buffers, thread
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors
from accel_ckpt.folder import staging
from accel_ckpt.folder.staging import staged
from accel_state.process.state import current_process


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    thread.join()
    thread._current = None
    staging.release_buffer()


def make_state() -> dict[str, Any]:
    """Every kind of sharing that the bytes of a file depend on."""
    torch.manual_seed(0)
    base = torch.randn(50, 40)
    parameter = nn.Parameter(torch.randn(3))
    text = "".join(["sha", "red"])
    return {
        "base": base,
        "view": base[3:7, ::2],
        "again": base,
        "transposed": base.t(),
        "parameter": parameter,
        "same parameter": [parameter, parameter],
        "empty": torch.empty(0, 3),
        "bf16": torch.ones(5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "text": (text, text, "other"),
        "nested": {"numbers": [1, 2.5, None], "group": {"lr": 0.1, "betas": (0.9, 0.99)}},
    }


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def save(folder: Path, blocking: bool, change: bool = False) -> None:
    state = make_state()
    weights = {"w": torch.randn(300, 40), "tied": torch.ones(4)}
    weights["also"] = weights["tied"]
    model = nn.Linear(70, 70)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(70)).sum().backward()
    optimizer.step()
    changed = threading.Event()
    with staged(folder, blocking=blocking) as opened:
        if change:  # nothing is written before it
            opened._deferred_writes.append(lambda: assert_set(changed))
        opened.write(weights, "model.safetensors", safe_serialization=True)
        opened.write(state, "custom_checkpoint_0.pkl")
        opened.write(optimizer.state_dict(), "optimizer.bin")
        opened.facts["step"] = 1
    if change:  # the state that is saved is that of the moment of the call
        with torch.no_grad():
            moments = optimizer.state_dict()["state"][0].values()
            for tensor in [*weights.values(), state["base"], state["parameter"], *moments]:
                tensor.fill_(7.0)
    changed.set()
    if not blocking:
        thread.wait()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "accel_manifest.json"}


@pytest.mark.core
def test_the_files_are_those_of_a_blocking_save_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path / "a", blocking=True)
    for name in ("b", "c"):  # the second time in memory that has been used
        save(tmp_path / name, blocking=False, change=True)

        assert files(tmp_path / name) == files(tmp_path / "a")
    assert torch.load(tmp_path / "b" / "custom_checkpoint_0.pkl", weights_only=True)["text"][0] == "shared"


def test_what_was_written_may_change_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_PIECE_BYTES", 4096)  # several threads copy one tensor
    weight = torch.arange(50_000.0)
    for name, safe in (("model.safetensors", True), ("custom_checkpoint_0.pkl", False)):
        weight.copy_(torch.arange(50_000.0))
        with staged(tmp_path / name, blocking=False) as opened:
            opened.write({"w": weight}, name, safe_serialization=safe)
            weight.zero_()
        thread.wait()
        saved = tensors.load(tmp_path / name / name)["w"]
        assert torch.equal(saved, torch.arange(50_000.0))


def test_the_memory_is_used_again(tmp_path: Path) -> None:
    save(tmp_path / "a", blocking=False)
    held = staging._buffer
    assert held is not None
    size = held.size
    save(tmp_path / "b", blocking=False)
    assert staging._buffer is held
    assert held.size == size
    staging.release_buffer()
    assert staging._buffer is None


class Gate:
    """Holds a save in the background until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self) -> None:
        self.open.wait(20)


def test_training_continues_and_one_save_is_in_flight(tmp_path: Path) -> None:
    gate = Gate()
    with staged(tmp_path / "a", blocking=False) as opened:
        opened.write(make_state(), "custom_checkpoint_0.pkl")
        opened._deferred_writes.append(gate)
    assert thread.in_flight()
    assert not (tmp_path / "a").exists()

    threading.Timer(0.2, gate.open.set).start()
    with staged(tmp_path / "b") as opened:  # waits for the other
        assert (tmp_path / "a").exists()
        assert not thread.in_flight()
        opened.write({}, "custom_checkpoint_0.pkl")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def fail() -> None:
    raise OSError(28, "disk full")


def test_an_error_surfaces_at_the_next_call_once_and_nothing_is_left(tmp_path: Path) -> None:
    with staged(tmp_path / "a", blocking=False) as opened:
        opened.write(make_state(), "custom_checkpoint_0.pkl")
        opened._deferred_writes.append(fail)
    thread.join()
    with pytest.raises(OSError, match="disk full"), staged(tmp_path / "b"):
        pytest.fail("entered")
    thread.wait()
    assert os.listdir(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("accel-")]


def test_an_error_while_copying_is_raised_immediately(tmp_path: Path) -> None:
    large = {"w": torch.ones(2**21)}  # threads copy it
    with pytest.raises(ValueError, match="safetensors stores only tensors"):  # noqa: SIM117
        with staged(tmp_path / "a", blocking=False) as opened:
            opened.write_all({"custom_checkpoint_0.pkl": large, "model.safetensors": {"x": 3}})
    assert not thread.in_flight()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("accel-")]
    assert os.listdir(tmp_path) == []


EXIT = """
import sys, threading, time
import torch
from accel_ckpt.folder.staging import staged
with staged(sys.argv[1], blocking=False) as opened:
    opened.write({"x": torch.ones(100)}, "custom_checkpoint_0.pkl")
    opened._deferred_writes.append(lambda: time.sleep(0.5))
    if sys.argv[2] == "fails":
        opened._deferred_writes.append(lambda: 1 / 0)
if sys.argv[2] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("raises", 3), ("fails", 0)])
def test_the_interpreter_waits_and_reports_an_error_that_nobody_saw(
    tmp_path: Path, how: str, code: int
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "c"), how], capture_output=True, text=True, timeout=180
    )
    assert run.returncode == code, run.stderr
    assert (tmp_path / "c").exists() == (how != "fails")
    if how == "fails":
        assert "has failed" in run.stderr
        assert "ZeroDivisionError" in run.stderr
    else:
        assert run.stderr == ""


# Several processes


def _train_meanwhile(folder: str, failing: int | None) -> str:
    process = current_process()
    for number in range(3):
        with staged(Path(folder) / str(number), blocking=False, process=process) as opened:
            if opened.writes_shared:
                opened.write({"x": torch.full((1000,), float(number))}, "custom_checkpoint_0.pkl")
            opened.write({"rank": process.rank}, f"random_states_{process.rank}.pkl")
            if process.rank == failing and number == 1:
                opened._deferred_writes.append(fail)
        for step in range(50):  # collectives of the training loop, while those of the save continue
            value = torch.tensor([float(step * (process.rank + 1))])
            dist.all_reduce(value)
            assert value.item() == step * 3
            if step == 20 and process.rank == 1:
                thread.join()  # ranks wait at different times
    thread.wait()
    return "saved"


def _caught(folder: str, failing: int | None) -> str:
    try:
        return _train_meanwhile(folder, failing)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        staging.release_buffer()


def test_collectives_of_training_and_saving_do_not_meet(world: Any, tmp_path: Path) -> None:
    assert world.run(_caught, str(tmp_path), None) == ["saved", "saved"]
    for number in range(3):
        names = sorted(os.listdir(tmp_path / str(number)))
        shared = ["accel_manifest.json", "custom_checkpoint_0.pkl"]
        assert names == [*shared, "random_states_0.pkl", "random_states_1.pkl"]


def test_when_one_fails_in_the_background_all_do(world: Any, tmp_path: Path) -> None:
    first, second = world.run(_caught, str(tmp_path), 1)

    assert second == "OSError: [Errno 28] disk full"
    assert first.startswith("CheckpointError: writing the checkpoint failed on another process. process 1")
    assert os.listdir(tmp_path) == ["0"]
    assert issubclass(CheckpointError, RuntimeError)


def _destroy_in_flight(folder: str) -> bool:
    from accel_state.process.state import PartialState

    state = PartialState(cpu=True)
    with staged(Path(folder) / "c", blocking=False, process=state.process) as opened:
        opened.write({"rank": 1}, f"random_states_{state.process_index}.pkl")
        opened._deferred_writes.append(lambda: threading.Event().wait(0.3))
    state.destroy_process_group()
    return (Path(folder) / "c").exists()


def test_the_process_group_is_destroyed_after_the_commit(world: Any, tmp_path: Path) -> None:
    assert world.run(_destroy_in_flight, str(tmp_path)) == [True, True]
