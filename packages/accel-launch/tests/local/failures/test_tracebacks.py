from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_launch.local.failures.tracebacks import clean, fold_frames, last_exception, library_folders

TRACEBACK = """Traceback (most recent call last):
  File "/home/a/train.py", line 9, in <module>
    main()
  File "/lib/torch/nn/modules/module.py", line 1, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/lib/torch/nn/modules/module.py", line 2, in _call_impl
    return forward_call(*args, **kwargs)
  File "/lib/accel/training/prepare.py", line 3, in forward
    return inner(x)
  File "/home/a/model.py", line 4, in forward
    return self.linear(x)
  File "/lib/torch/nn/modules/linear.py", line 5, in forward
    return F.linear(input)
  File "/lib/torch/nn/functional.py", line 6, in linear
    return _linear(input)
RuntimeError: shapes
  do not fit"""
FOLDERS = {"/lib/torch/": "torch", "/lib/accel/": "accel"}


def test_frames_of_libraries_become_a_line_but_for_the_last() -> None:
    assert fold_frames(TRACEBACK, FOLDERS) == (
        "Traceback (most recent call last):\n"
        '  File "/home/a/train.py", line 9, in <module>\n'
        "    main()\n"
        "  ... 3 frames of accel and torch\n"
        '  File "/home/a/model.py", line 4, in forward\n'
        "    return self.linear(x)\n"
        "  ... 1 frame of torch\n"
        '  File "/lib/torch/nn/functional.py", line 6, in linear\n'
        "    return _linear(input)\n"
        "RuntimeError: shapes\n"
        "  do not fit"
    )


def test_each_traceback_of_a_chain_keeps_its_last_frame() -> None:
    between = "During handling of the above exception, another exception occurred:"
    chain = f"{TRACEBACK}\n\n{between}\n\n{TRACEBACK}"
    folded = fold_frames(chain, FOLDERS)

    assert folded.count('  File "/lib/torch/nn/functional.py", line 6, in linear') == 2
    assert folded.count("  ... ") == 4
    assert "another exception occurred:" in folded


def test_text_without_frames_stays_as_it_is() -> None:
    assert fold_frames("one\n    two\nthree", FOLDERS) == "one\n    two\nthree"


@pytest.mark.parametrize(
    ("text", "exception"),
    [
        (TRACEBACK, "RuntimeError: shapes\n  do not fit"),
        (f"loading\n{TRACEBACK}\n\nlater:\n\n{TRACEBACK[:70]}\nKeyError: 'x'", "KeyError: 'x'"),
        (f"{TRACEBACK}\n[rank1]:[W1122 10:45 x.cpp:1] failed to recv", "RuntimeError: shapes\n  do not fit"),
        ("no data", ""),
        ("Traceback (most recent call last):\n  File", ""),
    ],
)
def test_the_last_exception_is_found(text: str, exception: str) -> None:
    assert last_exception(text) == exception


def test_colours_and_torchs_rank_are_taken_out() -> None:
    stderr_tail = b'[rank12]: Traceback (most recent call last):\n[rank12]:   File \x1b[35m"x"\x1b[0m\n'
    stderr_tail += b"[rank1]: \n[rank1]:[W1] y"

    assert clean(stderr_tail) == 'Traceback (most recent call last):\n  File "x"\n\n[rank1]:[W1] y'


def test_the_libraries_that_are_here_are_known_by_their_folders() -> None:
    folders = library_folders()
    own = os.path.join(Path(sys.modules["accel_launch"].__path__[0]), "")

    assert folders[own] == "accel"
    assert "torch" in folders.values()


def test_a_real_traceback_is_folded(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("from accel_state import env\nwith env.clear_environment():\n    env.get('NONE')\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, check=False)
    text = clean(ended.stderr)
    folded = fold_frames(text, library_folders())

    assert last_exception(text) == "KeyError: 'NONE'"
    assert f'File "{script}", line 3, in <module>' in folded
    assert "in get" in folded  # where it was raised
