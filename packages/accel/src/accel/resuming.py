"""load_state: which checkpoint an Accelerator goes on from, and which of its objects are restored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpointing import parts_of
from accel_ckpt import background, layout, rotation
from accel_ckpt.agree import collect, from_main
from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.reading import Reading, open_checkpoint
from accel_ckpt.restore import Objects, restore
from accel_optim.scaler import forget_round
from accel_state.warning import warn

if TYPE_CHECKING:
    from accel.accelerator import Accelerator
    from accel_ckpt.sharded import Parts

__all__ = ["load_state"]


def load_state(
    accelerator: Accelerator,
    input_dir: str | None,
    load_kwargs: dict[str, Any] | None,
    strict: bool | None = None,
    verify: bool = True,
    map_location: Any = None,
    **options: Any,
) -> None:
    """Restore a checkpoint; every process calls it.

    Without a folder, the newest automatically named checkpoint whose files are what its manifest says is
    restored; damaged ones are passed over on all processes alike, and told.

    Args:
        accelerator: Whose prepared and registered objects are restored.
        input_dir: The folder; None for the newest automatically named one.
        load_kwargs: Options of torch.load for everything but weights.
        strict: True for an error on any difference between the folder and the objects, False to restore what
            fits and tell the rest; by default strict for folders that accel wrote.
        verify: Whether to check the files' digests.
        map_location: Where files are read to: "cpu", "on_device" or a device.
        **options: Options of the models' load_state_dict; under DeepSpeed, of its `load_checkpoint`.

    Raises:
        ValueError: If there is no folder to read from.
        FileNotFoundError: If there is no checkpoint in it.
        CheckpointError: If it is damaged, or differs from the objects.
    """
    background.wait()
    read = (accelerator.process, map_location, dict(load_kwargs or {}), verify)
    if input_dir is not None:
        reading, newest = open_checkpoint(Path(input_dir), *read), Path(input_dir)
    else:
        reading, newest = _open_newest(accelerator, read)
    models = list(accelerator._models)
    for hook in accelerator._load_state_hooks.values():
        hook(models, str(reading.folder))
    engine = accelerator.engine
    engine.check_own(reading.names)
    others = [model for model in models if not engine.is_own(model)]
    optimizers = [item for item in accelerator._optimizers if not engine.is_own(item)]
    # On any number of processes, and under any engine.
    in_parts = any(layout.role_of(name) == "sharded" for name in reading.names)
    objects = Objects(
        [] if in_parts else [engine.model_to_load(model) for model in others],
        [] if in_parts else [engine.optimizer_to_load(optimizer) for optimizer in optimizers],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.scaler,
        accelerator._custom_objects,
        _parts(accelerator) if in_parts else None,
    )
    result = restore(
        reading,
        objects,
        accelerator.process_index,
        accelerator.process,
        hooked={*_left_to_hooks(accelerator, len(models)), "deepspeed", "megatron", "local"},
        strict=strict,
        **options if len(others) == len(models) else {},
    )
    engine.load_own(reading.folder, **options)
    forget_round(accelerator.scaler)
    if "window" in result:
        accelerator.window.load_state_dict(result["window"])
    else:
        accelerator.window.step = result.get("step", 0)
    number = layout.iteration_of(newest.name)
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and number is not None:
        # What is saved next comes after what is there, instead of meeting its name.
        config.iteration = max(config.iteration, number + 1)


def _parts(accelerator: Accelerator) -> Parts:
    from accel_ckpt.sharded import Parts  # takes most of a second to import

    return Parts.of(**parts_of(accelerator))


def _left_to_hooks(accelerator: Accelerator, left: int) -> set[str]:
    """Name what hooks read: files of their own, and the weights of models that they took out of the list."""
    if not accelerator._load_state_hooks:
        return set()
    taken = range(left, len(accelerator._models))
    return {"other", *(name for index in taken for name in layout.model_files(index))}


def _open_newest(accelerator: Accelerator, read: tuple[Any, ...]) -> tuple[Reading, Path]:
    """Open the newest sound checkpoint; also return the newest of all."""
    config, process = accelerator.project_configuration, accelerator.process
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        raise ValueError(
            "load_state needs input_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    root = Path(config.project_dir) / layout.CHECKPOINTS_DIR
    found = from_main(lambda: rotation.checkpoints(root), process, "looking for the newest checkpoint")
    if not found:
        raise FileNotFoundError(f"there is no complete checkpoint in {root}.")
    damage: list[str] = []
    for folder in reversed(found):
        try:
            reading = open_checkpoint(folder, *read)
        except Exception as error:
            # All are here, with an error each; where one has found damage, all go on to the one before.
            corrupt = str(error) if isinstance(error, CorruptCheckpointError) else None
            told = [text for text in collect(corrupt, process) if text is not None]
            if not told:
                raise
            damage.append(told[0])
            continue
        if damage:
            warn(f"Going on from {folder}. {' '.join(damage)}")
        return reading, found[-1]
    raise CheckpointError(f"no checkpoint in {root} can be read. {' '.join(damage)}")
