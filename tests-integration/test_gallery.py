"""The scripts that show one feature each: they run, and what each promises is so.

They are ranks of the persistent world, which has torch already; one goes through the real launcher.
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accel_launch.commands.launch import launch_command_parser
from accel_world.program import run_program

# The first run of a worker imports torch's compiler, or DeepSpeed, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHARED = {"handwriting.py", "small_gpt.py"}
SCRIPTS = sorted(path for folder in ("training", "large_models") for path in (EXAMPLES / folder).glob("*.py"))
SCRIPTS = [path for path in SCRIPTS if path.name not in SHARED]
ALONE = dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])  # as python starts a script
STEP = re.compile(r"^step (\d+): loss ([\d.]+)", re.MULTILINE)
# Sums in another order, in fp32, shown with six digits. Measured on 1 to 4 processes: one unit of the last.
TOLERANCE = 1e-5


def path_of(script):
    (path,) = [path for path in SCRIPTS if path.stem == script]
    return path


@pytest.fixture(scope="module")
def run(world):
    """Run a script, once for all tests that request the same run; return what each process printed."""

    @cache
    def run_once(script, *args, size=1):
        env = {"DS_ACCELERATOR": "cpu"} | (ALONE if size == 1 else {})
        path = str(path_of(script))
        return world.run(run_program, path, *map(str, args), size=size, init=False, env=env, timeout_s=250)

    return run_once


def losses(printed):
    """Return the loss of each step that is shown, by its number; the main process alone shows them."""
    assert not any(STEP.search(text) for text in printed[1:])
    found = STEP.findall(printed[0])
    assert found
    return {int(step): float(loss) for step, loss in found}


def same(printed, expected):
    assert losses(printed) == pytest.approx(losses(expected), abs=TOLERANCE)


# Training loops


@pytest.mark.parametrize(("micro_batches", "size"), [(1, 1), (4, 2)])
def test_accumulated_steps_are_those_of_the_full_batch(run, micro_batches, size):
    printed = run("gradient_accumulation", "--micro_batches", micro_batches, size=size)

    same(printed, run("gradient_accumulation"))
    assert list(losses(printed)) == list(range(11, 89, 11))
    accuracy = re.search(r"^88 steps over 64 images each, test accuracy ([\d.]+)$", printed[0], re.MULTILINE)
    assert float(accuracy[1]) > 0.88


@pytest.mark.parametrize(("micro_batches", "size"), [(1, 1), (4, 2)])
def test_steps_by_tokens_do_not_depend_on_how_lines_are_split(run, micro_batches, size):
    printed = run("exact_accumulation", "--micro_batches", micro_batches, size=size)
    whole = run("exact_accumulation")

    same(printed, whole)
    assert len(losses(printed)) == 25
    assert losses(printed)[25] < 0.5 * losses(printed)[1]
    counts = re.findall(r" over (\d+) bytes$", printed[0], re.MULTILINE)
    assert counts == re.findall(r" over (\d+) bytes$", whole[0], re.MULTILINE)
    assert len(set(counts)) > 20  # lines differ in length


def digest(printed):
    return re.search(r"^digest of the weights after step \d+: (\w{16})$", printed[0], re.MULTILINE)[1]


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(run, tmp_path, size):
    whole = run("exact_resume", "--project_dir", tmp_path / "whole", size=size)
    stopped = ["--project_dir", tmp_path / "stopped"]
    first = run("exact_resume", *stopped, "--stop_after", 23, size=size)
    second = run("exact_resume", *stopped, size=size)

    assert "digest" not in first[0]
    assert second[0].startswith("resuming after step 20\n")
    assert digest(second) == digest(whole)
    assert losses(first) | losses(second) == losses(whole)
    # Kept: the newest two.
    folders = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    last = max(int(name.rpartition("_")[2]) for name in folders)
    assert folders == [f"checkpoint_{last - 1}", f"checkpoint_{last}"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 4), (2, 1)])
def test_another_number_of_processes_continues_equally(run, tmp_path, saved_by, loaded_by):
    whole = run("elastic_resume", "--project_dir", tmp_path / "none")
    first = run("elastic_resume", "--project_dir", tmp_path / "run", "--stop_after", 30, size=saved_by)
    second = run("elastic_resume", "--project_dir", tmp_path / "run", size=loaded_by)

    assert f"{saved_by} processes saved after step 30" in first[0]
    assert f"{loaded_by} processes resume after step 30" in second[0]
    assert list(losses(second)) == [step for step in losses(whole) if step > 30]
    assert losses(first) | losses(second) == pytest.approx(losses(whole), abs=TOLERANCE)


def test_a_preempted_run_exits_and_the_same_command_continues(launched, run, tmp_path):
    whole = run("preemption", "--project_dir", tmp_path / "whole", size=2)
    command = (path_of("preemption"), "--project_dir", str(tmp_path / "run"))
    first = launched(*command, "--signal_at_step", "25", launch_args=["--cpu"])
    second = launched(*command, launch_args=["--cpu"])

    assert first.returncode == 75
    assert first.stderr.endswith("they have saved their state. Start the same command again to continue.\n")
    assert second.returncode == 0, second.stderr
    assert max(losses([first.stdout])) == 20
    assert min(losses([second.stdout])) == 30
    assert first.stdout + second.stdout == whole[0]  # "trained to the end" and the accuracy among it


@pytest.mark.parametrize("size", [1, 2])
def test_all_processes_stop_in_the_same_epoch(run, size):
    printed = run("early_stopping", "--patience", 2, size=size)

    accuracies = [float(value) for value in re.findall(r"^epoch \d+: test accuracy (\S+)$", printed[0], re.M)]
    last = len(accuracies) - 1
    for rank, text in enumerate(printed):
        assert f"process {rank} stopped after epoch {last}\n" in text
    best, epoch = re.search(r"^best: ([\d.]+) in epoch (\d+)$", printed[0], re.MULTILINE).groups()
    assert float(best) == max(accuracies) == accuracies[int(epoch)]
    assert int(epoch) == last - 2
    assert last < 99


def test_processes_drift_apart_and_are_averaged(run):
    printed = run("local_sgd", size=2)

    found = re.findall(r"([\d.]+) apart after 8 steps alone, ([\d.]+) after the average", printed[0])
    assert len(found) == 5
    for apart, together in found:
        assert float(apart) > 1e-4
        assert float(together) == 0
    assert float(re.findall(r"test accuracy ([\d.]+)", printed[0])[-1]) > 0.85


@pytest.mark.parametrize("size", [1, 2])
def test_a_profile_has_three_steps_of_each_process(run, tmp_path, size):
    printed = run("profiling", "--output_dir", tmp_path, size=size)

    names = [f"profile_{rank}.json" for rank in range(size)]
    assert f"traces: {' '.join(names)}\n" in printed[0]
    for name in names:
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        steps = [event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]
        assert len(steps) == 3
    (table,) = [text for text in printed if "Profile" in text]
    assert len(re.findall(r"\d+%", table)) == 5


def test_what_is_tracked_is_written_once_and_shown(run, tmp_path):
    printed = run("tracking", "--project_dir", tmp_path, size=2)

    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert lines[0]["config"]["model"] == {"hidden": 128}
    curve = {line["step"]: line["values"]["loss"] for line in lines if "loss" in line.get("values", {})}
    assert list(curve) == [10, 20, 30, 40, 50, 60]
    assert {step: round(loss, 2) for step, loss in curve.items()} == pytest.approx(losses(printed), abs=0.01)
    accuracies = [line["values"]["accuracy"] for line in lines if "accuracy" in line.get("values", {})]
    assert len(accuracies) == 3
    assert accuracies[-1] > 0.8
    (table,) = [line for line in lines if line.get("table") == "guesses"]
    assert sum(digit == guess for digit, guess in table["data"]) > 0.7 * len(table["data"])
    (image,) = [line["images"]["digit"][0] for line in lines if "images" in line]
    assert (tmp_path / image).is_file()


# Large models


@pytest.mark.parametrize(
    ("script", "args", "size"),
    [
        ("fsdp2", (), 2),
        ("tensor_parallel", (), 1),
        ("tensor_parallel", (), 2),
        ("context_parallel", (), 1),
        ("context_parallel", (), 2),
        ("compiled_regions", ("--backend", "eager"), 2),
        ("deepspeed_zero", ("--zero_stage", "2"), 2),
        ("deepspeed_zero", ("--zero_stage", "3"), 2),
    ],
)
def test_every_engine_trains_as_one_process_does(run, script, args, size):
    alone = run("fsdp2")
    assert losses(alone)[24] < losses(alone)[6]

    same(run(script, *args, size=size), alone)


def test_each_process_holds_its_shards_and_saves_the_whole(run, tmp_path):
    (alone,) = run("fsdp2")
    printed = run("fsdp2", "--output_dir", tmp_path, size=2)

    total = re.search(r"has ([\d,]+) of \1 parameters", alone)[1]
    number = int(total.replace(",", ""))
    for rank, text in enumerate(printed):
        assert f"process {rank} has {number // 2:,} of {total} parameters\n" in text
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == number


def test_each_process_has_its_part(run):
    for rank, text in enumerate(run("tensor_parallel", size=2)):
        assert f"process {rank} has the part (128, 64) of (256, 64) of blocks.0.up.weight" in text
    for rank, text in enumerate(run("context_parallel", size=2)):
        assert f"process {rank} works on 32 of 64 bytes" in text


def test_compiled_blocks_keep_their_names(run):
    printed = run("compiled_regions", "--backend", "eager", size=2)
    assert "names of the plain model: True" in printed[0]


def test_fp8_trains_nearly_as_bf16_does(run):
    (in_fp8,) = run("fp8", "--max_steps", 2)
    (in_bf16,) = run("fp8", "--max_steps", 2, "--mixed_precision", "bf16")

    assert in_fp8.startswith("11 of 13 linear layers in fp8, weights in torch.float32\n")
    assert in_bf16.startswith("0 of 13 ")
    assert losses([in_fp8]) == pytest.approx(losses([in_bf16]), abs=0.02)
    assert losses([in_fp8]) != losses([in_bf16])


def test_files_are_shared_out_and_ranked_as_by_one_process(run):
    share = re.compile(r"^process (\d+) has (\d+) of (\d+) files\n", re.MULTILINE)
    (alone,) = run("split_inference")
    printed = run("split_inference", size=3)

    shares = [tuple(map(int, share.match(text).groups())) for text in printed]
    total = shares[0][2]
    assert [rank for rank, _, _ in shares] == [0, 1, 2]
    assert sum(count for _, count, _ in shares) == total
    assert share.sub("", printed[0]) == share.sub("", alone)
    assert alone.count("nats per byte") == 10
    assert "argparse.py" in alone.split("least like")[0]


@pytest.mark.parametrize("memory", ["600KB", "300KB"])
def test_a_model_that_is_partly_on_the_disk_gives_the_same_outputs(run, memory):
    (printed,) = run("big_model_inference", "--memory", memory)

    assert re.search(r"^cpu: [1-9]", printed, re.MULTILINE)
    assert re.search(r"^disk: [1-9]", printed, re.MULTILINE)
    assert "the same outputs: True" in printed


# The list


def commands(text):
    return [line.strip() for line in text.splitlines() if re.match(r" {4}(python|accel) ", line)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_is_short_and_says_how_to_run_it(script):
    source = script.read_text()
    assert len(source.splitlines()) <= 80
    head = source.split('"""')[1]
    found = [shlex.split(command) for command in commands(head)]
    assert any(script.name in command for command in found)
    for program, *args in found:
        if program == "accel" and args[0] == "launch":
            parsed = launch_command_parser().parse_args(args[1:])
            assert (script.parent / parsed.training_script).is_file()
        elif program == "python":
            assert (script.parent / args[0]).is_file()


def test_the_list_has_every_script_with_a_command_of_its_head_and_a_page():
    rows = re.findall(
        r"^\| .+ \| \[.+?\]\((.+?)\) \| `(.+)` \| \[.+?\]\(\.\./docs/(.+?)(?:#(.+))?\) \|$",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(EXAMPLES / script for script, *_ in rows) == sorted(SCRIPTS)
    for script, command, page, anchor in rows:
        head = (EXAMPLES / script).read_text().split('"""')[1]
        assert command.replace(f"examples/{script}", Path(script).name) in commands(head)
        titles = re.findall(r"^##+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, (page, anchor)
