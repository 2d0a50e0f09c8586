"""Several workers of one machine: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
TWO = ("launch", "--num_processes", "2")
REPORT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
place = {name: os.environ[name] for name in names}
stdin = [sys.stdin.read(), os.readlink("/proc/self/fd/0")]
print(json.dumps({**place, "argv": sys.argv[1:], "stdin": stdin}))
"""
# Short sleeps: a signal that comes just before one is handled by Python only after it.
SLEEP = "for _ in range(600): time.sleep(0.1)\n"
WAIT = f"""
import os, sys, time
open("ready" + os.environ["RANK"], "w").close()
{SLEEP}"""


def wait_for_workers(run: Any, count: int = 2) -> None:
    for rank in range(count):
        run.wait_for_file(f"ready{rank}")


def test_each_worker_knows_its_place(start: Start) -> None:
    run = start("launch", "--num_processes", "3", "script.py", "--x", "1", stdin=subprocess.PIPE)
    (run.folder / "script.py").write_text(REPORT)
    run.process.stdin.write(b"typed")
    run.process.stdin.close()
    run.process.stdin = None
    code, out, _ = run.finish()

    found = sorted((json.loads(line) for line in out.splitlines()), key=lambda worker: worker["RANK"])
    assert code == 0
    assert (
        [worker["RANK"] for worker in found] == [worker["LOCAL_RANK"] for worker in found] == ["0", "1", "2"]
    )
    assert {(w["WORLD_SIZE"], w["LOCAL_WORLD_SIZE"], w["GROUP_RANK"]) for w in found} == {("3", "3", "0")}
    assert {worker["MASTER_ADDR"] for worker in found} == {"127.0.0.1"}
    assert len({worker["MASTER_PORT"] for worker in found}) == 1
    assert found[0]["argv"] == ["--x", "1"]
    assert found[0]["stdin"][0] == "typed"
    assert [worker["stdin"] for worker in found[1:]] == [["", "/dev/null"]] * 2


def test_a_port_of_choice_is_used(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    _, out, _ = start(*TWO, "--main_process_port", port, script=REPORT).finish()

    assert {json.loads(line)["MASTER_PORT"] for line in out.splitlines()} == {port}


def test_a_port_in_use_starts_nothing(start: Start) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        run = start(*TWO, "--main_process_port", port, script=WAIT)
        code, _, error = run.finish()

    assert code == 2
    assert f"Port {port} (from --main_process_port) is in use" in error
    assert not list(run.folder.glob("ready*"))


def test_the_first_failure_ends_all_with_its_traceback_and_code(start: Start) -> None:
    script = WAIT.replace("600", "600 * (os.environ['RANK'] != '1')") + (
        "while not os.path.exists('ready0'): time.sleep(0.01)\nraise ValueError('boom')\n"
    )
    begin = time.monotonic()
    run = start("launch", "--num_processes", "3", script=script)
    code, _, error = run.finish()

    assert code == 1
    assert time.monotonic() - begin < 10
    assert f"rank 1 of 3 on {socket.gethostname()} failed (exit code 1); 2 others were stopped." in error
    assert "script.py" in error
    assert error.count("Traceback (most recent call last):") == 1
    assert error.rstrip().endswith("ValueError: boom")
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("os.abort()", 134, "killed by SIGABRT"),
        ("sys.exit('no data')", 1, "no data"),
    ],
)
def test_the_exit_code_is_that_of_the_failed_worker(start: Start, end: str, code: int, text: str) -> None:
    script = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    run = start(*TWO, script=script)
    found, _, error = run.finish()

    assert found == code
    assert text in error
    run.assert_nothing_left()


@pytest.mark.long
def test_workers_that_ignore_sigterm_are_killed_within_ten_seconds(start: Start) -> None:
    script = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "while len([n for n in os.listdir() if n.startswith('ready')]) < 2: time.sleep(0.01)\n"
        "if os.environ['RANK'] == '0': sys.exit(3)\n"
        "time.sleep(60)\n"
    )
    begin = time.monotonic()
    run = start(*TWO, script=script)
    code, _, error = run.finish()

    assert code == 3
    assert time.monotonic() - begin < 10
    assert "rank 0 of 2" in error
    run.assert_nothing_left()


