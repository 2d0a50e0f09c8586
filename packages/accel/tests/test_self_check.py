"""`accel test` passes where everything works, and each of its checks fails when its subject is broken."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.commands import self_check
from accel_state import GradientState

pytestmark = pytest.mark.timeout(300)  # torch starts in every process, and the machine may be busy


def accel(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from accel_launch.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.long
def test_two_processes_pass_every_check(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("use_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n")
    run = accel(tmp_path, "test", "--config_file", "c.yaml")

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2 x cpu, MULTI_CPU, backend gloo, mixed precision bf16, started in ")
    passed = [line.split(" passed ")[0].strip() for line in run.stdout.splitlines() if " passed " in line]
    assert passed == [*self_check.CHECKS]
    assert run.stdout.endswith(f"All {len(passed)} checks passed.\n")


@pytest.mark.long
def test_deepspeed_passes_every_check(tmp_path: Path) -> None:
    """One Accelerator trains several models there, one after the other."""
    if importlib.util.find_spec("deepspeed") is None:  # importing it here would choose a device for all tests
        pytest.skip("the alone environment has no DeepSpeed")
    flags = ("--cpu", "--num_processes", "2", "--use_deepspeed", "--zero_stage", "2")
    run = accel(tmp_path, "test", *flags)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2 x cpu, DEEPSPEED, backend gloo, mixed precision no, started in ")
    assert run.stdout.endswith(f"All {len(self_check.CHECKS)} checks passed.\n")


@pytest.mark.long
def test_a_failing_check_is_named_and_ends_the_run(tmp_path: Path) -> None:
    script = """
from accel import Accelerator
from accel.commands.self_check import main

if __name__ == "__main__":
    plain = Accelerator.reduce
    Accelerator.reduce = lambda self, *a, **k: plain(self, *a, **k) + self.process_index
    main()
"""
    (tmp_path / "broken.py").write_text(script)
    run = accel(tmp_path, "launch", "--cpu", "--num_processes", "2", "broken.py")

    assert run.returncode == 1
    assert "collectives          FAILED on rank 1" in run.stdout
    assert "reduce returned [2.0, 2.0], not [1.0, 1.0]" in run.stderr
    assert "All" not in run.stdout


def test_a_script_is_rejected(tmp_path: Path) -> None:
    run = accel(tmp_path, "test", "mine.py")

    assert run.returncode == 2
    assert "accel test takes no script, got 'mine.py'" in run.stderr


def run_checks(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    for check in self_check.CHECKS.values():
        check(accelerator)


@pytest.mark.parametrize("size", [1, 3])
def test_checks_pass_in_process(world: Any, size: int) -> None:
    world.run(run_checks, "no", size=size, timeout_s=120)


def spoil_gather(accelerator: Accelerator) -> None:
    accelerator.gather = lambda tensor: torch.cat([tensor] * accelerator.num_processes)  # type: ignore[method-assign]


def spoil_sharding(accelerator: Accelerator) -> None:
    accelerator.prepare = lambda loader: loader  # type: ignore[method-assign]


def spoil_order(accelerator: Accelerator) -> None:
    plain = accelerator.gather_for_metrics
    rank = accelerator.process_index
    accelerator.gather_for_metrics = lambda batch: plain(batch).roll(rank)  # type: ignore[method-assign]


def spoil_gradients(accelerator: Accelerator) -> None:
    plain = accelerator.backward
    accelerator.backward = lambda loss: plain(loss * (1 + accelerator.process_index))  # type: ignore[method-assign]


def spoil_loading(accelerator: Accelerator) -> None:
    accelerator.load_state = lambda folder: None  # type: ignore[method-assign, assignment]


def spoil_shares(accelerator: Accelerator) -> None:
    from contextlib import nullcontext

    accelerator.split_between_processes = lambda items: nullcontext(items)  # type: ignore[method-assign]


def run_spoiled(check: str, spoil: Callable[[Accelerator], None]) -> str:
    accelerator = Accelerator(cpu=True)
    spoil(accelerator)
    with pytest.raises(RuntimeError) as error:
        self_check.CHECKS[check](accelerator)
    accelerator.wait_for_everyone()
    GradientState._reset_state()
    return str(error.value)


@pytest.mark.parametrize(
    ("check", "spoil", "message"),
    [
        ("processes", spoil_shares, "add up to"),
        ("collectives", spoil_gather, "gather returned"),
        ("sharding of data", spoil_sharding, "samples came as"),
        ("sharding of data", spoil_order, "disagree about the order"),
        ("one versus many", spoil_gradients, "on one process"),
        ("checkpoint", spoil_loading, "after loading the checkpoint"),
    ],
)
def test_each_check_notices_what_it_is_for(world: Any, check: str, spoil: Any, message: str) -> None:
    for said in world.run(run_spoiled, check, spoil, size=2, timeout_s=120):
        assert message in said
