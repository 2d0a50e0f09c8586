from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state.enums import DistributedType
from accel_state.process.info import ProcessInfo
from accel_state.process.methods import ProcessMethods, describe
from accel_state.process.state import PartialState
from accel_world.pool import World

SIZES = (1, 2, 3, 4)


class Control(ProcessMethods):
    """A process that is somewhere in a run, without one: for what needs no communication."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        kind = DistributedType.NO if size == 1 else DistributedType.MULTI_CPU
        self._process = ProcessInfo(rank, size, local_rank, local_size, torch.device("cpu"), "gloo", kind)

    @property
    def process(self) -> ProcessInfo:
        return self._process


def test_facts_follow_from_the_process() -> None:
    control = Control(rank=3, size=4, local_rank=1, local_size=2)

    assert (control.num_processes, control.process_index, control.local_process_index) == (4, 3, 1)
    assert (control.device, control.backend, control.debug) == (torch.device("cpu"), "gloo", False)
    assert control.distributed_type == DistributedType.MULTI_CPU
    assert control.use_distributed
    assert control.is_last_process
    assert not control.is_main_process
    assert not control.is_local_main_process
    assert control.process.node_rank == 1


def test_mixin_alone_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="ProcessMethods must provide the property `process`"):
        _ = ProcessMethods().device


def test_describe_names_every_fact() -> None:
    text = describe(Control(rank=1, size=2, local_rank=1, local_size=2))

    assert text.splitlines() == [
        "Distributed environment: MULTI_CPU  Backend: gloo",
        "Num processes: 2",
        "Process index: 1",
        "Local process index: 1",
        "Device: cpu",
    ]


def test_print_is_once_per_machine(capsys: pytest.CaptureFixture[str]) -> None:
    Control(rank=2, size=4, local_rank=0, local_size=2).print("first", "on", sep="-", end="!")
    Control(rank=3, size=4, local_rank=1, local_size=2).print("second")

    assert capsys.readouterr().out == "first-on!"


DECORATORS: dict[str, tuple[dict[str, int], list[int]]] = {
    "on_main_process": ({}, [0]),
    "on_local_main_process": ({}, [0, 2]),
    "on_last_process": ({}, [3]),
    "on_process": ({"process_index": 2}, [2]),
    "on_local_process": ({"local_process_index": 1}, [1, 3]),
}


@pytest.mark.parametrize("name", DECORATORS)
@pytest.mark.parametrize("bare", [True, False])
def test_decorators_run_the_function_where_they_say(name: str, bare: bool) -> None:
    options, expected = DECORATORS[name]
    ran = []
    for rank in range(4):
        control = Control(rank=rank, size=4, local_rank=rank % 2, local_size=2)

        def add(first: int, *, second: int) -> int:
            """Add two numbers."""
            return first + second

        decorator = getattr(control, name)
        if bare or name == "on_last_process":
            decorated = decorator(add, **options)
        else:
            decorated = decorator(**options)(add)
        if decorated(1, second=2) == 3:
            ran.append(rank)
        else:
            assert decorated(1, second=2) is None
        assert (decorated.__name__, decorated.__doc__) == ("add", "Add two numbers.")

    assert ran == expected


def test_decorators_ask_at_the_call_not_before() -> None:
    control = Control(rank=1, size=2)
    decorated = control.on_main_process(lambda: "ran")
    control._process = Control(rank=0, size=2).process

    assert decorated() == "ran"


@pytest.mark.parametrize("name", ["on_process", "on_local_process"])
def test_one_process_does_the_work_of_any_index(name: str) -> None:
    assert getattr(Control(), name)(lambda: "ran", 2)() == "ran"


@pytest.mark.parametrize(
    ("name", "option"), [("on_process", "process_index"), ("on_local_process", "local_process_index")]
)
def test_missing_index_is_rejected(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs {option}.*{option}=0"):
        getattr(Control(), name)(print)


def _turns(path: str, local: bool, fails: bool) -> str | None:
    state = PartialState()
    first = state.local_main_process_first() if local else state.main_process_first()
    try:
        with first:
            if state.is_main_process:
                time.sleep(0.1)  # the others would be through by now if they did not wait
            with open(path, "a") as file:
                file.write(f"{state.process_index}\n")
            if fails and state.is_main_process:
                raise OSError("disk full")
    except OSError as error:
        return str(error)
    return None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("local", [True, False])
def test_main_process_goes_first(world: World, tmp_path: Any, size: int, local: bool) -> None:
    path = tmp_path / "order"
    world.run(_turns, str(path), local, False, size=size)

    order = path.read_text().split()
    assert order[0] == "0"
    assert sorted(order) == [str(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_others_continue_when_the_first_fails(world: World, tmp_path: Any, size: int) -> None:
    results = world.run(_turns, str(tmp_path / "order"), False, True, size=size)

    assert results == ["disk full"] + [None] * (size - 1)


def _wait_and_look(path: str) -> bool:
    state = PartialState()
    if state.is_last_process:
        time.sleep(0.1)
        open(path, "w").close()
    state.wait_for_everyone()
    try:
        open(path).close()
    except FileNotFoundError:
        return False
    return True


@pytest.mark.parametrize("size", SIZES)
def test_nobody_passes_before_everyone_is_there(world: World, tmp_path: Any, size: int) -> None:
    assert world.run(_wait_and_look, str(tmp_path / "there"), size=size) == [True] * size


def _wait_without_group() -> str:
    state = PartialState()
    state.wait_for_everyone()  # the other one may still be connecting
    state.destroy_process_group()
    with pytest.raises(RuntimeError) as error:
        state.wait_for_everyone()
    return str(error.value)


def test_waiting_after_the_group_is_gone_is_rejected(world: World) -> None:
    messages = world.run(_wait_without_group)

    assert messages[1].startswith("Process 1 of 2 cannot wait for the others")
    assert "end_training()" in messages[1]


def _split_and_gather(length: int) -> tuple[list[int], list[int]]:
    state = PartialState()
    with state.split_between_processes(list(range(length))) as part:
        gathered: list[Any] = [None] * state.num_processes
        if state.use_distributed:
            dist.all_gather_object(gathered, part)
        else:
            gathered = [part]
    with state.split_between_processes(torch.arange(length), apply_padding=True) as padded:
        blocks = [torch.empty_like(padded) for _ in range(state.num_processes)]
        if state.use_distributed:
            dist.all_gather(blocks, padded)  # possible only because all have one shape
        else:
            blocks = [padded]
    return [item for part in gathered for item in part], torch.cat(blocks)[:length].tolist()


def _split_dictionary(length: int, padding: bool) -> dict[str, Any]:
    inputs = {"ids": torch.arange(length), "more": {"text": [f"{number}" for number in range(length)]}}
    with PartialState().split_between_processes(inputs, apply_padding=padding) as part:
        return {"ids": part["ids"].tolist(), "text": part["more"]["text"]}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_dictionary_is_split_equally_on_every_process(world: World, size: int, padding: bool) -> None:
    length = 4
    parts = world.run(_split_dictionary, length, padding, size=size)
    together = [number for part in parts for number in part["ids"]]

    assert [[f"{number}" for number in part["ids"]] for part in parts] == [part["text"] for part in parts]
    if padding:
        assert {len(part["ids"]) for part in parts} == {-(-length // size)}
        assert together[:length] == list(range(length))
        assert set(together[length:]) <= {length - 1}
    else:
        assert together == list(range(length))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [2, 5, 9])
def test_split_inputs_gather_to_the_inputs(world: World, size: int, length: int) -> None:
    everything = list(range(length))

    assert world.run(_split_and_gather, length, size=size) == [(everything, everything)] * size
