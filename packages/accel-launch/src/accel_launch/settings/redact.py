"""Redact secrets in printed text: tokens, keys and passwords, recognised by their names.

Started programs get the real values; printed text has `***` instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_WORD = re.compile(r"[\w.-]+")
# The end of a secret's name. `max_tokens` is a number: a plural of tokens counts with their purpose alone.
_SECRET = re.compile(
    r"(?:(?:token|secrets?|credentials?|(?:api|access|private|auth|license)[_-]?keys?)(?:[_-]?(?:id|key))?|"
    r"(?:api|access|auth|hf)[_-]?tokens|passw(?:or)?ds?|passphrases?|(?<![^\W_])pass|"
    r"(?<=\w[_.-])(?:keys?|pwd))(?:[_-]?\d+)?\Z",
    re.IGNORECASE,
)
# What data and tokenizers name: `pad_token_id`, `text_key`, `missing_keys`, `forward_pass`.
_HARMLESS = re.compile(
    r"(?:\A|[_.-])(?:(?:pad|eos|bos|unk|mask|sep|cls|image|video|audio|start|special)_token(?:_id)?|"
    r"(?:text|image|label|input|output|target|prompt|sort|group|primary|foreign|public|metric|feature|column|"
    r"dict|skip|ignore|missing|unexpected)[_-]keys?|(?:forward|backward)[_-]pass)\Z",
    re.IGNORECASE,
)
_CLOSED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
_UNCLOSED = r"""'[^']*\Z|"(?:\\.?|[^"\\])*\Z"""  # it takes all the rest
_SHELL_VALUE = re.compile(rf"""(?:{_CLOSED}|\\.?|[^\s;'"\\]+)+|{_UNCLOSED}""", re.DOTALL)
_JSON_VALUE = re.compile(
    rf"""(?:{_CLOSED})+|\\".*?(?:\\"|\Z)|(?:\\[^"']|[^\s;'"\\])+|{_UNCLOSED}""", re.DOTALL
)
_COLON = re.compile(r"""\\*["']?\s*:\s*""")
_SPACE = re.compile(r"\s+(?!--)")
_OPENING_QUOTE = re.compile(r"""\\*["']|""")
_IN_ADDRESS = re.compile(r"(?<=\w)://[^\s/]+@")


def is_secret(name: str) -> bool:
    """Return whether the value of a variable, flag or key must not be shown.

    Args:
        name: Such as `HF_TOKEN`, `--api-key` or `aws_secret_access_key`.
    """
    return _WORD.fullmatch(name) is not None and _is_secret_word(name)


def _is_secret_word(word: str) -> bool:
    word = word.lstrip("-")
    return _SECRET.search(word) is not None and _HARMLESS.search(word) is None


def redact_text(text: str) -> str:
    """Return text with `***` for the values of secret flags and keys, and for users in addresses.

    Args:
        text: Any text; JSON may become JSON with other spaces.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            pass  # other text, whose secrets are looked for below
        else:
            masked = redact_values(found)
            # Unchanged where nothing is secret, with the user's own spacing.
            return text if masked == found else json.dumps(masked)
    return _IN_ADDRESS.sub(f"://{MASK}@", _redact_named(text))


def _redact_named(text: str) -> str:
    """Return text with redacted values, in linear time."""
    pieces: list[str] = []
    done = 0
    while word := _WORD.search(text, done):
        value = _find_value(text, word) if _is_secret_word(word[0]) else None
        if value is None:
            pieces.append(text[done : word.end()])
            done = word.end()
        else:
            begin, end, shown = value
            pieces += text[done:begin], shown
            done = end
    return "".join([*pieces, text[done:]])


def _find_value(text: str, name: re.Match[str]) -> tuple[int, int, str] | None:
    """Return start and end of a secret's value, and its replacement, if it has one."""
    at = name.end()
    if colon := _COLON.match(text, at):
        begin, end = colon.end(), _json_value_end(text, colon.end())
        if end > begin:
            quote = _OPENING_QUOTE.match(text, begin)
            assert quote is not None, "it may be empty"
            return begin, end, f"{quote[0]}{MASK}{quote[0]}"
    if text.startswith("=", at):
        begin = at + 1
    elif name[0].startswith("-") and (space := _SPACE.match(text, at)):
        begin = space.end()
    else:
        return None
    value = _SHELL_VALUE.match(text, begin)
    return (begin, value.end(), MASK) if value else None


def _json_value_end(text: str, begin: int) -> int:
    if text.startswith(("[", "{"), begin):
        return _bracket_end(text, begin)
    value = _JSON_VALUE.match(text, begin)
    return value.end() if value else begin


def _bracket_end(text: str, begin: int) -> int:
    """Return where the bracket that opens at `begin` closes; the end of the text if it does not."""
    opening, closing = text[begin], {"[": "]", "{": "}"}[text[begin]]
    depth = 0
    for bracket in re.compile(rf"\{opening}|\{closing}").finditer(text, begin):
        depth += 1 if bracket[0] == opening else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return a command with `***` for the values of secret flags and assignments.

    Args:
        arguments: The program and its arguments.
    """
    masked: list[str] = []
    one = more = False  # whether this word, and those up to the next flag, are values of a secret flag
    for word in arguments:
        if (one and not word.startswith("--")) or (more and not word.startswith("-")):
            masked.append(MASK)
            one = False
            continue
        one = word.startswith("-") and is_secret(word)
        more = one and word.lower().endswith("s") and not word.lower().endswith("pass")
        masked.append(redact_text(word))
    return masked


def redact_values(value: Any, name: str = "") -> Any:
    """Return a config's value with `***` for every secret in it.

    Args:
        value: Text, a list, a mapping, or anything else.
        name: The key that it is the value of.
    """
    if value and is_secret(name):
        return MASK
    if isinstance(value, Mapping):
        return {key: redact_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
