"""Loading weight files into a model: file by file, each weight onto its device in a device map."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.files.digests import regular_file
from accel_ckpt.files.paths import listed_file
from accel_ckpt.files.safetensors_header import shortened
from accel_ckpt.weights.files import WeightFile, find_extra_state, find_weight_files
from accel_ckpt.weights.model_tensors import ModelTensors, without_wrapper_names
from accel_ckpt.weights.offload import load_offloaded_weight, replace_offloaded
from accel_ckpt.weights.placement import DeviceMap, WeightPlacement, device_for, memory_device
from accel_ops.modules import extract_model_from_parallel, model_has_dtensor
from accel_state.logging.warning import warn
from accel_state.process.state import current_process

__all__ = [
    "device_for",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_placed",
    "load_state_dict",
]

Folder = str | os.PathLike[str]
# By name in the model: the mapping that has a weight, and its name there.
Offloaded = dict[str, tuple[Mapping[str, torch.Tensor], str]]

_logger = logging.getLogger(__name__)


def load_state_dict(checkpoint_file: Folder, device_map: DeviceMap | None = None) -> dict[str, torch.Tensor]:
    """Read one file of weights.

    Args:
        checkpoint_file: A safetensors file, by its suffix, or else one of `torch.save`.
        device_map: Device by name of a module or weight, "" for all; the longest matching name decides.
            Weights of safetensors are moved there; those of "disk" and those without an entry stay on the
            CPU, as do all of a torch file.

    Returns:
        Tensors by name.

    Raises:
        CheckpointError: If the file is damaged, contains more than tensors and plain containers, or is not a
            dict.
    """
    state = _read(checkpoint_file)
    if device_map is None or not str(checkpoint_file).endswith(".safetensors"):
        return state
    moved: dict[tuple[int, str], torch.Tensor] = {}
    for name, value in state.items():
        device = memory_device(device_for(name, device_map, default="cpu"))
        # A tensor with two names stays one tensor on each device.
        state[name] = moved.setdefault((id(value), device), value if device == "cpu" else value.to(device))
    return state


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: Folder,
    device_map: DeviceMap | None = None,
    offload_folder: Folder | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load the weights that `save_model` wrote, or another tool under the same file names.

    Names and shapes are compared before the model changes. At most one file is open at a time, and it is
    mapped rather than read where its format allows.

    Args:
        model: The model. Parameters on the meta device are replaced; others are loaded in place, unless a
            device map moves them. Offloaded ones get the values where they are stored: in memory, in the
            folder, or, if they were read in place, in the safetensors file of the checkpoint.
        checkpoint: A file of weights, an index of any name (`weight_map`, or only that mapping), or a
            folder with a file or an `.index.json`. A weight is read from the file that the index names
            for it; copies in other files are ignored.
        device_map: Device by name of a module or weight, "" for the full model; it must cover all weights.
            Weights of "disk" are written to `offload_folder`, and are on the meta device in the model. Tied
            weights stay tied, and in memory if one of their names is.
        offload_folder: The folder for "disk", as `offload_state_dict` writes them: in the dtype of the
            checkpoint. It is created if needed, and its other weights are kept.
        dtype: The dtype of floating-point parameters and buffers, such as `torch.bfloat16` or "bfloat16". By
            default that of the model.
        offload_state_dict: Keep weights on the disk until each is placed. The mapped files already do this,
            so it has no effect.
        offload_buffers: Write the buffers of modules on "disk" there too. By default they go to the CPU.
        keep_in_fp32_modules: Names of modules, or the ends of their dotted paths, that are float32 regardless
            of `dtype`.
        offload_8bit_bnb: Not supported: `accel.utils.load_and_quantize_model` quantizes models while they
            are loaded.
        strict: Whether to raise for missing and unexpected weights; by default missing ones are warned of,
            and unexpected ones are logged.
        full_state_dict: Whether each process's files have full tensors, of which a sharded model takes its
            shard; if False, they have that process's shards as DTensors. No effect on other models.
        broadcast_from_rank0: Only the main process reads the files, and broadcasts the weights.

    Raises:
        FileNotFoundError: If there are no weights at `checkpoint`.
        ValueError: If `device_map` does not cover a weight, or has "disk" and there is no `offload_folder`;
            or `dtype` is unknown; or a weight would replace one that another model reads from the folder.
        TypeError: If `device_map` is not a mapping.
        RuntimeError: If a shape differs; or names differ and `strict` is set; or `device_map` or `dtype`
            would change a weight that hooks have offloaded.
        CheckpointError: If a file is damaged, or not a regular file, or an index leads out of its folder; it
            names the file.
        NotImplementedError: If `offload_8bit_bnb` is set.
    """
    if offload_8bit_bnb:
        raise NotImplementedError(
            "offload_8bit_bnb=True: weights that bitsandbytes quantized are not offloaded. Quantize a model "
            "while it is loaded, with accel.utils.load_and_quantize_model, which takes a device_map too."
        )
    placement = WeightPlacement.from_options(
        device_map, offload_folder, dtype, offload_buffers, keep_in_fp32_modules
    )
    load_placed(model, checkpoint, placement, strict, full_state_dict, broadcast_from_rank0)


