"""What `accel config` writes when every question about an engine is answered with Enter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel_launch.commands.launch import launch_command_parser
from accel_launch.config.ask.questionnaire import ask_all
from accel_launch.config.file import LaunchConfig
from accel_launch.plan.environment import common_environment
from accel_launch.settings.resolve import resolve
from accel_world.warned import warns_once


class Enter:
    """Takes every default, but for what is said to be trained on and how."""

    hint = ""

    def __init__(self, **answers: str) -> None:
        self.answers = answers

    def choose(self, title: str, labels: Sequence[str], default: int) -> int:
        wanted = next((text for word, text in self.answers.items() if word in title), None)
        return default if wanted is None else next(i for i, label in enumerate(labels) if wanted in label)

    def text(self, title: str, default: str, check: Callable[[str], Any]) -> str:
        return "2" if "processes" in title else default


def train() -> tuple[str, float]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with warns_once(UserWarning, match="fsdp_transformer_layer_cls_to_wrap in the config file"):
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        loss = model(torch.ones(2, 4, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.engine.name, float(loss.detach())


@pytest.mark.parametrize(("version", "engine"), [("2: fully_shard", "fsdp2"), ("1: Fully", "fsdp1")])
def test_the_defaults_of_fsdp_train_a_plain_model(world: Any, version: str, engine: str) -> None:
    values = ask_all(Enter(**{"distributed": "(FSDP)", "Which FSDP": version}), gpus=0)
    assert values is not None
    assert values["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    settings = resolve(launch_command_parser().parse_args(["x.py"]), LaunchConfig.from_values(values), {})
    environ = common_environment(settings, {}, gpus=None, threads=None)

    first, second = world.run(train, env=environ, timeout_s=60)

    assert first == second
    assert first[0] == engine
