"""What the actor of a Ray worker does, without Ray."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from accel_launch.errors import LaunchError
from accel_launch.launchers.ray.actor import Event, RayWorker

CODE = "import os, sys; print(os.environ['X'], os.getcwd()); print('err', file=sys.stderr); sys.exit(3)"


def run(*arguments: str, worker: RayWorker | None = None, folder: str = "/") -> list[Event]:
    return list((worker or RayWorker()).run(["py", *arguments], {"X": "7"}, folder, "py"))


def text(events: list[Event], stream: str) -> str:
    return b"".join(data for name, data in events if name == stream and isinstance(data, bytes)).decode()


def pipes() -> int:
    return sum(path.is_fifo() for path in Path("/proc/self/fd").iterdir())


def adopts_orphans() -> bool:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(found), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    return bool(found.value)


def test_output_and_the_end_are_reported(tmp_path: Path) -> None:
    events = run("-c", CODE, folder=str(tmp_path))

    assert (text(events, "1"), text(events, "2")) == (f"7 {tmp_path}\n", "err\n")
    assert events[-1] == ("end", 3)


def test_in_place_of_a_folder_that_is_not_there_the_actors_own_is_taken(tmp_path: Path) -> None:
    assert text(run("-c", CODE, folder=str(tmp_path / "none")), "1") == f"7 {os.getcwd()}\n"


def test_a_program_that_is_not_there_is_named() -> None:
    before = pipes()
    events = list(RayWorker().run(["/none"], {}, "/", "py"))

    assert events == [("2", b"/none: No such file or directory\n"), ("end", 127)]
    assert pipes() == before
    assert not adopts_orphans()


def test_megabytes_come_through() -> None:
    events = run("-c", "print('x' * 3_000_000, end='')")

    assert text(events, "1") == "x" * 3_000_000


def test_a_signal_waits_for_the_worker() -> None:
    worker = RayWorker()
    sender = threading.Thread(target=worker.send, args=(signal.SIGTERM, True))
    sender.start()
    events = run("-c", "import time; time.sleep(60)", worker=worker)
    sender.join(10)

    assert events == [("end", -signal.SIGTERM)]


def test_what_the_worker_started_is_waited_for() -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(0.5)\n    print('child')\n"

    events = run("-c", code)
    assert events[0] == ("end", 0)
    assert text(events, "1") == "child\n"


def test_a_child_that_keeps_writing_does_not_hide_the_end() -> None:
    worker = RayWorker()
    events = worker.run(["sh", "-c", "yes & sleep 0.2; exit 3"], {}, "/", "py")
    until = time.monotonic() + 5

    def has_time(event: Event) -> bool:
        time.sleep(0.002)  # one that reads faster than it is written would find the pipe empty
        return time.monotonic() < until

    try:
        assert ("end", 3) in itertools.takewhile(has_time, events)
    finally:
        worker.send(signal.SIGKILL, group=True)
        events.close()


def test_a_port_in_use_is_named() -> None:
    with pytest.raises(LaunchError, match="is in use"), socket.create_server(("", 0)) as server:
        RayWorker().reserve(server.getsockname()[1], "--main_process_port")