def load_placed(
    model: torch.nn.Module,
    checkpoint: Folder,
    placement: WeightPlacement,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load weights as `load_checkpoint_in_model` does, with a given placement.

    Weights of "cpu" that are read in place are mapped, and read when used; writes to them are private.

    Args:
        model: The model.
        checkpoint: A file, an index or a folder.
        placement: The placement of weights; has the entries of those on the disk afterwards.
        strict: Whether names must match.
        full_state_dict: Whether each process's files have full tensors.
        broadcast_from_rank0: Whether the main process reads for all.

    Raises:
        ValueError: As `load_checkpoint_in_model`; or if a weight of a model to be dispatched would have no
            values.
        RuntimeError: As `load_checkpoint_in_model`, like TypeError, OSError and CheckpointError.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)  # files have its names
    if model_has_dtensor(model) and placement.device_map is not None:
        raise ValueError("a model that is sharded over processes takes no device_map; omit it.")
    if broadcast_from_rank0 and placement.device_map is not None:
        warn("broadcast_from_rank0 is ignored: with a device_map each process reads the files.")
    elif model_has_dtensor(model) or (broadcast_from_rank0 and current_process().world_size > 1):
        if placement.dtype is not None:
            warn(
                "dtype is ignored: weights that are sharded or broadcast take the model's dtype. Convert the "
                "model instead.",
            )
        _load_collectively(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    targets = ModelTensors(model)
    placement.check(targets)
    # Two passes over the files, the first for names and shapes: mapped, so that it reads no weight.
    files = find_weight_files(checkpoint)
    files += find_extra_state(checkpoint, files)
    offloaded = _offloaded(model)
    # With a device map they are placed again, or it is an error, as with a dtype.
    replaced = offloaded if placement.device_map is None and placement.dtype is None else {}
    found = _check_files(targets, files, checkpoint, strict, placement, replaced)
    if placement.in_place and placement.device_map is not None:
        _check_values(targets, found & targets.expected | offloaded.keys(), placement.device_map, checkpoint)
    elif placement.device_map is not None or placement.dtype is not None:
        _check_not_offloaded(targets, found, offloaded, checkpoint)
    try:
        _place_files(targets, files, placement, replaced)
    # Also on Ctrl-C: a partly loaded model looks like a loaded one.
    except BaseException:
        placement.undo(targets)
        raise


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Any], offload_folder: Folder) -> None:
    """Load offloaded weights back into a model, on the CPU and in the dtype of the model.

    Args:
        model: The model.
        index: The entries of the folder's index to load. None or empty for nothing.
        offload_folder: The folder. The weights are copied, so that it may be deleted afterwards.

    Raises:
        ValueError: If the model has no such weight, or one of another shape.
        CorruptCheckpointError: If a file is damaged, or a name leads out of the folder.
    """
    targets, folder = ModelTensors(model), Path(offload_folder)
    for name, entry in (index or {}).items():
        if name not in targets:
            raise ValueError(
                f"{type(model).__name__} has no weight {name!r}, which {folder} has. Remove it from index."
            )
        value = load_offloaded_weight(listed_file(folder, f"{name}.dat", folder / "index.json"), entry)
        current = targets.get(name)
        if value.shape != current.shape:
            raise ValueError(
                f"{name} has the shape {list(value.shape)} in {folder} and {list(current.shape)} in "
                f"{type(model).__name__}."
            )
        # copy=True: a mapped tensor would keep the file in use after the folder is deleted.
        targets.put(name, value.to(current.dtype, copy=True))