def test_a_worker_may_use_the_grace_period_to_save(start: Start) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.3)\n    open('saved', 'w').close()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "while not os.path.exists('ready0'): time.sleep(0.01)\n"
        f"if os.environ['RANK'] == '1': os._exit(3)\n{SLEEP}"
    )
    run = start(*TWO, script=script)

    assert run.finish()[0] == 3
    assert (run.folder / "saved").exists()


def test_the_worker_in_trouble_first_is_named_though_another_ends_first(start: Start) -> None:
    script = (
        "import atexit, os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(time.sleep, 1.0)\n"
        "    print('loading', file=sys.stderr)\n"
        "    open('ready0', 'w').close()\n"
        "    raise ValueError('the cause')\n"
        "while not os.path.exists('ready0'): time.sleep(0.01)\n"
        "time.sleep(0.3)\nraise ConnectionError('the consequence')\n"
    )
    code, _, error = start(*TWO, script=script).finish()

    assert code == 1
    assert "rank 0 of 2" in error
    assert error.endswith(
        "ValueError: the cause\n"
        "  then rank 1 lost its connection (exit code 1): ConnectionError: the consequence\n"
    )
    assert error.count("ValueError: the cause") == 1
    assert "stopped" not in error  # both failed
    assert error.count("Traceback (most recent call last):") == 1


TWO_FAIL = """
import os, time
from accel_state.process.failure import record_uncaught

if {record}:
    record_uncaught()
open("ready" + os.environ["RANK"], "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    open("raised", "w").close()
    raise {first}
while not os.path.exists("raised"):
    time.sleep(0.01)
time.sleep(0.2)
raise {second}
"""
LOST = "RuntimeError('[pair.cc:534] Connection closed by peer [127.0.0.1]:1')"


@pytest.mark.parametrize(
    ("first", "second", "record", "named"),
    [
        ("ValueError('cause')", "KeyError('later')", True, 1),
        ("ValueError('cause')", LOST, True, 1),
        ("ValueError('cause')", LOST, False, 1),
        (LOST, "ValueError('cause')", True, 0),
    ],
)
def test_of_two_that_ended_before_the_launcher_looked_the_cause_is_named(
    start: Start, first: str, second: str, record: bool, named: int
) -> None:
    run = start(*TWO, script=TWO_FAIL.format(first=first, second=second, record=record))
    wait_for_workers(run)
    before = len(run.pids())
    run.process.send_signal(signal.SIGSTOP)  # it sees both ends at once
    (run.folder / "go").touch()
    run.wait_until(lambda: len(run.pids()) == before - 2, "both to end")
    run.process.send_signal(signal.SIGCONT)
    code, _, error = run.finish()

    assert code == 1
    assert f"rank {named} of 2" in error
    lost = " lost its connection" if "Connection" in first + second else ""
    assert f"ValueError: cause\n  then rank {1 - named}{lost} (exit code 1): " in error
    assert error.count("Traceback") == 1


def test_an_exception_that_could_not_be_shown_is_in_the_summary(start: Start) -> None:
    script = (
        "import os, sys, time\nfrom accel_state.process.failure import record_uncaught\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.excepthook = lambda *_: (open('ready0', 'w').close(), time.sleep(60))\n"
        "    record_uncaught()\n    raise ValueError('the cause')\n"
        "while not os.path.exists('ready0'): time.sleep(0.01)\nos._exit(7)\n"
    )
    code, _, error = start(*TWO, script=script).finish()

    assert code == 1
    assert "rank 0 of 2" in error
    assert "failed (stopped after its exception)." in error
    assert error.endswith("ValueError: the cause\n  then rank 1 (exit code 7): it wrote nothing to stderr\n")


