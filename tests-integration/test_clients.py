"""transformers on accel in the name of accelerate; `hatch run clients:test` does so with more libraries."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from accel import Accelerator, ParallelismConfig, PartialState
from accel.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from repo_checks.documented import client_entries

ROOT = Path(__file__).parents[1]
CLIENTS = (ROOT / "tools/reference/client-imports.txt").read_text()


def test_every_name_that_clients_import_is_there():
    entries = list(client_entries(CLIENTS))
    missing = []
    for entry in entries:
        found = import_module(entry.module)
        for attribute in entry.attributes:
            found = getattr(found, attribute, None)
        if found is None:
            missing.append(entry.name)

    assert len(entries) > 80
    assert missing == []


# What the list takes for members of accelerate's objects: torch.accelerator's functions, a torch.device's
# kind, two that transformers' subclass adds, and one that peft requests and does without.
FOREIGN = {
    *(
        f"accelerator.{name}"
        for name in ("current_accelerator", "device_count", "is_available", "set_device_index", "synchronize")
    ),
    "accelerator.type",
    *("hf_ds_config.dtype", "hf_ds_config.trainer_config_process"),
    "FullyShardedDataParallelPlugin.get_module_class_from_name",
}


def names_that_clients_import() -> dict[str, Any]:
    found = {}
    for entry in client_entries(CLIENTS):
        if len(entry.attributes) == 1:
            found[entry.attributes[0]] = getattr(import_module(entry.module), entry.attributes[0])
    # As transformers imports it.
    return found | {"accelerate_find_executable_batch_size": found["find_executable_batch_size"]}


def listed(kind: str) -> set[str]:
    lines = [line.split(": ", 1)[1] for line in CLIENTS.splitlines() if line.startswith(f"{kind}: ")]
    return {name for line in lines for name in line.split(", ") if name}


def test_every_keyword_argument_that_clients_give_is_taken():
    functions = names_that_clients_import()
    calls = [re.fullmatch(r"(\w+)\((\w+=|\*\*)\)", call).groups() for call in listed("keyword arguments")]
    missing = []
    for name, argument in calls:
        parameters = inspect.signature(functions[name]).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if argument != "**" and not takes_all and argument.rstrip("=") not in parameters:
            missing.append(f"{name}({argument})")

    assert len(calls) > 40
    assert missing == []


@pytest.mark.usefixtures("fresh_state")
def test_every_member_that_clients_use_is_there():
    accelerator = Accelerator(cpu=True)
    deepspeed = DeepSpeedPlugin()
    objects = names_that_clients_import() | {
        "AcceleratorState": accelerator.state,
        "PartialState": PartialState(),
        "accelerator": accelerator,
        "deepspeed_plugin": deepspeed,
        "distributed_state": PartialState(),
        "fsdp_plugin": FullyShardedDataParallelPlugin(),
        "gradient_state": accelerator.gradient_state,
        "hf_ds_config": deepspeed.hf_ds_config,
        "parallelism_config": ParallelismConfig(),
    }
    members = listed("members used")
    missing = set()
    for member in members:
        owner, _, name = member.partition(".")
        if not hasattr(objects[owner], name):
            missing.add(member)

    assert len(members) > 90
    assert missing == FOREIGN


@pytest.mark.timeout(300)
def test_transformers_on_accel():
    switched = [sys.executable, "-m", "accel.drop_in", "-m", "pytest"]
    options = ["-p", "no:cacheprovider", "-n", "0", "-q"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [*switched, *options, "tests-integration/clients/test_transformers.py"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout
