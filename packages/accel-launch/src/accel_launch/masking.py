"""Leave secrets out of what is printed: tokens, keys and passwords, known by the names they have.

What is started has them as they are; what is shown has `***` in their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MASK", "is_secret", "mask_command", "mask_text", "mask_values"]

MASK = "***"

# What data and tokenizers name: `pad_token_id`, `text_key`, `missing_keys`, `forward_pass`.
_HARMLESS = (
    r"(?:[\w.-]*[_.-])?(?:(?:pad|eos|bos|unk|mask|sep|cls|image|video|audio|start|special)_token(?:_id)?|"
    r"(?:text|image|label|input|output|target|prompt|sort|group|primary|foreign|public|metric|feature|column|"
    r"dict|skip|ignore|missing|unexpected)[_-]keys?|(?:forward|backward)[_-]pass)(?![\w.-])"
)
# `max_tokens` is a number, so that a plural of tokens counts with what they are for alone.
_NAME = (
    rf"(?!{_HARMLESS})[\w.-]*(?:(?:token|secrets?|credentials?|(?:api|access|private|auth|license)[_-]?keys?)"
    r"(?:[_-]?(?:id|key))?|(?:api|access|auth|hf)[_-]?tokens|passw(?:or)?ds?|passphrases?|(?<![^\W_])pass|"
    r"(?<=\w[_.-])(?:keys?|pwd))(?:[_-]?\d+)?"
)
_QUOTED = r"""(?:'[^']*'|"(?:\\.|[^"\\])*")"""
_SHELL_WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;'"\\])+"""
_JSON_VALUE = rf"""{_QUOTED}+|\\".*?\\"|\[[^\]]*\]|\{{[^}}]*\}}|(?:\\[^"']|[^\s;'"\\])+"""
# Whole names: `max_tokens` and `tokenizer` are no secrets.
_SECRET = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w.-])((?:--?)?{_NAME})(=)({_SHELL_WORD})", re.IGNORECASE)
_FLAG = re.compile(rf"(?<![\w.-])(--?{_NAME})(\s+)(?!--)({_SHELL_WORD})", re.IGNORECASE)
_KEYED = re.compile(rf"""(?<![\w.-])({_NAME}\\*["']?\s*)(:\s*)({_JSON_VALUE})""", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(\w+://)[^\s/]+@")


def is_secret(name: str) -> bool:
    """Tell whether the value of a variable, flag or key is not to be shown.

    Args:
        name: Such as `HF_TOKEN`, `--api-key` or `aws_secret_access_key`.
    """
    return _SECRET.fullmatch(name.lstrip("-")) is not None


def mask_text(text: str) -> str:
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
            masked = mask_values(found)
            return text if masked == found else json.dumps(masked)
    for pattern in (_ASSIGNED, _FLAG):
        text = pattern.sub(rf"\1\2{MASK}", text)
    text = _KEYED.sub(_mask_keyed, text)
    return _IN_ADDRESS.sub(rf"\1{MASK}@", text)


def _mask_keyed(found: re.Match[str]) -> str:
    quote = re.match(r"""\\*["']|""", found[3])
    assert quote is not None, "it may be empty"
    return f"{found[1]}{found[2]}{quote[0]}{MASK}{quote[0]}"


def mask_command(words: Sequence[str]) -> list[str]:
    """Return a command with `***` for the values of secret flags and assignments.

    Args:
        words: The program and its arguments.
    """
    masked: list[str] = []
    one = more = False  # whether this word, and those up to the next flag, are values of a secret flag
    for word in words:
        if (one and not word.startswith("--")) or (more and not word.startswith("-")):
            masked.append(MASK)
            one = False
            continue
        one = word.startswith("-") and is_secret(word)
        more = one and word.lower().endswith("s") and not word.lower().endswith("pass")
        masked.append(mask_text(word))
    return masked


def mask_values(value: Any, name: str = "") -> Any:
    """Return a config's value with `***` for every secret in it.

    Args:
        value: Text, a list, a mapping, or anything else.
        name: The key that it is the value of.
    """
    if value and is_secret(name):
        return MASK
    if isinstance(value, Mapping):
        return {key: mask_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_values(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value