def test_a_child_that_fails_is_not_taken_for_its_worker(start: Start) -> None:
    script = """
import os, subprocess, sys, time
from accel_state.process.failure import record_uncaught  # PartialState calls it

record_uncaught()
child = "import accel_state.process.failure as f; f.record_uncaught(); raise KeyError('the child')"
if os.environ["RANK"] == "0":
    assert subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL).returncode == 1
    open("ready0", "w").close()
    time.sleep(60)
while not os.path.exists("ready0"):
    time.sleep(0.01)
raise ValueError("the cause")
"""
    code, _, error = start(*TWO, script=script).finish()

    assert code == 1
    assert "rank 1 of 2" in error
    assert error.rstrip().endswith("ValueError: the cause")
    assert "the child" not in error


def test_a_worker_that_was_killed_is_named_before_one_that_noticed_it(start: Start) -> None:
    script = (
        "import atexit, os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(time.sleep, 1.0)\n"
        "    open('ready0', 'w').close()\n"
        "    raise ConnectionError('the other is gone')\n"
        "while not os.path.exists('ready0'): time.sleep(0.01)\n"
        "time.sleep(0.3)\nos.kill(os.getpid(), 9)\n"
    )
    code, _, error = start(*TWO, script=script).finish()

    assert code == 137
    assert "rank 1 of 2" in error
    assert "killed by SIGKILL" in error


def test_a_worker_that_saves_when_it_is_stopped_is_not_named(start: Start) -> None:
    script = (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n"
        f"    open('ready0', 'w').close()\n    {SLEEP}"
        "while not os.path.exists('ready0'): time.sleep(0.01)\n"
        "raise RuntimeError('Timed out waiting for rank 0')\n"
    )
    code, _, error = start(*TWO, script=script).finish()

    assert code == 1
    assert "rank 1 of 2" in error
    assert "  then rank 0 (exit code 75): it wrote nothing to stderr\n" in error


def test_workers_that_all_save_have_not_failed(start: Start) -> None:
    script = (
        "import os, sys, time\ntime.sleep(0.5 * int(os.environ['RANK']))\n"
        "print('saved', file=sys.stderr)\nos._exit(75)\n"
    )
    code, _, error = start(*TWO, script=script).finish()

    assert code == 75
    assert error.count("saved\n") == 2
    assert error.endswith(
        "accel launch: all 2 processes ended with exit code 75: they have saved their state. "
        "Start the same command again to continue.\n"
    )
    assert "failed" not in error