def _map_file(file: WeightFile) -> dict[str, Any]:
    """Open a file of weights; safetensors and torch's zip files are mapped, older torch files are read."""
    if file.path.name.endswith(".safetensors") or not tensors.is_zip(regular_file(file.path)):
        return file.select(_read(file.path))
    return file.select(_read(file.path, mmap=True))


def _read(file: Folder, **options: Any) -> dict[str, Any]:
    state = values.decode(tensors.load(file, map_location="cpu", **options))
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(state).__name__}, not weights by name. Save a state dict."
        )
    return dict(state)


def _check_files(
    targets: ModelTensors,
    files: list[WeightFile],
    checkpoint: Folder,
    strict: bool,
    placement: WeightPlacement,
    offloaded: Offloaded,
) -> set[str]:
    """Compare names and shapes, before the model changes; return the names in the files."""
    file_names: set[str] = set()
    for file in files:
        state = without_wrapper_names(_map_file(file), targets.expected)
        file_names |= state.keys()
        matching = {name: state[name] for name in state if name in targets and name in targets.expected}
        for name, value in matching.items():
            _check_shape(targets, name, value, file.path)
            _replace(targets, offloaded, name, value, (file.path, name), only_check=True)
        placement.check_folder(targets, ((name, value, file.path) for name, value in matching.items()))
        del state, matching
    common = file_names & targets.expected
    tied = {other for name in common if name in targets for other in targets.names(name)}
    _report_differences(
        targets.expected - common - tied, file_names - targets.expected, targets.model, checkpoint, strict
    )
    return file_names


def _offloaded(model: torch.nn.Module) -> Offloaded:
    """Return the storage of weights that accel's hooks have offloaded: mapping and name there, by name."""
    offloaded: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hook: Any = vars(module).get("_hf_hook")
        # By attribute: the classes of hooks are in a package above this one.
        for item in getattr(hook, "hooks", (hook,)):
            prefix = f"{path}." if path else ""
            for slot in getattr(item, "slots", ()):
                offloaded[prefix + slot.name] = item.weights_map, slot.name
    return offloaded


def _check_not_offloaded(
    targets: ModelTensors, found: set[str], offloaded: Collection[str], checkpoint: Folder
) -> None:
    """Check that hooks would not replace loaded weights by previous ones."""
    lost = [
        name for name in sorted(offloaded) if name in targets and not found.isdisjoint(targets.names(name))
    ]
    if lost:
        raise RuntimeError(
            f"{checkpoint} cannot be loaded into {shortened(lost)} with a device_map or dtype: they are "
            "offloaded, and keep their place and dtype. Omit both, or load with load_checkpoint_and_dispatch "
            "and a device_map, or remove the hooks first (accel.hooks.remove_hook_from_submodules)."
        )


def _check_values(targets: ModelTensors, found: set[str], device_map: DeviceMap, checkpoint: Folder) -> None:
    """Check that no weight of a model to be dispatched would stay without values."""
    model = targets.model
    lost = [
        name
        for entries in (model.named_parameters(), model.named_buffers())
        for name, value in entries
        if value.is_meta
        # Only names of the state dict count, which does not have all buffers.
        and found.isdisjoint(targets.names(name))
        and str(device_for(name, device_map, default="meta")) != "meta"
    ]
    if lost:
        raise ValueError(
            f"{checkpoint} has no values for {shortened(lost)}, and {type(model).__name__} has them on the "
            "meta device. Load a checkpoint that has them, or set their values first; for buffers, build "
            "the model without include_buffers=True."
        )


