"""Draws the life of a checkpoint, from the recorded file operations of a save."""

from __future__ import annotations

from collections.abc import Sequence

from pictures.svg import COLORS, picture, rect, text

__all__ = ["draw", "steps"]

LINE, BAR, LABELS = 24, 22, 118
MANIFEST = "accel_manifest.json"


def steps(operations: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return what happened: the folder's lane, and words, once for operations of one kind."""
    found: list[tuple[str, str]] = []
    for kind, path, *rest in operations:
        folder, _, name = (rest[0] if kind == "rename" else path).partition("/")
        lane = found[-1][0] if folder == "." else _lane(folder)
        if kind == "rename" and ".replaced-" in folder:
            words = f"move {lane} aside"
        elif kind == "rename" and not name:
            words = f"rename to {folder}: committed"
        elif kind == "delete":
            words = f"delete {lane}"
        elif kind == "flush":
            words = "flush to the disk" if name else "flush the folder"
        elif name.startswith("."):  # a draft, which gets its name by a rename
            continue
        else:
            words = "write the manifest: complete" if name == MANIFEST else f"write {name}"
        if (lane, words) not in found[-3:]:
            found.append((lane, words))
    return found


def _lane(folder: str) -> str:
    if ".replaced-" in folder:  # on its way out
        return folder[1:].partition(".replaced-")[0]
    return "staging" if folder.startswith(".") else folder


def draw(operations: Sequence[Sequence[str]]) -> str:
    """Return a column for each folder, as long as it is there, and the operations next to them."""
    happened = steps(operations)
    new = next(lane for lane, words in happened if words.endswith("committed"))
    old = next(lane for lane, words in happened if words.startswith("delete"))
    commit = next(at for at, (lane, _) in enumerate(happened) if lane == new)
    gone = max(at for at, (lane, _) in enumerate(happened) if lane == old)
    ends = len(happened)
    lanes = [(old, -0.5, gone + 0.5), ("staging", -0.2, commit), (new, commit, ends + 0.5)]
    parts, top, left = [], 40, 6.0
    for place, (name, first, last) in enumerate(lanes):
        x = 6 + place * 36
        parts.append(rect(left, 4, 11, 11, COLORS[place], 'rx="2"'))
        parts.append(text(left + 16, 14, name))
        left += 36 + 7 * len(name)
        height = (last - first) * LINE
        parts.append(rect(x, top + first * LINE, BAR, height, COLORS[place], 'class="folder" rx="4"'))
    for at, (lane, words) in enumerate(happened):
        place = [name for name, *_ in lanes].index(lane)
        y = top + at * LINE + LINE / 2
        parts.append(rect(6 + place * 36 + BAR / 2 - 4, y - 4, 8, 8, "currentColor", 'rx="4"'))
        weight = 'font-weight="bold"' if "committed" in words or "complete" in words else ""
        parts.append(text(LABELS, y + 4, words, "start", weight))
    return picture("The life of a checkpoint", top + (ends + 1) * LINE, parts)
