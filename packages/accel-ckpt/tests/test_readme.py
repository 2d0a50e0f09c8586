import os
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]
FILES = re.search(r"```text\n(.*?)```", README, flags=re.DOTALL)[1]


def test_the_example_runs_and_the_files_are_those_shown(fresh_state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLE, "README.md", "exec"), {})

    assert sorted(os.listdir("run/step_100")) == FILES.split()
