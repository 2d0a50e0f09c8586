"""Where the default config file is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from accel_state import env


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the default config file's path, whether it exists or not.

    It is `accelerate/default_config.yaml` in `$HF_HOME`, which defaults to `$XDG_CACHE_HOME/huggingface`,
    then to `~/.cache/huggingface`; `default_config.json` instead if only that one exists.

    Args:
        environ: The environment to read; this process's by default.
    """
    cache = env.raw("XDG_CACHE_HOME", environ) or "~/.cache"
    home = env.raw("HF_HOME", environ) or f"{cache}/huggingface"
    path = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    json = path.with_suffix(".json")
    # YAML first if both exist: it is written by default.
    return json if json.is_file() and not path.is_file() else path


default_config_file: str = str(config_path())
"""The default config file at the time of import, as client libraries want it."""
