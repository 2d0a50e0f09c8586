"""One process and many are told to be the same training, or what differs first and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel.observe.same_training import Verdict, compare
from accel_world.program import run_program

PROGRAM = str(Path(__file__).with_name("verified_program.py"))
STEPS = 3


def record(world: Any, folder: Path, size: int, fault: str, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    chosen = {"steps": STEPS, "batch_factor": 1, "without_dropout": False} | settings
    (folder / "settings.json").write_text(json.dumps(chosen))
    world.run(
        run_program, PROGRAM, fault, size=size, init=False, env={"ACCELERATE_VERIFY_FOLDER": str(folder)}
    )
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def verify(world: Any, folder: Path, fault: str, **settings: Any) -> Verdict:
    many = record(world, folder / "many", 2, fault, **settings)
    (one,) = record(world, folder / "one", 1, fault, batch_factor=2, **settings)
    assert len(one["steps"]) == STEPS
    return compare(one, many)


@pytest.mark.parametrize("program", ["right", "weighted"])
def test_a_right_program_is_the_same_training(world, tmp_path: Path, program: str):
    verdict = verify(world, tmp_path, program)

    assert verdict.difference is None
    assert verdict.causes == verdict.notes == ()
    assert [row.samples for row in verdict.rows] == [(8, 8)] * STEPS
    assert all(row.losses[0] == pytest.approx(row.losses[1], rel=1e-5) for row in verdict.rows)
    assert all(row.norms[0] == pytest.approx(row.norms[1], rel=1e-4) for row in verdict.rows)
    assert all(row.apart < 1e-3 for row in verdict.rows)


FAULTS = {
    "batch norm": ("loss", 1, "Sequential.1 is batch norm in training"),
    "dropout": ("loss", 1, "Sequential.2 is dropout"),
    "mean of means": ("loss", 1, "weight=num_items"),
    "sum": ("loss", 1, "The loss is a sum over the batch"),
    "model": ("gradients", 1, "Sequential is not prepared"),
    "optimizer": ("gradients", 1, "AdamW is not prepared"),
    "loader": ("samples", 1, "The DataLoader of TensorDataset is not prepared"),
    "weights": ("initial weights", 0, "set_seed(n) before the model is made"),
    "shuffle": ("samples", 1, "set_seed(n) before the loader is prepared"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_and_its_cause_are_named(world, tmp_path: Path, fault: str):
    verdict = verify(world, tmp_path, fault)

    kind, step, cause = FAULTS[fault]
    assert verdict.difference is not None
    print(verdict)
    assert (verdict.difference.kind, verdict.difference.step) == (kind, step)
    assert len(verdict.causes) == 1
    assert cause in verdict.causes[0]
