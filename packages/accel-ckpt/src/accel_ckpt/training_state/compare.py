"""Comparison of a checkpoint with the objects that it is loaded into, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_ckpt import file_names

_PER_RANK = ("random", "gradients", "buffers")
_SHARDED = ("sharded", "registered")


@dataclass(frozen=True)
class ExpectedFiles:
    """The objects to restore.

    Args:
        models: The number of models.
        optimizers: The number of optimizers.
        schedulers: The number of schedulers.
        loaders: The names that the file of each loader may have; empty for a loader without state.
        scaler: Whether a loss scaler is in use.
        custom: The number of registered objects.
        folders: Names of the folders of sharded models and optimizers.
        skip: Names of files, and roles of files, that are read elsewhere.
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
        critical: Differences that would resume another state than was saved: missing models, optimizers and
            schedulers, and an accumulation window that cannot be resumed.
        others: Other missing, unused or unknown files.
        notes: Expected differences that are worth a line in the warning.
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
    """Compare the files of a checkpoint with the objects that they are loaded into.

    Args:
        names: Its files.
        unlisted: Files in its folder that are not in its manifest.
        facts: The manifest's facts about the run.
        expected: The files to restore.
        rank: Rank of this process.
        world_size: The number of processes.
        listed: Returns the files that an index names.
    """
    findings = Findings()
    # `unused` are alternatives to a file that is loaded, such as .bin next to .safetensors.
    to_load, unused = _compare_shared_files(frozenset(names), expected, findings)
    # With an index, the files that it names are loaded too.
    indexes = sorted(filter(file_names.is_index, to_load))
    # Not every model has extra state.
    to_load.update(map(file_names.extra_state_file, range(expected.models)))
    for index in indexes:
        to_load.update(listed(index))
    hooks_read_shards = any(map(file_names.is_index, expected.skip))
    _compare_per_rank_files(frozenset(names), facts, rank, world_size, findings)
    for name in sorted(names):
        role = file_names.role_of(name)
        if name in to_load or role in (*_PER_RANK, *_SHARDED, *expected.skip):
            continue
        if file_names.is_shard(name) and hooks_read_shards:
            continue
        if file_names.is_shard(name) and indexes:
            findings.others.append(f"{name} is not loaded: {', '.join(indexes)} does not name it")
            continue
        if name in unused:
            findings.others.append(f"{name} is not loaded: {unused[name]} is loaded instead")
            continue
        if name in expected.skip:
            findings.notes.append(f"{name} is not loaded: a hook has removed its model")
            continue
        if role == "other":
            findings.notes.append(f"{name} was written by a hook; no registered hook reads it")
        else:
            findings.others.append(f"{name} is not loaded: there is no {_role_name(name, role)} for it here")
    sharded_roles = {role for role in _SHARDED if role not in expected.skip}
    folders = {name.partition("/")[0] for name in names if file_names.role_of(name) in sharded_roles}
    findings.notes += [
        f"the folder {name} is not loaded: a hook has removed its model"
        for name in sorted(folders.intersection(expected.skip))
    ]
    findings.others += [
        f"the folder {name} is not loaded: there is nothing sharded for it here"
        for name in sorted(folders.difference(expected.folders, expected.skip))
    ]
    # Other files, such as a README, belong to the user.
    findings.notes += [
        f"{name} is ignored: it is not in {file_names.MANIFEST}, so it was not saved with the checkpoint"
        for name in sorted(unlisted)
        if file_names.role_of(name) != "other"
    ]
    return findings


def _compare_shared_files(
    names: frozenset[str], expected: ExpectedFiles, findings: Findings
) -> tuple[set[str], dict[str, str]]:
    """Record missing files; return the files to load, and unused alternatives with the file used instead."""
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
    # Any of the alternative names is enough; the first existing one is loaded.
    for needed, missing in ((critical, findings.critical), (others, findings.others)):
        for what, files in needed:
            if names.isdisjoint(files):
                missing.append(f"there is no {' or '.join(files)} for {what}")
    existing = [[name for name in files if name in names] for _, files in (*critical, *others)]
    to_load = {files[0] for files in existing if files}
    return to_load, {name: files[0] for files in existing for name in files[1:]}


def _compare_per_rank_files(
    names: frozenset[str], facts: dict[str, Any], rank: int, world_size: int, findings: Findings
) -> None:
    saved = facts.get("world_size")
    # Without a manifest the number is unknown.
    saving_ranks = world_size if saved is None else saved
    for name in sorted(names):
        role = file_names.role_of(name)
        if role in _PER_RANK and file_names.rank_of(name) >= saving_ranks:
            findings.others.append(
                f"{name} is not loaded: it belongs to none of the {saving_ranks} processes that saved"
            )
        elif role == "gradients" and not facts.get("open_window"):
            findings.others.append(f"{name} is not loaded: no accumulation window was open")
    if saved is None or saved == world_size:
        name = file_names.random_states_file(rank)
        if name not in names:
            findings.others.append(
                f"there is no {name}: the random generators of process {rank} are unchanged"
            )
    else:
        missing = [file_names.random_states_file(r) for r in range(saved)]
        missing = [name for name in missing if name not in names]
        if missing:
            findings.others.append(
                f"there is no {', no '.join(missing)}, from which the generators here are derived"
            )
        text = f"saved on {saved} and loaded on {world_size} processes: random generators are "
        findings.notes.append(text + ("derived" if world_size > saved else "those of the first ranks"))
        if any(file_names.role_of(name) == "sampler" for name in names):
            findings.others.append(
                f"the state of a sampler was saved by one of {saved} processes, and may not fit {world_size}"
            )
    if facts.get("open_window") and saved != world_size:
        findings.critical.append(
            f"it was saved in the middle of an accumulation window on {saved} processes, and their gradients "
            f"cannot be used on {world_size}: load it on {saved}, or load one that was saved at the end of a "
            "window"
        )
    elif facts.get("open_window") and file_names.gradients_file(rank) not in names:
        findings.critical.append(
            "it was saved in the middle of an accumulation window, and has no "
            f"{file_names.gradients_file(rank)}: load one that was saved at the end of a window"
        )


def _role_name(name: str, role: str) -> str:
    names = {"custom": "registered object", "scaler": "loss scaler"}
    return names.get(role, role)
