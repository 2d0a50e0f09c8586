"""Loading the state of a training run: everything is restored or reported."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_ckpt import file_names
from accel_ckpt.background import thread
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.files.digests import plain_file
from accel_ckpt.folder import recovery
from accel_ckpt.folder.all_ranks import all_gather_object, run_on_all_ranks
from accel_ckpt.folder.reader import CheckpointReader, open_checkpoint
from accel_ckpt.training_state.compare import ExpectedFiles, Findings, compare_files
from accel_ckpt.training_state.gradients import different_gradients, set_gradients
from accel_ckpt.training_state.models import compare_models, load_models
from accel_ckpt.training_state.optimizer_groups import inner_optimizer, match_groups, schedulers_of
from accel_ckpt.training_state.rng import get_rng_state, set_rng_state
from accel_ckpt.training_state.rng_resharding import fingerprints, random_states_for
from accel_ckpt.training_state.undo import make_undo, register_undo
from accel_state.logging.warning import warn
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from accel_ckpt.sharded.save_load import ShardedObjects

Folder = str | os.PathLike[str]


def load_accelerator_state(
    input_dir: Folder,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | torch.device | None = None,
    load_kwargs: dict[str, Any] | None = None,
    *,
    custom_objects: Sequence[Any] | None = None,
    process: ProcessInfo | None = None,
    verify: bool = True,
    strict: bool | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load what `save_accelerator_state` has saved. Every process must call it.

    Every file is checked against the manifest before anything changes; the processes of a machine split this
    work. Then the files are compared with the objects, and so are the names and shapes of weights, and the
    groups of
    optimizers: anything missing, unused or unknown is an error in a strict load, and listed in one warning
    otherwise.

    The number of processes may differ from the save where the result is well defined: models, optimizers and
    schedulers are the same on all, the positions of prepared loaders count the samples of all processes, and
    random generators follow the rule of `rng_resharding`.

    Args:
        input_dir: The checkpoint folder.
        models: The models, prepared or not.
        optimizers: The optimizers.
        schedulers: The schedulers.
        dataloaders: The loaders.
        process_index: Rank of this process.
        scaler: The loss scaler of fp16 training.
        map_location: The device that files are read to: "cpu" (the default), "on_device" for this process's
            device, or a device. Models and optimizers copy from there to their own devices.
        load_kwargs: Options of `torch.load` for everything except safetensors; see `tensors.load`.
        custom_objects: The registered objects; None to load them with `load_custom_state`.
        process: This process; by default the current one.
        verify: Whether to check the digests of the files.
        strict: True to raise on any difference, False to restore what matches, with a warning. By default
            strict for folders with a manifest; for folders of another implementation only missing files of
            models, optimizers and schedulers are errors.
        **load_model_func_kwargs: Options of the models' `load_state_dict`.

    Returns:
        {"step": micro-batches in the open accumulation window}, if the folder has it, and under "window" the
        rest of this process's state of it, if the number of processes is that of the save.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        CorruptCheckpointError: If files are missing or changed.
        CheckpointError: If the folder and the objects differ, or another process has failed.
    """
    process = current_process() if process is None else process
    thread.wait()
    reader = open_checkpoint(Path(input_dir), process, map_location, dict(load_kwargs or {}), verify)
    objects = Objects(models, optimizers, schedulers, dataloaders, scaler, custom_objects or ())
    skip = {"custom"} if custom_objects is None else set()
    return restore(
        reader,
        objects,
        process_index,
        process,
        skip=skip,
        strict=strict,
        **load_model_func_kwargs,
    )


@dataclass(frozen=True)
class Objects:
    """The objects that a checkpoint is loaded into; see `load_accelerator_state`."""

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    scaler: torch.amp.GradScaler | None = None
    custom: Sequence[Any] = ()
    sharded: ShardedObjects | None = None  # further models and optimizers, loaded sharded
    optimizer_models: Sequence[torch.nn.Module] = ()  # all models, if some are not loaded here
    is_sharded: bool = False  # whether the models are sharded, however they are loaded

    @property
    def all_models(self) -> Sequence[torch.nn.Module]:
        """All models that may own parameters of the optimizers and gradients."""
        return self.optimizer_models or self.models

    def expected(self, skip: Collection[str]) -> ExpectedFiles:
        """Return the files that they need."""
        # A scaler that is off has an empty state, which torch does not load: load_state_dict returns at once.
        off = self.scaler is not None and not self.scaler.is_enabled()
        return ExpectedFiles(
            models=len(self.models),
            optimizers=len(self.optimizers),
            schedulers=len(self.schedulers),
            loaders=[_loader_files(loader, index) for index, loader in enumerate(self.loaders)],
            scaler=self.scaler is not None and not off,
            custom=len(self.custom),
            folders=[
                *([] if self.sharded is None else [name for _, name in self.sharded.folders()]),
                *(file_names.custom_folder(index) for index in range(len(self.custom))),
            ],
            skip={*skip, *(["scaler"] if off else [])},
        )

    def stateful(self) -> list[tuple[Any, str]]:
        """Return the objects with load_state_dict and one file, with its name, except optimizers."""
        named: list[tuple[Any, str]] = [
            *((item, file_names.scheduler_file(index)) for index, item in enumerate(self.schedulers)),
            *((item, file_names.custom_file(index)) for index, item in enumerate(self.custom)),
        ]
        return [
            *named,
            *([(self.scaler, file_names.SCALER)] if self.scaler and self.scaler.is_enabled() else []),
        ]


