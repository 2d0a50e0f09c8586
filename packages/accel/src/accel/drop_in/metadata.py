"""The metadata of the package accelerate, for `importlib.metadata`."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from accel.drop_in.interface import INTERFACE_VERSION

# Programs compare: sentence-transformers trains only with the accelerate whose home page is Hugging Face's.
_FILES = {
    "METADATA": f"""\
Metadata-Version: 2.1
Name: accelerate
Version: {INTERFACE_VERSION}
Summary: accel, in place of accelerate (accel.drop_in)
Home-page: https://github.com/huggingface/accelerate
""",
    "top_level.txt": "accelerate\n",
    "entry_points.txt": """\
[console_scripts]
accelerate = accelerate.commands.accelerate_cli:main
accelerate-config = accelerate.commands.config:main
accelerate-estimate-memory = accelerate.commands.estimate:main
accelerate-launch = accelerate.commands.launch:main
accelerate-merge-weights = accelerate.commands.merge:main
""",
}


class AccelDistribution(Distribution):
    """The package accelerate, as accel stands for it."""

    def read_text(self, filename: str) -> str | None:
        """Return a file of the package's metadata, or None where there is no such file.

        Args:
            filename: Its name.
        """
        return _FILES.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Return where a file of the package would be: next to accel.

        Args:
            path: The file, from the folder in which packages are installed.
        """
        return Path(__file__).parents[2] / path
