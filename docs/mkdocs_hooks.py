"""Lets the pages stand beside mkdocs.yml, in docs/ itself.

mkdocs refuses a docs_dir that holds its own configuration file, but only while it validates that file.
"""

from pathlib import Path
from typing import Any

__all__ = ["on_config"]


def on_config(config: Any) -> Any:
    """Take the pages from the folder of the configuration file."""
    config.docs_dir = str(Path(config.config_file_path).resolve().parent)
    return config
