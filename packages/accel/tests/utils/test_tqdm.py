"""Progress bars: one on a machine, unless each process requests its own."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from accel import PartialState
from accel.utils import tqdm

pytestmark = pytest.mark.usefixtures("fresh_state")


def bars_of_all(main_process_only: bool) -> tuple[list[int], str, str]:
    PartialState(cpu=True)
    shown, disabled = io.StringIO(), io.StringIO()
    options = {} if main_process_only else {"main_process_only": False}
    with contextlib.redirect_stderr(shown):
        seen = list(tqdm(range(3), desc="training", **options))
    with contextlib.redirect_stderr(disabled):
        list(tqdm(range(3), disable=True, **options))
    return seen, shown.getvalue(), disabled.getvalue()


@pytest.mark.parametrize("main_process_only", [True, False])
def test_the_first_process_shows_a_bar_and_all_see_every_item(world, main_process_only):
    pytest.importorskip("tqdm", reason="the alone environment has no tqdm")
    for rank, (seen, shown, disabled) in enumerate(world.run(bars_of_all, main_process_only, size=2)):
        assert seen == [0, 1, 2]
        assert ("training: 100%" in shown) == (rank == 0 or not main_process_only)
        assert disabled == ""


def test_without_tqdm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"accel\[progress\]"):
        tqdm(range(3))


BOTH_PATHS = """
import sys
import accel.utils
print("torch" in sys.modules)
from accel.utils.tqdm import tqdm as by_module
import accel.utils.tqdm
from accel.utils import tqdm
print(tqdm is by_module)
"""


def test_the_module_of_the_same_name_does_not_take_the_functions_place():
    command = [sys.executable, "-c", BOTH_PATHS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert run.stdout == "False\nTrue\n"
