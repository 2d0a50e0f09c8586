from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_launch.config import load_config_from_file
from accel_launch.config.ask import prompt
from accel_launch.errors import LaunchError

UP, DOWN, LEFT, ESC, ENTER, CTRL_C, CTRL_U = "\x1b[A", "\x1b[B", "\x1b[D", "\x1b", "\r", "\x03", "\x15"
Start = Callable[..., Any]


class Keyboard:
    """A terminal with `accel config` in it: types keys and reads the screen."""

    def __init__(self, start: Start, *arguments: str, **env: str) -> None:
        self.ours, self._theirs = pty.openpty()
        self.before = termios.tcgetattr(self._theirs)
        self.run = start(
            "config",
            *arguments,
            env={"TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", **env},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
        )
        self.text = self.seen = ""

    def see(self, words: str, timeout_s: float = 20) -> None:
        """Wait for words to appear behind those seen last."""
        until = time.monotonic() + timeout_s
        while words not in self.text:
            if time.monotonic() > until or not self._read(0.1):
                pytest.fail(f"did not see {words!r} in:\n{self.text}")
        self.text = self.text.split(words, 1)[1]

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self.ours, key.encode())

    def answer(self, words: str, *keys: str) -> None:
        """Wait for a question and answer it."""
        self.see(words)
        self.press(*keys)

    def _read(self, timeout_s: float) -> bool:
        if select.select([self.ours], [], [], timeout_s)[0]:
            try:
                read = os.read(self.ours, 4096).decode()
                self.text, self.seen = self.text + read, self.seen + read
            except OSError:  # the other side is closed
                return False
        return True

    def finish(self) -> int:
        code: int = self.run.process.wait(20)
        assert termios.tcgetattr(self._theirs) == self.before  # echo and line mode are back
        return code

    def close(self) -> None:
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def keyboard(start: Start) -> Iterator[Callable[..., Keyboard]]:
    opened: list[Keyboard] = []

    def open_keyboard(*arguments: str, **env: str) -> Keyboard:
        opened.append(Keyboard(start, *arguments, **env))
        return opened[-1]

    yield open_keyboard
    for terminal in opened:
        terminal.close()