def test_workers_whose_ends_are_seen_together_were_not_stopped(start: Start) -> None:
    script = (
        "import os, time\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '0': raise ConnectionError('the other is gone')\n"
        "os._exit(3)\n"
    )
    run = start(*TWO, script=script)
    wait_for_workers(run)
    workers = [pid for pid in run.pids() if b"accel_launch" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def ended(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"

    assert len(workers) == 2
    run.process.send_signal(signal.SIGSTOP)
    (run.folder / "go").touch()
    run.wait_until(lambda: all(map(ended, workers)), "both workers to end")
    run.process.send_signal(signal.SIGCONT)
    code, _, error = run.finish()

    assert code == 3
    assert "rank 1 of 2" in error
    assert "other was stopped" not in error


def test_a_worker_stuck_after_its_traceback_is_ended_too(start: Start) -> None:
    script = (
        "import atexit, os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(time.sleep, 60)\n"
        "    open('ready0', 'w').close()\n"
        "    raise ValueError('stuck')\n"
        "while not os.path.exists('ready0'): time.sleep(0.01)\n"
        "time.sleep(0.3)\nos._exit(7)\n"
    )
    begin = time.monotonic()
    run = start(*TWO, script=script)
    code, _, error = run.finish()

    assert code == 7
    assert time.monotonic() - begin < 10
    assert "ValueError: stuck" in error
    run.assert_nothing_left()


@pytest.mark.long
def test_a_traceback_that_had_to_be_shown_is_not_repeated(start: Start) -> None:
    script = "import atexit, time\natexit.register(time.sleep, 3.5)\nraise ValueError('boom')\n"
    code, _, error = start("launch", "--launcher", "local", script=script).finish()

    assert code == 1
    assert error.count("Traceback (most recent call last):") == 1
    assert error.rstrip().endswith("Its traceback is shown above: ValueError: boom")


@pytest.mark.parametrize(("environ", "begin"), [({}, "\x1b[31m"), ({"NO_COLOR": "1"}, "")])
def test_the_summary_has_colour_on_a_terminal(start: Start, environ: dict[str, str], begin: str) -> None:
    ours, terminal = os.openpty()
    run = start(*TWO, script="raise SystemExit(3)\n", env=environ, stderr=terminal)
    os.close(terminal)
    shown = b""
    while b"stderr" not in shown:
        shown += os.read(ours, 1000)
    run.process.wait(20)
    os.close(ours)

    assert shown.decode().startswith(f"{begin}accel launch: rank ")


def test_frames_of_libraries_are_left_out_unless_in_debug_mode(start: Start) -> None:
    script = (
        "from accel_state import env\nfrom accel_state.env.purge import purge_accelerate_environment\n"
        "@purge_accelerate_environment\ndef main(): env.put({}, 'RANK', 'x')\nmain()\n"
    )
    _, _, error = start("launch", "--launcher", "local", script=script).finish()
    _, _, whole = start("launch", "--launcher", "local", "--debug", script=script).finish()

    assert "  ... 1 frame of accel\n" in error
    assert "in plain" in whole
    assert "in plain" not in error
    assert error.splitlines()[-1] == whole.splitlines()[-1]


def test_a_logged_traceback_ends_nothing(start: Start) -> None:
    script = "import logging\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('caught')\n"
    code, _, error = start(*TWO, script=script).finish()

    assert code == 0
    assert error.count("ZeroDivisionError: division by zero") == 2
    assert "accel launch" not in error


def test_quiet_shows_the_traceback_alone(start: Start) -> None:
    _, _, error = start(*TWO, "-q", script="raise ValueError('boom')\n").finish()

    assert "accel launch" not in error
    assert "ValueError: boom" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(start: Start, number: signal.Signals) -> None:
    run = start(*TWO, script=WAIT)
    wait_for_workers(run)
    run.process.send_signal(number)
    code, _, error = run.finish()

    assert code == 128 + number
    assert number.name in error
    run.assert_nothing_left()


def test_workers_that_end_well_after_a_signal_make_a_good_run(start: Start) -> None:
    script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAIT
    run = start(*TWO, script=script)
    wait_for_workers(run)
    run.process.send_signal(signal.SIGTERM)

    assert run.finish()[0] == 0


def test_a_second_signal_waits_no_longer(start: Start) -> None:
    script = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAIT
    run = start(*TWO, script=script)
    wait_for_workers(run)
    begin = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)

    assert run.finish()[0] == 130
    assert time.monotonic() - begin < 5
    run.assert_nothing_left()


def test_the_grace_period_bounds_the_wait_after_a_signal(start: Start) -> None:
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    run = start(*TWO, "--grace_period", "0.3", script=script)
    wait_for_workers(run)
    begin = time.monotonic()
    run.process.send_signal(signal.SIGTERM)

    assert run.finish()[0] == 143
    assert 0.25 < time.monotonic() - begin < 5
    run.assert_nothing_left()


def test_other_signals_are_passed_on(start: Start) -> None:
    script = (
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: open('got' + os.environ['RANK'], 'w'))\n"
        + WAIT
    )
    run = start(*TWO, script="import os\n" + script)
    wait_for_workers(run)
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for_file("got0")
    run.wait_for_file("got1")

    assert run.process.poll() is None


