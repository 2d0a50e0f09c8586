"""One program on accel in the place of accelerate, and on accelerate itself: the same results and files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from accel_world.launched import LaunchedRun

__all__ = ["PYTHON", "Compared", "Side", "assert_close", "compare"]

PYTHON = "REAL_ACCELERATE_PYTHON"  # the python of the environment `accelerate`; set by hatch.toml
TIMEOUT_S = 550.0  # on a busy machine imports alone take minutes
# DeepSpeed, which accelerate imports, looks for a GPU otherwise.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Side:
    """One run of the program."""

    folder: Path  # where the program wrote
    run: LaunchedRun

    @property
    def results(self) -> dict[str, Any]:
        """What the program wrote in results.json."""
        results: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return results

    def files(self, *patterns: str, but: Sequence[str] = ()) -> list[str]:
        """Return the sorted names of the files, from the folder, that match one of the patterns, or all."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        names = sorted(path.relative_to(self.folder).as_posix() for path in paths)
        return [name for name in names if _matches(name, patterns or ["*"]) and not _matches(name, but)]


@dataclass(frozen=True)
class Compared:
    """Both runs of the program."""

    accel: Side
    accelerate: Side

    def assert_same_results(self, *keys: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Check that the results are equal, numbers to a tolerance.

        Args:
            *keys: Compare only this entry of the results, as in results["train"]["losses"].
            rtol: The relative tolerance of numbers.
            atol: The absolute tolerance of numbers.
        """
        __tracebackhide__ = True
        found, expected = self.accel.results, self.accelerate.results
        for key in keys:
            found, expected = found[key], expected[key]
        assert_close(found, expected, rtol=rtol, atol=atol, where=".".join(keys) or "results")

    def assert_same_files(self, *patterns: str, but: Sequence[str] = ()) -> None:
        """Check that both runs left files of the same names.

        Args:
            *patterns: Which files to compare, as in "checkpoint-*/*.json"; by default all.
            but: Which of these to leave out.
        """
        __tracebackhide__ = True
        found = self.accel.files(*patterns, but=but)
        expected = self.accelerate.files(*patterns, but=but)
        assert expected, f"accelerate's run left no files {patterns or ''} in {self.accelerate.folder}"
        assert found == expected

    def assert_same_tensors(
        self, *patterns: str, but: Sequence[str] = (), rtol: float = 1e-5, atol: float = 1e-6
    ) -> None:
        """Check that the safetensors files of these names have the same tensors.

        Args:
            *patterns: Which files, as in "checkpoint-*/*.safetensors".
            but: Names of tensors that only accelerate's files have.
            rtol: The relative tolerance.
            atol: The absolute tolerance.
        """
        from safetensors.torch import load_file

        __tracebackhide__ = True
        self.assert_same_files(*patterns)
        for name in self.accelerate.files(*patterns):
            found, expected = load_file(self.accel.folder / name), load_file(self.accelerate.folder / name)
            assert sorted([*found, *but]) == sorted(expected), name
            for key in found:
                value = expected[key]
                assert found[key].dtype == value.dtype, f"{name}: {key}"
                difference = (found[key].double() - value.double()).abs()
                allowed = atol + rtol * value.double().abs()
                assert (difference <= allowed).all(), f"{name}: {key} differs by {difference.max()}"


def compare(
    launched: Callable[..., LaunchedRun],
    folder: Path,
    program: Path,
    *arguments: str,
    processes: int = 1,
    own_launcher: bool = False,
    launch_args: Sequence[str] = (),
) -> Compared:
    """Run a program on both sides, one after the other.

    Args:
        launched: The fixture of this name.
        folder: An empty folder; each side writes in its own below it.
        program: A script that imports accelerate, or a client of it, and knows nothing of accel. Its first
            argument is the folder to write in; it writes its results there, in results.json.
        *arguments: The script's other arguments.
        processes: How many processes to start; several by `accel launch --drop-in`, and by torchrun.
        own_launcher: Start several processes by `accelerate launch` instead of torchrun.
        launch_args: Further arguments of both launchers, such as ("--config_file", path).

    Returns:
        Both runs, which ended well.
    """
    __tracebackhide__ = True
    python = os.environ.get(PYTHON)
    if not python or not Path(python).exists():
        raise AssertionError(
            f"{PYTHON} is {python!r}; it must be the python of the environment that has accelerate itself. "
            "Run this test with `hatch run clients:test`, or `hatch run clients:whole PATH`, which set it."
        )
    starts: dict[str, dict[str, Any]]
    if processes == 1:
        starts = {
            "accel": {"launcher": "python", "launch_args": ["-m", "accel.drop_in"]},
            "accelerate": {"launcher": "python", "python": python},
        }
    else:
        # With --cpu accelerate's launcher starts several processes only by mpirun.
        theirs = launch_args or ["--multi_gpu"] if own_launcher else launch_args
        starts = {
            "accel": {"launcher": "accel", "launch_args": ["--drop-in", "--cpu", *launch_args]},
            "accelerate": {
                "launcher": "accelerate" if own_launcher else "torchrun",
                "launch_args": theirs,
                "python": python,
            },
        }
    sides = {}
    for name, start in starts.items():
        target = folder / name
        target.mkdir()
        run = launched(
            program,
            str(target),
            *arguments,
            **start,
            num_processes=processes,
            env=_without_switch() | ENVIRONMENT | {"PYTHONPATH": str(program.parent)},
            timeout_s=TIMEOUT_S,
        )
        assert run.returncode == 0, f"{program.name} failed on {name}:\n{run.stdout}\n{run.stderr}"
        assert (target / "results.json").is_file(), f"{program.name} wrote no results.json on {name}"
        sides[name] = Side(target, run)
    return Compared(**sides)


def assert_close(found: Any, expected: Any, *, rtol: float, atol: float, where: str) -> None:
    """Check that two values read from JSON are equal, numbers to a tolerance.

    Args:
        found: The value to check.
        expected: The value that it must have.
        rtol: The relative tolerance of numbers.
        atol: The absolute tolerance of numbers.
        where: What the value is, for the message.
    """
    __tracebackhide__ = True
    if isinstance(expected, float) and type(found) in (int, float):
        same = math.isclose(found, expected, rel_tol=rtol, abs_tol=atol)
        assert same or (math.isnan(found) and math.isnan(expected)), f"{where}: {found} is not {expected}"
        return
    assert type(found) is type(expected), f"{where}: {found!r} is not {expected!r}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{where}: the keys {list(found)} are not {list(expected)}"
        for key, value in expected.items():
            assert_close(found[key], value, rtol=rtol, atol=atol, where=f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{where}: {found} is not {expected}"
        for index, value in enumerate(expected):
            assert_close(found[index], value, rtol=rtol, atol=atol, where=f"{where}[{index}]")
    else:
        assert found == expected, f"{where}: {found!r} is not {expected!r}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _without_switch() -> dict[str, str | None]:
    """Undo what `accel.drop_in` set for this process: it would reach the program that runs on accelerate."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    kept = [folder for folder in folders if not folder.endswith(os.path.join("drop_in", "bin"))]
    return {"ACCEL_DROP_IN": None, "ACCEL_DROP_IN_PYTHON": None, "PATH": os.pathsep.join(kept)}
