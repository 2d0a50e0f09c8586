"""Leave secrets out of what is printed: tokens, keys and passwords, known by the names they have.

What is started has them as they are; what is shown has `***` in their place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MASK", "is_secret", "mask_command", "mask_text", "mask_values"]

MASK = "***"

_NAME = (
    r"(?![\w.-]*(?:pad|eos|bos|unk|mask|sep|cls)_token)"  # a tokenizer's
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credential|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"auth[_-]?key|license[_-]?key)(?:[_-]?(?:id|key))?"
)
_SHELL_WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;'"\\])+"""
# Whole names: `max_tokens` and `tokenizer` are no secrets.
_SECRET = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w.-])((?:--?)?{_NAME})(=)({_SHELL_WORD})", re.IGNORECASE)
_FLAG = re.compile(rf"(?<![\w.-])(--?{_NAME})(\s+)(?!--)({_SHELL_WORD})", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(\w+://[^\s:/@]*):[^\s/@]+@")


def is_secret(name: str) -> bool:
    """Tell whether the value of a variable, flag or key is not to be shown.

    Args:
        name: Such as `HF_TOKEN`, `--api-key` or `aws_secret_access_key`.
    """
    return _SECRET.fullmatch(name.lstrip("-")) is not None


def mask_text(text: str) -> str:
    """Return text with `***` for the values of secret flags and assignments, and for passwords in addresses.

    Args:
        text: Any text.
    """
    for pattern in (_ASSIGNED, _FLAG):
        text = pattern.sub(rf"\1\2{MASK}", text)
    return _IN_ADDRESS.sub(rf"\1:{MASK}@", text)


def mask_command(words: Sequence[str]) -> list[str]:
    """Return a command with `***` for the values of secret flags and assignments.

    Args:
        words: The program and its arguments.
    """
    masked: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        follows = before.startswith("-") and is_secret(before) and not word.startswith("--")
        masked.append(MASK if follows else mask_text(word))
    return masked


def mask_values(value: Any, name: str = "") -> Any:
    """Return a config's value with `***` for every secret in it.

    Args:
        value: Text, a list, a mapping, or anything else.
        name: The key that it is the value of.
    """
    if isinstance(value, Mapping):
        return {key: mask_values(item, str(key)) for key, item in value.items()}
    if value and is_secret(name):
        return MASK
    if isinstance(value, (list, tuple)):
        return [mask_values(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value
