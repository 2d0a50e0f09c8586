"""The examples, run as users run them: whole programs under real launchers."""

from __future__ import annotations

import difflib
import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
IMAGES = EXAMPLES / "image_classification.py"
LANGUAGE = EXAMPLES / "language_model.py"
TEST_SIZE = 359
STEPS = 50
# fp32 sums in another order: what was measured is stated where the limit is used.
LOSS_TOLERANCE = 1e-5

EPOCH = re.compile(r"^epoch (\d+): loss ([\d.]+), test accuracy ([\d.]+) on (\d+) images$", re.MULTILINE)
STEP = re.compile(r"^step (\d+): loss ([\d.]+)", re.MULTILINE)
PERPLEXITY = re.compile(r"^held-out perplexity ([\d.]+) per byte on (\d+) sequences$", re.MULTILINE)

WAYS = [
    pytest.param({"launcher": "python", "num_processes": 1}, id="python"),
    pytest.param({"launcher": "accel", "num_processes": 1}, id="accel-launch"),
    pytest.param({"launcher": "accel", "num_processes": 2, "launch_args": ["--cpu"]}, id="accel-launch-2"),
    pytest.param({"launcher": "torchrun", "num_processes": 2}, id="torchrun-2"),
]


def completed(run):
    """Return what a run printed, after it ended well."""
    assert run.returncode == 0, run.stderr
    return run.stdout


def step_losses(stdout):
    found = STEP.findall(stdout)
    assert [int(step) for step, _ in found] == list(range(1, len(found) + 1))  # once each, in order
    return [float(loss) for _, loss in found]


@pytest.mark.parametrize("way", WAYS)
def test_digits_are_learned_however_the_script_is_started(launched, way):
    stdout = completed(launched(IMAGES, **way))

    epochs = EPOCH.findall(stdout)
    assert [int(number) for number, *_ in epochs] == list(range(10))  # printed by one process alone
    _, first_loss, _, _ = epochs[0]
    _, last_loss, accuracy, num_images = epochs[-1]
    assert float(last_loss) < 0.2 * float(first_loss)
    assert float(accuracy) >= 0.96
    assert int(num_images) == TEST_SIZE


def test_one_to_four_processes_count_every_image_and_have_the_same_losses(launched):
    runs = [
        completed(launched(IMAGES, "--num_epochs", "2", "--print-losses", num_processes=number))
        for number in (1, 2, 3, 4)
    ]

    for stdout in runs:
        for _, _, accuracy, num_images in EPOCH.findall(stdout):
            assert int(num_images) == TEST_SIZE
            # A whole number of images is right: none was counted in the accuracy and not in the number.
            num_correct = float(accuracy) * TEST_SIZE
            assert num_correct == pytest.approx(round(num_correct), abs=0.03)
    one, *others = (step_losses(stdout)[:STEPS] for stdout in runs)
    assert len(one) == STEPS
    assert len(set(one)) == STEPS  # losses of real steps, not one number printed many times
    for losses in others:
        assert losses == pytest.approx(one, rel=LOSS_TOLERANCE)


def test_accumulated_losses_of_one_and_two_processes_agree(launched):
    args = ["--num_epochs", "2", "--print-losses", "--gradient_accumulation_steps", "2"]
    one, two = (step_losses(completed(launched(IMAGES, *args, num_processes=n))) for n in (1, 2))

    assert len(one) >= STEPS
    assert two == pytest.approx(one, rel=LOSS_TOLERANCE)


def test_bf16_trains(launched):
    stdout = completed(launched(IMAGES, "--mixed_precision", "bf16"))

    assert float(EPOCH.findall(stdout)[-1][2]) >= 0.95


def test_tracking_and_progress_bars_are_on_the_main_process_alone(launched, tmp_path):
    run = launched(
        IMAGES, "--num_epochs", "1", "--with-tracking", "--print-losses", "--output-dir", str(tmp_path)
    )

    stdout = completed(run)
    config, *steps, epoch = [
        json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()
    ]
    assert config["config"]["num_epochs"] == 1
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["loss"] for line in steps] == pytest.approx(step_losses(stdout), abs=1e-8)
    assert epoch["accuracy"] == pytest.approx(float(EPOCH.findall(stdout)[0][2]), abs=1e-4)
    assert len(re.findall(r"\b29/29\b", run.stderr)) == 1  # where a second process would end its own bar


