"""One row of the table: what was measured, against which limit."""

from __future__ import annotations

from dataclasses import dataclass, field

from .timing import Spread

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """A measured value with its limit, and the same value for the peers.

    Attributes:
        what: What is compared with what.
        value: accel's value.
        limit: The highest value that passes; the lowest where `at_least`.
        unit: "x" for a ratio, "s" for seconds.
        at_least: Whether more is better.
        condition: Another condition, and whether it is met, as ("torch not imported", True).
        peers: The same value for other libraries, by name.
        noise: The baseline measured against itself: no row is finer than this.
        base: The baseline's own time, as text.
    """

    what: str
    value: float
    limit: float
    unit: str = "x"
    at_least: bool = False
    condition: tuple[str, bool] | None = None
    peers: dict[str, float] = field(default_factory=dict)
    noise: Spread | None = None
    base: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is within its limit, and the condition is met."""
        within = self.value >= self.limit if self.at_least else self.value <= self.limit
        return within and (self.condition is None or self.condition[1])
