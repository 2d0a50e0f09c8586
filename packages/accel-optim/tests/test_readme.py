import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]


def test_the_example_runs(fresh_state, capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {})

    assert capsys.readouterr().out == "3 steps, learning rate 0.0125\n"
