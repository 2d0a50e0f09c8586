from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ckpt.files import progress
from accel_ckpt.files.progress import Progress
from accel_ckpt.training_state.load import load_accelerator_state
from accel_ckpt.training_state.save import save_accelerator_state


def test_nothing_is_shown_at_first_and_bytes_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Progress("Saving c", total=10 * 2**20, shown=True)
    bar.add(2**20)
    now[0] = 1.9
    bar.add(2**20)
    assert capsys.readouterr().err == ""
    now[0] = 2.1
    bar.add(2**20)
    assert "Saving c:  30%" in (shown := capsys.readouterr().err)
    assert "3.00M/10.0M" in shown
    bar.add(7 * 2**20)
    bar.close()
    assert "10.0M/10.0M" in capsys.readouterr().err


def test_other_processes_show_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    bar = Progress("Saving c", total=10, shown=False)
    bar.add(5)
    bar.close()
    assert capsys.readouterr().err == ""
    assert bar.done == 5


def test_saves_and_loads_count_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    model: Any = torch.nn.Linear(10, 10)
    save_accelerator_state(tmp_path / "c", [model.state_dict()], [], [], [], 0, 0)
    assert "Saving c: 100%" in capsys.readouterr().err
    load_accelerator_state(tmp_path / "c", [model], [], [], [], 0)
    assert "Checking c: 100%" in capsys.readouterr().err


def test_tqdm_is_imported_when_it_is_shown_and_may_be_absent() -> None:
    code = (
        "import sys; from accel_ckpt.files import progress\n"
        "bar = progress.Progress('x', 3, shown=True); bar.add(1)\n"
        "assert 'tqdm' not in sys.modules\n"
        "sys.modules['tqdm'] = sys.modules['tqdm.auto'] = None; progress.AFTER_S = 0\n"
        "bar = progress.Progress('x', 3, shown=True); bar.add(1); bar.close()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (run.returncode, run.stderr) == (0, "")
