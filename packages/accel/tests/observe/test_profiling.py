"""Profiling through the Accelerator: one process, and two that share nothing but a folder."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import warnings

import pytest
import torch

from accel.accelerator import Accelerator
from accel.observe.profiling import summary as profile_summary
from accel_state.handlers import ProfileKwargs
from accel_state.imports.packages import is_torch_version

pytestmark = [
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle"),
]

WAIT = {"wait": 8, "warmup": 1}


def handler(**options):
    return ProfileKwargs(activities=["cpu"], **options)


def names(path):
    """The names of all events of a trace, which must be JSON."""
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def steps(path):
    return sorted(name for name in names(path) if name.startswith("ProfilerStep"))


# One process


def test_profile_sees_the_operations_and_writes_one_trace_per_process(tmp_path):
    accelerator = Accelerator(kwargs_handlers=[handler(output_trace_dir=str(tmp_path / "new" / "traces"))])

    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)

    assert any("mm" in event.key for event in profiler.key_averages())
    assert [path.name for path in (tmp_path / "new" / "traces").iterdir()] == ["profile_0.json"]
    assert "aten::mm" in names(tmp_path / "new" / "traces" / "profile_0.json")


def test_a_handler_of_the_call_comes_before_the_constructors(tmp_path):
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path / "a"))])

    with accelerator.profile(handler()):
        torch.ones(2) + 1

    assert not (tmp_path / "a").exists()


@pytest.mark.filterwarnings("ignore:with_modules is deprecated:FutureWarning")  # torch 2.15
def test_shapes_memory_stacks_flops_and_modules_are_recorded_as_requested(tmp_path):
    what = ["record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"]
    found = []
    for name, options in [("all", dict.fromkeys(what, True)), ("none", {})]:
        with Accelerator().profile(handler(**options, output_trace_dir=tmp_path / name)) as profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
        (product,) = (event for event in profiler.events() if event.name == "aten::mm")
        of_python = any("test_profiling.py" in event for event in names(tmp_path / name / "profile_0.json"))
        found.append((product.input_shapes, product.self_cpu_memory_usage, product.flops, of_python))
        asked = profiler.record_shapes, profiler.profile_memory, profiler.with_stack, profiler.with_modules
        assert asked == (bool(options),) * 4

    assert found == [([[8, 8], [8, 8]], 256, 2 * 8**3, True), ([], 0, 0, False)]


def test_each_recording_of_a_schedule_has_a_trace_and_the_users_function(tmp_path):
    ready = []

    def own(profiler):
        ready.append(profiler.step_num)
        profiler.export_chrome_trace(str(tmp_path / f"own_{len(ready)}.json"))

    options = handler(
        schedule_option={"skip_first": 1, "wait": 1, "warmup": 1, "active": 2, "repeat": 2},
        on_trace_ready=own,
        output_trace_dir=str(tmp_path / "traces"),
    )
    with Accelerator().profile(options) as profiler:
        for _ in range(12):
            torch.ones(3) + 1
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "last.json.gz"))

    written = {path.name: steps(path) for path in (tmp_path / "traces").iterdir()}
    first, second = [f"ProfilerStep#{step}" for step in (3, 4)], [f"ProfilerStep#{step}" for step in (7, 8)]
    assert written == {"profile_0.json": first, "profile_0_2.json": second}
    assert len(ready) == 2
    assert (steps(tmp_path / "own_1.json"), steps(tmp_path / "own_2.json")) == (first, second)
    with gzip.open(tmp_path / "last.json.gz", "rt") as file:
        assert file.read() == (tmp_path / "traces" / "profile_0_2.json").read_text()


def test_what_was_recorded_before_an_exception_is_written_and_counted(tmp_path, capsys):
    accelerator = Accelerator(kwargs_handlers=[handler(output_trace_dir=str(tmp_path), summary=1)])

    def fail():
        with accelerator.profile():
            torch.ones(3) @ torch.ones(3)
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail()
    assert "aten::dot" in names(tmp_path / "profile_0.json")
    assert capsys.readouterr().out == ""

    with accelerator.profile():  # and the next block starts as usual
        torch.ones(3) + 1
    assert "aten::dot" not in names(tmp_path / "profile_0.json")


def test_a_block_that_ends_before_the_first_recording_says_so(tmp_path):
    options = handler(schedule_option={**WAIT, "active": 1}, output_trace_dir=str(tmp_path), summary=3)

    def run():
        with Accelerator().profile(options) as profiler:
            for _ in range(2):
                profiler.step()

    with pytest.warns(UserWarning, match=r"recorded nothing: the block ended after 2 calls of step\(\)"):
        run()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("schedule", [None, {**WAIT, "active": 1}])
def test_a_second_profiler_inside_is_an_error_and_the_first_continues(tmp_path, schedule):
    accelerator = Accelerator()
    outer = handler(schedule_option=schedule, output_trace_dir=str(tmp_path))
    with warnings.catch_warnings(), accelerator.profile(outer):
        warnings.simplefilter("ignore")  # a schedule that only waits
        with pytest.raises(RuntimeError, match="a profiler is running in this process"):
            accelerator.profile(handler()).__enter__()
        torch.ones(3) @ torch.ones(3)

    assert schedule or "aten::dot" in names(tmp_path / "profile_0.json")


def test_inside_of_torchs_own_profiler_it_is_an_error():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError, match="a profiler is running in this process"):
            Accelerator().profile(handler()).__enter__()
        torch.ones(3) @ torch.ones(3)
    assert "aten::dot" in {event.key for event in profiler.key_averages()}


def test_a_folder_that_cannot_be_written_to_is_an_error_before_the_block(tmp_path):
    (tmp_path / "file").write_text("")
    options = handler(output_trace_dir=str(tmp_path / "file" / "traces"))
    with pytest.raises(OSError, match=r"output_trace_dir='.*traces'\): cannot write traces there \(.*Name a"):
        Accelerator().profile(options).__enter__()


def test_a_trace_that_was_not_written_is_an_error(tmp_path):
    def run():
        with Accelerator().profile(handler(output_trace_dir=str(tmp_path / "traces"))):
            (tmp_path / "traces").rmdir()

    with pytest.raises(OSError, match=r"profile_0\.json could not be written as a whole"):
        run()


def test_an_error_of_the_users_function_is_raised_and_the_next_block_starts():
    """torch 2.13 alone crashes here: it stops twice."""

    def own(profiler):
        raise KeyError("planted")

    def run():
        options = handler(schedule_option={"warmup": 1, "active": 1, "repeat": 2}, on_trace_ready=own)
        with Accelerator().profile(options) as profiler:
            for _ in range(5):
                torch.ones(3) + 1
                profiler.step()

    with pytest.raises(KeyError, match="planted"):
        run()
    with Accelerator().profile(handler()) as profiler:
        torch.ones(3) @ torch.ones(3)
    assert "aten::dot" in {event.key for event in profiler.key_averages()}


# The summary


def test_the_summary_adds_the_recordings_and_counts_self_time(capsys):
    options = handler(
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2}, summary=2, profile_memory=True
    )
    one = torch.ones(500, 500)  # its products take longer than all else, also on a busy machine
    with Accelerator().profile(options) as profiler:
        for _ in range(7):
            for _ in range(3):
                one @ one
            one.neg()
            profiler.step()
    title, head, *rows, total = capsys.readouterr().out.splitlines()

    assert title == "Profile:"
    assert head.split() == ["operator", "calls", "CPU", "ms", "share", "MB"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert next(iter(cells)) == "aten::mm"
    assert len(cells) == 2
    assert (cells["aten::mm"][0], cells["aten::mm"][3]) == ("6", "6.00")
    assert re.fullmatch(r"all \d+ operators +[\d.]+", total)
    shown, whole = sum(float(row[1]) for row in cells.values()), float(total.split()[-1])
    assert 0 < shown <= whole + 0.02


def test_methods_of_objects_are_summed_over_processes_which_have_them_elsewhere(capsys):
    with Accelerator(kwargs_handlers=[handler(with_stack=True, summary=10_000)]).profile() as profiler:
        torch.ones(2, requires_grad=True).sum().backward()

    printed = capsys.readouterr().out
    has_functions = any("run_backward" in event.key for event in profiler.key_averages())
    # Neither 2.10 nor 2.15 averages them.
    if is_torch_version(">=", "2.13") and is_torch_version("<", "2.14"):
        assert has_functions
    assert ("<built-in method run_backward of torch._C._EngineBase object>" in printed) == has_functions
    assert " at 0x" not in printed


def test_the_table_shows_means_the_slowest_process_and_who_is_missing():
    found = {
        0: {"a": [2, 3000.0, 0, 0], "b": [1, 1000.0, 0, 0]},
        2: {"a": [2, 5000.0, 0, 0], "c": [4, 500.0, 0, 0]},
    }
    assert profile_summary.table(found, 2, 3).splitlines() == [
        "Profile of 2 of 3 processes (nothing came from 1):",
        "operator         calls  CPU ms  share              most",
        "a                    2    4.00    84%  5.00 (process 2)",
        "b                    0    0.50    11%  1.00 (process 0)",
        "all 3 operators           4.75",
    ]


def test_the_table_goes_by_the_devices_time_where_there_is_some():
    found = {0: {"launch": [9, 9000.0, 0, 0], "mm": [1, 10.0, 2000.0, 3e6]}}
    assert profile_summary.table(found, 1, 1).splitlines() == [
        "Profile:",
        "operator         calls  device ms  share    MB",
        "mm                   1       2.00   100%  3.00",
        "all 2 operators              2.00",
    ]


# Two processes


def profile_on_each(folder: str) -> str:
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    accelerator = Accelerator()
    rank = accelerator.process_index
    kwargs = handler(
        output_trace_dir=folder, schedule_option={"warmup": 1, "active": 1, "repeat": 2}, summary=30
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), accelerator.profile(kwargs) as profiler:
        for _ in range(5):
            torch.ones(3).sin() if rank == 0 else torch.ones(3).cos()
            torch.ones(3).exp()
            profiler.step()
    return printed.getvalue()


def test_each_process_writes_its_own_events_and_one_table_has_all(world, tmp_path):
    printed, silent = world.run(profile_on_each, str(tmp_path), size=2)

    for rank, own, other in [(0, "aten::sin", "aten::cos"), (1, "aten::cos", "aten::sin")]:
        for number in ("", "_2"):
            found = names(tmp_path / f"profile_{rank}{number}.json")
            assert own in found
            assert other not in found
    assert len(list(tmp_path.iterdir())) == 4
    assert silent == ""
    assert printed.startswith("Profile, means of 2 processes:\n")
    calls = dict(re.findall(r"^(aten::\w+) +(\d+)", printed, flags=re.MULTILINE))
    assert (calls["aten::exp"], calls["aten::sin"], calls["aten::cos"]) == ("2", "1", "1")
    assert re.search(r"^aten::cos .*\(process 1\)$", printed, flags=re.MULTILINE)


def profile_where_one_raises(folder: str) -> tuple[str, list[float]]:
    """Process 1 leaves its block early, and continues with what all do next."""
    accelerator = Accelerator()
    printed = io.StringIO()
    block = accelerator.profile(handler(output_trace_dir=folder, summary=1))
    with contextlib.suppress(KeyError), contextlib.redirect_stdout(printed), block:
        torch.ones(3).exp()
        if accelerator.process_index == 1:
            raise KeyError("planted")
    gathered = accelerator.gather(torch.tensor([float(accelerator.process_index)]))
    return printed.getvalue().partition("\n")[0], gathered.tolist()


def test_an_exception_on_one_process_neither_holds_nor_misleads_the_others(world, tmp_path):
    assert world.run(profile_where_one_raises, str(tmp_path), size=2) == [
        ("Profile, means of 2 processes:", [0.0, 1.0]),
        ("", [0.0, 1.0]),
    ]
    assert all("aten::exp" in names(tmp_path / f"profile_{rank}.json") for rank in (0, 1))


def profile_on_the_main_process(folder: str) -> tuple[str, list[float]]:
    accelerator = Accelerator()
    printed = io.StringIO()
    if accelerator.is_main_process:
        profile_summary.WAIT_S = 0.2
        block = accelerator.profile(handler(output_trace_dir=folder, summary=1))
        with contextlib.redirect_stdout(printed), block:
            torch.ones(3).exp()
        profile_summary.WAIT_S = 60.0
    return printed.getvalue().partition("\n")[0], accelerator.gather(torch.tensor([1.0])).tolist()


def test_one_process_alone_can_profile(world, tmp_path):
    (title, gathered), other = world.run(profile_on_the_main_process, str(tmp_path), size=2)

    assert title == "Profile of 1 of 2 processes (nothing came from 1):"
    assert other == ("", gathered)
    assert gathered == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["profile_0.json"]
