"""Draws which sample goes where, for data.md: one picture for each way of sharding data.

What is drawn is read from loaders that `prepare_data_loader` returns, so the pictures show what the code
does. mkdocs runs this as a hook; the pictures exist only in the site that is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.files import File, Files
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader

__all__ = ["PICTURES", "Cell", "Picture", "draw", "on_files", "one_order", "shares"]

CELL, GAP, LABEL, LINE = 26, 12, 96, 34  # pixels
COLORS = ("#9ecae9", "#ffbf79", "#a1d99b", "#d4a6c8")


class Stream(IterableDataset[int]):
    """Numbers that can only be read from the front."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


class Cell(NamedTuple):
    """A sample in a batch, and whether it is padding."""

    sample: int
    padding: bool


@dataclass(frozen=True)
class Picture:
    """A way of sharding data.

    Args:
        title: What the picture shows, in words.
        make: Makes the loader that is prepared.
        processes: Number of processes.
        options: Options of `prepare_data_loader`.
        skip: Steps of an interrupted run on `skipped_on` processes before the ones that are drawn.
        skipped_on: Number of its processes.
    """

    title: str
    make: Callable[[], DataLoader[Any]]
    processes: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    skip: int = 0
    skipped_on: int = 2


def _in_order(**settings: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(range(10), **{"batch_size": 2, **settings})  # type: ignore[arg-type]


PICTURES = {
    "default": Picture("10 samples, batch_size=2, two processes", _in_order()),
    "uneven": Picture("even_batches=False", _in_order(), options={"even_batches": False}),
    "drop-last": Picture("DataLoader(drop_last=True)", _in_order(drop_last=True)),
    "split": Picture(
        "batch_size=4, split_batches=True", _in_order(batch_size=4), options={"split_batches": True}
    ),
    "shuffled": Picture("shuffle=True, two processes", _in_order(shuffle=True), options={"data_seed": 0}),
    "shuffled-one": Picture(
        "shuffle=True, one process", _in_order(shuffle=True), processes=1, options={"data_seed": 0}
    ),
    "resumed": Picture(
        "the same, stopped after one step on two processes and resumed on three",
        _in_order(shuffle=True),
        processes=3,
        options={"data_seed": 0},
        skip=1,
    ),
    "varying": Picture(
        "a batch sampler of varying batches",
        lambda: DataLoader(range(10), batch_sampler=[[0], [1, 2, 3], [4, 5], [6], [7, 8, 9]]),  # type: ignore[arg-type]
    ),
    "stream": Picture(
        "a stream of 9 samples, batch_size=2",
        lambda: DataLoader(Stream(9), 2),
        options={"dispatch_batches": False},
    ),
}


def shares(picture: Picture) -> list[list[list[Cell]]]:
    """Return the cells of each batch of each process, as real loaders give them."""
    state = None
    if picture.skip:
        loader = _prepared(picture, 0, picture.skipped_on)
        batches = iter(loader)
        for _ in range(picture.skip):
            next(batches)
        state = loader.state_dict()
    found = []
    for rank in range(picture.processes):
        loader = _prepared(picture, rank, picture.processes)
        if state is not None:
            loader.load_state_dict(state)
        found.append([_cells(batch.tolist(), loader.real_samples, rank) for batch in loader])
    return found


def _prepared(picture: Picture, rank: int, processes: int) -> Any:
    place = {"num_processes": processes, "process_index": rank}
    return prepare_data_loader(picture.make(), **place, **picture.options)


def _cells(samples: list[int], real: tuple[int, ...] | None, rank: int) -> list[Cell]:
    kept = len(samples) if real is None else real[rank]
    return [Cell(sample, position >= kept) for position, sample in enumerate(samples)]


def draw(picture: Picture) -> str:
    """Return an SVG: one line for each process, one group of cells for each of its batches."""
    processes = shares(picture)
    steps = max(map(len, processes))
    widths = [
        max((len(batches[step]) for batches in processes if step < len(batches)), default=0)
        for step in range(steps)
    ]
    starts = [LABEL + sum(widths[:step]) * CELL + step * GAP for step in range(steps)]
    parts = []
    for rank, batches in enumerate(processes):
        top = 24 + rank * LINE
        parts.append(_text(0, top + 18, f"process {rank}", "start"))
        for start, batch in zip(starts, batches, strict=False):
            for place, cell in enumerate(batch):
                parts.append(_drawn(cell, start + place * CELL, top, COLORS[rank % len(COLORS)]))
    parts += [
        _text(start + width * CELL / 2, 14, f"step {step}", "middle")
        for step, (start, width) in enumerate(zip(starts, widths, strict=True))
    ]
    # The last title may be wider than its cells.
    width, height = (
        starts[-1] + max(widths[-1] * CELL + 2, widths[-1] * CELL // 2 + 24),
        24 + len(processes) * LINE,
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" style="max-width:{1.2 * width:.0f}px" role="img" '
        f'font-family="sans-serif" font-size="12">'
        f"<title>{escape(picture.title)}</title>"
        f"{''.join(parts)}</svg>\n"
    )


def _drawn(cell: Cell, left: float, top: float, color: str) -> str:
    look = (
        f'fill="none" stroke="{color}" stroke-dasharray="3 2"'
        if cell.padding
        else f'fill="{color}" stroke="none"'
    )
    square = f'<rect x="{left + 1}" y="{top}" width="{CELL - 2}" height="{CELL}" rx="3" {look}/>'
    ink = "currentColor" if cell.padding else "#111"  # cells are light on any page
    return square + _text(left + CELL / 2, top + 18, f"{cell.sample}{'*' * cell.padding}", "middle", ink)


def _text(left: float, base: float, text: str, anchor: str, ink: str = "currentColor") -> str:
    return f'<text x="{left}" y="{base}" text-anchor="{anchor}" fill="{ink}">{escape(text)}</text>'


def one_order() -> str:
    """Return the picture of the README: one order on one process, on two, and its rest on three."""
    parts, height = [], 0
    for name in ("shuffled-one", "shuffled", "resumed"):
        drawn = draw(PICTURES[name])
        parts.append(
            f'<g transform="translate(8 {height + 28})">{drawn[drawn.index("</title>") + 8 : -7]}</g>'
        )
        parts.append(_text(8, height + 18, PICTURES[name].title, "start"))
        height += 28 + 24 + PICTURES[name].processes * LINE + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="{height}" role="img" '
        'font-family="sans-serif" font-size="12"><title>One order on any number of processes</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pictures to the files of the site."""
    if (Path(__file__).parent / "img/one-order.svg").read_text() != one_order():
        raise ValueError(
            "docs/img/one-order.svg, which the README shows, is not what loaders do: see one_order"
        )
    for name, picture in PICTURES.items():
        files.append(File.generated(config, f"img/sharding-{name}.svg", content=draw(picture)))
    return files
