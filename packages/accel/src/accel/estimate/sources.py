"""Where `accel estimate-memory` finds a model: a folder, an importable callable, or a name on the hub."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.estimate.formulas import ModelSize
from accel_ckpt.files.safetensors_header import read_header
from accel_ckpt.weights.files import find_weight_files
from accel_launch.errors import LaunchError
from accel_state.imports.packages import require

_FILES = (".bin", ".json", ".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class Tensors:
    """The shapes of a model.

    Args:
        parameters: The shape of each parameter by its name; shared ones once.
        buffers: Number of elements by buffer name.
        module: The model without memory; None where the shapes come from files.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int] = field(default_factory=dict)
    module: Any = None

    @property
    def size(self) -> ModelSize:
        """Its numbers of elements.

        Raises:
            ValueError: If there are no parameters.
        """
        return ModelSize(self.parameters, sum(self.buffers.values()))

    def split_dims(self, processes: int) -> dict[str, int]:
        """The dimension in which the model's tensor-parallel plan splits each parameter that it splits.

        Args:
            processes: Processes of one tensor-parallel group.

        Raises:
            LaunchError: If no model was built, which has the plan.
            ValueError: If it has none, or does not fit this many processes.
        """
        if processes == 1:
            return {}
        if self.module is None:
            raise LaunchError(
                f"--tp_size {processes} splits weights by the plan of a model, which files have not. Put "
                "its config.json into the folder, or name module:callable."
            )
        from accel.engines.tensor_parallel import split_dims

        return split_dims(self.module, processes)


def find_tensors(
    model: str, *, library: str | None = None, trust_remote_code: bool = False, builds: bool = False
) -> Tensors:
    """Find a model and list its tensors; no weights are read.

    Args:
        model: A folder with safetensors files or a config.json, `package.module:callable` that returns a
            module, or a name on the hub.
        library: transformers or timm, for a name; found from the config where it says so.
        trust_remote_code: Run code that comes with the model.
        builds: Build the model of a folder from its config.json, if there is one, instead of reading shapes.

    Raises:
        LaunchError: If there is no such model, or it cannot be built.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _tensors_of_folder(path, trust_remote_code, builds)
    if ":" in model:
        return _tensors_of(_call(model))
    # OWNER/NAME or NAME, as names on the hub are; all else was meant as a path.
    if path.suffix in _FILES or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise LaunchError(
            f"There is no folder {model!r}. Name a folder, module:callable, or a name on the hub."
        )
    return _tensors_of(_from_hub(model, library, trust_remote_code))


def _tensors_of_folder(path: Path, trust_remote_code: bool, builds: bool) -> Tensors:
    has_config = (path / "config.json").is_file()
    has_files = any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
    if has_files and not (builds and has_config):
        shapes: dict[str, tuple[int, ...]] = {}
        # Headers of safetensors have the shapes; other formats would have to be read as a whole.
        for file in find_weight_files(path):
            if file.path.suffix == ".safetensors":
                entries, _, _ = read_header(file.path)
                shapes |= {name: tuple(entry["shape"]) for name, entry in file.select(entries).items()}
        if shapes:  # there are none in files of other formats
            return Tensors(shapes)
    if not has_config:
        raise LaunchError(f"The folder {path} has neither safetensors files nor a config.json.")
    return _tensors_of(_from_config(str(path), trust_remote_code))


def _tensors_of(module: Any) -> Tensors:
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    return Tensors(shapes, {name: value.numel() for name, value in module.named_buffers()}, module)


def _call(name: str) -> Any:
    import torch

    where, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, and console scripts do not
    try:
        target: Any = importlib.import_module(where)
        for child in attribute.split("."):
            target = getattr(target, child)
        with torch.device("meta"):
            # On the meta device, as the model may be larger than this machine.
            module = target()
    except (ImportError, AttributeError, TypeError) as error:
        raise LaunchError(f"{name!r} cannot be called: {error}. Give package.module:callable.") from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, torch.nn.Module):
        raise LaunchError(f"{name!r} returned {type(module).__name__}; a torch.nn.Module is needed.")
    return module


def _from_config(place: str, trust_remote_code: bool) -> Any:
    import torch

    transformers = require("transformers", "estimate")
    config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    # The class that was trained, with its head; AutoModel would leave that out.
    names = getattr(config, "architectures", None) or []
    with torch.device("meta"):
        if names and hasattr(transformers, names[0]):
            return getattr(transformers, names[0])(config)
        return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def _from_hub(name: str, library: str | None, trust_remote_code: bool) -> Any:
    import torch

    try:
        if library == "timm":
            with torch.device("meta"):
                return require("timm", "estimate").create_model(name, pretrained=False)
        return _from_config(name, trust_remote_code)
    except (OSError, ValueError, RuntimeError, json.JSONDecodeError) as error:
        # The first line: libraries add paragraphs of advice behind it.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LaunchError(
            f"The model {name!r} was not found on the hub, or the hub cannot be reached: {first} Name a "
            "folder with its config.json, or module:callable."
        ) from error
