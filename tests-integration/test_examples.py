"""The examples, run as users run them: whole programs, each under every real launcher.

Where the way of starting makes no difference they are ranks of the persistent world, which has torch already.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from accel_state.imports.packages import install_hint
from accel_world.program import run_program
from accel_world.report import WorldFailure

# Each program takes seconds, but starts torch in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
IMAGES = EXAMPLES / "image_classification.py"
PLAIN = EXAMPLES / "plain_image_classification.py"
FIVE_LINES = EXAMPLES / "five_lines.py"
LANGUAGE = EXAMPLES / "language_model.py"
TEST_SIZE = 359
STEPS = 50
# Sums in another order, in fp32. Measured over 50 steps on 2 to 4 processes: 3e-7 at most.
LOSS_TOLERANCE = 1e-5

EPOCH = re.compile(r"^epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+) on (\d+) images$", re.MULTILINE)
STEP = re.compile(r"^step (\d+): loss ([\d.]+)", re.MULTILINE)
PERPLEXITY = re.compile(r"^held-out perplexity ([\d.]+) per byte on (\d+) sequences$", re.MULTILINE)

# The ways of starting a script, as (launcher, number of processes).
PYTHON, ONE, TWO, TORCHRUN = ("python", 1), ("accel", 1), ("accel", 2), ("torchrun", 2)
WAYS = [PYTHON, ONE, TWO, TORCHRUN]
WORLD = "world"  # in place of a launcher
ALONE = dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])  # as python starts a script


@pytest.fixture(scope="module")
def run(launched, world):
    """Run a script once for all tests that request the same run, and return what it printed."""

    @cache
    def run_once(script, way, *args):
        launcher, num_processes = way
        if launcher == WORLD:
            return "".join(
                world.run(run_program, str(script), *args, size=num_processes, init=False, timeout_s=150)
            )
        done = launched(
            script,
            *args,
            launcher=launcher,
            num_processes=num_processes,
            launch_args=["--cpu"] if launcher == "accel" else [],
            timeout_s=150,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_once


def step_losses(stdout):
    found = STEP.findall(stdout)
    assert [int(step) for step, _ in found] == list(range(1, len(found) + 1))  # once each, in order
    return [float(loss) for _, loss in found]


@pytest.mark.parametrize("way", WAYS)
def test_digits_are_learned_however_the_script_is_started(run, way):
    stdout = run(IMAGES, way, "--print-losses")

    epochs = EPOCH.findall(stdout)
    assert [int(number) for number, *_ in epochs] == list(range(8))  # printed by one process alone
    _, first_loss, _, _ = epochs[0]
    _, last_loss, accuracy, num_images = epochs[-1]
    assert float(last_loss) < 0.1 * float(first_loss)
    assert float(accuracy) >= 0.96
    assert int(num_images) == TEST_SIZE


@pytest.mark.parametrize("way", [ONE, TWO, TORCHRUN, (WORLD, 3), (WORLD, 4)])
def test_every_test_image_counts_once(run, way):
    args = ["--print-losses"] if way[1] < 3 else ["--num_epochs", "1"]
    epochs = EPOCH.findall(run(IMAGES, way, *args))

    assert epochs
    for _, _, accuracy, num_images in epochs:
        assert int(num_images) == TEST_SIZE
        # A whole number of images is right: none was counted in the accuracy and not in the number.
        num_correct = float(accuracy) * TEST_SIZE
        assert num_correct == pytest.approx(round(num_correct), abs=0.03)


@pytest.mark.parametrize("way", [ONE, TWO, TORCHRUN])
def test_losses_do_not_depend_on_the_number_of_processes(run, way):
    expected = step_losses(run(IMAGES, PYTHON, "--print-losses"))[:STEPS]
    losses = step_losses(run(IMAGES, way, "--print-losses"))[:STEPS]

    assert len(expected) == STEPS
    assert len(set(expected)) == STEPS  # losses of real steps, not one number printed many times
    assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_accumulated_losses_of_one_and_two_processes_agree(run):
    args = ["--num_epochs", "2", "--print-losses", "--gradient_accumulation_steps", "2"]
    one, two = (step_losses(run(IMAGES, way, *args)) for way in (ONE, (WORLD, 2)))

    assert len(one) >= STEPS
    assert two == pytest.approx(one, rel=LOSS_TOLERANCE)


def test_bf16_trains(run):
    stdout = run(IMAGES, (WORLD, 2), "--mixed_precision", "bf16", "--print-losses")

    assert float(EPOCH.findall(stdout)[-1][2]) >= 0.96
    in_fp32 = step_losses(run(IMAGES, TWO, "--print-losses"))
    assert step_losses(stdout)[:STEPS] != pytest.approx(in_fp32[:STEPS], rel=LOSS_TOLERANCE)


@pytest.fixture(scope="module")
def written(launched, tmp_path_factory):
    """Run with all that writes files; return the run and the folder."""
    folder = tmp_path_factory.mktemp("written")
    options = ["--num_epochs", "1", "--with-tracking", "--print-losses", "--save"]
    done = launched(IMAGES, *options, "--output-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return done, folder


def test_tracking_and_progress_bars_are_on_the_main_process_alone(written):
    run, folder = written

    config, *steps, epoch = [json.loads(line) for line in (folder / "digits.jsonl").read_text().splitlines()]
    assert config["config"]["num_epochs"] == 1
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["loss"] for line in steps] == pytest.approx(step_losses(run.stdout), abs=1e-8)
    assert epoch["accuracy"] == pytest.approx(float(EPOCH.findall(run.stdout)[0][2]), abs=1e-4)
    # A bar may show its end twice, and its beginning once.
    assert len(re.findall(r" 0/29 ", run.stderr)) == 1
    assert " 29/29 " in run.stderr


def test_saved_weights_can_be_read(written):
    safetensors = pytest.importorskip("safetensors.torch")

    weights = safetensors.load_file(written[1] / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()}["head.weight"] == (10, 64)


def test_the_launchers_accumulation_flag_comes_before_the_scripts(run, launched):
    args = ["--num_epochs", "2", "--print-losses"]
    by_the_script = step_losses(run(IMAGES, ONE, *args, "--gradient_accumulation_steps", "2"))
    by_the_launcher = launched(
        IMAGES, *args, num_processes=1, launch_args=["--cpu", "--gradient_accumulation_steps", "2"]
    )

    assert by_the_launcher.returncode == 0, by_the_launcher.stderr
    assert step_losses(by_the_launcher.stdout) == by_the_script


@pytest.mark.parametrize("script", [IMAGES, LANGUAGE])
def test_a_batch_that_cannot_be_cut_is_rejected(world, script):
    message = "ValueError: --batch_size 48 cannot be cut into --gradient_accumulation_steps 5"
    options = ["--batch_size", "48", "--gradient_accumulation_steps", "5"]
    with pytest.raises(WorldFailure, match=message):
        world.run(run_program, str(script), *options, size=1, init=False, env=ALONE)


def changed_lines():
    body = [path.read_text().partition('"""\n\n')[2].splitlines() for path in (PLAIN, FIVE_LINES)]
    return [line for line in difflib.ndiff(*body) if line[0] in "+-" and line[2:].strip()]


