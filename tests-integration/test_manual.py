"""The worked examples of the manual, which its build runs too."""

from __future__ import annotations

import ast
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

from accel.engines import ENGINES
from accel_ckpt import load_checkpoint_in_model
from accel_state.devices.table import DEVICES
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


def test_pages_say_under_which_engines_a_save_may_stand_inside_a_window():
    """What the engines do there is in test_exact_resume.py and test_misuse.py."""
    table = (DOCS / "engines.md").read_text()
    row = next(
        line for line in table.splitlines() if line.startswith("| `save_state` inside an accumulation")
    )
    said = [cell.strip() for cell in row.strip("|").split("|")][1:]
    engines = ["single", "ddp", "fsdp1", "fsdp2", "tp", "deepspeed"]  # the columns of that table
    may = []
    for name in engines:
        module, _, kind = ENGINES[name].path.partition(":")
        may.append(getattr(import_module(module), kind).traits.can_save_mid_window)

    assert said == ["yes" if each else "rejected" for each in may]
    assert may == [True, True, False, False, False, False]
    for page in (DOCS.parent / "README.md", DOCS / "checkpoints.md", DOCS / "migrate.md"):
        assert "on one process and under ddp" in page.read_text().lower()


def test_the_page_on_architecture_names_each_module_that_knows_a_kind_of_accelerator():
    packages = DOCS.parent / "packages"
    accelerators = set(DEVICES) - {"cpu"}
    found = set()
    for path in packages.glob("*/src/**/*.py"):
        if path.parent.name == "devices":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                knows = node.attr in {f"is_{name}" for name in accelerators}
            else:
                compares = isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".type")
                knows = compares and any(repr(name) in ast.unparse(node) for name in accelerators)
            if knows:
                found.add(path.relative_to(packages).as_posix().partition("/src/")[2])
    page = (DOCS / "architecture.md").read_text().split("**The device table**")[1].split("**The engine**")[0]

    assert found == set(re.findall(r"`(accel\w*/[\w/]+\.py)`", page)) - {"accel_state/devices/table.py"}
