"""One process and many are reported as the same training, or what differs first and why."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from accel import Accelerator
from accel.observe.verify.compare import Verdict, compare
from accel.observe.verify.recorded_runs import read_record
from accel_world.program import run_program

PROGRAM = str(Path(__file__).with_name("verified_program.py"))
SAVING_PROGRAM = str(Path(__file__).with_name("saving_program.py"))
STEPS = 3


def run(kind: str, program: str = PROGRAM) -> tuple[str, list[Any]]:
    """Run a program; returns what it printed, and what would be left of the recorder."""
    printed = run_program(program, kind)
    wrapped = [torch.nn.Module.__call__, torch.Tensor.backward, torch.nn.functional.dropout]
    left = [item.__name__ for item in wrapped if hasattr(item, "__wrapped__")]
    return printed, [*left, *_global_optimizer_pre_hooks, *_global_optimizer_post_hooks]


def record(
    world: Any, folder: Path, size: int, kind: str, program: str = PROGRAM, **settings: Any
) -> list[dict[str, Any]]:
    folder.mkdir()
    chosen = {"steps": STEPS, "batch_factor": 1, "without_dropout": False} | settings
    (folder / "settings.json").write_text(json.dumps(chosen))
    environment = {"ACCELERATE_VERIFY_FOLDER": str(folder)}
    for printed, left in world.run(run, kind, program, size=size, init=False, env=environment):
        assert printed == ""  # it did not come to its end
        assert len(left) <= 2  # torch's hooks of accel's own checks
    return [read_record(folder, rank) for rank in range(size)]


def verify(world: Any, folder: Path, kind: str, size: int = 2, **settings: Any) -> Verdict:
    many = record(world, folder / "many", size, kind, **settings)
    factor = 1 if many[0]["split_batches"] else many[0]["data_shards"]
    (one,) = record(world, folder / "one", 1, kind, batch_factor=factor, **settings)
    assert len(one["steps"]) >= STEPS
    return compare(one, many)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_of_the_user_are_neither_read_nor_written(world, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(2):  # the second continues from the first
        world.run(run_program, SAVING_PROGRAM, str(out), size=2, init=False)
    before = contents(out)
    assert {Path(name).parts[0] for name in before} == {
        *("checkpoints", "weights", "fsdp", "traces", "statistics", "run.jsonl", "lines.txt"),
        *("accelerator.pt", "function.pt", "last.pt", "by the script.txt"),
    }

    verdict = verify(world, tmp_path, str(out), program=SAVING_PROGRAM)

    assert contents(out) == before
    assert verdict.difference is None
    assert verdict.notes == ("load_state found nothing: both runs start without a checkpoint.",)


def record_and_read(folder: Path) -> list[str]:
    """Train under the recorder; returns what it has written before each step."""
    written = []
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
    with contextlib.suppress(SystemExit):  # of the recorder
        for _ in range(9):
            written.append("".join(path.read_text() for path in sorted(folder.glob("rank-*"))))
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    return written


def test_a_step_adds_to_the_record_and_leaves_what_is_there(world, tmp_path: Path):
    settings = {"steps": 5, "batch_factor": 1, "without_dropout": False}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    environment = {"ACCELERATE_VERIFY_FOLDER": str(tmp_path)}

    (written,) = world.run(record_and_read, tmp_path, size=1, init=False, env=environment)

    assert len(written) == 5
    for earlier, later in itertools.pairwise(written):
        assert later.startswith(earlier)
        assert len(later) > len(earlier)
    assert len(read_record(tmp_path, 0)["steps"]) == 5


RIGHT = {  # samples of a step
    "plain": 8,
    "weighted": 8,
    "accumulation": 16,
    "weighted accumulation": 16,
    "split batches": 4,
    "fsdp 2": 8,
    "padding": 8,
    "batches of three": 6,
    "evaluation": 8,
    "two optimizers": 8,
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_program_is_the_same_training(world, tmp_path: Path, kind: str):
    verdict = verify(world, tmp_path, kind)

    assert verdict.difference is None
    assert verdict.causes == verdict.notes == ()
    steps = [row for row in verdict.rows if row.samples[0]]
    assert [row.samples for row in steps] == [(RIGHT[kind], RIGHT[kind])] * STEPS
    assert all(row.losses[0] == pytest.approx(row.losses[1], rel=1e-5) for row in steps)
    assert all(row.norms[0] == pytest.approx(row.norms[1], rel=1e-4) for row in verdict.rows)
    assert all(row.apart < 1e-3 for row in verdict.rows)


def test_parameters_that_are_sharded_are_left_out_and_noted(world, tmp_path: Path):
    verdict = verify(world, tmp_path, "fsdp 1")

    assert verdict.difference is None
    assert verdict.notes == ("Not compared, as each process has a part: Sequential._flat_param (1 in all).",)


def test_losses_with_weights_are_recorded_as_the_sums_that_they_are(world, tmp_path: Path):
    (one,) = record(world, tmp_path / "one", 1, "weighted accumulation", steps=1)
    (plain,) = record(world, tmp_path / "plain", 1, "plain", steps=1)
    (loss, weight), _ = one["steps"][0]["losses"]

    assert one["steps"][0]["samples"][:4] == plain["steps"][0]["samples"]
    assert weight == int(weight) > 4  # items of four samples
    assert 0.3 < (loss / weight) / plain["steps"][0]["losses"][0][0] < 3


def test_batches_that_a_loop_reads_ahead_are_recorded_with_the_step_that_they_are_for(world, tmp_path: Path):
    (plain,) = record(world, tmp_path / "plain", 1, "short", batch_factor=2)
    (ahead,) = record(world, tmp_path / "ahead", 1, "read ahead", batch_factor=2)

    samples = [[len(step["samples"]) for step in one["steps"]] for one in (plain, ahead)]
    assert samples == [[8] * STEPS] * 2  # the third step has the last batch of the epoch
    assert [step["samples"] for step in ahead["steps"]] == [step["samples"] for step in plain["steps"]]


def test_three_processes_and_no_dropout_are_the_same_training(world, tmp_path: Path):
    verdict = verify(world, tmp_path, "dropout", size=3, without_dropout=True)

    assert verdict.difference is None
    assert [row.samples for row in verdict.rows] == [(12, 12)] * STEPS


FAULTS = {
    "batch norm": ("loss", 1, "Sequential.1 is batch norm in training"),
    "dropout": ("loss", 1, "Sequential.2 is dropout"),
    "noise": ("loss", 1, "A step draws random numbers"),
    "mean of means": ("loss", 1, "weight=num_items"),
    "sum": ("loss", 1, "The loss is a sum over the batch"),
    "model": ("gradients", 1, "Sequential is not prepared"),
    "optimizer": ("gradients", 1, "AdamW is not prepared"),
    "loader": ("samples", 1, "The DataLoader of TensorDataset is not prepared"),
    "weights": ("initial weights", 0, "set_seed(n) before the model is made"),
    "shuffle": ("samples", 1, "set_seed(n) before the loader is prepared"),
    "short epoch": ("samples", 3, "completed with samples from the start"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_first_difference_and_its_cause_are_named(world, tmp_path: Path, kind: str):
    verdict = verify(world, tmp_path, kind)

    difference, step, cause = FAULTS[kind]
    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.step) == (difference, step), verdict
    assert len(verdict.causes) == 1
    assert cause in verdict.causes[0]


def test_the_process_and_the_parameter_are_named(world, tmp_path: Path):
    verdict = verify(world, tmp_path, "one process alone")

    assert verdict.difference is not None
    assert verdict.difference.kind == "gradients"
    assert verdict.difference.step == 2
    assert re.match(
        r"The gradient of Sequential\.0\.weight on process 1 is \d\S* times its norm away",
        verdict.difference.text,
    )
    assert verdict.causes == ()  # not known


def test_a_factor_of_all_gradients_that_clipping_hides_is_found(world, tmp_path: Path):
    verdict = verify(world, tmp_path, "factor")

    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.step) == ("gradients", 1)
    assert "The norm of the gradients before clipping is" in verdict.difference.text
    assert verdict.rows[0].norms[1] == pytest.approx(3 * verdict.rows[0].norms[0], rel=1e-4)


def test_an_optimizer_that_is_not_prepared_and_does_no_harm_is_noted(world, tmp_path: Path):
    verdict = verify(world, tmp_path, "optimizer without accumulation")

    assert verdict.difference is None
    assert verdict.notes == ("Not prepared: optimizer AdamW.",)


def made_up(share: float, after: float, loss: float = 2.0) -> dict[str, Any]:
    """A record of one step: of `b` the share of all gradients, and its value after the step."""
    step = {
        "samples": [1, 2],
        "losses": [[loss, None]],
        "rates": [0.1],
        "norm": None,
        "gradients": {"a": [1.0, 1.0], "b": [share, share]},
        "parameters": {"a": [2.0, 2.0], "b": [abs(after), after]},
    }
    unprepared: dict[str, list[str]] = {"model": [], "optimizer": [], "loader": []}
    return {
        "process": 0,
        "data_rank": 0,
        "precision": "no",
        "initial": {"a": [1.0, 1.0], "b": [0.0, 0.0]},
        "steps": [step],
        "not_compared": [],
        "batch_norm": [],
        "dropout": [],
        "draws": False,
        "loads": False,
        "unprepared": unprepared,
    }


def test_steps_along_gradients_of_rounding_do_not_count():
    assert compare(made_up(1e-9, 0.1), [made_up(1e-9, -0.1)]).difference is None

    difference = compare(made_up(1e-2, 0.1), [made_up(1e-2, -0.1)]).difference
    assert difference is not None
    assert difference.kind == "parameters"
    assert difference.text.startswith("b on process 0 is away from that of one process by 2 times")


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_what_is_not_finite_in_both_runs_is_equal(loss: float):
    verdict = compare(made_up(1.0, 0.1, loss), [made_up(1.0, 0.1, loss)])
    assert verdict.difference is None
    assert verdict.notes == ("The loss is not finite from step 1 on: what comes after cannot be compared.",)
    nan = float("nan")  # gradients and parameters as well
    assert compare(made_up(nan, nan, loss), [made_up(nan, nan, loss)]).difference is None
    assert compare(made_up(1.0, 0.1, loss), [made_up(nan, nan, loss)]).difference is not None
    difference = compare(made_up(1.0, 0.1), [made_up(1.0, 0.1, loss)]).difference
    assert difference is not None
    assert difference.kind == "loss"