def test_five_lines_are_five_lines():
    assert len([line for line in changed_lines() if line.startswith("+")]) == 5
    assert [line[2:].strip() for line in changed_lines() if line.startswith("-")] == ["loss.backward()"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/quickstart.md"])
def test_pages_show_the_five_lines(page):
    diff = re.search(r"```diff .*?\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert diff is not None
    shown = diff[1].splitlines()

    assert [line for line in shown if line[:1] in "+-"] == [line[0] + line[2:] for line in changed_lines()]
    script = iter(FIVE_LINES.read_text().splitlines())
    for line in shown:
        if line[:1] in "+ " and line.strip():
            assert line[1:] in script  # in the script, after the line before


@pytest.mark.parametrize("way", [PYTHON, TWO])
def test_five_lines_learn_what_the_plain_script_learns(run, way):
    result = re.compile(r"test accuracy ([\d.]+) on (\d+) images")
    (plain_result,) = result.findall(run(PLAIN, (WORLD, 1)))
    changed_results = result.findall(run(FIVE_LINES, way))

    assert len(changed_results) == way[1]  # a plain print, in each process
    for accuracy, num_images in [plain_result, *changed_results]:
        assert float(accuracy) >= 0.93
        assert int(num_images) == TEST_SIZE


@pytest.mark.parametrize("script", [PLAIN, FIVE_LINES, IMAGES, EXAMPLES / "plain_ddp.py"])
def test_without_scikit_learn_the_command_that_installs_it_is_named(world, tmp_path, script):
    """In workers that have not imported it: a module in its place says that there is none."""
    missing = "raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')"
    (tmp_path / "sklearn.py").write_text(missing)
    with pytest.raises(WorldFailure, match=re.escape(f"with: {install_hint('examples')}")):
        world.run(run_alone, str(tmp_path), str(script), size=1, init=False, env=ALONE)


def run_alone(folder, script):
    with mock.patch.object(sys, "path", [folder, *sys.path]), mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] in ("digits", "sklearn")]:
            del sys.modules[name]
        run_program(script)


