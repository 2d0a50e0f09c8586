"""Random histories of runs in one project folder; test_checkpoint_histories.py starts it.

Usage: checkpoint_histories.py <folder> <examples>. Processes that are killed are forked, so that torch is
imported once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from interrupted_run import Injection, ended

from accel.accelerator import Accelerator
from accel_ckpt.config import ProjectConfiguration
from accel_ckpt.file_names import custom_file, iteration_of
from accel_ckpt.files import tensors
from accel_ckpt.folder import manifest, rotation


class Value:
    """What is saved: one number, another one at each save."""

    number = -1

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


@dataclass
class History:
    """A project folder, and what must be in it.

    Args:
        project: The folder.
        committed: Name and number of each checkpoint that is there, in the order of the commits.
        saves: The number of the last save.
        sealed: That of the last one that was killed when all was written and nothing committed: the next save
            may commit it before its own.
    """

    project: Path
    committed: list[tuple[str, int]] = field(default_factory=list)
    saves: int = 0
    sealed: int | None = None

    def begin(self, limit: int | None, iteration: int) -> None:
        """A process starts, and loads nothing."""
        naming = ProjectConfiguration(
            str(self.project), automatic_checkpoint_naming=True, total_limit=limit, iteration=iteration
        )
        self.accelerator, self.value = Accelerator(cpu=True, project_config=naming), Value()
        self.accelerator.register_for_checkpointing(self.value)

    def save(self, blocking: bool) -> None:
        before = self.names()
        self.saves += 1
        self.value.number = self.saves
        saved = Path(self.accelerator.save_state(blocking=blocking))
        self.accelerator.wait_for_save()
        above = [iteration_of(name) for name in before]
        assert saved.is_dir(), f"{saved} was told and is not there"
        assert all(number < iteration_of(saved.name) for number in above if number is not None)
        self.committed.append((saved.name, self.saves))
        limit = self.accelerator.project_configuration.total_limit
        self.committed = self.committed[-limit:] if limit else self.committed

    def save_and_be_killed(self, at: int) -> None:
        """Another process saves as this one would, and is killed at some point of it, or just ends."""
        self.saves += 1
        pid = os.fork()
        if pid == 0:
            try:
                self.value.number = self.saves
                Injection(at, "kill")
                self.accelerator.save_state()
            finally:
                os._exit(0)
        assert ended(pid, 60) in (0, -signal.SIGKILL)
        complete = {path.name for path in rotation.checkpoints(self.root)}
        known = {name for name, _ in self.committed}
        limit = self.accelerator.project_configuration.total_limit
        if new := complete - known:
            name = new.pop()
            assert not new
            number = tensors.load(self.root / name / custom_file(0))["number"]
            assert number in (self.saves, self.sealed)
            self.committed += [(name, number)]
        else:
            limit = None  # nothing goes before the new one is there
        spared = self.committed[-limit:] if limit else self.committed
        assert {name for name, _ in spared} <= complete
        self.committed = [entry for entry in self.committed if entry[0] in complete]
        if any(manifest.is_complete(path) for path in self.root.glob(".*.staging-*")):
            self.sealed = self.saves

    def load(self, which: int) -> None:
        """Load one of those that are there, by its name."""
        if self.committed:
            name, number = self.committed[which % len(self.committed)]
            self.accelerator.load_state(str(self.root / name))
            assert self.value.number == number

    def strip(self) -> None:
        """Make the checkpoints those of an earlier version, if their names tell their order."""
        numbers = [iteration_of(name) or 0 for name, _ in self.committed]
        if numbers == sorted(numbers):
            for name, _ in self.committed:
                described = manifest.read(self.root / name)
                assert described is not None
                facts = {key: value for key, value in described.facts.items() if key != "sequence"}
                manifest.write(self.root / name, manifest.Manifest(described.files, facts))

    def check(self) -> None:
        """The newest commit is there, and what a new process loads."""
        assert [path.name for path in rotation.checkpoints(self.root)] == [name for name, _ in self.committed]
        if self.committed:
            before = self.accelerator, self.value
            self.begin(None, 0)
            self.accelerator.load_state()
            assert self.value.number == self.committed[-1][1]
            self.accelerator, self.value = before

    @property
    def root(self) -> Path:
        return self.project / "checkpoints"

    def names(self) -> list[str]:
        return os.listdir(self.root) if self.root.is_dir() else []


limits = st.none() | st.integers(1, 3)
begins = st.tuples(st.just("begin"), limits, st.sampled_from([0, 0, 0, 2, 5]))
steps = st.one_of(
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.just("save"), st.booleans()),
    begins,
    st.tuples(st.just("load"), st.integers(0, 5)),
    st.tuples(st.just("save_and_be_killed"), st.integers(0, 45)),
    st.tuples(st.just("strip")),
)


def main() -> None:
    base, examples = Path(sys.argv[1]), int(sys.argv[2])
    Accelerator(cpu=True).save_state(str(base / "first"))  # imports what is imported on first use

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(begins, st.lists(steps, min_size=3, max_size=12))
    def hold(first: tuple, following: list[tuple]) -> None:
        shutil.rmtree(base / "project", ignore_errors=True)
        history = History(base / "project")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*has checkpoints that this run has neither saved nor loaded")
            for name, *arguments in (first, *following):
                note(f"{name} {arguments}: {history.committed}")
                getattr(history, name)(*arguments)
                history.check()

    hold()


if __name__ == "__main__":
    main()