def _check_shape(targets: ModelTensors, name: str, value: Any, file: Path) -> None:
    current = targets.get(name)
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"{name} is a {type(value).__name__} in {file}, where a tensor is expected.")
    if value.shape != current.shape:
        raise RuntimeError(
            f"{name} has the shape {list(value.shape)} in {file} and {list(current.shape)} in "
            f"{type(targets.model).__name__}."
        )
    # DTensors are loaded by another function; a plain tensor would replace a quantized weight of torchao.
    if hasattr(current, "__tensor_flatten__") and not hasattr(value, "__tensor_flatten__"):
        raise RuntimeError(
            f"{name} is a plain tensor in {file}, and of the class {type(current).__name__} in "
            f"{type(targets.model).__name__}. Load the weights before the model is quantized."
        )


def _place_files(
    targets: ModelTensors,
    files: list[WeightFile],
    placement: WeightPlacement,
    offloaded: Offloaded,
) -> None:
    extra: dict[str, Any] = {}
    for file in files:
        state = _map_file(file)
        # By object: tied names of one file are one tensor after loading, and are offloaded once.
        name_in_file: dict[int, str] = {}
        for name, value in state.items():
            name_in_file.setdefault(id(value), name)
        for name, value in without_wrapper_names(state, targets.expected).items():
            if name in targets and name in targets.expected:
                source = file.path, name_in_file[id(value)]
                if not _replace(targets, offloaded, name, value, source):
                    placement.place(targets, name, value, source)
            elif name in targets.expected:
                # In `expected` and not in `targets`: neither a parameter nor a buffer.
                extra[name] = value  # extra state of a module
        del state
    placement.finish()
    if extra:
        targets.model.load_state_dict(extra, strict=False)


def _replace(
    targets: ModelTensors,
    offloaded: Offloaded,
    name: str,
    value: torch.Tensor,
    source: tuple[Path, str],
    only_check: bool = False,
) -> bool:
    """Replace an offloaded weight, or only check that this is possible; False if it is not offloaded."""
    stored = next((offloaded[other] for other in targets.names(name) if other in offloaded), None)
    if stored is not None:
        in_place = source[0].name.endswith(".safetensors")
        replace_offloaded(*stored, value, source if in_place else None, only_check)
    return stored is not None


def _load_collectively(
    model: torch.nn.Module, checkpoint: Folder, strict: bool, full: bool, broadcast: bool
) -> None:
    # The two options are those of torch's StateDictOptions.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    if current_process().is_main or not broadcast:
        files = find_weight_files(checkpoint)
        for file in [*files, *find_extra_state(checkpoint, files)]:
            state.update(file.select(load_state_dict(file.path)))
        state = without_wrapper_names(state, set(model.state_dict(keep_vars=True)))
    incompatible = set_model_state_dict(
        model,
        state,
        options=StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=strict),
    )
    # A process that has read no file (broadcast_from_rank0) has nothing to compare.
    if state and incompatible is not None:
        _report_differences(
            incompatible.missing_keys, incompatible.unexpected_keys, model, checkpoint, strict
        )


def _report_differences(
    missing: Collection[str],
    unexpected: Collection[str],
    model: torch.nn.Module,
    checkpoint: Folder,
    strict: bool,
) -> None:
    """Raise if strict; otherwise warn of missing weights, and log unexpected ones."""
    missing_text = f"in the model and not in the files: {', '.join(sorted(missing))}"
    unexpected_text = f"in the files and not in the model: {', '.join(sorted(unexpected))}"
    subject = f"{checkpoint} and {type(model).__name__} have different weights"
    if strict and (missing or unexpected):
        reported = "; ".join([missing_text] * bool(missing) + [unexpected_text] * bool(unexpected))
        raise RuntimeError(f"{subject}; {reported}. Load what fits with strict=False.")
    if missing:
        warn(f"{subject}; {missing_text}.")
    if unexpected:
        _logger.warning("%s; %s.", subject, unexpected_text)
