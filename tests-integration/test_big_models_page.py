"""The page on big models: every block of its code, what it prints, and the picture of the device map."""

from __future__ import annotations

import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from accel import infer_auto_device_map, init_empty_weights
from accel.utils import convert_file_size_to_int
from accel_world.program import run_program

# bitsandbytes compiles nothing, but its import and torch's exporter take their time on a busy machine.
pytestmark = pytest.mark.timeout(300)

DOCS = Path(__file__).parents[1] / "docs"
MODEL = DOCS / "placed_model.py"
PAGE = (DOCS / "big-models.md").read_text()
# A block of code, and of what it prints, if that is shown.
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / MODEL.name).write_text(MODEL.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("placed_model", None)


def test_the_blocks_of_the_page_print_what_it_says(folder, capfd, fresh_state):
    pytest.importorskip("bitsandbytes")
    ran, names = 0, {"__name__": "__main__"}
    for code, shown in BLOCKS[1:]:
        if code.startswith("# pipeline.py"):
            continue
        capfd.readouterr()
        exec(compile(code, "big-models.md", "exec"), names)
        assert capfd.readouterr().out == shown
        ran += 1

    assert ran == PAGE.count("```python\n") - 2 > 5


def test_the_pipeline_of_the_page_runs_on_two_processes(folder, world):
    (script,) = [code for code, _ in BLOCKS if code.startswith("# pipeline.py")]
    (folder / "pipeline.py").write_text(script)
    first, second = world.run(run_program, str(folder / "pipeline.py"), size=2, init=False, timeout_s=200)

    assert first == "0 has ['a', 'b']\n0 equal: True\n"
    assert second == "1 has ['c']\n1 equal: True\n"


def drawn(svg: str) -> dict[str, list[tuple[str, float]]]:
    """Read a picture: by device the names of layers, as they are written there, and the widths of cells."""
    space = "{http://www.w3.org/2000/svg}"
    found = {}
    for row in ElementTree.fromstring(svg).iter(f"{space}g"):
        if not row.get("id", "").startswith("on-"):
            continue
        written = " ".join(text.text for text in row.iter(f"{space}text"))
        cells = []
        for cell in row.iter(f"{space}g"):
            if cell.get("class") == "layer":
                name = cell.find(f"{space}title").text.partition(":")[0]
                assert f" {name} " in f" {written} "
                cells.append((name, float(cell.find(f"{space}rect").get("width"))))
        found[row.get("id").removeprefix("on-")] = cells
    return found


@pytest.mark.parametrize("limits", [None, {0: "1500KB", "cpu": "40MB"}, {"cpu": "3MB"}])
def test_the_picture_is_the_device_map(limits):
    drawing, page = runpy.run_path(str(DOCS / "draw_placement.py")), runpy.run_path(str(MODEL))
    limits = limits or page["MAX_MEMORY"]
    with init_empty_weights():
        model = page["GPT"]()
    svg = drawing["draw"](drawing["bars"](model, limits, ["Block"]))
    device_map = infer_auto_device_map(model, limits, ["Block"], clean_result=False)

    found = drawn(svg)
    assert {name: device for device, cells in found.items() for name, _ in cells} == {
        name: str(device) for name, device in device_map.items()
    }
    widths = dict(cell for cells in found.values() for cell in cells)
    assert widths.pop("head") == 0  # it is the embedding's
    sizes = {name: sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in widths}
    scale = widths["blocks.0"] / sizes["blocks.0"]
    assert widths == pytest.approx({name: scale * size for name, size in sizes.items()}, abs=0.01)
    for device, limit in limits.items():
        assert sum(width for _, width in found[str(device)]) <= scale * convert_file_size_to_int(limit) + 0.1


def test_the_picture_of_the_page_is_the_map_that_it_prints(capsys):
    runpy.run_path(str(MODEL), run_name="__main__")
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())

    found = drawn(runpy.run_path(str(DOCS / "draw_placement.py"))["picture"]())
    assert {name: device for device, cells in found.items() for name, _ in cells} == printed
    assert {*printed.values()} == {"0", "1", "cpu", "disk"}