def test_ctrl_z_stops_the_workers_and_fg_continues_them(start: Start) -> None:
    run = start(*TWO, script=WAIT)
    wait_for_workers(run)
    workers = [pid for pid in run.pids() if b"accel_launch" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def states() -> set[str]:
        pids = [run.process.pid, *workers]
        return {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in pids}

    assert len(workers) == 2
    run.process.send_signal(signal.SIGTSTP)
    run.wait_until(lambda: states() == {"T"}, "everything to stop")
    run.process.send_signal(signal.SIGCONT)
    run.wait_until(lambda: states() == {"S"}, "everything to go on")


GRANDCHILD = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL)
open("ready" + os.environ["RANK"], "w").close()
while len([name for name in os.listdir() if name.startswith("ready")]) < 2: time.sleep(0.01)
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("sys.exit(0)", 0)])
def test_what_workers_started_ends_with_them(start: Start, end: str, code: int) -> None:
    run = start(*TWO, script=GRANDCHILD + end)

    assert run.finish()[0] == code
    run.assert_nothing_left(timeout_s=20)


def test_a_stubborn_grandchild_is_killed(start: Start) -> None:
    script = (
        GRANDCHILD.replace('["sleep", "60"]', '["sh", "-c", "trap \'\' TERM; sleep 60"]') + "time.sleep(0.2)"
    )
    run = start(*TWO, script=script)

    assert run.finish()[0] == 0
    run.assert_nothing_left(timeout_s=20)


def test_nothing_outlives_a_launcher_that_is_killed(start: Start) -> None:
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GRANDCHILD + "time.sleep(60)"
    run = start(*TWO, script=script)
    wait_for_workers(run)
    run.process.kill()

    run.assert_nothing_left(timeout_s=20)


