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
from accel.saving import savers

SHORT_S = 0.5


@contextmanager
def patience(seconds: float = 100.0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(savers, "PATIENCE_S", seconds)
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


def saves_on_main(folder: str) -> tuple[list[Any], ...]:
    objects = make()
    accelerator, model = objects[:2]
    trained, waited, loaded = [], [], []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for count in range(3):
            trained.append(step(*objects))
            begin = time.monotonic()
            if accelerator.is_main_process:
                with patience(SHORT_S if not count else 100):  # not for the second time
                    accelerator.save_state(f"{folder}/{count}")
                    accelerator.save_model(model, f"{folder}/model")
            waited.append(time.monotonic() - begin)
        step(*objects)
        with patience():
            accelerator.save_state(f"{folder}/all")
        for count in range(3):
            accelerator.load_state(f"{folder}/{count}")
            loaded.append([value.item() for value in accelerator.unwrap_model(model).weight[0]])
    told = [str(warning.message) for warning in found]
    return trained, loaded, waited, told


def test_the_main_process_saves_alone_where_the_others_do_not_come(world, tmp_path: Path):
    main, other = world.run(saves_on_main, str(tmp_path), size=2, timeout_s=100)

    for trained, loaded, _, _ in (main, other):
        assert loaded == trained == main[0]
    told, of_loading = main[3][:2], main[3][2:]
    for text, name in zip(told, ("save_state", "save_model"), strict=True):
        assert f"the main process calls {name}, and the others have not within 0.5 s" in text
    assert all("saved on 1 and loaded on 2 processes" in text for text in of_loading)
    assert other[3] == []
    assert main[2][0] > 2 * SHORT_S  # once at each line
    assert max(main[2][1:]) < 100
    assert worlds(tmp_path) == {"0": 1, "1": 1, "2": 1, "all": 2}
    assert (tmp_path / "model/model.safetensors").exists()


def comes_late(folder: str) -> tuple[list[Any], ...]:
    objects = make()
    accelerator = objects[0]
    returned = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for count in range(3):
            if not accelerator.is_main_process and not count:
                time.sleep(6 * SHORT_S)
            with patience(SHORT_S if not count else 100):
                returned.append(accelerator.save_state(f"{folder}/{count}"))
            step(*objects)
        with patience():
            if accelerator.is_main_process:
                accelerator.save_state(f"{folder}/lines")
            else:
                accelerator.save_state(f"{folder}/lines")
    return returned, [str(warning.message) for warning in found]


def test_a_process_that_comes_late_is_told_and_the_next_save_has_all(world, tmp_path: Path):
    main, other = world.run(comes_late, str(tmp_path), size=2, timeout_s=100)

    assert main[0] == other[0] == [str(tmp_path / str(count)) for count in range(3)]
    assert "it saves alone" in main[1][0]
    assert "process 1 calls save_state after" in other[1][0]
    assert (len(main[1]), len(other[1])) == (1, 1)
    # The last is called at one line by each process.
    assert worlds(tmp_path) == {"0": 1, "1": 2, "2": 2, "lines": 2}


def worlds(folder: Path) -> dict[str, int]:
    manifests = sorted(folder.glob("*/accel_manifest.json"))
    return {path.parent.name: find(json.loads(path.read_text()), "world_size") for path in manifests}


def find(facts: Any, key: str) -> Any:
    if isinstance(facts, dict):
        return facts.get(key) or next((hit for value in facts.values() if (hit := find(value, key))), None)
    return None
