"""Ask one question: with arrow keys in a terminal, or line by line without one.

Both have two methods, `choose` and `text`. Each returns the answer, or raises `Back` to return to the
previous question.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from accel_launch.errors import LaunchError
from accel_state import env

_KEYS = {
    b"\x1b[A": "up",
    # Terminals in application mode send ESC O instead of ESC [.
    b"\x1bOA": "up",
    # Ctrl-P and Ctrl-N (0x0e) as in readline, for terminals without arrow keys.
    b"\x10": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x0e": "down",
    b"\x1b[D": "back",
    b"\x1bOD": "back",
    b"\x1b": "back",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "erase",
    b"\b": "erase",
    b"\x15": "clear",
    b"\x03": "interrupt",
    b"\x04": "end",
}


_ENDED = "The input ended before the last question; nothing was written."


class Back(Exception):
    """The user wants the previous question."""


def wrap(text: str, indent: str = "") -> list[str]:
    """Wrap a text to the width of the terminal, which would cut words at its edge.

    Args:
        text: The text.
        indent: Prefix of the lines after the first.
    """
    # Not to the last column, after which terminals differ in where the cursor is.
    width = max(shutil.get_terminal_size().columns - 1, 20)
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return lines or [""]


class Prompt(Protocol):
    """Asks questions."""

    hint: str

    def choose(self, title: str, labels: Sequence[str], default: int) -> int:
        """Let the user choose one of several labels; returns its index."""

    def text(self, title: str, default: str, check: Callable[[str], Any]) -> str:
        """Let the user enter a line; `check` raises ValueError for an invalid one."""


def open_prompt() -> Prompt:
    """Return the prompt that fits standard input and output."""
    # A dumb terminal, such as that of an editor, shows escape sequences as text.
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and env.raw("TERM") not in (None, "", "dumb")
    # Windows has no termios, by which keys are read one by one.
    return TerminalPrompt() if terminal and sys.platform != "win32" else LinePrompt()


class LinePrompt:
    """Questions as plain lines: for pipes, dumb terminals and screen readers."""

    hint = "An empty line takes the default in brackets; `back` returns to the question before."

    def choose(self, title: str, labels: Sequence[str], default: int) -> int:
        """Show numbered labels and read a number or a label.

        Args:
            title: The question.
            labels: The choices.
            default: Index of the default.

        Raises:
            Back: If the user wants the previous question.
        """
        print("\n".join(wrap(title)))
        for number, label in enumerate(labels, 1):
            print("\n".join(wrap(f"  {number}. {label}", " " * 5)))
        numbers = {str(number): index for index, number in enumerate(range(1, len(labels) + 1))}
        index_by_label = {label.lower(): index for index, label in enumerate(labels)}
        # "2: fully_shard" also matches "2" and what stands before the colon.
        index_by_label |= {label.split(":")[0].lower(): index for index, label in enumerate(labels)}
        while True:
            line = self._line(f"[{default + 1}]: ")
            if not line:
                return default
            index = numbers.get(line, index_by_label.get(line.lower()))
            if index is not None:
                return index
            print(f"{line!r} is not one of them; give a number from 1 to {len(labels)}.")

    def text(self, title: str, default: str, check: Callable[[str], Any]) -> str:
        """Read a line.

        Args:
            title: The question.
            default: The answer for an empty line.
            check: Raises ValueError for an answer that is not allowed.

        Raises:
            Back: If the user wants the previous question.
        """
        while True:
            line = self._line("\n".join(wrap(f"{title} [{default}]:")) + " ") or default
            try:
                check(line)
            except ValueError as error:
                print("\n".join(wrap(str(error))))
            else:
                return line

    def _line(self, prompt: str) -> str:
        print(prompt, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            raise LaunchError(_ENDED)
        if line.strip().lower() == "back":
            raise Back
        return line.strip()


class TerminalPrompt:
    """Questions with a highlighted choice, moved with the arrow keys."""

    hint = "Up and down choose, Enter accepts, left or Esc returns to the question before, Ctrl-C leaves."

    def choose(self, title: str, labels: Sequence[str], default: int) -> int:
        """Show the labels with one highlighted and move it with the keys (digits choose at once).

        Args:
            title: The question.
            labels: The choices.
            default: Index highlighted at first.

        Raises:
            Back: If the user wants the previous question.
            KeyboardInterrupt: If the user wants to quit.
        """
        index = default
        with _raw_terminal():
            lines = self._show(title, labels, index, default)
            while True:
                key = _key()
                if key == "enter":
                    self._answer(lines, title, labels[index])
                    return index
                if key in ("up", "down"):
                    index = (index + (1 if key == "down" else -1)) % len(labels)
                elif key.isdecimal() and 1 <= int(key) <= len(labels):
                    index = int(key) - 1
                else:
                    self._leave(key, lines)
                    continue
                # Back up over the title and the labels, which are drawn again.
                _write(f"\x1b[{lines}A")
                lines = self._show(title, labels, index, default)

    def text(self, title: str, default: str, check: Callable[[str], Any]) -> str:
        """Read a line; the default is shown until something is typed.

        Args:
            title: The question.
            default: The answer for an empty line.
            check: Raises ValueError for an answer that is not allowed.

        Raises:
            Back: If the user wants the previous question.
            KeyboardInterrupt: If the user wants to quit.
        """
        typed, above = "", 0  # lines between the first one and the cursor
        with _raw_terminal():
            while True:
                # 2 is dim, 22 normal again; \x1b[J clears from the cursor to the end of the screen.
                shown = typed or f"\x1b[2m{default}\x1b[22m"
                lines = wrap(title)
                _write(_up(above) + "\r\x1b[J" + "\r\n".join(lines) + f" {shown}")
                # What is typed continues in the next line where this one ends.
                length = len(lines[-1]) + 1 + len(typed or default)
                above = len(lines) - 1 + (length - 1) // shutil.get_terminal_size().columns
                key = _key()
                if key == "erase":
                    typed = typed[:-1]
                elif key == "clear":
                    typed = ""
                elif key == "enter":
                    try:
                        check(typed or default)
                    except ValueError as error:
                        note = "\r\n".join(f"\x1b[31m{line}\x1b[39m" for line in wrap(str(error)))
                        _write(f"\r\n{note}\r\n")
                        above = 0
                        continue
                    self._answer(above, title, typed or default)
                    return typed or default
                elif len(key) == 1 and key.isprintable():
                    typed += key
                else:
                    self._leave(key, above)

    def _show(self, title: str, labels: Sequence[str], index: int, default: int) -> int:
        """Draw the question; returns its number of lines."""
        lines = wrap(title)
        for number, label in enumerate(labels):
            text = label + (" (default)" if number == default else "")
            mark = "> " if number == index else "  "
            found = wrap(f"{mark}{text}", "  ")
            lines += [line[:2] + _bold(line[2:]) for line in found] if number == index else found
        _write("".join(f"\r\x1b[J{line}\r\n" for line in lines))
        return len(lines)

    def _answer(self, above: int, title: str, answer: str) -> None:
        """Replace a question, which begins so many lines above the cursor, with its answer."""
        *lines, last = wrap(title)
        lines += [f"{last} {_bold(answer)}"] if len(wrap(f"{last} {answer}")) == 1 else [last, _bold(answer)]
        _write(_up(above) + "".join(f"\r\x1b[J{line}\r\n" for line in lines))

    def _leave(self, key: str, lines: int) -> None:
        """Act on the keys that end a question without an answer; ignore any other."""
        if key == "back":
            _write(f"{_up(lines)}\r\x1b[J")
            raise Back
        if key in ("interrupt", "end"):
            _write("\r\n")
            raise KeyboardInterrupt


def _up(lines: int) -> str:
    return f"\x1b[{lines}A" if lines else ""


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[22m"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Read keys one by one without echo; the terminal is always restored afterwards."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Raw, not cbreak: Ctrl-C arrives as a byte, and the terminal is restored
        # before KeyboardInterrupt is raised.
        tty.setraw(descriptor, termios.TCSADRAIN)  # keeps what was typed ahead
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is closed, as the error in the block says
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key() -> str:
    """Wait for a key: its name, or the character that it writes."""
    descriptor = sys.stdin.fileno()
    data = _byte(descriptor)
    if data == b"\x1b":
        # An arrow key sends three bytes at once; Esc alone sends one.
        while len(data) < 3 and _more(descriptor):
            data += _byte(descriptor)
    # UTF-8: from 0xC0 on a byte begins a character of two to four.
    while data[0] >= 0xC0 and len(data) < 4 and not _decodes(data):
        data += _byte(descriptor)
    return _KEYS.get(data) or data.decode("utf-8", "replace")


def _byte(descriptor: int) -> bytes:
    try:
        data = os.read(descriptor, 1)
    except OSError:  # how some versions of Linux report a closed terminal
        data = b""
    if not data:
        raise LaunchError(_ENDED)
    return data


def _more(descriptor: int) -> bool:
    import select

    # 50 ms: far longer than between the bytes of one key, too short to notice after Esc.
    return bool(select.select([descriptor], [], [], 0.05)[0])


def _decodes(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