def test_workers_end_even_if_the_guard_was_killed_first(start: Start) -> None:
    run = start(*TWO, script=WAIT)
    wait_for_workers(run)
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    (guard,) = [
        pid for pid in map(int, children) if b"accel_launch.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(guard, signal.SIGKILL)
    time.sleep(0.1)
    assert run.process.poll() is None
    run.process.kill()

    run.assert_nothing_left(timeout_s=20)


def test_megabytes_of_output_come_through_whole(start: Start) -> None:
    script = (
        "import os, sys\nline = os.environ['RANK'] * 99 + '\\n'\n"
        "for _ in range(30000):\n    sys.stderr.write(line)\n    sys.stdout.write(line)\n"
    )
    _, out, error = start(*TWO, script=script).finish(60)

    lines = error.splitlines()
    assert sorted(set(lines)) == ["0" * 99, "1" * 99]
    assert [lines.count(digit * 99) for digit in "01"] == [30000, 30000]
    assert len(out) == 2 * 30000 * 100


def test_output_is_not_delayed(start: Start) -> None:
    script = "import sys, time\nprint('now', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    run = start("launch", "--launcher", "local", script=script)

    assert run.process.stderr.readline() == b"now\n"
    assert run.process.poll() is None


def test_tee_shows_the_rank_and_keeps_logs(start: Start) -> None:
    script = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n"
    run = start(*TWO, "--tee", "3", "--log_dir", "logs", "--role", "trainer", script=script)
    code, out, error = run.finish()

    assert code == 0
    assert sorted(out.splitlines()) == ["[trainer0]: out 0", "[trainer1]: out 1"]
    assert sorted(error.splitlines()) == ["[trainer0]: err", "[trainer1]: err"]
    (folder,) = (run.folder / "logs").iterdir()
    assert (folder / "1/stdout.log").read_text() == "out 1\n"
    assert (folder / "0/stderr.log").read_text() == "err\n"


def test_logs_alone_leave_the_console_as_it_is(start: Start) -> None:
    script = "import sys\nprint('out')\nsys.exit('failed')\n"
    run = start("launch", "--log_dir", "logs", script=script)
    code, out, error = run.finish()

    assert (code, out) == (1, "out\n")
    (folder,) = (run.folder / "logs").iterdir()
    assert f"logs: logs/{folder.name}" in error
    assert (folder / "0/stderr.log").read_text() == "failed\n"


def test_closed_standard_streams_do_no_harm(start: Start) -> None:
    # Were the guard's pipe opened under the number of stderr, the workers' output would end the guard.
    def close_all() -> None:
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    script = "import sys\nprint('text', file=sys.stderr)\n" + GRANDCHILD + "time.sleep(60)"
    run = start(*TWO, script=script, preexec_fn=close_all, stdin=None, stdout=None, stderr=None)
    wait_for_workers(run)
    run.process.kill()

    run.assert_nothing_left(timeout_s=20)


def test_on_a_terminal_workers_see_a_terminal(start: Start) -> None:
    ours, terminal = os.openpty()
    script = "import os, sys\nprint(sys.stderr.isatty(), os.get_terminal_size(2), file=sys.stderr)\n"
    run = start("launch", "--launcher", "local", script=script, stderr=terminal)
    os.close(terminal)
    run.process.wait(20)

    assert re.match(rb"True os.terminal_size", os.read(ours, 1000))
    os.close(ours)


def test_the_launcher_ends_at_once_after_the_last_worker(start: Start) -> None:
    script = "import os, time\nprint(time.monotonic(), flush=True)\nos._exit(0)\n"

    def delay(*flags: str) -> float:
        run = start("launch", *flags, script=script)
        out = run.process.stdout.read()
        run.process.wait(20)
        return time.monotonic() - max(map(float, out.split()))

    # A single process has no launcher to wait for: what it takes is the machine's own share.
    delays = [(delay("--num_processes", "2"), delay()) for _ in range(5)]

    assert min(two for two, _ in delays) - min(one for _, one in delays) < 0.2


def test_torch_meets_on_the_reserved_port(start: Start) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(f"done{dist.get_rank()}", "w").write(f"{total.item():g}")
dist.destroy_process_group()
"""
    run = start(*TWO, script=script)
    code, _, error = run.finish(90)

    assert code == 0, error
    assert [(run.folder / f"done{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize(("flags", "reports"), [((), False), (("--watch",), True)])
def test_with_a_watchdog_the_others_have_time_to_report_a_failure(
    start: Start, flags: tuple[str, ...], reports: bool
) -> None:
    script = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    while not pathlib.Path("ready0").exists(): time.sleep(0.01)
    sys.exit(3)
open("ready0", "w").close()
time.sleep(0.5)
sys.stderr.write("Traceback (most recent call last):\\n  File ...\\nRuntimeError: lost\\n")
sys.stderr.write("Watchdog, process 0 of 2: a collective failed here.\\n  process 1: left\\n")
sys.exit(1)
"""
    code, _, error = start(*TWO, *flags, "--grace_period", "20", "script.py", script=script).finish()

    assert code == 3
    assert ("Watchdog, process 0 of 2: a collective failed here.\n  process 1: left\n" in error) == reports
    assert "File ..." not in error  # the traceback of rank 0 is a line of the summary


@pytest.mark.long
def test_a_collective_that_waits_for_a_dead_rank_ends_with_its_traceback(start: Start) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("bad sample")
dist.all_reduce(torch.ones(1))
"""
    run = start(*TWO, script=script)
    code, _, error = run.finish(90)

    assert code == 1
    _, _, summary = error.partition("accel launch: rank 1 of 2")
    assert "ValueError: bad sample\n" in summary
    run.assert_nothing_left()


@pytest.mark.parametrize("delay_s", [0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3])
def test_ctrl_c_at_any_moment_leaves_nothing(start: Start, delay_s: float) -> None:
    run = start("launch", "--num_processes", "2", script=f"import time\n{SLEEP}")
    time.sleep(delay_s)
    run.process.send_signal(signal.SIGINT)
    try:
        code, _, error = run.finish(10)
    except subprocess.TimeoutExpired as lost:
        # Python itself loses an interrupt that comes inside of a finalizer, and says so; a user asks again.
        if b"Exception ignored in" not in (lost.stderr or b""):
            raise
        run.process.send_signal(signal.SIGINT)
        code, _, error = run.finish()
    # Before the launcher's own code runs it is Python's: the signal, or 1 while it imports its site module.
    assert code in (130, -signal.SIGINT) or (code == 1 and "Fatal Python error" in error), error
    run.assert_nothing_left()
