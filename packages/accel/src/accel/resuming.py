"""load_state: which checkpoint an Accelerator goes on from, and which of its objects are restored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ckpt import layout, rotation
from accel_ckpt.agree import from_main
from accel_ckpt.state import load_accelerator_state, load_custom_state

if TYPE_CHECKING:
    from accel.accelerator import Accelerator

__all__ = ["load_state"]


def load_state(
    accelerator: Accelerator,
    input_dir: str | None,
    load_kwargs: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Restore a checkpoint; every process calls it.

    Args:
        accelerator: Whose prepared and registered objects are restored.
        input_dir: The folder; None for the newest automatically named one.
        load_kwargs: Options of torch.load for everything but weights.
        **options: Options of the models' load_state_dict, and `map_location`.

    Raises:
        ValueError: If there is no folder to read from.
        FileNotFoundError: If there is no checkpoint in it.
    """
    folder = _old_folder(accelerator, input_dir)
    models = list(accelerator._models)
    for hook in accelerator._load_state_hooks.values():
        hook(models, str(folder))
    result = load_accelerator_state(
        folder,
        models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.scaler,
        options.pop("map_location", None),
        load_kwargs,
        process=accelerator.process,
        **options,
    )
    for index, item in enumerate(accelerator._custom_objects):
        load_custom_state(item, folder, index, weights_only=(load_kwargs or {}).get("weights_only", True))
    accelerator.window.step = result.get("step", 0)
    number = layout.iteration_of(folder.name)
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and number is not None:
        # What is saved next comes after what was loaded, instead of meeting its name.
        config.iteration = max(config.iteration, number + 1)


def _old_folder(accelerator: Accelerator, input_dir: str | None) -> Path:
    if input_dir is not None:
        return Path(input_dir)
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        raise ValueError(
            "load_state needs input_dir, unless checkpoints are named automatically: "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    root = Path(config.project_dir) / layout.CHECKPOINTS_DIR
    found = from_main(lambda: rotation.latest(root), accelerator.process, "looking for the newest checkpoint")
    if found is None:
        raise FileNotFoundError(f"there is no complete checkpoint in {root}.")
    return found
