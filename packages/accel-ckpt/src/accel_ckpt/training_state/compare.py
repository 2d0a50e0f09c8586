"""Comparison of a checkpoint with the objects that it is loaded into, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_ckpt import file_names

_PER_RANK = ("random", "gradients", "buffers")
_IN_PARTS = ("sharded", "registered")


@dataclass(frozen=True)
class ExpectedFiles:
    """The objects to restore.

    Args:
        models: How many models.
        optimizers: How many optimizers.
        schedulers: How many schedulers.
        loaders: The names that the file of each loader may have; none for a loader without a state.
        scaler: Whether there is a loss scaler that is in use.
        custom: How many registered objects.
        folders: Names of folders that have models and optimizers in parts.
        skip: Names of files, and roles of files, that the caller reads by itself.
    """

    models: int = 0
    optimizers: int = 0
    schedulers: int = 0
    loaders: Sequence[Sequence[str]] = ()
    scaler: bool = False
    custom: int = 0
    folders: Collection[str] = ()
    skip: Collection[str] = ()


@dataclass
class Findings:
    """The differences, one line each.

    Args:
        core: Without what these name, training would go on from something else than was saved: models,
            optimizers and schedulers that are missing, and an accumulation window that cannot be resumed.
        others: What else is missing, not asked for, or not known.
        notes: What is as it should be, and worth a line in the warning.
    """

    critical: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_files(
    names: Collection[str],
    unlisted: Collection[str],
    facts: dict[str, Any],
    expected: ExpectedFiles,
    rank: int,
    world_size: int,
    listed: Callable[[str], Collection[str]],
) -> Findings:
    """Compare the files of a checkpoint with what they are to be loaded into.

    Args:
        names: Its files.
        unlisted: Files in its folder that are not in its manifest.
        facts: What its manifest says about the run.
        expected: What is to be restored.
        rank: Rank of this process.
        world_size: How many processes there are.
        listed: Returns the files that an index names.
    """
    findings = Findings()
    # `spare` are alternatives that are there beside the file that is loaded,
    # such as .bin beside .safetensors.
    asked, spare = _compare_shared_files(frozenset(names), expected, findings)
    # A model in several files: those that its index names are asked for with it.
    indexes = sorted(filter(file_names.is_index, asked))
    # Not every model has something beside its weights.
    asked.update(map(file_names.extra_state_file, range(expected.models)))
    for index in indexes:
        asked.update(listed(index))
    hooks_read_shards = any(map(file_names.is_index, expected.skip))
    _compare_per_rank_files(frozenset(names), facts, rank, world_size, findings)
    for name in sorted(names):
        role = file_names.role_of(name)
        if name in asked or role in (*_PER_RANK, *_IN_PARTS, *expected.skip):
            continue
        if file_names.is_shard(name) and hooks_read_shards:
            continue
        if file_names.is_shard(name) and indexes:
            findings.others.append(f"{name} is not loaded: {', '.join(indexes)} does not name it")
            continue
        if name in spare:
            findings.others.append(f"{name} is not loaded: {spare[name]} is, in its place")
            continue
        if name in expected.skip:
            findings.notes.append(f"{name} is not loaded: a hook has taken its model out")
            continue
        if role == "other":
            findings.notes.append(f"{name} was written by a hook; no hook is registered that could read it")
        else:
            findings.others.append(f"{name} is not loaded: there is no {_what(name, role)} for it here")
    in_parts = {role for role in _IN_PARTS if role not in expected.skip}
    parts = {name.partition("/")[0] for name in names if file_names.role_of(name) in in_parts}
    findings.notes += [
        f"the folder {name} is not loaded: a hook has taken its model out"
        for name in sorted(parts.intersection(expected.skip))
    ]
    findings.others += [
        f"the folder {name} is not loaded: there is nothing in parts for it here"
        for name in sorted(parts.difference(expected.folders, expected.skip))
    ]
    # Other files, such as a README, are the user's own.
    findings.notes += [
        f"{name} is ignored: it is not in {file_names.MANIFEST}, so it is not part of what was saved"
        for name in sorted(unlisted)
        if file_names.role_of(name) != "other"
    ]
    return findings


def _compare_shared_files(
    names: frozenset[str], expected: ExpectedFiles, findings: Findings
) -> tuple[set[str], dict[str, str]]:
    """Note what is missing; return the names of what is loaded, and what is not by what is in its place."""
    critical = [
        *((f"model {i}", file_names.model_files(i)) for i in range(expected.models)),
        *((f"optimizer {i}", [file_names.optimizer_file(i)]) for i in range(expected.optimizers)),
        *((f"scheduler {i}", [file_names.scheduler_file(i)]) for i in range(expected.schedulers)),
    ]
    others = [
        *((f"loader {i}", files) for i, files in enumerate(expected.loaders) if files),
        *([("the loss scaler", [file_names.SCALER])] if expected.scaler else []),
        *((f"registered object {i}", [file_names.custom_file(i)]) for i in range(expected.custom)),
    ]
    # Any of the alternative names will do; the first that is there is the one that is loaded.
    for needed, missing in ((critical, findings.critical), (others, findings.others)):
        for what, files in needed:
            if names.isdisjoint(files):
                missing.append(f"there is no {' or '.join(files)} for {what}")
    found = [[name for name in files if name in names] for _, files in (*critical, *others)]
    return {there[0] for there in found if there}, {name: there[0] for there in found for name in there[1:]}


def _compare_per_rank_files(
    names: frozenset[str], facts: dict[str, Any], rank: int, world_size: int, findings: Findings
) -> None:
    saved = facts.get("world_size")
    # Without a manifest the number is not known.
    there = world_size if saved is None else saved
    for name in sorted(names):
        role = file_names.role_of(name)
        if role in _PER_RANK and file_names.rank_of(name) >= there:
            findings.others.append(f"{name} is not loaded: it is of none of {there} processes")
        elif role == "gradients" and not facts.get("open_window"):
            findings.others.append(f"{name} is not loaded: no accumulation window was open")
    if saved is None or saved == world_size:
        name = file_names.random_states_file(rank)
        if name not in names:
            findings.others.append(
                f"there is no {name}: the random generators of process {rank} stay as they are"
            )
    else:
        missing = [file_names.random_states_file(r) for r in range(saved)]
        missing = [name for name in missing if name not in names]
        if missing:
            findings.others.append(
                f"there is no {', no '.join(missing)}, which the generators here derive from"
            )
        text = f"saved on {saved} and loaded on {world_size} processes: random generators are "
        findings.notes.append(text + ("derived" if world_size > saved else "those of the first ranks"))
        if any(file_names.role_of(name) == "sampler" for name in names):
            findings.others.append(
                f"the state of a sampler was saved by one of {saved} processes, and may not fit {world_size}"
            )
    if facts.get("open_window") and saved != world_size:
        findings.critical.append(
            f"it was saved in the middle of an accumulation window on {saved} processes, and the gradients "
            f"of {saved} do not fit {world_size}: load it on {saved}, or load one that was saved at the end "
            "of a window"
        )
    elif facts.get("open_window") and file_names.gradients_file(rank) not in names:
        findings.critical.append(
            "it was saved in the middle of an accumulation window, and has no "
            f"{file_names.gradients_file(rank)}: load one that was saved at the end of a window"
        )


def _what(name: str, role: str) -> str:
    names = {"custom": "registered object", "scaler": "loss scaler"}
    return names.get(role, role)
