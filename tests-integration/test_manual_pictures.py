"""The pictures of the manual show what its runs did, and its table says."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from accel_world.program import run_program

pytestmark = pytest.mark.timeout(300)

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
ALONE = dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])  # as python starts a script


@pytest.fixture
def drawing(monkeypatch):
    """The modules that draw, which are in no package."""
    monkeypatch.syspath_prepend(DOCS)
    from pictures import commit, costs, memory, meshes, window

    yield {"commit": commit, "costs": costs, "memory": memory, "meshes": meshes, "window": window}
    for name in [name for name in sys.modules if name.partition(".")[0] == "pictures"]:
        del sys.modules[name]


def boxes(svg: str, kind: str, attribute: str) -> list[float]:
    """Return an attribute of each box of a kind, in the order of the picture."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [float(box.get(attribute)) for box in found if box.get("class") == kind]


def words(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_window_is_that_of_two_processes(world, drawing):
    printed = world.run(run_program, str(PICTURES / "window_run.py"), size=2, init=False)
    first, second = json.loads("".join(printed))
    svg = drawing["window"].draw([first, second])

    ends = [row["ends"] for row in first]
    assert ends == [False, False, False, True, False, True]
    assert [row["stepped"] for row in first] == [row["stepped"] for row in second] == ends
    same = [one["gradient"] == other["gradient"] for one, other in zip(first, second, strict=True)]
    assert same == ends
    gradients = [row["gradient"] for row in [*first, *second]]
    scale = boxes(svg, "gradient", "height")[0] / gradients[0]
    assert boxes(svg, "gradient", "height") == pytest.approx([scale * g for g in gradients], abs=0.06)


def _print_into(pipe, path: str) -> None:
    pipe.send(run_program(path))


def run_in_a_fork(path: str) -> str:
    """Run a program in its own process, as it leaves a hook of Python's behind."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_print_into, args=(writing, path))
    process.start()
    printed = reading.recv() if reading.poll(100) else ""
    process.join(100)
    return printed


def test_the_commit_is_that_of_a_save(world, drawing):
    path = str(PICTURES / "commit_run.py")
    (printed,) = world.run(run_in_a_fork, path, size=1, init=False, env=ALONE)
    operations = json.loads(printed)
    happened = drawing["commit"].steps(operations)
    said = [text for _, text in happened]
    svg = drawing["commit"].draw(operations)

    written = [name for name in said if name.startswith("write ")]
    assert "write model.safetensors" in written
    assert "write optimizer.bin" in written
    manifest, committed = (
        said.index("write the manifest: complete"),
        said.index("rename to checkpoint_1: committed"),
    )
    assert said.index(written[-1]) == manifest
    assert "flush to the disk" in said[:manifest]
    assert "flush the folder" in said[manifest:committed]
    assert said.index("delete checkpoint_0") > committed
    assert not any(text.startswith("delete") for text in said[:committed])
    for text in said:
        assert text in words(svg)


def test_the_meshes_are_those_of_accel(world, drawing):
    (printed,) = world.run(run_program, str(PICTURES / "mesh_run.py"), size=1, init=False, env=ALONE)
    settings = json.loads(printed)
    svg = drawing["meshes"].draw(settings)
    copies = {name: drawing["meshes"].copies(processes) for name, processes in settings.items()}

    assert [processes[0]["engine"] for processes in settings.values()] == [
        *("ddp", "fsdp2", "fsdp2", "fsdp2 x tp", "fsdp2 x cp"),
    ]
    assert [len(groups) for groups in copies.values()] == [8, 1, 2, 1, 1]
    assert [processes[0]["shares"] for processes in settings.values()] == [8, 8, 8, 4, 4]
    assert len(boxes(svg, "process", "x")) == 8 * len(settings)
    assert len(boxes(svg, "copy", "x")) == sum(map(len, copies.values()))


def test_the_memory_is_that_of_the_formula(drawing):
    found = drawing["memory"].needed()
    svg = drawing["memory"].draw(found)

    totals = {name: sum(sizes) for name, sizes in found.items()}
    number = 6_738_415_616  # parameters of Llama 2 7B
    assert totals["1 process"] == pytest.approx(16 * number)
    assert totals["ddp, 8 processes"] == pytest.approx(20 * number)
    assert [text for text in words(svg) if text.endswith(" GB")] == [
        f"{total / 1e9:.0f} GB" for total in totals.values()
    ]
    sizes = [size for each in found.values() for size in each]
    widths = boxes(svg, "memory", "width")
    assert widths == pytest.approx([widths[0] / sizes[0] * size for size in sizes], abs=0.06)


def test_the_costs_are_those_of_the_table(drawing):
    page = (DOCS / "performance.md").read_text()
    rows = drawing["costs"].rows(page)
    svg = drawing["costs"].draw(rows)

    table = page[: page.index("<!-- bench: end -->")]  # rows measured on a GPU follow on the page
    (step,) = re.findall(
        r"^\| training step of a toy MLP, 1 process: .*? \| ([\d.]+) x .*$", table, re.MULTILINE
    )
    assert rows[0].values["accel"] == float(step)
    assert {*rows[0].values} == {"accel", "accelerate", "lightning-fabric"}
    assert len(rows) >= 6
    # More tokens in a second are less time: to the left of plain PyTorch.
    tokens = re.search(
        r"^\| (training the language model, .*?): tokens per second.*? \| ([\d.]+) x", table, re.M
    )
    assert tokens is not None
    (model,) = (row for row in rows if row.name.startswith(f"{tokens[1]}:"))
    assert model.values["accel"] == pytest.approx(1 / float(tokens[2]))
    values = [value for row in rows for value in row.values.values()]
    widths = boxes(svg, "cost", "width")
    assert len(widths) == len(values)
    # Longer the further a value is from plain PyTorch, in either direction.
    distances = [max(value, 1 / value) for value in values]
    pairs = sorted(zip(distances, widths, strict=True))
    assert [width for _, width in pairs] == sorted(widths)
