"""Lets the pages stand beside mkdocs.yml, in docs/ itself, and show files of the repository.

mkdocs refuses a docs_dir that holds its own configuration file, but only while it validates that file.
"""

import re
from pathlib import Path
from typing import Any

__all__ = ["on_config", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    """Take the pages from the folder of the configuration file."""
    config.docs_dir = str(Path(config.config_file_path).resolve().parent)
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the text of a file in the place of a line `# all of path/from/the/root`."""
    return re.sub(
        r"^# all of (\S+)$",
        lambda match: (ROOT / match[1]).read_text().rstrip(),
        markdown,
        flags=re.MULTILINE,
    )
