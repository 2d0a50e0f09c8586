from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_launch.local.output.log_file import Log

Start = Callable[..., Any]


def test_a_full_disk_is_reported_once_and_ends_the_log_alone() -> None:
    errors: list[OSError] = []
    log = Log(Path("/dev/full"), errors.append)
    log.write(b"one")
    log.write(b"two")
    log.close()

    assert [error.errno for error in errors] == [errno.ENOSPC]


def test_a_full_disk_does_not_end_the_run(start: Start) -> None:
    script = (
        "import os, sys\nfor number in range(100):\n    print(os.environ['RANK'] * 99, flush=True)\n"
        "    print(os.environ['RANK'] * 99, file=sys.stderr)\n"
        "open('done' + os.environ['RANK'], 'w').close()\n"
    )

    def fill_the_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    flags = ("launch", "--num_processes", "2", "--log_dir", "logs")
    # Else Python would truncate compiled files, too.
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    run = start(*flags, script=script, env=env, preexec_fn=fill_the_disk)
    code, out, error = run.finish()

    assert code == 0, error
    assert sorted(path.name for path in run.folder.glob("done*")) == ["done0", "done1"]
    assert [out.count(digit) for digit in "01"] == [9900, 9900]
    assert error.count("are incomplete from here on: File too large. The run continues.") == 1
    sizes = [path.stat().st_size for path in run.folder.glob("logs/*/*/*.log")]
    assert sizes == [1000] * 4  # what there was room for
