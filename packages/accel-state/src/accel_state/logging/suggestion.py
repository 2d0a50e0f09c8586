"""Suggestions in messages: the known word that an unknown one probably was to be."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a sentence that names the known word nearest to an unknown one, or "" if none is near.

    Args:
        word: The unknown word.
        known: The known ones.
    """
    # Imported here, as only an error needs it.
    from difflib import get_close_matches

    near = get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
