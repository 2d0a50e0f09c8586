"""The worked examples of the manual, which its build runs too."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from accel_ckpt import load_checkpoint_in_model
from accel_world.program import run_program

pytestmark = pytest.mark.timeout(300)

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = Path(__file__).parents[1] / "examples"
MISSING = Path(__file__).parents[1] / "tools" / "reference" / "missing.txt"
GRADIENTS = """
gradient of                                  window of 4   tail of 2
all items of the window at once                   2.3000      3.0000
backward(losses.sum(), weight=len(losses))        2.3000      3.0000
backward(losses.mean(), weight=1)                 2.7500      4.0000
backward(losses.mean())                           2.7500      2.0000
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_the_numbers_that_the_page_on_gradients_explains(world, processes):
    script = str(DOCS / "worked_gradients.py")
    printed = world.run(run_program, script, size=processes, init=False, timeout_s=100)

    assert "".join(printed).strip() == GRADIENTS.strip()


ENGINE = """
engine late_average
gradient norm 1.157883
gradient norm 4.853258
weight 0.566064
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_the_engine_that_the_page_on_engines_shows_trains_as_one_process_does(world, processes):
    script = str(EXAMPLES / "late_average" / "train.py")
    printed = world.run(run_program, script, size=processes, init=False, timeout_s=100)

    assert "".join(printed).strip() == ENGINE.strip()


def test_the_table_of_the_page_on_scale_says_yes_where_all_of_it_fits(capsys):
    runpy.run_path(str(DOCS / "scale_table.py"))
    head, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    devices = [float(name.removesuffix(" GB")) for name in head[7:]]
    assert len(rows) == 15
    for row in rows:
        own, gathered, total = map(float, row[4:7])
        assert total == pytest.approx(own + gathered, abs=0.11)
        assert row[7:] == ["yes" if total <= device else "-" for device in devices]


def test_every_documented_name_is_there_as_the_readme_says():
    names = [line for line in MISSING.read_text().splitlines() if not line.startswith("#")]
    promised = "No documented name of Accelerate is missing" in (DOCS.parent / "README.md").read_text()
    assert promised == (not names)


def test_a_value_that_is_not_built_fails_as_the_front_page_promises():
    promise = (DOCS / "index.md").read_text().split("\n6. ")[1]
    assert "`NotImplementedError`" in promise
    with pytest.raises(NotImplementedError, match="offload_8bit_bnb"):
        load_checkpoint_in_model(None, "folder", offload_8bit_bnb=True)