@pytest.fixture(scope="module")
def text_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("text"))


TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--lr=5e-3", "--eval_sequences=101"]
TINY += [f"--max_steps={STEPS}", "--warmup_steps=10", "--log_every=1", "--gradient_accumulation_steps=2"]


@pytest.mark.parametrize("way", WAYS)
def test_language_model_learns_the_same_however_it_is_started(run, text_cache, way):
    stdout = run(LANGUAGE, way, *TINY, "--cache_dir", text_cache)

    losses = step_losses(stdout)
    ((perplexity, num_sequences),) = PERPLEXITY.findall(stdout)
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)  # knows nothing of the 256 bytes yet
    assert losses[-1] < 0.7 * losses[0]
    assert float(perplexity) < 60
    assert int(num_sequences) == 101  # a prime: the last batch is always padded

    alone = run(LANGUAGE, PYTHON, *TINY, "--cache_dir", text_cache)
    assert losses == pytest.approx(step_losses(alone), rel=LOSS_TOLERANCE)
    assert float(perplexity) == pytest.approx(float(PERPLEXITY.findall(alone)[0][0]), rel=LOSS_TOLERANCE)


def test_language_model_follows_its_schedule(run, text_cache):
    """Rates count optimizer steps, whatever the accumulation: up to the peak in 10, then down to a tenth."""
    stdout = run(LANGUAGE, TWO, *TINY, "--cache_dir", text_cache)

    rates = [float(rate) for rate in re.findall(r"learning rate ([\d.e-]+)", stdout)]
    assert rates[:10] == pytest.approx([5e-4 * step for step in range(1, 11)], rel=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(5e-4, rel=0.02)


def test_text_is_written_once_and_whole(world, tmp_path):
    """Two processes start with no cache: one writes it, the other finds it, and nothing else is left."""
    args = [str(LANGUAGE), *TINY, "--max_steps", "2", "--cache_dir", str(tmp_path)]
    first = world.run(run_program, *args, init=False)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    again = world.run(run_program, *args, init=False)

    assert sorted(name.rpartition("-")[2] for name in written) == ["out.bin", "train.bin"]
    assert size > 5_000_000
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    losses = step_losses("".join(first))
    assert len(losses) == 2
    assert step_losses("".join(again)) == losses


def test_a_batch_larger_than_the_text_is_rejected(world, text_cache):
    options = ["--batch_size", "100000000", "--cache_dir", text_cache]
    with pytest.raises(WorldFailure, match=r"ValueError: .*take a smaller batch or --block_size"):
        world.run(run_program, str(LANGUAGE), *options, size=1, init=False, env=ALONE, timeout_s=100)