def test_a_batch_that_cannot_be_cut_is_refused(launched):
    run = launched(IMAGES, "--gradient_accumulation_steps", "5", launcher="python")

    assert run.returncode == 2
    assert "--batch_size 48 cannot be cut into --gradient_accumulation_steps 5" in run.stderr


def changed_lines():
    plain, changed = ((EXAMPLES / name).read_text() for name in (f"plain_{IMAGES.name}", "five_lines.py"))
    body = [text.partition('"""\n\n')[2].splitlines() for text in (plain, changed)]
    return [line for line in difflib.ndiff(*body) if line[0] in "+-"]


def test_five_lines_are_five_lines():
    changed = [line for line in changed_lines() if line[2:].strip()]

    assert len([line for line in changed if line.startswith("+")]) == 5
    assert [line[2:].strip() for line in changed if line.startswith("-")] == ["loss.backward()"]


def test_readme_shows_the_five_lines():
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert diff is not None
    shown = diff[1].splitlines()

    assert [line for line in shown if line[:1] in "+-"] == [
        line[0] + line[2:] for line in changed_lines() if line[2:].strip()
    ]
    script = iter((EXAMPLES / "five_lines.py").read_text().splitlines())
    for line in shown:
        if line[:1] in "+ " and line.strip():
            assert line[1:] in script  # in the script, after the line before


@pytest.mark.parametrize("num_processes", [1, 2])
def test_five_lines_learn_what_the_plain_script_learns(launched, num_processes):
    result = re.compile(r"test accuracy ([\d.]+) on (\d+) images")
    plain = completed(launched(EXAMPLES / "plain_image_classification.py", launcher="python"))
    changed = completed(launched(EXAMPLES / "five_lines.py", num_processes=num_processes))

    (plain_result,) = result.findall(plain)
    changed_results = result.findall(changed)
    assert len(changed_results) == num_processes  # a plain print, in each process
    for accuracy, num_images in [plain_result, *changed_results]:
        assert float(accuracy) >= 0.93
        assert int(num_images) == TEST_SIZE


@pytest.fixture(scope="module")
def text_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("text"))


def tiny_language_model(launched, text_cache, *args, **options):
    model = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--lr", "5e-3"]
    run = ["--max_steps", str(STEPS), "--warmup_steps", "10", "--log_every", "1", "--eval_sequences", "101"]
    return completed(launched(LANGUAGE, *model, *run, *args, "--cache_dir", text_cache, **options))


@pytest.mark.parametrize("way", WAYS)
def test_language_model_learns_however_it_is_started(launched, text_cache, way):
    stdout = tiny_language_model(launched, text_cache, **way)

    losses = step_losses(stdout)
    ((perplexity, num_sequences),) = PERPLEXITY.findall(stdout)
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)  # knows nothing of 256 bytes yet
    assert losses[-1] < 0.7 * losses[0]
    assert float(perplexity) < 60
    assert int(num_sequences) == 101  # a prime: the last batch is always padded


def test_language_model_is_the_same_on_one_and_two_processes(launched, text_cache):
    args = ["--gradient_accumulation_steps", "2"]
    one, two = (tiny_language_model(launched, text_cache, *args, num_processes=n) for n in (1, 2))

    assert step_losses(two) == pytest.approx(step_losses(one), rel=LOSS_TOLERANCE)
    perplexity_of_one, perplexity_of_two = (float(PERPLEXITY.findall(text)[0][0]) for text in (one, two))
    assert perplexity_of_two == pytest.approx(perplexity_of_one, rel=LOSS_TOLERANCE)
    # Rates count optimizer steps, whatever the accumulation: up to the peak in 10, then down to a tenth.
    rates = [float(rate) for rate in re.findall(r"learning rate ([\d.e-]+)", two)]
    assert rates.index(max(rates)) + 1 == 10
    assert max(rates) == pytest.approx(5e-3)
    assert rates[-1] == pytest.approx(5e-4, rel=0.02)


def test_text_is_written_once_and_complete(launched, tmp_path):
    """Two processes start with no cache: one writes it, whole, and leaves nothing else."""
    first = tiny_language_model(launched, str(tmp_path), "--max_steps", "2", num_processes=2)
    files = sorted(tmp_path.iterdir())
    written = {path.name: path.stat().st_mtime_ns for path in files}
    again = tiny_language_model(launched, str(tmp_path), "--max_steps", "2", num_processes=2)

    assert [path.name.rpartition("-")[2] for path in files] == ["out.bin", "train.bin"]
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert step_losses(first) == step_losses(again)