def restore(
    reader: CheckpointReader,
    objects: Objects,
    process_index: int,
    process: ProcessInfo,
    *,
    skip: Collection[str] = (),
    strict: bool | None = None,
    only_check: bool = False,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load an opened checkpoint. Every process must call it.

    Args:
        reader: What `open_checkpoint` returned.
        objects: The objects to load it into.
        process_index: Rank of this process.
        process: This process.
        skip: Names of files, and roles of files, that are read elsewhere.
        strict: As for `load_accelerator_state`.
        only_check: Whether to compare the files with the objects, and load nothing.
        **load_model_func_kwargs: As for `load_accelerator_state`.

    Returns:
        As `load_accelerator_state`.

    Raises:
        CheckpointError: As `load_accelerator_state`.
    """
    # Set before `check`: comparing sharded objects is collective, and `check` runs in `run_on_all_ranks`.
    states: dict[str, Any] = {}  # the states to load, by file
    not_loaded: list[Any] = []  # optimizers without a state
    loaders: list[tuple[Any, Any]] = []  # with their states
    compared: Any = None
    if objects.sharded is not None:
        # Takes most of a second to import.
        from accel_ckpt.sharded.save_load import compare_sharded, load_sharded

        compared = compare_sharded(reader.folder, reader.names, objects.sharded, process)
        if strict is False:
            not_loaded += [objects.sharded.optimizers[index] for index in compared.incomplete]

    def check() -> Findings:
        findings = _audit(reader, objects, skip, process_index, process)
        findings.critical += compared.differences if compared is not None else []
        findings.critical += compare_models(reader, objects.models)
        not_loaded.extend(_read_optimizers(reader, objects, skip, states, findings))
        unused = _unused_scheduler_files(reader, objects.schedulers, not_loaded, findings)
        stateful = [name for _, name in objects.stateful() if name in reader.names - unused]
        states.update((name, reader.load(name)) for name in stateful)
        _read_gradients(reader, objects.all_models, process_index, process, states, findings)
        for index, loader in enumerate(objects.loaders):
            if (loadable := _check_loader(reader, loader, index, undo, findings)) is not None:
                loaders.append(loadable)
        _check_findings(reader, findings, strict)
        return findings

    def load_stateful() -> dict[str, Any]:
        # All undo steps are registered before the first load, as a state_dict may be collective.
        for item, name in objects.stateful():
            if name in states:
                register_undo(item, undo)
        for item, name in objects.stateful():
            if name in states:
                item.load_state_dict(states.pop(name))
        result = _set_random(reader, generators, process, findings)
        # Before anything changes for good, as filters may turn a warning into an error.
        _warn_differences(reader, findings, process)
        return result

    def load() -> None:
        options = {**load_model_func_kwargs, **({} if strict is not False else {"strict": False})}
        _load_objects(reader, objects, states, loaders, options, read_directly=not load_model_func_kwargs)
        # Again: loading modules and optimizers may draw random numbers.
        set_rng_state(generators, process)
        if gradients in states:
            set_gradients(objects.all_models, states.pop(gradients))

    # Everything is compared before anything changes, as far as possible. Objects that may still reject their
    # state are loaded before the models, and restored if something fails. The collectives in between have one
    # order.
    gradients = file_names.gradients_file(process_index)
    with ExitStack() as undo:
        undo.callback(set_rng_state, get_rng_state(process), process)
        findings = run_on_all_ranks(check, process, "comparing the checkpoint with the objects")
        if only_check:
            return {}
        generators = _random_states(reader, process_index, process)
        states |= _load_registered(reader, objects, states, process)
        result = run_on_all_ranks(load_stateful, process, "loading the checkpoint")
        if objects.all_models and reader.facts.get("open_window") and gradients not in states:
            result = {"step": 0}  # training starts a new window
        _register_optimizer_undo(objects, undo)
        if objects.sharded is not None and compared is not None:
            load_sharded(reader.folder, objects.sharded, process, compared, strict is not False)
        run_on_all_ranks(load, process, "loading the checkpoint")
        undo.pop_all()
    return result


def load_custom_state(obj: Any, path: Folder, index: int = 0, *, weights_only: bool = True) -> None:
    """Load the state of a registered object.

    Args:
        obj: Anything with a `load_state_dict`.
        path: The checkpoint folder.
        index: Its number.
        weights_only: Whether to reject anything but tensors, arrays and plain containers. False runs code in
            the file.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file contains other objects.
    """
    file = plain_file(recovery.find(Path(path)), file_names.custom_file(index))
    obj.load_state_dict(values.decode(tensors.load(file, map_location="cpu", weights_only=weights_only)))


def _audit(
    reader: CheckpointReader,
    objects: Objects,
    skip: Collection[str],
    process_index: int,
    process: ProcessInfo,
) -> Findings:
    """Compare the existing files with those that the objects need."""
    findings = compare_files(
        reader.names,
        reader.unlisted,
        reader.facts,
        objects.expected(skip),
        process_index,
        process.world_size,
        reader.listed,
    )
    scaler = objects.scaler
    if scaler is not None and not scaler.is_enabled() and reader.load(file_names.SCALER):
        findings.others.append(f"{file_names.SCALER} is not loaded: the loss scaler here is off")
    return findings


def _read_optimizers(
    reader: CheckpointReader,
    objects: Objects,
    skip: Collection[str],
    states: dict[str, Any],
    findings: Findings,
) -> Iterator[Any]:
    """Read the states of optimizers; yield the optimizers without one."""
    for index, optimizer in enumerate(objects.optimizers):
        name = file_names.optimizer_file(index)
        if name in reader.names:
            state, lines = match_groups(name, index, reader.load(name), optimizer, objects.all_models)
            findings.critical += lines
            if lines:
                yield optimizer
            else:
                states[name] = state
        elif not {name, file_names.role_of(name)} & {*skip}:
            yield optimizer


def _register_optimizer_undo(objects: Objects, undo: ExitStack) -> None:
    for item in [
        *objects.optimizers,
        *([] if objects.sharded is None else objects.sharded.optimizers),
    ]:
        if isinstance(optimizer := inner_optimizer(item), torch.optim.Optimizer):
            undo.callback(make_undo(optimizer))


def _load_objects(
    reader: CheckpointReader,
    objects: Objects,
    states: dict[str, Any],
    loaders: Sequence[tuple[Any, Any]],
    options: dict[str, Any],
    read_directly: bool,
) -> None:
    """Load optimizers, models and loaders."""
    for index, optimizer in enumerate(objects.optimizers):
        name = file_names.optimizer_file(index)
        if name in states:
            optimizer.load_state_dict(states.pop(name))
    # Options (`assign`) may replace the model's tensors.
    load_models(reader, objects.models, options, read_directly=read_directly)
    for loader, state in loaders:
        loader.load_state_dict(state)


def _load_registered(
    reader: CheckpointReader, objects: Objects, states: dict[str, Any], process: ProcessInfo
) -> dict[str, Any]:
    """Return the states of registered objects, which may be sharded, by file. Every process must call it."""
    loaded: dict[str, Any] = {}
    if not objects.is_sharded and not any(file_names.role_of(name) == "registered" for name in reader.names):
        return loaded
    # Takes most of a second to import.
    from accel_ckpt.training_state.registered import load_registered_shards

    for index, item in enumerate(objects.custom):
        name = file_names.custom_file(index)
        if name in reader.names:
            folder_and_names = reader.folder, reader.names
            loaded[name] = load_registered_shards(
                item, index, states[name], *folder_and_names, objects.is_sharded, process
            )
    return loaded


def _unused_scheduler_files(
    reader: CheckpointReader, schedulers: Sequence[Any], not_loaded: Sequence[Any], findings: Findings
) -> set[str]:
    """Report the files of schedulers whose optimizers are not loaded: other groups have other rates."""
    names = {
        file_names.scheduler_file(index) for index in schedulers_of(schedulers, not_loaded)
    } & reader.names
    findings.critical += [f"{name} is not loaded: its optimizer is not loaded" for name in sorted(names)]
    return names


def _loader_files(loader: Any, index: int) -> list[str]:
    sampler = getattr(loader, "sampler", None)
    files = []
    if hasattr(loader, "load_state_dict"):
        files.append(file_names.loader_file(index))
    if sampler is not None and hasattr(sampler, "load_state_dict"):
        files.append(file_names.sampler_file(index))
    return files


def _check_loader(
    reader: CheckpointReader, loader: Any, index: int, undo: ExitStack, findings: Findings
) -> tuple[Any, Any] | None:
    """Return the loader or its sampler, with its state, if it must still be loaded."""
    name = next((name for name in _loader_files(loader, index) if name in reader.names), None)
    if name is None:
        return None
    target = loader if name == file_names.loader_file(index) else loader.sampler
    state = reader.load(name)
    loadable = getattr(target, "fitting_state_dict", None)
    try:
        if loadable is not None:
            return target, loadable(state)
        # One that cannot check a state is loaded now, as only loading shows whether it rejects the state.
        register_undo(target, undo)
        target.load_state_dict(state)
    except Exception as error:
        difference = f"{name} does not fit loader {index}, which begins from the start without it"
        findings.critical.append(f"{difference}: {str(error).rstrip('.')}")
    return None


def _read_gradients(
    reader: CheckpointReader,
    models: Sequence[torch.nn.Module],
    process_index: int,
    process: ProcessInfo,
    states: dict[str, Any],
    findings: Findings,
) -> None:
    """Read the gradients of the open accumulation window, if they can be restored."""
    name = file_names.gradients_file(process_index)
    # Gradients of other data shards cannot be used.
    is_same_size = reader.facts.get("world_size") == process.world_size
    if not (models and reader.facts.get("open_window") and name in reader.names and is_same_size):
        return
    gradients = reader.load(name)
    if mismatched := different_gradients(models, gradients):
        findings.critical.append(
            f"{name} has gradients of an open accumulation window for {', '.join(mismatched)}, which the "
            "models do not have in this shape"
        )
    else:
        states[name] = gradients


def _random_states(reader: CheckpointReader, process_index: int, process: ProcessInfo) -> dict[str, Any]:
    """Read the generators of this process, or derive them. Every process calls it, and opens one file."""
    saved = reader.facts.get("world_size", process.world_size)
    # A rank beyond those that saved starts from the file of its rank modulo their number.
    name = file_names.random_states_file(process_index % saved)

    def read() -> dict[str, Any]:
        return reader.load(name) or {}

    states: dict[str, Any] = run_on_all_ranks(read, process, "reading the random generators")
    if process.world_size > saved:
        # Collective: every process of the larger run calls it, even those that keep their own state.
        saved_fingerprints = all_gather_object(fingerprints(states), process)[:saved]
        if all(saved_fingerprints):
            return random_states_for(process_index, states, saved_fingerprints, process)
    # Without the fingerprints of all, new ranks keep their generators.
    return states if process_index < saved else {}


def _set_random(
    reader: CheckpointReader, states: dict[str, Any], process: ProcessInfo, findings: Findings
) -> dict[str, Any]:
    if states and (missing := set_rng_state(states, process)):
        findings.notes.append(f"the random generators saved do not include {', '.join(missing)}")
    step = reader.facts.get("step", states.get("step"))
    result = {} if step is None else {"step": step}
    if "window" in states and reader.facts.get("world_size", process.world_size) == process.world_size:
        result["window"] = states["window"]
    return result


def _check_findings(reader: CheckpointReader, findings: Findings, strict: bool | None) -> None:
    is_strict = reader.has_manifest if strict is None else strict
    fatal = [] if strict is False else findings.critical
    fatal = fatal + (findings.others if is_strict else [])
    if fatal:
        raise CheckpointError(
            f"{reader.folder} and the objects differ: {'; '.join(fatal)}. Load into the objects "
            "that were saved, in the same order; or pass strict=False to restore what matches, with a "
            "warning about the rest."
        )


def _warn_differences(reader: CheckpointReader, findings: Findings, process: ProcessInfo) -> None:
    """Warn of all differences on the main process, and on every other process of its own differences."""
    lines = [*findings.critical, *findings.others, *findings.notes]
    # The main process reports what is the same on all; random generators differ between processes.
    if not process.is_main:
        lines = [line for line in lines if file_names.random_states_file(process.rank) in line]
    if lines:
        warn(
            f"Checkpoint {reader.folder}: {'; '.join(lines)}.", about="run" if process.is_main else "process"
        )
