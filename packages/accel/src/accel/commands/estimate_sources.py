"""Where `accel estimate-memory` finds a model: a folder, an importable callable, or a name on the hub."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from accel.estimate import ModelSize
from accel_ckpt.header import read_header
from accel_ckpt.weights import find_weight_files
from accel_launch.errors import LaunchError
from accel_state.imports import require

__all__ = ["size_of"]

_FILES = (".bin", ".json", ".pt", ".pth", ".safetensors")


def size_of(model: str, *, library: str | None = None, trust_remote_code: bool = False) -> ModelSize:
    """Find a model and count its tensors; no weights are read.

    Args:
        model: A folder with safetensors files or a config.json, `package.module:callable` that returns a
            module, or a name on the hub.
        library: transformers or timm, for a name; found from the config where it says so.
        trust_remote_code: Run code that comes with the model.

    Raises:
        LaunchError: If there is no such model, or it cannot be built.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _size_of_folder(path, trust_remote_code)
    if ":" in model:
        return _size_of_module(_call(model))
    if path.suffix in _FILES or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise LaunchError(
            f"There is no folder {model!r}. Name a folder, module:callable, or a name on the hub."
        )
    return _size_of_module(_from_hub(model, library, trust_remote_code))


def _size_of_folder(path: Path, trust_remote_code: bool) -> ModelSize:
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        counts: dict[str, int] = {}
        for file in find_weight_files(path):
            if file.suffix == ".safetensors":
                entries, _, _ = read_header(file)
                counts |= {name: math.prod(entry["shape"]) for name, entry in entries.items()}
        if counts:
            return ModelSize.from_counts(counts)
    if not (path / "config.json").is_file():
        raise LaunchError(f"The folder {path} has neither safetensors files nor a config.json.")
    return _size_of_module(_from_config(str(path), trust_remote_code))


def _size_of_module(module: Any) -> ModelSize:
    parameters = {name: value.numel() for name, value in module.named_parameters()}
    return ModelSize.from_counts(parameters, {name: value.numel() for name, value in module.named_buffers()})


def _call(name: str) -> Any:
    import torch

    where, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        target: Any = importlib.import_module(where)
        for part in attribute.split("."):
            target = getattr(target, part)
        with torch.device("meta"):
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
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LaunchError(
            f"The model {name!r} was not found on the hub, or the hub cannot be reached: {first} Name a "
            "folder with its config.json, or module:callable."
        ) from error