class Screen:
    """What a terminal shows: as much of one as the questions need."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines = columns, [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for up, clear, char in re.findall(r"\x1b\[(\d+)A|(\x1b\[J)|\x1b\[\d+m|(.)", text, flags=re.DOTALL):
            if up:
                assert int(up) <= self._row
                self._row -= int(up)
            elif clear:
                self.lines[self._row :] = [self.lines[self._row][: self._column]]
            elif char == "\r":
                self._column = 0
            elif char == "\n":
                self._next_line()
            elif char:
                if self._column == self.columns:
                    self._next_line()
                    self._column = 0
                line = self.lines[self._row]
                self.lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
                self._column += 1

    def _next_line(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")


def test_a_narrow_terminal_cuts_no_word_and_questions_are_drawn_over_as_a_whole(
    keyboard: Callable[..., Keyboard],
) -> None:
    terminal = keyboard("--config_file", "c.yaml", COLUMNS="28")
    terminal.answer("Where do you train?", DOWN, UP, ENTER)
    terminal.answer("How many processes", "none", ENTER)
    terminal.answer("not allowed", CTRL_U, "1", ENTER)
    terminal.answer("Mixed precision?", DOWN, UP, ENTER)
    terminal.answer("Compile", DOWN, ENTER)
    terminal.answer("Which mode", LEFT)
    terminal.answer("Compile", ENTER)
    terminal.answer("Write it?", UP, ENTER)
    terminal.see("Nothing was written.")
    terminal.finish()

    screen = Screen(28)
    screen.feed(terminal.seen)
    shown = " ".join(" ".join(screen.lines).split())
    for words in (
        "Questions for c.yaml. Up and down choose, Enter accepts, left or Esc returns to the question",
        "Where do you train? this machine How many processes",
        "How many processes, over all machines? 1 Mixed precision? no Compile",
        "Compile the model with torch.compile? no The config file:",
    ):
        assert words in shown
    assert shown.count("How many processes") == 2  # the first has its answer that is not allowed
    assert "Which mode" not in shown


def test_enter_alone_writes_the_defaults(keyboard: Callable[..., Keyboard], tmp_path: Path) -> None:
    terminal = keyboard()
    terminal.see("Up and down choose")
    for question in ("Where do you train?", "How many processes", "Mixed precision?", "torch.compile?"):
        terminal.answer(question, ENTER)
    terminal.see("num_processes: 1")
    terminal.answer("Write it?", ENTER)
    terminal.see("Wrote")

    assert terminal.finish() == 0
    assert load_config_from_file(tmp_path / "hf/accelerate/default_config.yaml").to_dict() == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": False,
    }


def test_a_job_on_sagemaker_is_asked_in_a_terminal(keyboard: Callable[..., Keyboard], tmp_path: Path) -> None:
    terminal = keyboard("--config_file", str(tmp_path / "c.yaml"))
    terminal.answer("Where do you train?", "4", ENTER)
    terminal.answer("AWS profile", "me", ENTER)
    terminal.answer("AWS region?", ENTER)
    terminal.answer("IAM role", ENTER)
    terminal.see("The role is needed.")
    terminal.press("trainer", ENTER)
    for question in ("Type of the instances?", "How many instances?", "How do they work together?"):
        terminal.answer(question, ENTER)
    terminal.answer("Your own image", "mine:1", ENTER)
    for question in (
        "Version of Python",
        "Beginning of",
        "inputs",
        "metrics",
        "Mixed precision?",
        "torch.compile?",
    ):
        terminal.answer(question, ENTER)
    terminal.answer("Write it?", ENTER)

    assert terminal.finish() == 0
    config = load_config_from_file(tmp_path / "c.yaml")
    assert config.compute_environment == "AMAZON_SAGEMAKER"
    assert (config.iam_role_name, config.profile, config.image_uri) == ("trainer", "me", "mine:1")


def test_deepspeed_is_asked_in_a_terminal(keyboard: Callable[..., Keyboard], tmp_path: Path) -> None:
    terminal = keyboard("--config_file", str(tmp_path / "c.yaml"))
    terminal.answer("Where do you train?", ENTER)
    terminal.answer("How many processes", "2", ENTER)
    terminal.answer("How is the model distributed?", "4", ENTER)
    terminal.answer("JSON", ENTER)
    terminal.answer("What is sharded", DOWN, ENTER)
    for question in ("optimizer states kept?", "parameters kept?", "gradients are accumulated"):
        terminal.answer(question, ENTER)
    terminal.answer("Largest gradient norm", "0.5", ENTER)
    for question in (
        "while the model is built",
        "16-bit",
        "experts",
        "Mixed",
        "torch.compile?",
        "collective",
    ):
        terminal.answer(question, ENTER)
    terminal.answer("Write it?", ENTER)

    assert terminal.finish() == 0
    config = load_config_from_file(tmp_path / "c.yaml")
    assert config.distributed_type == "DEEPSPEED"
    assert (config.settings["zero_stage"], config.settings["gradient_clipping"]) == (3, 0.5)


def test_arrows_choose_digits_jump_text_is_edited_and_checked(
    keyboard: Callable[..., Keyboard], tmp_path: Path
) -> None:
    terminal = keyboard("--config_file", str(tmp_path / "c.yaml"))
    terminal.answer("Where do you train?", DOWN, UP, ENTER)
    terminal.answer("How many processes", "x", ENTER)
    terminal.see("'x' is not allowed; allowed: an integer, at least 1.")
    terminal.press("\x7f", "7", CTRL_U, "2", ENTER)
    terminal.answer("How is the model distributed?", ENTER)
    terminal.answer("Mixed precision?", "2")
    terminal.answer("> \x1b[1mbf16", ENTER)
    terminal.answer("torch.compile?", UP, UP, ENTER)
    for question in ("Which mode", "graph breaks", "dynamic shapes", "repeated block"):
        terminal.answer(question, ENTER)
    terminal.answer("Check every collective", DOWN, ENTER)
    terminal.answer("Write it?", ENTER)

    assert terminal.finish() == 0
    config = load_config_from_file(tmp_path / "c.yaml")
    assert (config.num_processes, config.mixed_precision, config.debug) == (2, "bf16", True)
    assert (config.distributed_type, config.settings["dynamo_backend"]) == ("MULTI_CPU", "inductor")


@pytest.mark.parametrize("key", [LEFT, ESC])
def test_back_returns_to_the_question_before(
    keyboard: Callable[..., Keyboard], tmp_path: Path, key: str
) -> None:
    terminal = keyboard("--config_file", str(tmp_path / "c.yaml"))
    terminal.answer("Where do you train?", DOWN, ENTER)
    terminal.answer("How many machines?", key)
    terminal.answer("Where do you train?", ENTER)
    terminal.answer("How many processes", "3", ENTER)
    terminal.answer("How is the model distributed?", key)
    terminal.answer("How many processes", ENTER)  # back to the default: a question is asked afresh
    terminal.answer("Mixed precision?", ENTER)
    terminal.answer("torch.compile?", ENTER)
    terminal.answer("Write it?", ENTER)

    assert terminal.finish() == 0
    assert load_config_from_file(tmp_path / "c.yaml").num_processes == 1


def test_ctrl_c_leaves_the_terminal_and_the_folder_as_they_were(
    keyboard: Callable[..., Keyboard], tmp_path: Path
) -> None:
    terminal = keyboard("--config_file", str(tmp_path / "c.yaml"))
    terminal.answer("Where do you train?", ENTER)
    terminal.answer("How many processes", CTRL_C)

    assert terminal.finish() == 130
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize("typed", [b"", b"\xc3", b"\x1b", b"\xf0\x9f"])
def test_a_terminal_that_closes_inside_a_character_is_an_error(
    start: Start, tmp_path: Path, typed: bytes
) -> None:
    ours, theirs = pty.openpty()
    file = str(tmp_path / "c.yaml")
    run = start("config", "--config_file", file, env={"TERM": "xterm"}, stdin=theirs, stdout=theirs)
    os.close(theirs)
    shown = b""
    while b"SageMaker" not in shown:
        shown += os.read(ours, 4096)
    time.sleep(0.1)  # the terminal is raw by then
    os.write(ours, typed)
    time.sleep(0.1)  # what was typed is read before the end is seen
    os.close(ours)
    code, _, error = run.finish(60)

    assert code == 2
    assert "The input ended before the last question; nothing was written." in error
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize("typed", [b"", b"\xc3", b"\x1b"])
def test_a_key_without_its_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, typed: bytes) -> None:
    reading, writing = os.pipe()
    os.write(writing, typed)
    os.close(writing)
    with open(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(LaunchError, match="The input ended"):
            prompt._key()


def test_no_at_the_end_writes_nothing(keyboard: Callable[..., Keyboard], tmp_path: Path) -> None:
    terminal = keyboard("--config_file", str(tmp_path / "c.yaml"))
    for question in ("Where do you train?", "How many processes", "Mixed precision?", "torch.compile?"):
        terminal.answer(question, ENTER)
    terminal.answer("Write it?", DOWN, ENTER)
    terminal.see("Nothing was written.")

    assert terminal.finish() == 1
    assert not (tmp_path / "c.yaml").exists()


def ask(start: Start, tmp_path: Path, lines: str) -> tuple[int, str, str]:
    run = start(
        "config",
        "--config_file",
        str(tmp_path / "c.yaml"),
        env={"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
    )
    out, err = run.process.communicate(lines.encode(), timeout=120)
    return run.process.returncode, out.decode(), err.decode()


def test_plain_prompts_without_a_terminal(start: Start, tmp_path: Path) -> None:
    lines = ["2", "back", "this machine", "none", "2", "", "9", "bf16", "", "", "y", "yes"]
    code, out, err = ask(start, tmp_path, "\n".join(lines) + "\n")

    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "'none' is not allowed; allowed: an integer, at least 1." in out
    assert "'9' is not one of them; give a number from 1 to 4." in out
    assert "'y' is not one of them" in out
    config = load_config_from_file(tmp_path / "c.yaml")
    assert (config.num_processes, config.mixed_precision) == (2, "bf16")


def test_input_that_ends_early_is_an_error(start: Start, tmp_path: Path) -> None:
    code, _, err = ask(start, tmp_path, "1\n2\n")

    assert code == 2
    assert "The input ended before the last question; nothing was written." in err
    assert not (tmp_path / "c.yaml").exists()


def test_the_present_file_gives_the_defaults(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 3\nuse_cpu: true\nmixed_precision: bf16\n")
    code, out, _ = ask(start, tmp_path, "\n" * 20)

    assert code == 0
    assert "whose values are the defaults" in " ".join(out.split())
    config = load_config_from_file(tmp_path / "c.yaml")
    assert (config.num_processes, config.mixed_precision) == (3, "bf16")
