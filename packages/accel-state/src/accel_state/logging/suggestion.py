"""Suggestions in error messages: the valid name nearest to an unknown one."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: object, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a sentence that names the nearest valid name, or "" if none is near.

    Args:
        word: The unknown name.
        candidates: The valid names.
        cutoff: How similar a name has to be, from 0 to 1.
    """
    # Imported here, as only errors need it.
    from difflib import get_close_matches

    matches = get_close_matches(str(word), list(candidates), n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""
