"""Small SVG pictures that take the page's colours, and that can be read on a phone.

They are put into the page itself, where `currentColor` and the variables of extra.css follow light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["COLORS", "WIDTH", "line", "picture", "rect", "text"]

WIDTH = 440
"""Units across: on a phone of 390 pixels text of 12 units is 10 pixels high."""

COLORS = tuple(
    f"var(--picture-{number}, {color})"
    for number, color in enumerate(
        ("#4c86e0", "#e08a2e", "#2e9b6b", "#9259b8", "#c9504a", "#2ba3b5", "#b59a1f", "#8a8f98")
    )
)


def picture(title: str, height: float, parts: Iterable[str]) -> str:
    """Return the complete picture."""
    look = 'class="picture" role="img" font-family="inherit" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" {look}>'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>\n"
    )


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """Return words with their base line at y."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{_space(more)}>'
        f"{escape(words)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """Return a box; the words after `fill` are attributes."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{fill}"{_space(more)}/>'


def line(x1: float, y1: float, x2: float, y2: float, more: str = 'stroke="currentColor"') -> str:
    """Return a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{_space(more)}/>'


def _space(more: str) -> str:
    return f" {more}" if more else ""
