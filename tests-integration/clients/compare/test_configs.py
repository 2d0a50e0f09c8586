"""Config files go both ways: with those that one side wrote, the other starts scripts in the same way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_launch.config.ask.questionnaire import ask_all
from accel_launch.config.file import LaunchConfig
from accel_state import env

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Written by `accelerate config` of 1.15.0, whose questions were answered by hand; and DeepSpeed's own file.
THERE = Path(__file__).parent / "configs"
ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "multi_cpu": (0, {"processes": "2"}),
    "fsdp1": (2, {"spread": "(FSDP)", "Which FSDP": "1: Fully"}),
    "fsdp2": (2, {"spread": "(FSDP)", "Which FSDP": "2: fully"}),
    "deepspeed": (2, {"spread": "DeepSpeed", "norm": "1.0"}),
    "deepspeed_file": (2, {"spread": "DeepSpeed", "JSON": "zero3.json"}),
}
# What the sides do on purpose: docs/migrate.md, "Launching and settings"; accel counts processes for itself.
OURS = {"ACCELERATE_NUM_PROCESSES", "ACCELERATE_USE_CPU", "ACCELERATE_CONFIG_DS_FIELDS"}
# Nothing is compiled here, and "as torch decides", accel's default for shapes, is no value there.
OURS |= {"ACCELERATE_DYNAMO_USE_DYNAMIC"}


class Answered:
    """Takes the default of every question, but for those that are answered here by a word of their title."""

    hint = ""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def _answer(self, title: str) -> str | None:
        return next((text for word, text in self.answers.items() if word in title), None)

    def choose(self, title: str, labels: Sequence[str], default: int) -> int:
        wanted = self._answer(title)
        return default if wanted is None else next(i for i, label in enumerate(labels) if wanted in label)

    def text(self, title: str, default: str, check: Callable[[str], Any]) -> str:
        return self._answer(title) or default


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of both sides, in one folder."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copy(THERE / "zero3.json", folder)
    for name, (gpus, answers) in ANSWERS.items():
        values = ask_all(Answered(answers), gpus=gpus)
        assert values is not None
        LaunchConfig.from_values(values).write(folder / f"accel_{name}.yaml")
        shutil.copy(THERE / f"{name}.yaml", folder / f"accelerate_{name}.yaml")
    return [str(path) for path in sorted(folder.glob("*.yaml"))]


def differences(found: dict[str, str], expected: dict[str, str]) -> set[str]:
    """The variables whose values, with the defaults of those that are not set, differ."""
    families = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    names = {name for name in env.VARIABLES if name.startswith(families)} - OURS
    return {name for name in names if env.get(name, found) != env.get(name, expected)}


def test_scripts_see_the_same_settings(compared, configs):
    both = compared("configs", "launch", *configs)

    assert {Path(config).stem for config in configs} == both.accel.results.keys()
    engines = {"fsdp": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}
    for name, found in both.accel.results.items():
        expected, kind = both.accelerate.results[name], name.split("_", 1)[1]
        assert differences(found, expected) == set(), name
        assert [env.get(variable, expected) for variable in engines.values()] == [
            kind.startswith(word) for word in engines
        ]
        if kind != "multi_cpu":  # accelerate starts one process, without mpirun
            assert (found["WORLD_SIZE"], found["RANK"]) == (expected["WORLD_SIZE"], expected["RANK"])


def test_keys_that_are_not_there_have_the_same_defaults(compared, tmp_path: Path):
    paths = []
    for version in (1, 2):
        values = {"fsdp_version": version, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
        config = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": values}
        paths.append(tmp_path / f"bare{version}.yaml")
        paths[-1].write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", **config}))
    both = compared("configs", "launch", *map(str, paths))

    for name, found in both.accel.results.items():
        expected = both.accelerate.results[name]
        assert expected["FSDP_MIN_NUM_PARAMS"] == found["FSDP_MIN_NUM_PARAMS"] == "100000000"
        assert differences(found, expected) == set(), name


def test_files_are_rewritten_to_the_same(compared, configs):
    both = compared("configs", "write", *configs)

    converted = {name for name in both.accel.results if name.endswith("fsdp1 to fsdp2")}
    assert len(converted) == 2
    for name in converted:
        assert both.accel.results[name]["fsdp_config"]["fsdp_version"] == 2
        assert both.accel.results[name] == both.accelerate.results[name]
    # accelerate also writes what it takes for defaults.
    for name in ["default", "half", *(name for name in both.accel.results if name.endswith(" updated"))]:
        found, filled = both.accel.results[name], both.accelerate.results[name]
        same = {key: value for key, value in found.items() if key != "use_cpu"}
        assert same == {key: filled[key] for key in same}, name


def test_default_files_start_scripts_equally(compared, configs):
    written = compared("configs", "write", *configs)
    for writer in (written.accel, written.accelerate):
        both = compared("configs", "launch", str(writer.folder / "half.yaml"))
        found, expected = (side.results["half"] for side in (both.accel, both.accelerate))
        assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert differences(found, expected) == set()
