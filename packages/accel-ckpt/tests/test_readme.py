"""The examples of the README, as a reader runs them."""

import os
import re
from pathlib import Path

import torch.distributed as dist

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLE, SHARDED = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
FILES = re.search(r"```text\n(.*?)```", README, flags=re.DOTALL)[1]


def run(example):
    namespace = {}
    exec(compile(example, "README.md", "exec"), namespace)
    return namespace.get("step")


def run_in(folder, example):
    os.chdir(folder)
    run(example)
    dist.destroy_process_group()


def test_the_first_example_continues_where_it_was(fresh_state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = [run(EXAMPLE) for _ in range(3)]

    assert steps == [0, 1, 2]
    assert sorted(os.listdir("run")) == ["checkpoint_2", "checkpoint_3"]
    assert sorted(os.listdir("run/checkpoint_3")) == FILES.split()


def test_it_has_ten_lines_at_most():
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 10


def test_the_sharded_example_runs_on_two_processes(world, tmp_path):
    world.run(run_in, str(tmp_path), SHARDED, init=False)

    assert os.listdir(tmp_path / "sharded") == ["checkpoint_1"]
