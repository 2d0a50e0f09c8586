"""The example that uses accel-data alone, as users run it: under python and torchrun.

Runs with further options are ranks of the persistent world, which has torch already.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from accel_world.program import run_program
from accel_world.report import WorldFailure

# Each run starts torch in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parents[1] / "examples" / "plain_ddp.py"
STEP = re.compile(r"^step (\d+): loss ([\d.]+)$", re.MULTILINE)
ACCURACY = re.compile(r"^test accuracy ([\d.]+) on (\d+) images$", re.MULTILINE)
NUM_EPOCHS, STEPS_PER_EPOCH = 3, 44
LOSS_TOLERANCE = 1e-5  # sums in another order, in fp32


@pytest.fixture(scope="module")
def run(launched, world):
    @cache
    def run_once(num_processes, *options):
        launcher = "python" if num_processes == 1 else "torchrun"
        args = ("--num_epochs", str(NUM_EPOCHS), *options)
        if options:
            env = {"RANK": None} if num_processes == 1 else {}  # as python starts a script
            limits = {"size": num_processes, "init": False, "env": env, "timeout_s": 150}
            return "".join(world.run(run_program, str(SCRIPT), *args, **limits))
        done = launched(SCRIPT, *args, launcher=launcher, num_processes=num_processes, timeout_s=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_once


def losses(stdout):
    return {int(step): float(loss) for step, loss in STEP.findall(stdout)}


def test_it_imports_no_accelerator():
    tree = ast.parse(SCRIPT.read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]

    assert {name for name in names if name.startswith("accel")} == {"accel_data"}


@pytest.mark.parametrize("args", [(), ("--workers", "1")])
def test_losses_do_not_depend_on_processes_and_workers(run, args):
    expected = losses(run(1))
    seen = losses(run(2, *args))

    assert list(seen) == list(range(1, NUM_EPOCHS * STEPS_PER_EPOCH + 1))
    assert seen == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert expected[len(expected)] < 0.5 * expected[1]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_continues_with_another_number_of_processes(run, tmp_path, before, after):
    """It stops within the second epoch, and every loss after that is the uninterrupted run's."""
    stop = STEPS_PER_EPOCH + 10
    checkpoint = str(tmp_path / "state.pt")
    first = losses(run(before, "--checkpoint", checkpoint, "--stop_after", str(stop)))
    rest = losses(run(after, "--checkpoint", checkpoint))

    assert (max(first), min(rest)) == (stop, stop + 1)
    assert {**first, **rest} == pytest.approx(losses(run(1)), rel=LOSS_TOLERANCE)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_test_image_counts_once(run, num_processes):
    ((accuracy, num_images),) = ACCURACY.findall(run(num_processes))

    assert int(num_images) == 359
    assert float(accuracy) * 359 == pytest.approx(round(float(accuracy) * 359), abs=0.03)


def test_stopping_needs_a_checkpoint(world, capsys):
    with pytest.raises(WorldFailure, match="SystemExit: 2"):
        world.run(run_program, str(SCRIPT), "--stop_after", "3", size=1, init=False, env={"RANK": None})
    assert "--stop_after needs a --checkpoint" in capsys.readouterr().out
