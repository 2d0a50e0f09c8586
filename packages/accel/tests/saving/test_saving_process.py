"""Scripts that save on the main process alone, and those in which a process comes late."""

from __future__ import annotations

import json
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.saving import saving_process
from accel.utils import FullyShardedDataParallelPlugin

SHORT_S = 0.5


@contextmanager
def patience(seconds: float):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving_process, "PATIENCE_S", seconds)
        yield


def make() -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer) -> list[float]:
    accelerator.backward(model(torch.ones(1, 2) + accelerator.process_index).mean())
    optimizer.step()
    optimizer.zero_grad()
    return [value.item() for value in accelerator.unwrap_model(model).weight[0]]


def save_inside(accelerator: Accelerator, folder: str) -> None:
    accelerator.save_state(folder)


def save_if_main(accelerator: Accelerator, folder: str) -> None:
    if not accelerator.is_main_process:
        return
    accelerator.save_state(folder)


def saves_on_main(folder: str) -> tuple[Any, ...]:
    objects = make()
    accelerator, model = objects[:2]

    @accelerator.on_main_process
    def save_decorated() -> None:
        accelerator.save_state(f"{folder}/decorated")

    trained, loaded = [step(*objects)], []
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if accelerator.is_main_process:
            accelerator.save_state(f"{folder}/if")
            accelerator.save_model(model, f"{folder}/model")
        step(*objects)
        if accelerator.is_main_process or accelerator.distributed_type == "DEEPSPEED":
            if not trained[1:]:
                accelerator.save_state(f"{folder}/or", blocking=False)
            accelerator.wait_for_save()
        step(*objects)
        if begin and accelerator.is_main_process:
            save_inside(accelerator, f"{folder}/called")
        step(*objects)
        save_if_main(accelerator, f"{folder}/returned")
        save_decorated()
        is_first = accelerator.process_index == 0
        if is_first:  # nothing says it, but the call
            accelerator.save_state(f"{folder}/said", main_process_only=True)
        step(*objects)
        accelerator.save_state(f"{folder}/all")
        waited = time.monotonic() - begin
        accelerator.load_state(f"{folder}/if")
        loaded.append([value.item() for value in accelerator.unwrap_model(model).weight[0]])
    return trained, loaded, waited, [str(warning.message) for warning in found]


def test_the_main_process_saves_alone_where_the_program_or_the_call_says_so(world, tmp_path: Path):
    main, other = world.run(saves_on_main, str(tmp_path), size=2, timeout_s=100)

    for trained, loaded, waited, _ in (main, other):
        assert loaded == trained == main[0]
        assert waited < saving_process.PATIENCE_S  # for nobody
    of_saving, of_loading = main[3][:-1], main[3][-1]
    assert len(of_saving) == 5  # not where the call says it
    assert all("save_state is called on the main process alone" in text for text in of_saving)
    assert "saved on 1 and loaded on 2 processes" in of_loading
    assert other[3] == []
    names = ("if", "or", "called", "returned", "decorated", "said")
    assert worlds(tmp_path) == {**dict.fromkeys(names, 1), "all": 2}
    assert (tmp_path / "model/model.safetensors").exists()


def comes_late(folder: str) -> tuple[list[Any], ...]:
    objects = make()
    accelerator, model = objects[:2]
    returned = []
    with warnings.catch_warnings(record=True) as found, patience(SHORT_S):
        warnings.simplefilter("always")
        if not accelerator.is_main_process:
            time.sleep(6 * SHORT_S)
        returned.append(accelerator.save_state(f"{folder}/late"))
        step(*objects)
        with patience(100.0):
            if accelerator.is_main_process:
                accelerator.save_state(f"{folder}/lines")
            else:
                accelerator.save_state(f"{folder}/lines")
            if accelerator.is_main_process:
                save_inside(accelerator, f"{folder}/calls")
            else:
                save_inside(accelerator, f"{folder}/calls")
        if not accelerator.is_main_process:
            time.sleep(6 * SHORT_S)
        accelerator.save_model(model, f"{folder}/model")
    return returned, [str(warning.message) for warning in found]


def test_a_process_that_comes_late_is_waited_for(world, tmp_path: Path):
    main, other = world.run(comes_late, str(tmp_path), size=2, timeout_s=100)

    assert main[0] == other[0] == [str(tmp_path / "late")]
    for text, name in zip(main[1], ("save_state", "save_model"), strict=True):
        assert f"waited for 0.5 s in {name}, and these processes have not called it: 1. It" in text
        assert "main_process_only=True" in text
    assert other[1] == []
    assert worlds(tmp_path) == {"late": 2, "lines": 2, "calls": 2}
    assert (tmp_path / "late/random_states_1.pkl").exists()


def says_it_everywhere(folder: str) -> str | None:
    accelerator = make()[0]
    error = None
    try:
        accelerator.save_state(f"{folder}/everywhere", main_process_only=True)
    except ValueError as caught:
        error = str(caught)
    accelerator.wait_for_everyone()
    return error


def test_only_the_main_process_may_say_that_it_is_alone(world, tmp_path: Path):
    main, other = world.run(says_it_everywhere, str(tmp_path), size=2, timeout_s=100)

    assert main is None
    assert "save_state(main_process_only=True) is called on process 1. Call it under `if" in other


def says_it_of_parts(folder: str) -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(ValueError) as error:
        accelerator.save_state(folder, main_process_only=True)
    return str(error.value)


def test_engines_that_need_all_processes_say_so(world, tmp_path: Path):
    for text in world.run(says_it_of_parts, str(tmp_path / "parts"), size=2, timeout_s=100):
        assert "save_state(main_process_only=True): the fsdp2 engine saves on all processes" in text


def worlds(folder: Path) -> dict[str, int]:
    manifests = sorted(folder.glob("*/accel_manifest.json"))
    return {path.parent.name: find(json.loads(path.read_text()), "world_size") for path in manifests}


def find(facts: Any, key: str) -> Any:
    if isinstance(facts, dict):
        return facts.get(key) or next((hit for value in facts.values() if (hit := find(value, key))), None)
    return None
