"""Whole states of sharded optimizers: by the names of parameters, as other implementations read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.engines.common.full_state import with_names
from accel.utils import FullyShardedDataParallelPlugin


def stepped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for item in parameters:
        item.grad = torch.ones_like(item)
    optimizer.step()
    return optimizer


def test_parameters_are_called_as_in_their_model():
    first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    optimizer = stepped([second.bias, second.weight])
    state = with_names(optimizer.state_dict(), optimizer, [first, second])

    assert state["param_groups"][0]["params"] == list(state["state"]) == ["bias", "weight"]
    assert state["state"]["bias"] is optimizer.state[second.bias]


def test_numbers_stay_where_names_would_not_be_clear():
    first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    both = stepped([first.weight, second.weight])
    assert with_names(both.state_dict(), both, [first, second]) == both.state_dict()
    own = {"param_groups": [{"lr": 0.1}], "state": {}}  # a form that is not torch's
    assert with_names(own, both, [first, second]) is own


def make(version: int | None, together: bool) -> tuple[Accelerator, list[Any], list[Any]]:
    torch.manual_seed(0)
    plugin = None
    if version is not None:
        own = {"use_orig_params": True} if version == 1 else {}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type="FULL_STATE_DICT", **own
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    # In another order than the modules; an optimizer for each, or one for both.
    groups = [list(model.parameters())[::-1] for model in models]
    if together:
        groups = [groups[0] + groups[1]]
    prepared = accelerator.prepare(*models, *(torch.optim.AdamW(group, lr=0.1) for group in groups))
    return accelerator, prepared[:2], prepared[2:]


def step(accelerator: Accelerator, models: list[Any], optimizers: list[Any]) -> list[torch.Tensor]:
    """Make a step, and return the full weights where they are gathered."""
    for number, model in enumerate(models, 1):
        accelerator.backward((model(torch.linspace(-1, 1, 8).view(2, 4)) * number).square().sum())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return [value for model in models for value in accelerator.get_state_dict(model).values()]


def save(folder: str, version: int, together: bool) -> list[torch.Tensor]:
    run = make(version, together)
    step(*run)
    run[0].save_state(folder)
    expected = step(*run)
    again = make(version, together)
    again[0].load_state(folder)
    assert all(torch.equal(a, b) for a, b in zip(step(*again), expected, strict=True))
    return expected


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize(("version", "together"), [(1, False), (2, False), (2, True)])
def test_a_checkpoint_has_the_documented_form_and_any_engine_reads_it(world, tmp_path, version, together):
    expected = world.run(save, str(tmp_path / "saved"), version, together, size=2)[0]

    names = {path.name for path in (tmp_path / "saved").glob("*model*")}
    assert names == {"pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"}
    files = ["optimizer.bin"] if together else ["optimizer.bin", "optimizer_1.bin"]
    for file in files:
        state = torch.load(Path(tmp_path, "saved", file))
        called = list(range(4)) if together else ["bias", "weight"]
        assert state["param_groups"][0]["params"] == list(state["state"]) == called
    plain = make(None, together)
    with pytest.warns(UserWarning, match="random generators are those of the first ranks"):
        plain[0].load_state(str(tmp_path / "saved"))
    for found, value in zip(step(*plain), expected, strict=True):
        torch.testing.assert_close(found, value)
