"""The launch functions start real forks of the test process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accel_launch.errors import LaunchError
from accel_launch.notebook import PrepareForLaunch, debug_launcher, notebook_launcher
from accel_state.process import hooks


def all_ranks(folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    report = [total.item(), torch.get_num_threads(), os.environ["FORK_LAUNCHED"], os.environ["LOCAL_RANK"]]
    Path(folder, str(dist.get_rank())).write_text(repr(report))
    dist.destroy_process_group()


def met_through_the_state(folder: str) -> None:
    from accel_state.process.state import PartialState

    state = PartialState()
    Path(folder, str(state.process_index)).write_text(
        f"{state.num_processes} {state.device} {state.fork_launched}"
    )
    state.wait_for_everyone()  # a process that leaves early takes the connections of the others along


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")


def test_debug_launcher_runs_every_rank_on_the_cpu(tmp_path: Path) -> None:
    before = dict(os.environ)
    debug_launcher(all_ranks, (str(tmp_path),), num_processes=3)

    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        f"[6.0, 1, 'true', '{rank}']" for rank in range(3)
    ]
    assert dict(os.environ) == before


def test_debug_launcher_serves_the_state(tmp_path: Path) -> None:
    debug_launcher(met_through_the_state, (str(tmp_path),))

    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 cpu True"] * 2


def test_forks_may_train_after_the_parent_has(tmp_path: Path) -> None:
    def train() -> None:
        model = torch.nn.Linear(300, 300)
        model(torch.randn(300, 300)).sum().backward()  # wide enough for OpenMP threads

    train()
    debug_launcher(train)
    assert notebook_launcher(train, num_processes=2, use_port="0") is None


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(
        torch.multiprocessing.ProcessRaisedException, match=r"(?s)Process 1 .*ValueError: boom"
    ):
        debug_launcher(fail_on_rank_1)


def test_notebook_launcher_returns_what_rank_0_returned() -> None:
    def train(offset: int) -> list[Any]:
        return [
            int(os.environ["RANK"]) + offset,
            os.environ["ACCELERATE_MIXED_PRECISION"],
            os.environ["WORLD_SIZE"],
        ]

    assert notebook_launcher(train, (5,), 2, "bf16", use_port="0") == [5, "bf16", "2"]


def test_notebook_launcher_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook_launcher(os.getpid, num_processes=2, use_port="0")

    assert list(tmp_path.iterdir()) == []


def leave_one_by_one(folder: str) -> None:
    """Rank 0 ends only when it sees that rank 1 has left."""
    rank = os.environ["RANK"]
    hooks.register(lambda process: None, lambda process: None, leaves=Path(folder, rank).touch)
    until = time.monotonic() + 30
    while rank == "0" and not Path(folder, "1").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_debug_mode_hears_of_the_end_of_each_function(tmp_path: Path) -> None:
    notebook_launcher(leave_one_by_one, (str(tmp_path),), num_processes=2, use_port="0")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_result_that_cannot_be_sent_is_none() -> None:
    def train() -> Any:
        return lambda: None

    with pytest.warns(UserWarning, match=r"cannot be sent back from its process \(function: "):
        assert notebook_launcher(train, num_processes=2, use_port="0") is None


def test_one_process_is_this_one() -> None:
    def train() -> tuple[int, str, Any]:
        return os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"], os.environ.get("RANK")

    assert notebook_launcher(train, num_processes=1, mixed_precision="fp16") == (os.getpid(), "fp16", None)
    assert notebook_launcher(train)[0] == os.getpid()
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def fail_on_both_ranks(folder: str) -> None:
    other = Path(folder, "1")
    if os.environ["RANK"] == "1":
        other.touch()
        raise ValueError("boom")
    while not other.exists():
        time.sleep(0.01)
    raise RuntimeError("[pair.cc:534] Connection closed by peer [::1]:1")


def test_a_failing_rank_of_notebook_launcher_gives_the_launchers_summary(capfd: Any) -> None:
    with pytest.raises(ChildFailedError) as raised:
        notebook_launcher(fail_on_rank_1, num_processes=2, use_port="0")
    lines = str(raised.value).splitlines()

    assert lines[0].startswith("notebook_launcher: rank 1 of 2 on ")
    assert lines[0].endswith(" failed (exit code 1).")
    assert lines[1:3] == ["The end of its stderr:", "Traceback (most recent call last):"]
    assert lines[3:4] == ["  ... 2 frames of accel and torch"]
    assert lines[-1] == "ValueError: boom"
    assert capfd.readouterr().err == ""  # torch's log lines


def fail_beside_one_that_goes_on(folder: str) -> None:
    from accel_state.process.failure import record_uncaught

    record_uncaught()  # as a PartialState does
    child = (
        "from accel_state.process.failure import record_uncaught; record_uncaught(); raise KeyError('child')"
    )
    if os.environ["RANK"] == "0":
        subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL, check=False)
        Path(folder, "ready").touch()
        time.sleep(60)
    while not Path(folder, "ready").exists():
        time.sleep(0.01)
    raise ValueError("the cause")


def test_notebook_launcher_names_the_function_that_raised_and_not_a_child(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as raised:
        notebook_launcher(fail_beside_one_that_goes_on, (str(tmp_path),), num_processes=2, use_port="0")
    text = str(raised.value)

    assert "rank 1 of 2" in text
    assert text.rstrip().endswith("ValueError: the cause")
    assert "KeyError" not in text


def test_notebook_launcher_names_the_cause_and_not_a_lost_connection(tmp_path: Path) -> None:
    for attempt in range(3):  # torch's agent looks at either first
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with pytest.raises(ChildFailedError) as raised:
            notebook_launcher(fail_on_both_ranks, (str(folder),), 2, use_port="0")

        assert "rank 1 of 2" in str(raised.value)
        assert "ValueError: boom\n  then rank 0 lost its connection (" in str(raised.value)


@pytest.mark.parametrize(
    ("end", "text"), [(lambda: sys.exit(3), "exit code 3"), (os.abort, "killed by SIGABRT")]
)
def test_notebook_launcher_says_how_a_rank_ended_without_an_exception(
    end: Callable[[], Any], text: str
) -> None:
    def leave() -> None:
        if os.environ["RANK"] == "1":
            end()
        time.sleep(60)

    with pytest.raises(ChildFailedError, match=rf"rank 1 of 2 on .* failed \({text}\)"):
        notebook_launcher(leave, num_processes=2, use_port="0")


def test_notebook_launcher_leaves_signals_as_they_were() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

    def handlers() -> list[str]:
        return [repr(signal.getsignal(number)) for number in numbers]

    before = handlers()
    assert notebook_launcher(handlers, num_processes=2, use_port="0") == before
    assert handlers() == before


@pytest.mark.usefixtures("fresh_state")
def test_a_process_with_a_state_is_rejected() -> None:
    from accel_state.process.state import PartialState

    PartialState(cpu=True)
    with pytest.raises(LaunchError, match="Restart the kernel, and make the Accelerator inside the function"):
        notebook_launcher(fail_on_rank_1, num_processes=2)
    with pytest.raises(LaunchError, match="Restart the kernel"):
        debug_launcher(fail_on_rank_1)


def test_a_process_with_a_group_is_rejected(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match="has a process group already"):
            debug_launcher(fail_on_rank_1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": 2, "num_nodes": 2, "node_rank": 2}, "node_rank=2"),
        ({"num_processes": 2, "mixed_precision": "fp17"}, "fp17"),
    ],
)
def test_bad_numbers_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        notebook_launcher(fail_on_rank_1, **options)


def test_a_port_in_use_is_rejected() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Port {port} .* is in use"):
            notebook_launcher(fail_on_rank_1, num_processes=2, use_port=str(port))


def test_debug_launcher_needs_a_process() -> None:
    with pytest.raises(LaunchError, match="num_processes=0"):
        debug_launcher(fail_on_rank_1, num_processes=0)


def test_prepare_for_launch_tells_the_rank() -> None:
    def where(*args: int) -> tuple[Any, ...]:
        return os.environ.get("RANK"), os.environ.get("LOCAL_RANK"), os.environ["FORK_LAUNCHED"], args

    assert PrepareForLaunch(where, "MULTI_GPU")(3, 7) == ("3", "3", "true", (7,))
    assert PrepareForLaunch(where)(0) == (None, None, "true", ())
    assert "RANK" not in os.environ
